"""Reads LoRA adapters in the folders of peft's ``save_pretrained``.

A part of an adapter that would not be served is an error that names it; nothing is ignored.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import safetensors.torch
from torch import Tensor

from radixrt.layers.lora import LowRank
from radixrt.models.adapter_files.form import AdapterError, AdapterFile, digest_of, invocation_of

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"

_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules (modules_to_save)",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "lora_bias": "biases (lora_bias)",
    "layer_replication": "repeated layers (layer_replication)",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA (use_bdlora)",
    "arrow_config": "a router over adapters (arrow_config)",
    "megatron_config": "Megatron's layers (megatron_config)",
    "kasa_config": "KaSA (kasa_config)",
    "velora_config": "VeLoRA (velora_config)",
    "monteclora_config": "MonteCLoRA (monteclora_config)",
}
"""Fields of the config that change what is computed, and what is said of them."""
_SCALING = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_parameters")
"""Fields of the config that the digest is of, with the tensors."""


class _Scalings(msgspec.Struct):
    """Types of these fields."""

    r: int | None = None
    lora_alpha: float = 8.0
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool | None = None
    target_parameters: list[str] | None = None


_NAME = re.compile(r"base_model\.model\.(.+?)((?:\.base_layer)*)\.lora_([AB])\.weight")
"""Wrappers of several parameters of one module are nested."""


def read_folder(folder: Path) -> AdapterFile:
    """Read an adapter, each file once, so that what is computed with is what the digest is of.

    Raises:
        AdapterError: it is broken, or has parts that are not served.
    """
    try:
        config = msgspec.json.decode((folder / _CONFIG).read_bytes(), type=dict[str, Any])
        tensors = safetensors.torch.load((folder / _TENSORS).read_bytes())
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise AdapterError(
            f"it is no LoRA adapter, for it has no {name}; save it with peft's save_pretrained(), or give a GGUF file"
        ) from error
    except (OSError, msgspec.MsgspecError, safetensors.SafetensorError) as error:
        raise AdapterError(f"it cannot be read: {error}") from error
    check_config(config)
    invocation = invocation_of(config.get("alora_invocation_tokens"))
    settings = [invocation, [config.get(field) or None for field in _SCALING]]
    return AdapterFile(digest_of(settings, tensors), list(_modules(config, tensors)), invocation)


def check_config(config: Mapping[str, Any]) -> None:
    """Raises AdapterError if the adapter has parts that are not served."""
    try:
        msgspec.convert(config, _Scalings)
        for pattern in {
            **(config.get("rank_pattern") or {}),
            **(config.get("alpha_pattern") or {}),
        }:
            re.compile(pattern)
    except (msgspec.ValidationError, re.error) as error:
        raise AdapterError(f"its {_CONFIG} cannot be read: {error}") from error
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"its peft_type is {kind}; LORA is served")
    for field, what in _REFUSED.items():
        if config.get(field):
            raise AdapterError(
                f"{what} are not served yet" if what.endswith(")") else f"{what} is not served yet"
            )
    if config.get("bias", "none") != "none":
        raise AdapterError(f"biases (bias: {config['bias']}) are not served yet")


def _modules(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Iterator[dict[str, LowRank]]:
    pairs: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        if (found := _NAME.fullmatch(name)) is None:
            raise AdapterError(f"the tensor {name} is no part of a linear layer's LoRA")
        pairs.setdefault((found[1], found[2]), {})[found[3]] = tensor
    if not pairs:
        raise AdapterError("it has no tensors")
    for (module, _), pair in pairs.items():
        if len(pair) < 2 or any(tensor.dim() != 2 for tensor in pair.values()):
            raise AdapterError(f"{module} lacks one of the matrices lora_A and lora_B")
        down, up = pair["A"].float(), pair["B"].float()
        if len(down) != up.shape[1]:
            raise AdapterError(f"the matrices of {module} have ranks {len(down)} and {up.shape[1]}")
        stacks = dict(_stacks(config, module, down, up))
        is_parameter = f"{module}.weight" in _targets(config, module)
        name = f"{module}.weight" if is_parameter else module
        plain = {}
        if not stacks or len(down) == _rank_of(config, name):
            scaling = _scaling_of(config, name, len(down))
            plain[f"{module}.weight"] = LowRank(down, up * scaling)
        yield plain | stacks


def _stacks(
    config: Mapping[str, Any], module: str, down: Tensor, up: Tensor
) -> Iterator[tuple[str, LowRank]]:
    """The pairs of a stack of experts, by the parameters of the module that they may belong to.

    Wrappers of several parameters are nested in an order that the file does not tell; their shapes
    do.
    """
    for name in _targets(config, module):
        rank = _rank_of(config, name)
        if not name.endswith((".weight", ".bias")) and rank and len(down) % rank == 0:
            ups = up.unflatten(1, (rank, -1)).permute(2, 0, 1)
            scaling = _scaling_of(config, name, rank)
            yield name, LowRank(down.unflatten(0, (-1, rank)), ups * scaling)


def _targets(config: Mapping[str, Any], module: str) -> list[str]:
    """The parameters of a module that the config may mean by its target_parameters."""
    found = []
    for target in config.get("target_parameters") or ():
        path, _, parameter = target.rpartition(".")
        if not path or module == path or module.endswith(f".{path}"):
            found.append(f"{module}.{parameter}")
    return found


def _scaling_of(config: Mapping[str, Any], module: str, rank: int) -> float:
    """The factor of ``up @ down``, as peft has it.

    Raises:
        AdapterError: the config gives another rank.
    """
    if (expected := _rank_of(config, module)) != rank:
        raise AdapterError(f"the tensors of {module} have rank {rank}, its config says {expected}")
    alpha = float(_by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", rank)))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _rank_of(config: Mapping[str, Any], module: str) -> int:
    return int(_by_pattern(config.get("rank_pattern"), module, config.get("r")) or 0)


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern, a regular expression of the end of a module's name, that
    fits."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
