"""Reads prompts and arrival times from files: ShareGPT, JSON lines of prompts or chat requests,
recorded traces."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from radixrt.base.errors import ConfigError
from radixrt.bench.cache.trace import BLOCK_TOKENS, TraceRequest, read_trace
from radixrt.bench.workloads import Conversation, Prompt, TextPrompts, TokenPrompts, Turn

CHARACTERS_PER_TOKEN = 4
"""Characters of a token in recorded answers, to choose the length of new ones without their
tokenizer."""


def read_dataset(
    path: Path, *, limit: int, turns: int, output_len: int, speed: float, vocab_size: int | None
) -> list[Conversation]:
    """The conversations of a file, in order of arrival.

    - ShareGPT, an array with ``conversations``: their questions in turn; answers as long as the
      recorded ones.
    - Lines with ``prompt``: one question; ``output_len`` or ``max_tokens`` is the length.
    - Lines with ``messages`` or ``body``, as OpenAI's batch files: a chat request as recorded.
    - Lines with ``timestamp`` and ``hash_ids``, a trace: prompts that share prefixes as recorded, at
      the recorded times.

    Args:
        limit: most requests.
        turns: most questions of a ShareGPT conversation.
        output_len: tokens of an answer where the file does not say.
        speed: a trace's requests arrive so many times as fast as recorded.
        vocab_size: a trace's prompts are made of token ids below it; None: of text.

    Raises:
        ConfigError: the file cannot be read, or holds none of these.
    """
    try:
        head = path.open("rb").read(2)
    except OSError as error:
        raise ConfigError(f"--dataset {path} cannot be read: {error}.") from error
    if head[:1] == b"[":
        conversations = _sharegpt(path, turns)
    elif head == b"\x1f\x8b" or "timestamp" in _first(path):
        trace = read_trace(path, limit=limit, speed=speed)
        conversations = (
            Conversation(
                "",
                [Turn(_trace_prompt(one, vocab_size), max(1, one.output_tokens))],
                arrival_s=one.arrival_s,
            )
            for one in trace.requests
        )
    else:
        conversations = _lines(path, output_len)
    return list(_limited(conversations, limit, path))


def _limited(
    conversations: Iterator[Conversation], limit: int, path: Path
) -> Iterator[Conversation]:
    count = 0
    for conversation in conversations:
        if count >= limit:
            break
        count += len(conversation.turns)
        yield conversation
    if not count:
        raise ConfigError(f"--dataset {path} holds no request.")


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ConfigError(
                    f"--dataset {path}, line {number} is no JSON: {error}."
                ) from error
            if not isinstance(value, dict):
                raise ConfigError(f"--dataset {path}, line {number} is no JSON object.")
            yield number, value


def _first(path: Path) -> dict[str, Any]:
    return next(_objects(path), (0, {}))[1]


def _lines(path: Path, output_len: int) -> Iterator[Conversation]:
    for number, line in _objects(path):
        request = line.get("body", line)
        length = (
            request.get("output_len")
            or request.get("max_tokens")
            or request.get("max_completion_tokens")
        )
        turn = Turn(request.get("prompt", ""), int(length or output_len))
        if isinstance(request.get("messages"), list):
            yield Conversation("", [turn], messages=request["messages"])
        elif turn.question:
            yield Conversation("", [turn])
        else:
            raise ConfigError(f"--dataset {path}, line {number} has neither prompt nor messages.")


def _sharegpt(path: Path, turns: int) -> Iterator[Conversation]:
    try:
        entries = json.loads(path.read_bytes())
        for entry in entries:
            said = entry.get("conversations") or []
            pairs = [
                (question["value"], answer["value"])
                for question, answer in itertools.pairwise(said)
                if question["from"] in ("human", "user") and answer["from"] in ("gpt", "assistant")
            ]
            if pairs:
                yield Conversation(
                    "",
                    [
                        Turn(question, max(1, len(answer) // CHARACTERS_PER_TOKEN))
                        for question, answer in pairs[:turns]
                    ],
                )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"--dataset {path} is no ShareGPT file: {type(error).__name__}: {error}."
        ) from error


def _trace_prompt(request: TraceRequest, vocab_size: int | None) -> Prompt:
    """The prompt of a recorded request: equal blocks get equal tokens."""
    lengths = [BLOCK_TOKENS] * len(request.blocks)
    lengths[-1] = request.input_tokens - BLOCK_TOKENS * (len(lengths) - 1)
    both = zip(map(np.random.default_rng, map(int, request.blocks)), lengths, strict=True)
    if vocab_size is None:
        return "".join(TextPrompts(rng)(length) for rng, length in both)
    return [token for rng, length in both for token in TokenPrompts(rng, vocab_size)(length)]
