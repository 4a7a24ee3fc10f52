"""The MLP of a decoder layer: gated (Shazeer, 2020), or a mixture of experts (Shazeer et al.,
2017), whose router sends each token to a few of many small MLPs."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from radixrt.base.errors import ConfigError
from radixrt.layers.kernels.interface import Choice, KernelLayer
from radixrt.layers.linear import ColumnParallelLinear, LinearLayer, Projection, RowParallelLinear
from radixrt.layers.matrix import DenseMatrix, MatrixFormat, MatrixStack, Placement
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.weights import WeightSlot
from radixrt_kernels import mixture

RELU_SQUARED = "relu2"
"""The activation of MLPs without a gate (Nemotron)."""
_NAMES = {
    RELU_SQUARED: RELU_SQUARED,
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "clamped_swiglu": "clamped_swiglu",
}


def gated_activation(hidden_act: str) -> str:
    """The kernel's name for a config's ``hidden_act``.

    Raises:
        ConfigError: the activation is not one that gated MLPs use here.
    """
    if hidden_act not in _NAMES:
        raise ConfigError(
            f"The checkpoint's activation {hidden_act!r} is not supported; supported: {', '.join(_NAMES)}."
        )
    return _NAMES[hidden_act]


class SquaredReluMLP(KernelLayer):
    """``down(relu(up(x))**2)`` (So et al., 2021)"""

    def __init__(self, hidden_size: int, size: int, tp: TensorParallel, bias: bool = False) -> None:
        super().__init__()
        up = [Projection.even("up_proj", size, tp)]
        self.merged_up_proj = ColumnParallelLinear(hidden_size, up, bias)
        self.down_proj = RowParallelLinear(size, hidden_size, bias, tp)

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]"""
        return self.down_proj.forward(self.merged_up_proj.forward(hidden).relu().square())


class GatedMLP(KernelLayer):
    """``down(act(gate(x)) * up(x))``"""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        tp: TensorParallel,
        *,
        activation: str,
        bias: bool = False,
    ) -> None:
        super().__init__()
        gate_up = [
            Projection.even(name, intermediate_size, tp) for name in ("gate_proj", "up_proj")
        ]
        self.gate_up_proj = ColumnParallelLinear(hidden_size, gate_up, bias)
        self.activation = gated_activation(activation)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, tp)

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]"""
        gate_up = self.gate_up_proj.forward(hidden)
        return self.down_proj.forward(self.kernels.gated_activation(self.activation, gate_up))


class Router(LinearLayer, KernelLayer):
    """Scores the experts for each token; the same on every rank. Its weights are plain in every
    checkpoint."""

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, normalize: bool, bias: bool = False
    ) -> None:
        """
        Args:
            normalize: scale each token's weights to sum to 1.
        """
        super().__init__(num_experts, hidden_size, bias)
        self.num_experts = num_experts
        self.top_k = top_k
        self.normalize = normalize

    def allocate(self, matrix_format: MatrixFormat) -> None:
        super().allocate(DenseMatrix)

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, num_experts]"""
        output = self.matrix.multiply(hidden, self.bias)
        return output if self.lora is None else self.lora.add(hidden, output)

    def choose(self, hidden: Tensor) -> Choice:
        """The experts of each token."""
        return self.kernels.choose_experts(
            self.forward(hidden), self.top_k, normalize=self.normalize
        )

    def placements(self, path: str) -> Iterator[Placement]:
        yield Placement(path, (self.rows, self.columns), slice(None), 0, 0)


class SigmoidRouter(Router):
    """Scores each expert by a sigmoid, independent of the others. A learned bias and groups of
    experts take part in the choice, but not in the weights (DeepSeek V3).

    Its weights are kept in float32, and so are the scores: the choice depends on small differences.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        normalize: bool,
        *,
        num_groups: int = 1,
        top_groups: int = 1,
        factor: float = 1.0,
    ) -> None:
        """
        Args:
            num_groups, top_groups: experts are chosen from the ``top_groups`` groups whose two best
                experts score highest.
            factor: of the weights, once they are normalized.
        """
        super().__init__(hidden_size, num_experts, top_k, normalize)
        self.num_groups = num_groups
        self.top_groups = top_groups
        self.factor = factor
        bias = torch.zeros(num_experts, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def allocate(self, matrix_format: MatrixFormat) -> None:
        super().allocate(matrix_format)
        self.matrix.float()

    def choose(self, hidden: Tensor) -> Choice:
        scores = self.scores(self.forward(hidden.float()))
        ranked = self.ranks(scores)
        if self.top_groups < self.num_groups:
            groups = ranked.unflatten(-1, (self.num_groups, -1))
            best = self.group_ranks(groups).topk(self.top_groups, dim=-1).indices
            outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
            ranked = groups.masked_fill(outside[..., None], -torch.inf).flatten(-2)
        experts = ranked.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.factor, experts

    def scores(self, logits: Tensor) -> Tensor:
        """The weights of all experts: [num_tokens, num_experts] -> the same"""
        return self.kernels.sigmoid_gate(logits[:, None])[:, 0]

    def ranks(self, scores: Tensor) -> Tensor:
        """What experts are chosen by: [num_tokens, num_experts] -> the same"""
        return scores + self.e_score_correction_bias

    def group_ranks(self, ranks: Tensor) -> Tensor:
        """What groups are chosen by: [num_tokens, groups, experts of each] -> [num_tokens,
        groups]"""
        return ranks.topk(2, dim=-1).values.sum(dim=-1)

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        yield from super().weight_slots(path)
        bias = self.e_score_correction_bias
        yield f"{path}.e_score_correction_bias", WeightSlot(tuple(bias.shape), bias)


class SoftmaxGroupRouter(SigmoidRouter):
    """Scores experts by a softmax over all of them, without a bias; a group counts as its best
    expert (DeepSeek V2)."""

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=-1)

    def ranks(self, scores: Tensor) -> Tensor:
        return scores

    def group_ranks(self, ranks: Tensor) -> Tensor:
        return ranks.amax(dim=-1)

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        yield from Router.weight_slots(self, path)


class Experts(KernelLayer):
    """MLPs, gated but for ``relu2``; loads ``experts.0.gate_proj.weight``, ...

    Each is split over ranks like a dense one, or a rank holds some of them (``--ep``); the sum over ranks is
    the same.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        tp: TensorParallel,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.num_experts = num_experts
        self.intermediate_size = intermediate_size
        self.activation = gated_activation(activation)
        self.own = tp.own_experts(num_experts)
        self.part = tp.expert_share(intermediate_size)
        share = self.part.stop - self.part.start
        self.names = ("up_proj",) if activation == RELU_SQUARED else ("gate_proj", "up_proj")
        rows = len(self.names) * share  # gate's, then up's
        self.gate_up_proj = MatrixStack(len(self.own), rows, hidden_size, bias)
        self.down_proj = MatrixStack(len(self.own), hidden_size, share, bias)
        self.counts: Tensor | None = None

    def forward(self, hidden: Tensor, choice: Choice) -> Tensor:
        """[num_tokens, hidden_size] -> the same"""
        if self.counts is not None:
            mixture.count_by_expert(choice[1], self.counts)
        stacks = self.gate_up_proj, self.down_proj
        is_part = len(self.own) < self.num_experts
        if is_part:
            weights, experts = choice
            choice = weights, experts - self.own.start
        output = self.kernels.experts(hidden, choice, stacks, self.activation, is_part=is_part)
        return self.tp.all_reduce(output)

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        for expert in range(self.num_experts):
            if expert in self.own:
                yield from self._slots_of(f"{path}.{expert}", expert - self.own.start)
            else:  # of the same shapes
                for name, slot in self._slots_of(f"{path}.{expert}", 0):
                    yield name, dataclasses.replace(slot, held=False)

    def _slots_of(self, path: str, index: int) -> Iterator[tuple[str, WeightSlot]]:
        """The slots of one expert, which is number ``index`` of this rank's."""
        start, share = self.part.start, self.part.stop - self.part.start
        wide, down = self.placements(path, index)
        for half, placement in enumerate(wide):
            yield from self.gate_up_proj.loadable.slots(placement)
            if (bias := self.gate_up_proj.bias) is not None:
                own = bias[index, half * share : (half + 1) * share]
                slot = WeightSlot((self.intermediate_size,), own, 0, start)
                yield f"{placement.name}.bias", slot
        yield from self.down_proj.loadable.slots(down)
        if (bias := self.down_proj.bias) is not None:  # the sum over ranks has it once
            slot = WeightSlot((self.down_proj.rows_each,), bias[index], held=not start)
            yield f"{down.name}.bias", slot

    def placements(self, path: str, index: int) -> tuple[list[Placement], Placement]:
        """The projections in ``gate_up_proj`` and that in ``down_proj`` of an expert, which is
        number ``index`` of this rank's."""
        hidden_size, start = self.gate_up_proj.columns, self.part.start
        share = self.part.stop - start
        size, first = self.intermediate_size, self.gate_up_proj.rows_of(index).start
        wide = []
        for name in self.names:
            rows = slice(first, first + share)
            wide.append(Placement(f"{path}.{name}", (size, hidden_size), rows, 0, start))
            first += share
        rows = self.down_proj.rows_of(index)
        return wide, Placement(f"{path}.down_proj", (hidden_size, size), rows, 1, start)


def check_expert_groups(model: nn.Module, tp: TensorParallel) -> None:
    """
    Raises:
        ConfigError: experts are to be spread over ranks, and ``model`` has none.
    """
    if tp.expert_groups > 1 and not any(isinstance(module, Experts) for module in model.modules()):
        raise ConfigError(
            "--ep spreads the experts of a mixture over ranks, and this model has no experts; leave --ep out."
        )


def count_tokens(model: nn.Module) -> Tensor:
    """Let ``model`` count the tokens of each expert from now on.

    Returns:
        the counts, int64 [layers with experts, experts], on the host
    """
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    most = max((each.num_experts for each in experts), default=0)
    counts = torch.zeros(len(experts), most, dtype=torch.int64)
    for each, row in zip(experts, counts, strict=True):
        each.counts = row[: each.num_experts]
    return counts


class SparseMoE(KernelLayer):
    """Router and experts in the place of a dense MLP."""

    def __init__(
        self,
        gate: Router,
        experts: Experts,
        shared: GatedMLP | SquaredReluMLP | None = None,
        shared_gate: Router | None = None,
    ) -> None:
        """
        Args:
            shared: an expert that each token goes to beside those of its choice.
            shared_gate: its weight is the sigmoid of this score of one expert; None: 1.
        """
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.shared_experts = shared
        self.shared_expert_gate = shared_gate

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]"""
        output = self.experts.forward(hidden, self.gate.choose(hidden))
        if self.shared_experts is None:
            return output
        shared = self.shared_experts.forward(hidden)
        if self.shared_expert_gate is not None:
            gate = self.shared_expert_gate.forward(hidden)
            shared = self.kernels.sigmoid_gate(gate[:, None], shared[:, None])[:, 0]
        return output + shared


def split_fused_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split the experts that a checkpoint keeps in one tensor into those that ``Experts`` loads.

    Args:
        name: of ``...experts.gate_up_proj`` [experts, 2 * size, hidden_size],
            ``...experts.gate_proj`` and ``...experts.up_proj`` [experts, size, hidden_size], or
            ``...experts.down_proj`` [experts, hidden_size, size], perhaps with ``.weight`` behind;
            any other tensor passes unchanged.
    """
    prefix, _, projection = name.removesuffix(".weight").rpartition(".")
    if not prefix.endswith(".experts"):
        yield name, tensor
        return
    for expert, weight in enumerate(tensor):
        if projection == "gate_up_proj":
            gate, up = weight.chunk(2)
            yield f"{prefix}.{expert}.gate_proj.weight", gate
            yield f"{prefix}.{expert}.up_proj.weight", up
        else:
            yield f"{prefix}.{expert}.{projection}.weight", weight
