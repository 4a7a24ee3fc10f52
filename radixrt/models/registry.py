"""The served architectures and their classes. Imports no torch, since the supervisor reads the table too."""

import importlib
from collections.abc import Mapping
from typing import Any

from radixrt.base.errors import ConfigError

ARCHITECTURES = {
    "Gemma2ForCausalLM": "radixrt.models.gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "radixrt.models.gemma3:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "radixrt.models.gemma3:Gemma3ForConditionalGeneration",
    "LlamaForCausalLM": "radixrt.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "radixrt.models.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "radixrt.models.mixtral:MixtralForCausalLM",
    "Phi3ForCausalLM": "radixrt.models.phi3:Phi3ForCausalLM",
    "Qwen2ForCausalLM": "radixrt.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "radixrt.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "radixrt.models.qwen3_moe:Qwen3MoeForCausalLM",
}
"""Architecture, as config.json spells it, to "module:Class"."""


def check_architecture(config: Mapping[str, Any]) -> str:
    """The architecture of a checkpoint.

    Args:
        config: the content of its config.json.

    Raises:
        ConfigError: it names none, or none that is supported.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or not names:
        raise ConfigError(
            "The checkpoint's config.json names no architecture; its field 'architectures' must hold one of: "
            f"{', '.join(sorted(ARCHITECTURES))}."
        )
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return name
    raise ConfigError(
        f"The architecture {', '.join(map(str, names))} is not supported; supported are: "
        f"{', '.join(sorted(ARCHITECTURES))}."
    )


def model_class(architecture: str) -> Any:
    """The class of an architecture that ``check_architecture`` returned. Imports torch."""
    module, _, name = ARCHITECTURES[architecture].partition(":")
    return getattr(importlib.import_module(module), name)
