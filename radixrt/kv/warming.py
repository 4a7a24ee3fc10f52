"""What comes of bringing a prompt into the radix tree without an answer?

It is a request with the settings :data:`radixrt.base.sampling_params.PREFILL_ONLY`.
"""

import msgspec

from radixrt.messages.answers import AnswerChunk

DEFAULT_PIN_S = 300.0
"""How long a lease lasts unless something else is asked for."""


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """What warming a prompt took, in tokens."""

    prompt_tokens: int
    cached_tokens: int
    """Found in the radix tree."""
    cache_write_tokens: int
    """Computed and put into it: the rest, but for a last page that is not full."""

    @staticmethod
    def of(chunk: AnswerChunk) -> "Warmed":
        """From the one chunk that answers a warm request."""
        return Warmed(
            prompt_tokens=0 if chunk.prompt is None else chunk.prompt.num_tokens,
            cached_tokens=chunk.cached_tokens,
            cache_write_tokens=chunk.cache_write_tokens,
        )
