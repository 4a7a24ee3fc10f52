"""radixrt: an LLM serving engine whose KV cache is a radix tree over token ids."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixrt.cache_hint import CacheHint
    from radixrt.engine import LLM, Answer, Output
    from radixrt.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Answer", "CacheHint", "Output", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command line and the language start without the engine."""
    if name == "SamplingParams":
        from radixrt.sampling_params import SamplingParams

        return SamplingParams
    if name == "CacheHint":
        from radixrt.cache_hint import CacheHint

        return CacheHint
    if name in __all__:
        from radixrt import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'radixrt' has no attribute {name!r}")
