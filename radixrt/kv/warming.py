"""Results of warm requests, which compute a prompt's KV and generate nothing.

Such a request has the parameters :data:`radixrt.base.sampling_params.PREFILL_ONLY`.
"""

import msgspec

from radixrt.messages.answers import AnswerChunk

DEFAULT_PIN_S = 300.0
"""Default time of a lease."""


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a warm request, in tokens."""

    prompt_tokens: int
    cached_tokens: int
    """Found in the radix tree."""
    cache_write_tokens: int
    """Computed and inserted into it; all other tokens, except those of an incomplete last page."""

    @staticmethod
    def of(chunk: AnswerChunk) -> "Warmed":
        """From the one chunk that answers a warm request."""
        return Warmed(
            prompt_tokens=0 if chunk.prompt is None else chunk.prompt.num_tokens,
            cached_tokens=chunk.cached_tokens,
            cache_write_tokens=chunk.cache_write_tokens,
        )
