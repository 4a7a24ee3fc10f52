"""What a layer asks of a device: the few operations that have a fast form of their own on each kind."""

from typing import Protocol, runtime_checkable

import torch
from torch import nn

from radixrt.layers.matrix import Matrix


class LayerKernels(Protocol):
    """Everything between a model's attention calls. ``TorchKernels`` is the reference for the others."""

    is_taped: bool
    """``radixrt_kernels.tape`` hears of every call, so that a step can be repeated without its layers."""

    def rms_norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool
    ) -> torch.Tensor:
        """[..., size] -> [..., size]; see ``RMSNorm`` for what ``unit_offset`` changes."""

    def add_rms_norm(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        unit_offset: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of hidden + residual, hidden + residual), both [num_tokens, size]. May overwrite its inputs."""

    def rotate(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the first ``rotary_dim`` features of each head. May overwrite its inputs.

        Args:
            positions: [num_tokens] int64
            query, key: [num_tokens, heads, head_dim], perhaps views into one merged projection
            cos_sin: [context_length, rotary_dim] float32, cosines then sines
        """

    def gated_activation(self, name: str, gate_up: torch.Tensor) -> torch.Tensor:
        """[num_tokens, 2 * size] -> [num_tokens, size]; gate first. ``name`` is one of ``GATED_ACTIVATIONS``."""

    def experts(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        activation: str,
    ) -> torch.Tensor:
        """The weighted sum of the chosen experts' gated MLPs.

        Args:
            hidden: [num_tokens, hidden_size]
            weights: [num_tokens, top_k] float32
            experts: [num_tokens, top_k] int64
            gate_up: [num_experts, 2 * size, hidden_size]
            down: [num_experts, hidden_size, size]
        """

    def pack(self, matrix: Matrix) -> Matrix:
        """A loaded matrix in the form that multiplies fastest; ``matrix`` itself where that is it."""


@runtime_checkable
class HasKernels(Protocol):
    """A layer that computes by kernels."""

    kernels: LayerKernels


def use_kernels(model: nn.Module, kernels: LayerKernels) -> None:
    """Let every layer of ``model`` compute by ``kernels``."""
    for module in model.modules():
        if isinstance(module, HasKernels):
            module.kernels = kernels
