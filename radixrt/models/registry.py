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
    "BertForSequenceClassification": "radixrt.models.encoders.bert:BertModel",
    "BertModel": "radixrt.models.encoders.bert:BertModel",
    "DeepseekV2ForCausalLM": "radixrt.models.mixtures.deepseek:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "radixrt.models.mixtures.deepseek:DeepseekV3ForCausalLM",
    "Ernie4_5ForCausalLM": "radixrt.models.families.ernie4_5:Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM": "radixrt.models.families.exaone4:Exaone4ForCausalLM",
    "FalconH1ForCausalLM": "radixrt.models.hybrids.mamba:FalconH1ForCausalLM",
    "Gemma2ForCausalLM": "radixrt.models.gemma.gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "radixrt.models.gemma.gemma3:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "radixrt.models.gemma.gemma3:Gemma3ForConditionalGeneration",
    "Gemma3TextModel": "radixrt.models.encoders.gemma3:Gemma3TextModel",
    "Gemma4ForCausalLM": "radixrt.models.gemma.gemma4:Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration": "radixrt.models.gemma.gemma4:Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForCausalLM": "radixrt.models.gemma.gemma4:Gemma4UnifiedForCausalLM",
    "Gemma4UnifiedForConditionalGeneration": "radixrt.models.gemma.gemma4:Gemma4UnifiedForConditionalGeneration",
    "Glm4MoeForCausalLM": "radixrt.models.mixtures.glm4_moe:Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": "radixrt.models.mixtures.deepseek:Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM": "radixrt.models.mixtures.gpt_oss:GptOssForCausalLM",
    "GraniteForCausalLM": "radixrt.models.families.granite:GraniteForCausalLM",
    "GraniteMoeHybridForCausalLM": "radixrt.models.hybrids.mamba:GraniteMoeHybridForCausalLM",
    "HunYuanDenseV1ForCausalLM": "radixrt.models.families.hunyuan:HunYuanDenseV1ForCausalLM",
    "Lfm2ForCausalLM": "radixrt.models.hybrids.lfm2:Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM": "radixrt.models.hybrids.lfm2:Lfm2MoeForCausalLM",
    "LlamaForCausalLM": "radixrt.models.families.llama:LlamaForCausalLM",
    "LlamaForSequenceClassification": "radixrt.models.families.llama:LlamaForCausalLM",
    "LlamaModel": "radixrt.models.families.llama:LlamaForCausalLM",
    "Mamba2ForCausalLM": "radixrt.models.hybrids.nemotron_h:Mamba2ForCausalLM",
    "MiniMaxM2ForCausalLM": "radixrt.models.mixtures.minimax_m2:MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM": "radixrt.models.families.ministral3:Ministral3ForCausalLM",
    "Mistral3ForConditionalGeneration": "radixrt.models.families.ministral3:Mistral3ForConditionalGeneration",
    "MistralForCausalLM": "radixrt.models.families.mistral:MistralForCausalLM",
    "MistralForSequenceClassification": "radixrt.models.families.mistral:MistralForCausalLM",
    "MistralModel": "radixrt.models.families.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "radixrt.models.mixtures.mixtral:MixtralForCausalLM",
    "ModernBertForSequenceClassification": "radixrt.models.encoders.modernbert:ModernBertModel",
    "ModernBertModel": "radixrt.models.encoders.modernbert:ModernBertModel",
    "NemotronHForCausalLM": "radixrt.models.hybrids.nemotron_h:NemotronHForCausalLM",
    "Olmo2ForCausalLM": "radixrt.models.families.olmo:Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "radixrt.models.families.olmo:Olmo3ForCausalLM",
    "Phi3ForCausalLM": "radixrt.models.families.phi3:Phi3ForCausalLM",
    "Qwen2ForCausalLM": "radixrt.models.families.qwen2:Qwen2ForCausalLM",
    "Qwen2ForSequenceClassification": "radixrt.models.families.qwen2:Qwen2ForCausalLM",
    "Qwen2Model": "radixrt.models.families.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "radixrt.models.families.qwen3:Qwen3ForCausalLM",
    "Qwen3ForSequenceClassification": "radixrt.models.families.qwen3:Qwen3ForCausalLM",
    "Qwen3Model": "radixrt.models.families.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "radixrt.models.mixtures.qwen3_moe:Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM": "radixrt.models.hybrids.qwen3_next:Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM": "radixrt.models.hybrids.qwen3_next:Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "radixrt.models.hybrids.qwen3_next:Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "radixrt.models.hybrids.qwen3_next:Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "radixrt.models.hybrids.qwen3_next:Qwen3_5MoeForConditionalGeneration",
    "RobertaForSequenceClassification": "radixrt.models.encoders.bert:RobertaModel",
    "RobertaModel": "radixrt.models.encoders.bert:RobertaModel",
    "SeedOssForCausalLM": "radixrt.models.families.seed_oss:SeedOssForCausalLM",
    "SmolLM3ForCausalLM": "radixrt.models.families.smollm3:SmolLM3ForCausalLM",
    "XLMRobertaForSequenceClassification": "radixrt.models.encoders.bert:RobertaModel",
    "XLMRobertaModel": "radixrt.models.encoders.bert:RobertaModel",
}
"""Architecture, as config.json spells it, to "module:Class"."""

_ENCODERS = "radixrt.models.encoders."
"""The package of the models whose tokens see those behind them."""
_HYBRIDS = "radixrt.models.hybrids."
"""The package of the models with recurrent layers."""


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


def model_class(architecture: str) -> Any:
    """The class of an architecture that ``check_architecture`` returned. Imports torch."""
    module, _, name = ARCHITECTURES[architecture].partition(":")
    return getattr(importlib.import_module(module), name)
