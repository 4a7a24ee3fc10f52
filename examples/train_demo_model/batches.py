"""Makes the batch of a training step: rows of tokens, a loss weight per token, and the positions of
the answers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor
from world import render, sample

END_OF_TEXT, IM_END = 0, 2
FIRST_PLAIN_TOKEN = 3

# Row length that holds one sample of each of world.LEVELS.
LENGTHS = (128, 256, 256, 512, 1024, 1024, 1024, 2048, 2048)
TASK_WEIGHTS = {"qa": 28, "json": 32, "second_turn": 14, "label": 8, "tool": 16, "talk": 2}
FIRST_TASKS = ("qa", "json", "label")
PROMPT_SHARE = 0.12  # share of the prompt's tokens that are predicted too
PROMPT_WEIGHT = 0.3


@dataclass
class Row:
    tokens: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # loss weight of predicting this token
    answers: list[tuple[str, int, int]] = field(default_factory=list)  # task, start, end in tokens


@dataclass
class Batch:
    tokens: Tensor  # [rows, length]
    positions: Tensor  # [n] flat positions whose next token is predicted
    targets: Tensor  # [n]
    weights: Tensor  # [n]
    answers: list[tuple[str, int, int]]  # task, start, end in 0..n


def repeat_row(rng: random.Random, length: int, vocab_size: int, plain: float = 0.4) -> Row:
    """Random tokens that are repeated, as a whole or as shuffled blocks. They train induction.

    With a small alphabet single tokens are ambiguous, so the model must match several tokens.
    """
    row = Row()
    while len(row.tokens) < length:
        alphabet = range(FIRST_PLAIN_TOKEN, vocab_size)
        if rng.random() < 0.8 * (1 - plain):
            alphabet = rng.sample(alphabet, rng.choice((12, 24, 48, 96)))
        start = len(row.tokens)
        if rng.random() < plain:
            period = rng.randint(4, max(5, min(48, length // 3)))
            block = rng.choices(alphabet, k=period)
            tokens = block * rng.randint(2, 3)
            weights = [0.0] * (period + 1) + [1.0] * (len(tokens) - period - 1)
        else:
            keys, size = set(), rng.randint(4, 8)
            for _ in range(rng.randint(2, max(3, length // 24))):
                keys.add(tuple(rng.choices(alphabet, k=3)))
            blocks = [[*k, *rng.choices(alphabet, k=size - 3)] for k in sorted(keys)]
            rng.shuffle(blocks)
            again = rng.sample(blocks, len(blocks))
            tokens = [t for b in (*blocks, *again) for t in b]
            weights = [0.0] * (len(tokens) // 2) + ([0.0] * 3 + [1.0] * (size - 3)) * len(again)
        row.tokens += tokens
        row.weights += weights
        if sum(weights[: length - start]) and len(row.tokens) <= length:
            first = next(i for i, w in enumerate(weights) if w)
            row.answers.append(("repeat", start + first, len(row.tokens)))
    del row.tokens[length:], row.weights[length:]
    return row


def encode_sample(tokenizer: Tokenizer, rng: random.Random, task: str, level: int) -> Row:
    s = sample(rng, task, level)
    row = Row()
    for text, is_answer in render(s.messages, s.tools):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if is_answer:
            row.answers.append((s.task, len(row.tokens), len(row.tokens) + len(ids)))
        row.tokens += ids
        row.weights += [1.0 if is_answer else -1.0] * len(ids)
    row.tokens.append(END_OF_TEXT)
    row.weights.append(0.0)
    return row


def task_row(
    tokenizer: Tokenizer, rng: random.Random, level: int, length: int, tasks: list[str]
) -> Row:
    """Concatenate whole samples until the next one would not fit."""
    row = Row()
    weights = [TASK_WEIGHTS[t] for t in tasks]
    misses = 0
    while misses < 2:
        part = encode_sample(tokenizer, rng, rng.choices(tasks, weights)[0], level)
        offset = len(row.tokens)
        if offset + len(part.tokens) > length:
            misses += 1
            level = max(0, level - 1)
            continue
        row.tokens += part.tokens
        row.weights += [
            (PROMPT_WEIGHT if rng.random() < PROMPT_SHARE else 0.0) if w < 0 else w
            for w in part.weights
        ]
        row.answers += [(t, a + offset, b + offset) for t, a, b in part.answers]
    row.tokens += [END_OF_TEXT] * (length - len(row.tokens))
    row.weights += [0.0] * (length - len(row.weights))
    return row


def make_batch(
    tokenizer: Tokenizer, rng: random.Random, level: int, size: int, repeat_share: float
) -> Batch:
    """The rows of one step at a level; level -1 has only repeats."""
    length = LENGTHS[max(level, 0)]
    n_rows = max(1, size // length)
    tasks = [
        t for t in TASK_WEIGHTS if level >= 3 or t in FIRST_TASKS or (level == 2 and t != "tool")
    ]
    rows = []
    for i in range(n_rows):
        # A fractional number of rows is rounded up or down at random.
        repeat = level < 0 or (i + rng.random()) / n_rows < repeat_share
        rows.append(
            repeat_row(rng, length, tokenizer.get_vocab_size(), 0.85 if level < 0 else 0.4)
            if repeat
            else task_row(tokenizer, rng, level, length, tasks)
        )
    positions, weights, answers = [], [], []
    for i, row in enumerate(rows):
        index = {}
        for j in range(1, length):
            if row.weights[j]:
                index[j] = len(positions)
                positions.append(i * length + j - 1)
                weights.append(row.weights[j])
        for task, a, b in row.answers:
            places = [index[j] for j in range(a, b) if j in index]
            if places:
                answers.append((task, places[0], places[-1] + 1))
    tokens = torch.tensor([r.tokens for r in rows])
    flat = torch.tensor(positions)
    return Batch(tokens, flat, tokens.view(-1)[flat + 1], torch.tensor(weights), answers)
