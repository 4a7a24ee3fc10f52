"""Finds the projections of a model that a LoRA adapter changes, and keeps the adapters of a model in
the places of its layers' stacks."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from radixrt.layers.kernels.native import NativeKernels
from radixrt.layers.latent_attention import UpProjections
from radixrt.layers.linear import ColumnParallelLinear, RowParallelLinear
from radixrt.layers.lora import LoraKernels, LoraStack, LowRank, StepRows
from radixrt.layers.matrix import Placement
from radixrt.layers.mlp import Experts, Router, SigmoidRouter
from radixrt.models.adapter_files.form import AdapterError, AdapterFile
from radixrt.models.adapter_files.gguf import read_file
from radixrt.models.adapter_files.peft import read_folder
from radixrt.models.decoder import CausalLM

_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")


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


def read_adapter(path: Path, model: CausalLM, max_rank: int | None = None) -> Adapter:
    """Read an adapter for ``model``, of peft's folder or llama.cpp's file.

    Args:
        max_rank: the largest that is served; None: any.

    Raises:
        AdapterError: it is broken, is for another model, or has parts that are not served.
    """
    config, is_file = model.config, path.is_file()
    try:
        if not path.exists():
            raise AdapterError("there is no such folder or file")
        file = (
            read_file(path, {name: getattr(config, name, None) for name in _LAYOUT})
            if is_file
            else read_folder(path)
        )
        projections = dict(_projections(file, model))
        _check_order(projections, config, is_file)
        if not is_file and getattr(config, "linear_value_heads_tiled", False):
            projections = {name: _tiled(name, pair, config) for name, pair in projections.items()}
        if file.invocation and (name := next(_of_latents(model, projections), None)):
            raise AdapterError(
                f"it is activated by tokens, and changes {name}, which is computed for cached tokens too"
            )
        largest = max(len(pair.down) for pair in projections.values())
        if max_rank is not None and largest > max_rank:
            raise AdapterError(f"its rank is {largest}; start with --max-lora-rank {largest}")
    except AdapterError as error:
        raise AdapterError(f"The LoRA adapter {path} cannot be served: {error}.") from error
    return Adapter(file.digest, projections, largest, file.invocation)


_LAYOUT = ("model_type", "num_attention_heads", "num_key_value_heads")
"""Settings of a model on which the order of its output features in GGUF files depends."""


def _projections(file: AdapterFile, model: CausalLM) -> Iterator[tuple[str, LowRank]]:
    """The projections that the modules of an adapter consist of: checkpoints, and adapters with
    them, may have several in one matrix."""
    known = {name: placement.size for name, placement in projections(model)}
    for candidates in file.modules:
        errors = []
        for name, pair in candidates.items():
            try:
                found = list(_parts(name, pair, model, known))
            except AdapterError as error:
                errors.append(error)
            except (RuntimeError, ValueError):  # a split that does not divide it
                errors.append(AdapterError(f"{name} has another shape in the adapter"))
            else:
                yield from found
                break
        else:
            raise errors[0]


def _parts(
    name: str, pair: LowRank, model: CausalLM, known: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[str, LowRank]]:
    """The projections in a weight of the checkpoint. Output features are translated as those of the
    weight are.

    Raises:
        AdapterError: it is none of the model's, or of another size.
    """
    up, module, part = pair.up, name.removesuffix(".weight"), None
    is_stack = up.dim() == 3
    if is_stack and module == name and model.has_transposed_experts:
        up = up.transpose(1, 2)
    for translated, rows in model.translate(name, up):
        part, down = translated.removesuffix(".weight"), pair.down
        if is_stack:
            number = _EXPERT.fullmatch(part)
            down = pair.down[int(number[2])] if number else down
        if part not in known:
            raise AdapterError(f"{module} is no linear layer of this model whose LoRA is served")
        if rows.dim() != 2 or known[part] != (len(rows), down.shape[-1]):
            have = f"{rows.shape[-2]} x {down.shape[-1]}"
            size = "{} x {}".format(*known[part])
            raise AdapterError(f"{module} is {have} in the adapter and {size} in the model")
        yield part, LowRank(down, rows)
    if part is None:
        raise AdapterError(f"{module} is no linear layer of this model whose LoRA is served")
    if is_stack and _EXPERT.sub(rf"\g<1>{len(up)}\g<3>", part) in known:
        raise AdapterError(f"{module} has {len(up)} experts in the adapter, and more in the model")


def _check_order(names: Mapping[str, LowRank], config: Any, is_file: bool) -> None:
    """
    Raises:
        AdapterError: the layers of the model are not those of the checkpoint that the adapter was
            trained on, as llama.cpp's converter changes some.
    """
    tiles = is_file and str(config.model_type).startswith("qwen3_5")
    is_tiled = getattr(config, "linear_value_heads_tiled", False)
    if tiles and not is_tiled and any(".linear_attn." in name for name in names):
        raise AdapterError(
            "the heads of its linear_attn have another order in GGUF files: serve a GGUF adapter with a GGUF model"
        )
    if is_file and config.model_type == "falcon_h1":
        raise AdapterError("GGUF adapters of Falcon-H1 are not served")
    if getattr(config, "has_multiplied_weights", False):
        raise AdapterError("adapters of Falcon-H1 are not served with a GGUF model")


def _tiled(name: str, pair: LowRank, config: Any) -> LowRank:
    """The adapter of a projection of a linear attention whose value heads have the order of GGUF
    files: those of one key have a distance of the number of keys."""
    path, _, projection = name.rpartition(".")
    if not path.endswith(".linear_attn"):
        return pair
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    order = torch.arange(heads).view(keys, -1).T.flatten()

    def reordered(values: torch.Tensor, dim: int) -> torch.Tensor:
        return values.unflatten(dim, (heads, -1)).index_select(dim, order).flatten(dim, dim + 1)

    if projection == "out_proj":
        return LowRank(reordered(pair.down, 1), pair.up)
    first = 2 * keys * config.linear_key_head_dim if projection == "in_proj_qkv" else 0
    return LowRank(pair.down, torch.cat((pair.up[:first], reordered(pair.up[first:], 0))))


def _of_latents(model: CausalLM, names: Mapping[str, LowRank]) -> Iterator[str]:
    for path, layer in model.named_modules():
        if isinstance(layer, UpProjections) and path in names:
            yield path


# ------------------------------------------------------------ the places in a model


def projections(model: CausalLM) -> Iterator[tuple[str, Placement]]:
    """The projections of a model that adapters may change, those of other ranks' experts too, by
    name."""
    for path, layer in _layers(model):
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear | Router | UpProjections):
            yield from ((placement.name, placement) for placement in layer.placements(path))
        elif isinstance(layer, Experts):
            for expert in range(layer.num_experts):
                wide, down = layer.placements(f"{path}.{expert}", 0)
                yield from ((placement.name, placement) for placement in (*wide, down))


def _layers(model: CausalLM) -> Iterator[tuple[str, Any]]:
    """The modules of the language model. A vision tower has no adapters: the features of an image
    are the same for all of them."""
    for path, layer in model.named_modules():
        if not path.startswith("vision."):
            yield path, layer


@dataclass(frozen=True, slots=True)
class _Cut:
    """What a matrix on this rank has of a projection's adapter."""

    name: str
    """The projection's name in the checkpoint."""
    of: Callable[[LowRank], LowRank]


@dataclass(frozen=True, slots=True)
class _Site:
    """A place for the stack of the adapters of a layer."""

    layer: Any
    attribute: str
    """The layer's attribute that has the stack."""
    members: Sequence[Sequence[_Cut]]
    """The parts of each member."""
    widths: Sequence[int]
    columns: int
    dtype: torch.dtype


def _sites(model: CausalLM) -> Iterator[_Site]:
    for path, layer in _layers(model):
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear | Router):
            placements = list(layer.placements(path))
            dtype = torch.float32 if isinstance(layer, SigmoidRouter) else model.dtype
            widths = [len(range(*p.rows.indices(layer.rows))) for p in placements]
            cuts = [_cut(p, width, layer.columns) for p, width in zip(placements, widths, strict=True)]  # fmt: skip
            yield _Site(layer, "lora", [cuts], widths, layer.columns, dtype)
        elif isinstance(layer, Experts):
            yield from _expert_sites(path, layer, model.dtype)
        elif isinstance(layer, UpProjections):
            yield from _head_sites(path, layer, model.dtype)


def _expert_sites(path: str, experts: Experts, dtype: torch.dtype) -> Iterator[_Site]:
    size = experts.part.stop - experts.part.start
    stack, down = experts.gate_up_proj, experts.down_proj
    each = [experts.placements(f"{path}.{expert}", 0) for expert in experts.own]
    first = [[_cut(p, size, stack.columns) for p in wide] for wide, _ in each]
    yield _Site(stack, "lora", first, [size] * len(experts.names), stack.columns, dtype)
    second = [[_cut(p, down.rows_each, size)] for _, p in each]
    yield _Site(down, "lora", second, [down.rows_each], size, dtype)


def _head_sites(path: str, layer: UpProjections, dtype: torch.dtype) -> Iterator[_Site]:
    """Each head has its rows of ``up``. Those of the key are multiplied from the other side."""
    each = layer.key_dim + layer.value_dim
    starts = [(layer.rank * layer.heads + head) * each for head in range(layer.heads)]

    def key(start: int, pair: LowRank) -> LowRank:
        return LowRank(pair.up[start : start + layer.key_dim].T, pair.down.T)

    def value(start: int, pair: LowRank) -> LowRank:
        return LowRank(pair.down, pair.up[start + layer.key_dim : start + each])

    keys, values = ([[_Cut(path, partial(of, s))] for s in starts] for of in (key, value))
    yield _Site(layer, "key_lora", keys, [layer.columns], layer.key_dim, dtype)
    yield _Site(layer, "value_lora", values, [layer.value_dim], layer.columns, dtype)


def _cut(placement: Placement, width: int, columns: int) -> _Cut:
    """A range of output features of ``up``, or of input features of ``down``, whose partial products
    are added with those of the weight."""
    start = placement.start

    def rows(pair: LowRank) -> LowRank:
        return LowRank(pair.down, pair.up[start : start + width])

    def inputs(pair: LowRank) -> LowRank:
        return LowRank(pair.down[:, start : start + columns], pair.up)

    return _Cut(placement.name, rows if placement.dim == 0 else inputs)


class ModelAdapters:
    """The adapters of a model, each in a place of the stacks of its layers.

    Args:
        num_adapters: places.
        max_rank: the largest rank of an adapter.
        kernels: for the device of the model.
    """

    def __init__(
        self,
        model: CausalLM,
        num_adapters: int,
        max_rank: int,
        kernels: LoraKernels = NativeKernels.lora,
    ) -> None:
        self.model = model
        self.num_adapters = num_adapters
        self.max_rank = max_rank
        self.rows = StepRows(num_adapters, kernels)
        self._device = next(model.parameters()).device
        self._sites = list(_sites(model))
        self._stacks: list[LoraStack | None] = [None] * len(self._sites)
        """The stack of each site, which may be one that its layer has not yet."""
        self._new: SimpleQueue[tuple[_Site, LoraStack]] = SimpleQueue()
        """Stacks for layers that have none, or one for smaller ranks."""

    def read(self, path: Path) -> Adapter:
        """Read an adapter; see :func:`read_adapter`. Safe to call beside a step."""
        return read_adapter(path, self.model, self.max_rank)

    def put(self, index: int, adapter: Adapter) -> None:
        """Put an adapter into a place, between steps."""
        self.write(index, adapter)
        self.attach()

    def write(self, index: int, adapter: Adapter) -> None:
        """Write an adapter into a place, which no sequence uses. Safe to call beside a step.

        The layers have all of it after the next :meth:`attach`.
        """
        for number, site in enumerate(self._sites):
            members = [[self._part(adapter, cut) for cut in cuts] for cuts in site.members]
            ranks = [len(part.down) for parts in members for part in parts if part is not None]
            stack = self._stacks[number]
            if ranks and (stack is None or stack.rank < max(ranks)):
                stack = self._grown(site, stack, max(ranks))
                self._stacks[number] = stack
                self._new.put((site, stack))
            if stack is not None:
                stack.put(index, members)

    def attach(self) -> bool:
        """Give the layers the stacks that were made for them.

        Returns:
            Whether layers have other stacks now.
        """
        has_new = False
        with contextlib.suppress(Empty):
            while True:
                site, stack = self._new.get_nowait()
                setattr(site.layer, site.attribute, stack)
                has_new = True
        return has_new

    def _part(self, adapter: Adapter, cut: _Cut) -> LowRank | None:
        pair = adapter.projections.get(cut.name)
        return None if pair is None else cut.of(pair)

    def _grown(self, site: _Site, before: LoraStack | None, rank: int) -> LoraStack:
        """A stack with room for adapters of a rank, and with those of the one before."""
        stack = LoraStack(
            site.widths,
            site.columns,
            rank,
            self.rows,
            self.num_adapters,
            site.dtype,
            len(site.members),
            self._device,
        )
        if before is not None:
            stack.take(before)
        return stack
