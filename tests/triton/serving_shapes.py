"""Each Triton kernel launched once in the shapes that serving has: what is compiled ahead, and timed on a GPU."""

from collections.abc import Callable

import torch

from radixrt_kernels.triton.activation import gated_activation
from radixrt_kernels.triton.append import append_kv
from radixrt_kernels.triton.norm import add_rms_norm, rms_norm
from radixrt_kernels.triton.rotary import rotate

BF16 = torch.bfloat16
TOKENS = 4
HIDDEN = 4096


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


def _append(dtype: torch.dtype) -> Callable[[], None]:
    def launch() -> None:
        cache = torch.zeros(2, 16, 8, 128).to(dtype)
        append_kv(_heads(8), _heads(8), cache, cache, torch.zeros(TOKENS, dtype=torch.int64))

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
    "append_kv": _append(BF16),
    "append_kv to fp8": _append(torch.float8_e4m3fn),
}
