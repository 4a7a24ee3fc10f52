"""Each Triton kernel launched once in the shapes that serving has: what is compiled ahead, and
timed on a GPU."""

from collections.abc import Callable

import torch

from radixrt_kernels.triton import groupwise
from radixrt_kernels.triton.activation import gated_activation
from radixrt_kernels.triton.fp8 import quantize_rows
from radixrt_kernels.triton.lora import add_lora_, group_rows
from radixrt_kernels.triton.moe import experts_mlp
from radixrt_kernels.triton.norm import add_rms_norm, rms_norm
from radixrt_kernels.triton.penalties import penalise
from radixrt_kernels.triton.rotary import rotate
from radixrt_kernels.triton.sampling import SETTINGS, draw_tokens

BF16 = torch.bfloat16
TOKENS = 4
HIDDEN = 4096
VOCAB = 128_256


def _heads(count: int) -> torch.Tensor:
    """Heads of 128 features inside Llama-3.1-8B's merged projection."""
    merged = torch.zeros(TOKENS, (32 + 8 + 8) * 128, dtype=BF16)
    return merged[:, : count * 128].unflatten(-1, (count, 128))


def _norm() -> None:
    rms_norm(torch.zeros(TOKENS, HIDDEN, dtype=BF16), torch.ones(HIDDEN, dtype=BF16), 1e-5, False)


def _head_norm() -> None:
    rms_norm(_heads(8), torch.ones(128, dtype=BF16), 1e-6, False)


def _gemma_norm() -> None:
    hidden = torch.zeros(TOKENS, 3584, dtype=BF16)
    add_rms_norm(hidden, hidden.clone(), torch.ones(3584, dtype=BF16), 1e-6, True)


def _add_norm() -> None:
    hidden = torch.zeros(TOKENS, HIDDEN, dtype=BF16)
    add_rms_norm(hidden, hidden.clone(), torch.ones(HIDDEN, dtype=BF16), 1e-5, False)


def _rotate() -> None:
    rotate(torch.zeros(TOKENS, dtype=torch.int64), _heads(32), _heads(8), torch.zeros(128, 128))


def _activation(name: str) -> Callable[[], None]:
    def launch() -> None:
        gated_activation(name, torch.zeros(TOKENS, 2 * 14336, dtype=BF16))

    return launch


def _draw(masked: bool) -> Callable[[], None]:
    def launch() -> None:
        settings = torch.zeros(TOKENS, SETTINGS, dtype=torch.int32)
        rows = torch.full((TOKENS,), -1, dtype=torch.int32)
        bits = torch.full((1, VOCAB // 32), -1, dtype=torch.int32)
        positions = torch.zeros(TOKENS, dtype=torch.int64)
        draw_tokens(torch.zeros(TOKENS, VOCAB), settings, positions, *[rows, bits][: 2 * masked])

    return launch


def _penalise() -> None:
    rows, strengths = torch.zeros(1, dtype=torch.int64), torch.ones(1, 1)
    counts = torch.zeros(1, VOCAB, dtype=torch.int32)
    penalise(torch.zeros(1, VOCAB), rows, rows, strengths, strengths, strengths, counts > 0, counts)


def _experts(tokens: int, num_experts: int = 8, top_k: int = 2) -> Callable[[], None]:
    """Few experts, so that few weights are allocated; what matters is how many pairs each has."""

    def launch() -> None:
        gate_up = torch.zeros(num_experts, 2 * 768, 2048, dtype=BF16)
        experts_mlp(
            torch.zeros(tokens, 2048, dtype=BF16),
            torch.zeros(tokens, top_k),
            torch.zeros(tokens, top_k, dtype=torch.int64),
            gate_up,
            torch.zeros(num_experts, 2048, 768, dtype=BF16),
            "silu",
        )

    return launch


def _lora(tokens: int) -> Callable[[], None]:
    """Eight adapters of rank 16 of a merged projection."""

    def launch() -> None:
        widths = torch.tensor([HIDDEN, 1024, 1024], dtype=torch.int32)
        add_lora_(
            torch.zeros(tokens, HIDDEN, dtype=BF16),
            group_rows(torch.zeros(tokens, dtype=torch.int64), 8),
            torch.zeros(8, 48, HIDDEN, dtype=BF16),
            torch.zeros(8, HIDDEN + 2048, 16, dtype=BF16),
            16,
            torch.full((8, 3), 16, dtype=torch.int32),
            widths,
            torch.zeros(tokens, HIDDEN + 2048, dtype=BF16),
        )

    return launch


def _groupwise(bits: int, tokens: int) -> Callable[[], None]:
    def launch() -> None:
        codes = torch.zeros(256, HIDDEN, dtype=torch.uint8)
        groups = torch.zeros(256, HIDDEN // 128)
        packed = groupwise.pack(codes, groups.half(), groups.byte(), bits, 128)
        groupwise.linear(torch.zeros(tokens, HIDDEN, dtype=BF16), packed, None)
        groupwise.dequantize(packed, BF16)

    return launch


def _quantize_rows(columns: int) -> Callable[[], None]:
    def launch() -> None:
        quantize_rows(torch.zeros(TOKENS, columns, dtype=BF16))

    return launch


LAUNCHES: dict[str, Callable[[], None]] = {
    "rms_norm": _norm,
    "rms_norm of heads": _head_norm,
    "add_rms_norm": _add_norm,
    "add_rms_norm of Gemma": _gemma_norm,
    "rotate": _rotate,
    "silu": _activation("silu"),
    "gelu": _activation("gelu"),
    "gelu_tanh": _activation("gelu_tanh"),
    "draw_tokens": _draw(False),
    "draw_tokens of grammars": _draw(True),
    "penalise": _penalise,
    "adapters": _lora(TOKENS),
    **{f"experts of {tokens} tokens": _experts(tokens) for tokens in (8, 128, 256, 2048)},
    **{
        f"{bits} bits, {tokens} tokens": _groupwise(bits, tokens)
        for bits in (4, 8)
        for tokens in (1, 64)
    },
    "quantize_rows": _quantize_rows(HIDDEN),
    "quantize_rows of an MLP": _quantize_rows(14336),
}
