"""How likely are several texts behind one prompt? By token ids, so that only what differs is scored."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from radixrt.lang.backends.protocol import Prompt, Score

Encode = Callable[[Prompt, bool], Awaitable[list[int]]]
"""The token ids of a prompt whose last message is (True) or is not (False) to be continued."""
Logprobs = Callable[[list[list[int]], list[int]], Awaitable[list[tuple[float, ...]]]]
"""The log-probabilities of each sequence's tokens from its start on, computed in one batch."""


async def score_choices(
    prompt: Prompt,
    continues: bool,
    choices: Sequence[str],
    unconditional: bool,
    encode: Encode,
    logprobs: Logprobs,
) -> list[Score]:
    """Encode the prompt with each choice behind it, as it will be when it is part of a longer prompt.

    A choice's first characters may join the prompt's last token, so the scores begin where the first of the encoded
    texts parts from the prompt alone: at the same token for all.
    """
    alone, *whole = await asyncio.gather(
        encode(prompt, continues), *(encode(*followed_by(prompt, continues, c)) for c in choices)
    )
    start = min(shared_tokens(alone, ids) for ids in whole)
    start = max(start, 1)  # nothing comes before the first token that could make it likely
    sequences, starts = list(whole), [start] * len(whole)
    if unconditional:  # behind the text's first token alone, since something has to stand there
        sequences += [ids[:1] + ids[start:] for ids in whole]
        starts += [1] * len(whole)
    found = await logprobs(sequences, starts)
    without = found[len(whole) :] or [()] * len(whole)
    return [Score(given, alone) for given, alone in zip(found[: len(whole)], without, strict=True)]


def followed_by(prompt: Prompt, continues: bool, text: str) -> tuple[Prompt, bool]:
    """A prompt with a text behind it: in a conversation, as (a part of) the assistant's message."""
    if isinstance(prompt, str):
        return prompt + text, False
    if not continues:
        return [*prompt, {"role": "assistant", "content": text}], True
    last = {**prompt[-1], "content": prompt[-1]["content"] + text}
    return [*prompt[:-1], last], True


def shared_tokens(one: list[int], other: list[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
