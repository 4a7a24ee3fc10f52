"""``radixrt verify``: computes an answer again by its receipt, on an engine that has nothing cached,
and says whether it is the same."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError, RadixrtError, RequestError
from radixrt.messages.ids import pack_ids
from radixrt.messages.receipts import Receipt
from radixrt.messages.requests import GenerateRequest, RequestOptions, TokenPrompt
from radixrt.offline.background_engine import BackgroundEngine
from radixrt.supervisor.launch import prepare

_KNOWN = {
    "weights": "the weights",
    "config": "config.json",
    "tokenizer": "the tokenizer",
    "isa": "the kernels' instruction set",
    "kernels": "the build of the kernels",
    "code": "the code of radixrt",
}
"""What an engine's digests are of, for messages."""


def run(arguments: argparse.Namespace) -> int:
    """Verify each receipt of a file; returns the exit status: 0 if all answers are the same."""
    receipts = read_receipts(arguments.receipt)
    settings: dict[str, Any] = {**receipts[0].settings, "model_path": arguments.model_path}
    if any(receipt.settings != receipts[0].settings for receipt in receipts):
        raise ConfigError("The receipts are of servers with different settings: verify each alone.")
    try:
        for receipt in receipts:
            receipt.check()
        config = prepare(ServerConfig(**settings, receipts=True, log_level="warning"))
        engine = BackgroundEngine(config)
        try:
            verdicts = [verdict(receipt, recomputed(engine, receipt)) for receipt in receipts]
        finally:
            engine.close()
    except RequestError as error:
        print(error)
        return 1
    except TypeError as error:
        raise ConfigError(f"The receipt has settings that are not known here: {error}.") from error
    for sentences, _ in verdicts:
        print(*sentences, sep="\n")
    return 0 if all(same for _, same in verdicts) else 1


def read_receipts(path: str) -> list[Receipt]:
    """The receipts in a file (``-``: standard input): one, or those in a response of the API.

    Raises:
        ConfigError: there is none.
    """
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        found = [
            msgspec.convert(one, Receipt, str_keys=True)
            for one in _receipts_in(msgspec.json.decode(content))
        ]
    except (OSError, ValueError, RadixrtError) as error:
        raise ConfigError(f"{path} cannot be read as a receipt: {error}") from error
    if not found:
        raise ConfigError(f"{path} holds no receipt: it is the field `receipt` of a choice.")
    return found


def _receipts_in(content: Any) -> Iterator[Any]:
    if isinstance(content, dict):
        if "chain" in content and "prompt_ids" in content:
            yield content
            return
        content = list(content.values())
    if isinstance(content, list):
        for part in content:
            yield from _receipts_in(part)


def recomputed(engine: BackgroundEngine, receipt: Receipt) -> Receipt:
    """The receipt of the same request here.

    Raises:
        RadixrtError: the engine refuses the request.
    """
    parameters = receipt.parameters
    request = GenerateRequest(
        request_id=f"verify-{receipt.chain[-1]}",
        prompt=TokenPrompt(pack_ids(receipt.prompt_ids)),
        options=RequestOptions(sampling=parameters.sampling),
        constraint=parameters.constraint,
        parse_reasoning=parameters.parse_reasoning,
        parse_tool_calls=parameters.parse_tool_calls,
        receipt=True,
    )

    async def answer() -> list[Any]:
        return [chunk async for chunk in engine.client.generate(request)]

    found: Receipt | None = engine.run(answer())[-1].receipt
    assert found is not None, "the last chunk of a complete answer has it"
    return found


def verdict(receipt: Receipt, here: Receipt) -> tuple[list[str], bool]:
    """Sentences on the differences, and whether the tokens are the same."""
    names = sorted({*receipt.engine, *here.engine})
    sentences = [
        f"not the same: {_KNOWN.get(name, name)}, {_short(receipt.engine, name)} in the receipt and "
        f"{_short(here.engine, name)} here"
        for name in names
        if receipt.engine.get(name) != here.engine.get(name)
    ]
    ours, theirs = here.token_ids, receipt.token_ids
    if ours == theirs:
        what = "by another engine" if sentences else "and the engine is the same"
        return [*sentences, f"equal: {len(theirs)} tokens, {what}"], True
    place = next(
        (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
        min(len(ours), len(theirs)),
    )
    token = [str(ids[place]) if place < len(ids) else "the end" for ids in (theirs, ours)]
    return [
        *sentences,
        f"different: token {place} of the answer is {token[0]} in the receipt, and {token[1]} here",
    ], False


def _short(engine: dict[str, str], name: str) -> str:
    value = engine.get(name, "nothing")
    return value[:12] if len(value) > 40 else value
