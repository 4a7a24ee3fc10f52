"""The explanation of the cache misses of a request, and the facts of the scheduler that it is made
from."""

from typing import Literal

import msgspec

from radixrt.messages.ids import PackedIds

Cause = Literal[
    "none",
    "never_seen",
    "evicted",
    "missing_state",
    "other_salt",
    "other_adapter",
    "template_rewrote_history",
    "tools_changed",
    "volatile_text",
    "page_rounding",
]
"""``docs/explanations.md`` says when each of them is named."""

SHOWN_TOKENS = 128
"""Most tokens of the nearest cached continuation that travel and are compared as text."""


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """The eviction of the first page that a prompt missed."""

    seconds_ago: float
    """Seconds before the admission of the request."""
    rule: str
    """The eviction policy; "retain=none" or "retain=high" for KV of that retention level,
    "next_use" for KV with a stated next use, "max_cached_fraction" for KV of a key above its share,
    "flush" for a flush of the cache."""


class DiskRead(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a prompt whose KV was read from disk (``--cache-dir``)."""

    tokens: int
    seconds: float
    """For which the request waited for it."""
    evicted_s_ago: float | None = None
    """Seconds between the eviction of the first page and the read; None: that is not known, or it
    was before a restart."""

    @property
    def sentence(self) -> str:
        """For people.

        >>> DiskRead(tokens=96, seconds=0.04, evicted_s_ago=40.0).sentence
        '96 tokens, evicted 40 s before, were read from disk in 0.04 s.'
        """
        ago = self.evicted_s_ago
        evicted = "" if ago is None else f", evicted {ago:.0f} s before,"
        return f"{self.tokens} tokens{evicted} were read from disk in {self.seconds:.2g} s."


class CacheFacts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The state of the radix tree around the end of a prompt's cached prefix, when its sequence was
    admitted."""

    cached_tokens: int = 0
    """Prompt tokens whose KV came from the tree. Set with the first token: sequences that compute
    the same prompt at once share its pages."""
    reusable_tokens: int
    """Leading tokens that could have come from the tree: all but the last, unless the request asks
    for log-probabilities of its prompt or the cache is off."""
    seen_tokens: int = 0
    """Leading tokens of the prompt with which a cached sequence begins, those of its last,
    incomplete page included."""
    cached_ids: PackedIds = b""
    """The next tokens of that sequence: up to SHOWN_TOKENS."""
    seq_id: int = -1
    """The id of the request that used that sequence last; -1: unknown."""
    is_own: bool = False
    """Whether that request had the same key."""
    evicted: Eviction | None = None
    stateless_tokens: int = 0
    """Tokens whose KV was found but that were computed again, because no state of the recurrent
    layers was kept behind them."""
    disk: DiskRead | None = None
    other_salt_tokens: int = 0
    """Leading tokens of the prompt that are cached under another salt of the same key, if they are
    more."""
    other_adapter_tokens: int = 0
    """The same, under the same salt and another adapter or the base model."""


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The place where a prompt leaves the nearest cached sequence."""

    token_index: int
    """Number of leading tokens that agree."""
    message_index: int | None
    """Index of the message of the prompt in which the texts begin to differ, system message
    included; None: in the tools, or the prompt has no messages."""
    role: str | None
    """The role of that message."""
    prompt_text: str | None
    """The prompt from that token on, its first tokens; None: texts are not shown to this client."""
    cached_text: str | None
    """The cached sequence from there on; empty if it ends there. None: as above, or another key of
    the cache group has used it last."""


class CacheExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a prompt that did not come from the cache, and why."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    missed_tokens: int
    cause: Cause
    detail: str
    """The cause in a sentence."""
    divergence: Divergence | None
    """None: the prompt was cached as far as it could be."""
    evicted: Eviction | None
    disk: DiskRead | None = None
    """None: nothing was read from disk."""
