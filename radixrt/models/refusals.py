"""Words the refusals of checkpoints: what is missing or damaged, and what can be served instead;
and checks the rope parameters of a config.json before anything is allocated for them.

Names of architectures are those of config.json and of GGUF files. Only their beginnings are
compared, in lower case and without signs between the words.
"""

import contextlib
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from radixrt.base.errors import ConfigError


class _Unsupported(NamedTuple):
    beginnings: str
    """A regular expression."""
    reason: str
    nearest: str
    """A hub id."""


_SEES = "a model that reads images or sound"
_SPARSE = "latent attention that an indexer makes sparse"
_LATENT = "latent attention of another form"
_EMBEDS = "an encoder of another family"
_OLDER = "an older architecture"
_TABLE = (
    _Unsupported(r"llamawithexperts", "Mixtral in a GGUF file", "mistralai/Mixtral-8x7B-Instruct-v0.1, in safetensors,"),
    _Unsupported(r"qwen(2|25|3|35)?(5)?(moe)?(vl|omni)|qwen2audio", _SEES, "Qwen/Qwen3-4B"),
    _Unsupported(r"llava(next|onevision)|videollava|vipllava|mllama|internvl|idefics|pixtral|minicpm[ov]|phi3v|phi4mm|molmo|kimivl", _SEES, "google/gemma-3-4b-it"),
    _Unsupported(r"smolvlm|paligemma|moondream|whisper|clip|siglip|deepseekocr|glm4v|glmocr", _SEES, "google/gemma-3-4b-it"),
    _Unsupported(r"granitemoe", "a mixture of Granite's experts alone", "ibm-granite/granite-3.3-2b-instruct"),
    _Unsupported(r"falconmamba|jamba|mamba|zamba|plamo2|rwkv|recurrentgemma|kimilinear|minimaxm1", "recurrent layers of another kind", "Qwen/Qwen3.5-4B"),
    _Unsupported(r"deepseekv(32|4)|glm(moedsa|5)", _SPARSE, "deepseek-ai/DeepSeek-V3.1"),
    _Unsupported(r"deepseek|kimi|minicpm3|longcat|mistral4", _LATENT, "deepseek-ai/DeepSeek-V2-Lite-Chat"),
    _Unsupported(r"gemma3n", "AltUp and Laurel layers", "google/gemma-4-E2B-it"),
    _Unsupported(r"gemma", "the first Gemma", "google/gemma-3-1b-it"),
    _Unsupported(r"llama4", "chunked attention with experts", "meta-llama/Llama-3.2-3B-Instruct"),
    _Unsupported(r"phimoe|phi", "another Phi", "microsoft/Phi-4-mini-instruct"),
    _Unsupported(r"qwen2moe|olmoe|bailing|ernie45moe|dbrx|grok|hunyuan(v1)?moe|arctic|dots1", "a mixture of experts of another family", "Qwen/Qwen3-30B-A3B"),
    _Unsupported(r"starcoder|codegen|gptbigcode|codeshell", _OLDER, "Qwen/Qwen2.5-Coder-1.5B-Instruct"),
    _Unsupported(r"olmo", _OLDER, "allenai/OLMo-2-0425-1B-Instruct"),
    _Unsupported(r"exaone", _OLDER, "LGAI-EXAONE/EXAONE-4.0-1.2B"),
    _Unsupported(r"m?t5|m?bart|pegasus|marian|m2m|nllb|led|prophetnet", "an encoder and a decoder", "Qwen/Qwen3-1.7B"),
    _Unsupported(r"mpnet|distilbert|nomic|jina|new|electra|deberta|camembert|albert|gte|eurobert|neobert", _EMBEDS, "BAAI/bge-m3"),
)  # fmt: skip
_ANY = _Unsupported("", "an architecture of its own", "Qwen/Qwen3-4B")


def not_yet(name: str) -> str:
    """Two sentences about an architecture that is not served.

    >>> not_yet("JambaForCausalLM")
    'Not yet: JambaForCausalLM (recurrent layers of another kind). The nearest supported model is Qwen/Qwen3.5-4B.'
    """
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    found = next((one for one in _TABLE if re.match(one.beginnings, plain)), _ANY)
    return f"Not yet: {name} ({found.reason}). The nearest supported model is {found.nearest}."


_KINDS_OF_FORKS = {
    31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
    133: "Q6_0", 134: "IQ1_BN", 135: "IQ2_BN", 137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K", 141: "IQ6_K",
    144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS", 151: "Q8_KV", 152: "IQ5_KS", 153: "IQ2_KT", 154: "IQ3_KT",
    155: "IQ4_KT", 156: "IQ3_KS", 157: "IQ2_KL", 158: "IQ1_KT", 202: "Q4_0_R8", 206: "Q5_0_R4", 208: "Q8_0_R8",
    210: "Q2_K_R4", 211: "Q3_K_R4", 212: "Q4_K_R4", 213: "Q5_K_R4", 214: "Q6_K_R4", 216: "IQ2_XXS_R4",
    217: "IQ2_XS_R4", 218: "IQ3_XXS_R4", 219: "IQ1_S_R4", 220: "IQ4_NL_R4", 221: "IQ3_S_R4", 222: "IQ2_S_R4",
    223: "IQ4_XS_R8", 229: "IQ1_M_R4", 230: "BF16_R16", 233: "Q6_0_R4", 335: "IQ2_BN_R4", 337: "IQ2_K_R4",
    338: "IQ3_K_R4", 339: "IQ4_K_R4", 340: "IQ5_K_R4", 344: "IQ4_KS_R4", 352: "IQ5_KS_R4", 398: "Q8_KV_R8",
    399: "Q8_K_R8",
}  # fmt: skip
"""ik_llama.cpp's kinds of weights, and those that llama.cpp has removed, by their numbers."""


def unknown_kind(number: int) -> str:
    """The refusal of a GGUF file with a kind of weights that the package ``gguf`` does not know."""
    name = _KINDS_OF_FORKS.get(number)
    kind = f"{name} of ik_llama.cpp or an old llama.cpp" if name else f"number {number}"
    return (
        f"Not yet: weights of the kind {kind}. Take a file of one of llama.cpp's kinds, such as Q4_K_M or IQ4_XS"
        + ("." if name else ", or update the package gguf.")
    )


def damaged(file: Path, form: str, error: Exception) -> str:
    """The refusal of a file of weights that cannot be read."""
    with contextlib.suppress(OSError), file.open("rb") as opened:
        if opened.read(len(_POINTER)) == _POINTER:
            return f"{file} is a Git LFS pointer and no {form} file. Run `git lfs pull` in its folder, or download it again."
    return f"{file} is no readable {form} file: it is damaged, or its download did not finish ({error}). Download it again."


def no_checkpoint(folder: Path | str, names: Collection[str]) -> str:
    """The refusal of a folder without config.json, by the names of its files."""
    if "adapter_config.json" in names:
        return (
            f"{folder} is a LoRA adapter, which is not served alone. Merge it into its model and serve that: peft's "
            "AutoPeftModelForCausalLM.from_pretrained(DIR).merge_and_unload().save_pretrained(NEW_DIR)."
        )
    if files := sorted(name for name in names if name.endswith(".gguf")):
        return f"{folder} is no checkpoint but holds GGUF files. Give one of them: {folder}/{files[0]}."
    return (
        f"{folder} is no checkpoint: it holds no config.json. Give a folder with config.json and safetensors files, a GGUF "
        "file, or the name of a model on the hub, such as Qwen/Qwen3-0.6B."
    )


_POINTER = b"version https://git-lfs"


ROPE_TYPES = (
    "default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "mrope", "su"
)  # fmt: skip
"""The last two are older names of ``default`` with sections and of ``longrope``."""

_POSITIVE = (
    "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "partial_rotary_factor", "beta_fast", "beta_slow",
)  # fmt: skip


def check_rope(config: Mapping[str, Any]) -> None:
    """Check the rope parameters of a text model's config.

    Raises:
        ConfigError: an unknown type, or a value that gives frequencies that are no numbers.
    """
    _check_positive(config, "rope_theta")
    given = config.get("rope_parameters") or config.get("rope_scaling")
    if not given:
        return
    if not isinstance(given, dict):
        raise _refusal("rope_parameters", given, "is not an object")
    by_layer_type = [one for one in given.values() if isinstance(one, dict)]
    for parameters in by_layer_type or [given]:
        _check_parameters(parameters)


def _check_parameters(parameters: Mapping[str, Any]) -> None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"The checkpoint's rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}."
        )
    for name in _POSITIVE:
        _check_positive(parameters, name)
    low, high = parameters.get("low_freq_factor"), parameters.get("high_freq_factor")
    if low is not None and high is not None and low > high:
        raise _refusal("low_freq_factor", low, f"is above 'high_freq_factor': {high}")
    lengths = {_num_factors(parameters, name) for name in ("short_factor", "long_factor")} - {0}
    if len(lengths) > 1:
        raise _refusal("long_factor", max(lengths), "is not the number of 'short_factor'")


def _num_factors(parameters: Mapping[str, Any], name: str) -> int:
    factors = parameters.get(name)
    if factors is None:
        return 0
    if not (isinstance(factors, list) and factors and all(map(_is_positive, factors))):
        raise _refusal(name, factors, "is not a list of positive numbers")
    return len(factors)


def _check_positive(values: Mapping[str, Any], name: str) -> None:
    if (value := values.get(name)) is not None and not _is_positive(value):
        raise _refusal(name, value, "is not a positive number")


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _refusal(name: str, value: Any, reason: str) -> ConfigError:
    return ConfigError(
        f"The checkpoint's config.json has {name!r}: {str(value)[:60]}, which {reason}."
    )
