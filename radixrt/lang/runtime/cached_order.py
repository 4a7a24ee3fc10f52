"""Orders retrieved passages so that those in the server's KV cache stand first.

A cache of prefixes finds a passage only behind the same passages as before, and retrieval ranks
them anew for each question. The order of a prompt is free within limits, so it can follow a chain
of passages that is cached. The chains are walked level by level: one call of the backend looks for
all candidates that are one passage longer than the chains found so far.
"""

from collections.abc import Sequence
from typing import Any

from radixrt.lang.backends.protocol import Backend, CachedPrompt, Prompt
from radixrt.lang.backends.server import backend_of, default_backend
from radixrt.lang.runtime.placeholder import BACKGROUND

Order = tuple[int, ...]
"""Indices of passages, which are their ranks."""

BEAM = 4
"""Chains that are followed at a time."""
MAX_MATCHES = 256
"""Prompts of one call: the server's limit."""
CACHED_SHARE = 0.5
"""A passage counts as cached if the cache holds at least this share of its tokens behind the
passages before it."""


async def cached_order(
    backend: Backend,
    prompt: Prompt,
    passages: Sequence[str],
    separator: str,
    max_shift: int | None,
) -> list[int]:
    """The order of passages: the chain with most cached tokens, then the others by rank.

    The backend is asked once for each passage of the longest chain, and once more.

    Args:
        prompt: before the passages: a text, or messages of which the passages continue the last.
        passages: by rank.
        max_shift: most places between the rank of a passage and its place; None: any number.
    """
    count = len(passages)
    chains: dict[Order, CachedPrompt] = {}
    best: Order = ()
    most_tokens = 0
    for _ in passages:
        longer = [
            (*chain, index)
            for chain in chains or [()]
            for index in range(count)
            if index not in chain and _may_begin((*chain, index), count, max_shift)
        ]
        if len(longer) == 1 and len(longer[0]) == count:
            break  # nothing is left to choose
        asked = longer[:MAX_MATCHES] if chains else [(), *longer[: MAX_MATCHES - 1]]
        texts = ["".join(passages[i] + separator for i in order) for order in asked]
        found = await backend.match_cache([_with_text(prompt, text) for text in texts])
        if found is None:
            break
        known = chains | dict(zip(asked, found, strict=True))
        cached = [order for order in asked if order and _adds(order, known)]
        if not cached:
            break
        cached.sort(key=lambda order: -known[order].cached_tokens)  # stable: ties by rank
        chains = {order: known[order] for order in cached[:BEAM]}
        if (tokens := known[cached[0]].cached_tokens) > most_tokens:
            best, most_tokens = cached[0], tokens
    return _completed(best, count)


def _with_text(prompt: Prompt, text: str) -> Prompt:
    """A prompt with a text behind it, as the beginning of one in which more follows."""
    if isinstance(prompt, str):
        return prompt + text
    *before, last = prompt
    more: Any = [{"type": "text", "text": text}] if isinstance(last["content"], list) else text
    messages = [*before, {**last, "content": last["content"] + more}]
    # Some chat templates write a system message only into the user's message behind it.
    return [*messages, {"role": "user", "content": ""}] if last["role"] == "system" else messages


def _adds(order: Order, known: dict[Order, CachedPrompt]) -> bool:
    """Whether the last passage of an order is cached behind the others."""
    whole, before = known[order], known[order[:-1]]
    tokens = max(whole.prompt_tokens - before.prompt_tokens, 1)
    return whole.cached_tokens - before.cached_tokens >= CACHED_SHARE * tokens


def _may_begin(chain: Order, count: int, max_shift: int | None) -> bool:
    """Whether all passages can stay within the limit. If any order of the others can, that by rank
    can."""
    return max_shift is None or all(
        abs(place - rank) <= max_shift for place, rank in enumerate(_completed(chain, count))
    )


def _completed(chain: Order, count: int) -> list[int]:
    """The chain, and behind it the other passages by rank."""
    return [*chain, *(index for index in range(count) if index not in chain)]


def order_documents(
    passages: Sequence[str],
    before: Prompt = "",
    *,
    separator: str = "\n\n",
    max_shift: int | None = None,
    backend: Backend | str | None = None,
) -> list[int]:
    """The order in which :func:`radixrt.lang.documents` would put passages: those first that the
    server has cached.

    Args:
        passages: the texts, the best first.
        before: the prompt before the passages, character by character: a text, or messages of which
            the passages continue the last.
        separator: between two passages.
        max_shift: most places that a passage may move from its rank. None: any number.
        backend: a backend, or the address of a radixrt server. None: the default backend.

    Returns:
        The indices of the passages. By rank where the backend does not tell what is cached.

    >>> order_documents(["Cats eat mice.", "Dogs bark."], backend="http://127.0.0.1:1")
    [0, 1]
    """
    chosen = default_backend() if backend is None else backend_of(backend)
    return BACKGROUND.submit(cached_order(chosen, before, passages, separator, max_shift)).result()
