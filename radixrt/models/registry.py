"""The served architectures and their classes. Imports no torch, since the supervisor reads the
table too."""

import importlib
import re
from collections.abc import Mapping
from typing import Any

from radixrt.base.errors import ConfigError
from radixrt.models.refusals import not_yet

ARCHITECTURES = {
    "BambaForCausalLM": "radixrt.models.hybrids.mamba:BambaForCausalLM",
    "BertForSequenceClassification": "radixrt.models.encoders:BertModel",
    "BertModel": "radixrt.models.encoders:BertModel",
    "DeepseekV2ForCausalLM": "radixrt.models.mixtures:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "radixrt.models.mixtures:DeepseekV3ForCausalLM",
    "Ernie4_5ForCausalLM": "radixrt.models.dense:Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM": "radixrt.models.dense:Exaone4ForCausalLM",
    "FalconH1ForCausalLM": "radixrt.models.hybrids.mamba:FalconH1ForCausalLM",
    "Gemma2ForCausalLM": "radixrt.models.gemma:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "radixrt.models.gemma:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "radixrt.models.vision.gemma3:Gemma3ForConditionalGeneration",
    "Gemma3TextModel": "radixrt.models.encoders:Gemma3TextModel",
    "Gemma4ForCausalLM": "radixrt.models.gemma4:Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration": "radixrt.models.vision.gemma4:Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForCausalLM": "radixrt.models.gemma4:Gemma4ForCausalLM",
    "Gemma4UnifiedForConditionalGeneration": "radixrt.models.gemma4:Gemma4ForCausalLM",
    "Glm4MoeForCausalLM": "radixrt.models.mixtures:Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": "radixrt.models.mixtures:Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM": "radixrt.models.mixtures:GptOssForCausalLM",
    "GraniteForCausalLM": "radixrt.models.dense:GraniteForCausalLM",
    "GraniteMoeHybridForCausalLM": "radixrt.models.hybrids.mamba:GraniteMoeHybridForCausalLM",
    "HunYuanDenseV1ForCausalLM": "radixrt.models.dense:HunYuanDenseV1ForCausalLM",
    "Lfm2ForCausalLM": "radixrt.models.hybrids.lfm2:Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM": "radixrt.models.hybrids.lfm2:Lfm2MoeForCausalLM",
    "Idefics3ForConditionalGeneration": "radixrt.models.vision.idefics3:Idefics3ForConditionalGeneration",
    "LlamaForCausalLM": "radixrt.models.dense:LlamaForCausalLM",
    "LlamaForSequenceClassification": "radixrt.models.dense:LlamaForCausalLM",
    "LlamaModel": "radixrt.models.dense:LlamaForCausalLM",
    "LlavaForConditionalGeneration": "radixrt.models.vision.llava:LlavaForConditionalGeneration",
    "Mamba2ForCausalLM": "radixrt.models.hybrids.nemotron_h:Mamba2ForCausalLM",
    "MiniMaxM2ForCausalLM": "radixrt.models.mixtures:MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM": "radixrt.models.dense:Ministral3ForCausalLM",
    "Mistral3ForConditionalGeneration": "radixrt.models.vision.mistral3:Mistral3ForConditionalGeneration",
    "MistralForCausalLM": "radixrt.models.dense:MistralForCausalLM",
    "MistralForSequenceClassification": "radixrt.models.dense:MistralForCausalLM",
    "MistralModel": "radixrt.models.dense:MistralForCausalLM",
    "MixtralForCausalLM": "radixrt.models.mixtures:MixtralForCausalLM",
    "ModernBertForSequenceClassification": "radixrt.models.encoders:ModernBertModel",
    "ModernBertModel": "radixrt.models.encoders:ModernBertModel",
    "NemotronHForCausalLM": "radixrt.models.hybrids.nemotron_h:NemotronHForCausalLM",
    "Olmo2ForCausalLM": "radixrt.models.dense:Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "radixrt.models.dense:Olmo3ForCausalLM",
    "Phi3ForCausalLM": "radixrt.models.dense:Phi3ForCausalLM",
    "Qwen2ForCausalLM": "radixrt.models.dense:Qwen2ForCausalLM",
    "Qwen2ForSequenceClassification": "radixrt.models.dense:Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "radixrt.models.vision.qwen:Qwen2_5_VLForConditionalGeneration",
    "Qwen2VLForConditionalGeneration": "radixrt.models.vision.qwen:Qwen2VLForConditionalGeneration",
    "Qwen2Model": "radixrt.models.dense:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "radixrt.models.dense:Qwen3ForCausalLM",
    "Qwen3ForSequenceClassification": "radixrt.models.dense:Qwen3ForCausalLM",
    "Qwen3Model": "radixrt.models.dense:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "radixrt.models.mixtures:Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM": "radixrt.models.hybrids.qwen3_next:Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration": "radixrt.models.vision.qwen:Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration": "radixrt.models.vision.qwen:Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForCausalLM": "radixrt.models.hybrids.qwen3_next:Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "radixrt.models.vision.qwen_hybrid:Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "radixrt.models.hybrids.qwen3_next:Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "radixrt.models.vision.qwen_hybrid:Qwen3_5ForConditionalGeneration",
    "RobertaForSequenceClassification": "radixrt.models.encoders:RobertaModel",
    "RobertaModel": "radixrt.models.encoders:RobertaModel",
    "SeedOssForCausalLM": "radixrt.models.dense:SeedOssForCausalLM",
    "SmolLM3ForCausalLM": "radixrt.models.dense:SmolLM3ForCausalLM",
    "SmolVLMForConditionalGeneration": "radixrt.models.vision.idefics3:SmolVLMForConditionalGeneration",
    "XLMRobertaForSequenceClassification": "radixrt.models.encoders:RobertaModel",
    "XLMRobertaModel": "radixrt.models.encoders:RobertaModel",
}
"""Architecture, as config.json spells it, to "module:Class"."""

_ENCODERS = "radixrt.models.encoders:"
"""The module of the models whose tokens see those behind them."""
_VISION = "radixrt.models.vision."
"""The package of the models that see images."""
_HYBRIDS = ("radixrt.models.hybrids.", "radixrt.models.vision.qwen_hybrid:")
"""The package of the models with recurrent layers, and the module of those that see images."""


def check_architecture(config: Mapping[str, Any]) -> str:
    """The architecture of a checkpoint.

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
    asked = ", ".join(map(str, names))
    if others := [name for name in ARCHITECTURES if _family(name) == _family(asked)]:
        raise ConfigError(
            f"Not yet: {asked}. The nearest supported models are those of its family: {', '.join(others)}."
        )
    raise ConfigError(f"{not_yet(asked)} All that are: docs/status.md.")


def _family(name: str) -> str:
    """The family of an architecture: ``Qwen3`` of ``Qwen3ForCausalLM``."""
    return re.sub(r"(For[A-Z]\w*|(Text)?Model)$", "", name)


def is_encoder(architecture: str) -> bool:
    """Whether the tokens of a model see those behind them, so that none of its prompts is cached or
    generates text."""
    return ARCHITECTURES[architecture].startswith(_ENCODERS)


def is_recurrent(architecture: str) -> bool:
    """Whether a model has layers that keep a state of a sequence."""
    return ARCHITECTURES[architecture].startswith(_HYBRIDS)


def sees_images(architecture: str) -> bool:
    """Whether a model has a vision tower that is served."""
    return ARCHITECTURES[architecture].startswith(_VISION)


def model_class(architecture: str) -> Any:
    """The class of an architecture that ``check_architecture`` returned. Imports torch."""
    module, _, name = ARCHITECTURES[architecture].partition(":")
    return getattr(importlib.import_module(module), name)
