"""Mixture of experts: a router sends each token to a few of many small MLPs."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from radixrt.layers.activation import gated_activation
from radixrt.layers.kernels import KernelLayer
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.weights import WeightSlot, parameter


class Router(nn.Module):
    """Chooses ``top_k`` experts a token by softmax; the same on every rank."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, normalize: bool) -> None:
        """
        Args:
            normalize: scale each token's weights to sum to 1.
        """
        super().__init__()
        self.top_k = top_k
        self.normalize = normalize
        self.weight = parameter(num_experts, hidden_size)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens, hidden_size] -> weights float32 and expert ids, both [num_tokens, top_k]"""
        probabilities = F.linear(hidden, self.weight).float().softmax(dim=-1)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts


class Experts(KernelLayer):
    """Gated MLPs, each split over ranks like a dense one. Loads ``experts.0.gate_proj.weight``, ..."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.intermediate_size = intermediate_size
        self.activation = gated_activation(activation)
        share = tp.share(intermediate_size, "expert size")
        self.gate_up = parameter(num_experts, 2 * share, hidden_size)
        self.down = parameter(num_experts, hidden_size, share)

    def forward(self, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """hidden [num_tokens, hidden_size], weights and expert ids [num_tokens, top_k] -> as hidden"""
        output = self.kernels.experts(
            hidden, weights, experts, self.gate_up, self.down, self.activation
        )
        return self.tp.all_reduce(output)

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        num_experts, hidden_size, share = self.down.shape
        start = self.tp.rank * share
        wide, tall = (self.intermediate_size, hidden_size), (hidden_size, self.intermediate_size)
        for expert in range(num_experts):
            gate, up = self.gate_up[expert].chunk(2)
            yield f"{path}.{expert}.gate_proj.weight", WeightSlot(wide, gate, 0, start)
            yield f"{path}.{expert}.up_proj.weight", WeightSlot(wide, up, 0, start)
            yield f"{path}.{expert}.down_proj.weight", WeightSlot(tall, self.down[expert], 1, start)


class SparseMoE(nn.Module):
    """Router and experts in the place of a dense MLP."""

    def __init__(self, gate: Router, experts: Experts) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]"""
        return self.experts(hidden, *self.gate(hidden))


def split_fused_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Experts that a checkpoint keeps in one tensor, as the single ones that ``Experts`` loads.

    Args:
        name: of ``...experts.gate_up_proj`` [experts, 2 * size, hidden_size] or ``...experts.down_proj``
            [experts, hidden_size, size]; any other tensor passes unchanged.
    """
    prefix, _, projection = name.rpartition(".")
    if not prefix.endswith(".experts") or projection not in ("gate_up_proj", "down_proj"):
        yield name, tensor
        return
    for expert, weight in enumerate(tensor):
        if projection == "down_proj":
            yield f"{prefix}.{expert}.down_proj.weight", weight
        else:
            gate, up = weight.chunk(2)
            yield f"{prefix}.{expert}.gate_proj.weight", gate
            yield f"{prefix}.{expert}.up_proj.weight", up
