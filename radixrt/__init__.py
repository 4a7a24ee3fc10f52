"""radixrt: an LLM serving engine whose KV cache is a radix tree over token ids."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixrt.base.sampling_params import SamplingParams
    from radixrt.kv.cache_hint import CacheHint
    from radixrt.offline.llm import LLM, Answer, Embedding, Output

__version__ = "0.1.0"
__all__ = ["LLM", "Answer", "CacheHint", "Embedding", "Output", "SamplingParams"]


_MODULES = {
    "CacheHint": "radixrt.kv.cache_hint",
    "SamplingParams": "radixrt.base.sampling_params",
    **dict.fromkeys(("LLM", "Answer", "Embedding", "Output"), "radixrt.offline.llm"),
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command line and the language start without the engine."""
    if name not in _MODULES:
        raise AttributeError(f"module 'radixrt' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
