"""Reads LoRA adapters in peft's format, and finds the projections of the model that they change.

A part of an adapter that would not be served is an error that names it; nothing is ignored.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from radixrt.base.errors import ConfigError
from radixrt.layers.linear import ColumnParallelLinear, RowParallelLinear
from radixrt.layers.lora import LoraStack, LowRank, StepRows
from radixrt.layers.matrix import Placement
from radixrt.models.decoder import CausalLM

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"

_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules (modules_to_save)",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "lora_bias": "biases (lora_bias)",
    "layer_replication": "repeated layers (layer_replication)",
    "target_parameters": "experts (target_parameters)",
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

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


class AdapterError(ConfigError):
    """An adapter cannot be served."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as it was read."""

    digest: str
    """SHA-256 of all that its answers depend on: tensors and scalings."""
    projections: Mapping[str, LowRank]
    """By the checkpoint's name of the projection: ``model.layers.0.self_attn.q_proj``."""
    rank: int
    """The largest of a projection."""
    invocation: tuple[int, ...] = ()
    """As of ``AdapterInfo``."""


def read_adapter(folder: Path, model: CausalLM, max_rank: int) -> Adapter:
    """Read an adapter for ``model``. Each file is read once, so that what is computed with is what
    the digest is of.

    Raises:
        AdapterError: it is broken, is for another model, or has parts that are not served.
    """
    try:
        config = msgspec.json.decode((folder / _CONFIG).read_bytes(), type=dict[str, Any])
        tensors = safetensors.torch.load((folder / _TENSORS).read_bytes())
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise AdapterError(
            f"{folder} is no LoRA adapter: it has no {name}. Save it with peft's save_pretrained()."
        ) from error
    except (OSError, msgspec.MsgspecError, safetensors.SafetensorError) as error:
        raise AdapterError(f"The LoRA adapter {folder} cannot be read: {error}.") from error
    try:
        check_config(config)
        modules = dict(_modules(config, tensors))
        largest = max(len(pair.down) for pair in modules.values())
        if largest > max_rank:
            raise AdapterError(f"its rank is {largest}; start with --max-lora-rank {largest}")
        return Adapter(
            digest_of(config, tensors),
            dict(_projections(modules, model)),
            largest,
            invocation_of(config),
        )
    except AdapterError as error:
        raise AdapterError(f"The LoRA adapter {folder} cannot be served: {error}.") from error


def check_config(config: Mapping[str, Any]) -> None:
    """Raises:
    AdapterError: the adapter has parts that are not served.
    """
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


def invocation_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that invoke an activated adapter; empty: it is none."""
    return tuple(config.get("alora_invocation_tokens") or ())


def scaling_of(config: Mapping[str, Any], module: str, rank: int) -> float:
    """The factor of ``up @ down``, as peft has it.

    Raises:
        AdapterError: the config gives another rank.
    """
    expected = _by_pattern(config.get("rank_pattern"), module, config.get("r"))
    if expected != rank:
        raise AdapterError(f"the tensors of {module} have rank {rank}, its config says {expected}")
    alpha = float(_by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", rank)))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern, a regular expression of the end of a module's name, that
    fits."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def digest_of(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """The digest of an adapter: of names, dtypes, shapes and bytes of its tensors, of its
    scalings and its invocation."""
    digest = hashlib.sha256(msgspec.msgpack.encode(invocation_of(config)))
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        found = _NAME.fullmatch(name)
        scaling = 1.0
        if found is not None and found[2] == "A":
            scaling = scaling_of(config, found[1], len(tensor))
        head = (name, str(tensor.dtype), list(tensor.shape), scaling)
        digest.update(msgspec.msgpack.encode(head))
        digest.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def _modules(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, LowRank]]:
    """The modules of an adapter, by their names in the model that it was trained on."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if (found := _NAME.fullmatch(name)) is None:
            raise AdapterError(f"the tensor {name} is no part of a linear layer's LoRA")
        pairs.setdefault(found[1], {})[found[2]] = tensor
    if not pairs:
        raise AdapterError("it has no tensors")
    for module, pair in pairs.items():
        if len(pair) < 2 or any(tensor.dim() != 2 for tensor in pair.values()):
            raise AdapterError(f"{module} lacks one of the matrices lora_A and lora_B")
        down, up = pair["A"], pair["B"]
        if len(down) != up.shape[1]:
            raise AdapterError(f"the matrices of {module} have ranks {len(down)} and {up.shape[1]}")
        scaling = scaling_of(config, module, len(down))
        yield module, LowRank(down.float(), up.float() * scaling)


def _projections(modules: Mapping[str, LowRank], model: CausalLM) -> Iterator[tuple[str, LowRank]]:
    """The projections that modules consist of: checkpoints, and adapters with them, may have several
    in one matrix. Output features are translated as those of a weight are."""
    known = {placement.name: placement for _, _, placement in linear_projections(model)}
    for module, pair in modules.items():
        suffix = ".weight"
        parts = list(model.translate(module + suffix, pair.up))
        for name, up in parts:
            placement = known.get(name.removesuffix(suffix))
            if placement is None:
                break
            if placement.size != (len(up), pair.down.shape[1]):
                have = f"{len(up)} x {pair.down.shape[1]}"
                size = "{} x {}".format(*placement.size)
                raise AdapterError(f"{module} is {have} in the adapter and {size} in the model")
            yield placement.name, LowRank(pair.down, up)
        else:
            if parts:
                continue
        raise AdapterError(f"{module} is no linear layer of this model whose LoRA is served")


Layer = ColumnParallelLinear | RowParallelLinear


def linear_projections(model: CausalLM) -> Iterator[tuple[Layer, int, Placement]]:
    """Each projection of a layer that may have adapters: the layer, and the projection's number in
    it."""
    for path, layer in model.named_modules():
        if type(layer) in (ColumnParallelLinear, RowParallelLinear):
            assert isinstance(layer, Layer)
            for number, placement in enumerate(layer.placements(path)):
                yield layer, number, placement


class ModelAdapters:
    """The adapters of a model, each in a place of the stacks of its layers.

    Args:
        num_adapters: places.
        max_rank: the largest rank of an adapter.
    """

    def __init__(self, model: CausalLM, num_adapters: int, max_rank: int) -> None:
        self.model = model
        self.num_adapters = num_adapters
        self.max_rank = max_rank
        self.rows = StepRows(num_adapters)
        self._layers: dict[Layer, list[Placement]] = {}
        for layer, _, placement in linear_projections(model):
            self._layers.setdefault(layer, []).append(placement)

    def read(self, folder: Path) -> Adapter:
        """Read an adapter; see :func:`read_adapter`. Safe to call beside a step."""
        return read_adapter(folder, self.model, self.max_rank)

    def put(self, index: int, adapter: Adapter) -> bool:
        """Put an adapter into a place, which no sequence uses.

        Returns:
            Whether layers have adapters now that had none.
        """
        is_new = False
        for layer, placements in self._layers.items():
            parts = [self._on_rank(adapter, placement, layer.columns) for placement in placements]
            if layer.lora is None and any(parts):
                layer.lora, is_new = self._stack(layer, placements), True
            if layer.lora is not None:
                layer.lora.put(index, parts)
        return is_new

    def _stack(self, layer: Layer, placements: list[Placement]) -> LoraStack:
        widths = [_width(placement, layer.rows) for placement in placements]
        return LoraStack(
            widths, layer.columns, self.max_rank, self.rows, self.num_adapters, self.model.dtype
        )

    def _on_rank(self, adapter: Adapter, placement: Placement, columns: int) -> LowRank | None:
        """The part of a projection's adapter that this rank computes: output features of ``up``, or
        input features of ``down``, whose partial products are added with those of the weight."""
        pair = adapter.projections.get(placement.name)
        if pair is None:
            return None
        start = placement.start
        if placement.dim == 0:
            rows = placement.rows.stop - placement.rows.start
            return LowRank(pair.down, pair.up[start : start + rows])
        return LowRank(pair.down[:, start : start + columns], pair.up)


def _width(placement: Placement, rows: int) -> int:
    start, stop, _ = placement.rows.indices(rows)
    return stop - start
