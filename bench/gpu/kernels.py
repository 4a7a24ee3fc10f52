"""Part 7: the layers' kernels one by one, FlashInfer's beside Triton's, and attention."""

import importlib.util
from collections.abc import Callable

import torch

from bench.gpu.attention_kernels import measure_attention
from bench.gpu.ceilings import Ceilings, median_seconds
from bench.gpu.results import Result, Results
from radixrt.layers.kernels.gpu import FlashInferLayers, GpuKernels
from radixrt.layers.kernels.interface import LayerKernels
from radixrt_kernels.triton import groupwise
from radixrt_kernels.triton.fp8 import quantize_rows
from radixrt_kernels.triton.moe import experts_mlp
from radixrt_kernels.triton.sampling import SETTINGS, draw_tokens

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256
"""Sizes of Llama-3.1-8B."""

Work = Callable[[], object]


def measure_kernels(device: torch.device, ceilings: Ceilings, results: Results) -> None:
    """Time each operation at the sizes of a decode step and of a prefill."""
    if device.type != "cuda":
        return
    kinds: dict[str, LayerKernels] = {"Triton": GpuKernels(None)}
    if importlib.util.find_spec("flashinfer") is not None:
        kinds["FlashInfer"] = GpuKernels(FlashInferLayers())
    for tokens in (64, 256, 8192):
        for operation in ("add_rms_norm", "rotate", "silu"):
            figures = {}
            for name, kernels in kinds.items():
                work, num_bytes = _layer_operation(operation, kernels, tokens, device)
                figures[f"{name} µs"] = median_seconds(work, device) * 1e6
            bound = {name: num_bytes / ceilings.read_bytes_per_s * 1e6 for name in figures}
            results.add(Result(7, f"{operation}, {tokens} tokens", figures, bound))
    for rows in (1, 64, 256):
        _sampling(rows, device, ceilings, results)
    for tokens in (16, 256, 4096):
        _experts(tokens, device, ceilings, results)
    for tokens in (1, 16, 64, 256, 1024):
        _products(tokens, device, ceilings, results)
    if "FlashInfer" in kinds:
        measure_attention(device, ceilings, results)


def _layer_operation(
    operation: str, kernels: LayerKernels, tokens: int, device: torch.device
) -> tuple[Work, int]:
    """Something to time, and the bytes that it can't avoid to move."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    if operation == "add_rms_norm":
        hidden, residual, weight = zeros(tokens, HIDDEN), zeros(tokens, HIDDEN), zeros(HIDDEN)
        work = lambda: kernels.add_rms_norm(hidden, residual, weight, 1e-5, False)  # noqa: E731
        return work, 4 * hidden.numel() * 2
    if operation == "rotate":
        merged = zeros(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        query, key, _ = merged.split([HEADS * HEAD_DIM, *[KV_HEADS * HEAD_DIM] * 2], dim=-1)
        query, key = query.unflatten(-1, (HEADS, HEAD_DIM)), key.unflatten(-1, (KV_HEADS, HEAD_DIM))
        table = torch.ones(8192, HEAD_DIM, device=device)
        positions = torch.arange(tokens, device=device) % 8192
        return lambda: kernels.rotate(positions, query, key, table), 2 * 2 * tokens * (
            HEADS + KV_HEADS
        ) * HEAD_DIM
    gate_up = zeros(tokens, 2 * INTERMEDIATE)
    return lambda: kernels.gated_activation("silu", gate_up), 3 * tokens * INTERMEDIATE * 2


def _sampling(rows: int, device: torch.device, ceilings: Ceilings, results: Results) -> None:
    logits = torch.randn(rows, VOCAB, device=device) * 3
    positions = torch.zeros(rows, dtype=torch.int64, device=device)
    floats = {"greedy": (0.0, 2.0), "temperature": (1.0, 2.0), "top-p 0.95": (1.0, 0.95)}
    figures = {}
    for name, (temperature, top_p) in floats.items():
        settings = torch.zeros(rows, SETTINGS, dtype=torch.int32, device=device)
        settings[:, 0] = torch.tensor(temperature).view(torch.int32)
        settings[:, 1] = VOCAB
        settings[:, 2] = torch.tensor(top_p).view(torch.int32)
        settings[:, 3] = torch.tensor(-torch.inf).view(torch.int32)
        work = lambda settings=settings: draw_tokens(logits, settings, positions)  # noqa: E731
        figures[f"{name} µs"] = median_seconds(work, device) * 1e6
    sort = median_seconds(lambda: logits.sort(dim=-1, descending=True), device, repeats=3)
    figures["torch.sort alone µs"] = sort * 1e6
    bound = {"greedy µs": logits.numel() * 4 / ceilings.read_bytes_per_s * 1e6}
    results.add(Result(7, f"sampling, {rows} rows of {VOCAB}", figures, bound))


def _experts(tokens: int, device: torch.device, ceilings: Ceilings, results: Results) -> None:
    """The experts of one layer of Qwen3-30B-A3B."""
    num_experts, top_k, hidden_size, size = 128, 8, 2048, 768

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.05

    hidden, gate_up = draw(tokens, hidden_size), draw(num_experts, 2 * size, hidden_size)
    down = draw(num_experts, hidden_size, size)
    weights, experts = torch.randn(tokens, num_experts, device=device).softmax(-1).topk(top_k)
    seconds = median_seconds(
        lambda: experts_mlp(hidden, weights, experts, gate_up, down, "silu"), device
    )
    used = int(experts.unique().numel())
    num_bytes = used * 3 * size * hidden_size * 2
    flops = 2 * tokens * top_k * 3 * size * hidden_size
    bound = max(num_bytes / ceilings.read_bytes_per_s, flops / ceilings.gemm_flops_per_s)
    results.add(
        Result(7, f"128 experts, {tokens} tokens", {"µs": seconds * 1e6}, {"µs": bound * 1e6})
    )


def _products(tokens: int, device: torch.device, ceilings: Ceilings, results: Results) -> None:
    """The MLP's down projection with weights of 16, 8 and 4 bits."""
    rows, columns = HIDDEN, INTERMEDIATE
    hidden = torch.randn(tokens, columns, device=device, dtype=torch.bfloat16)
    plain = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
    codes8 = plain.to(torch.float8_e4m3fn)
    row_scales = torch.ones(1, rows, device=device)
    codes4 = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=device)
    groups = torch.ones(rows, columns // 128, device=device)
    packed = groupwise.pack(codes4, groups.half(), groups.byte(), 4, 128)

    def in_fp8() -> torch.Tensor:
        codes, scales = quantize_rows(hidden)
        return torch._scaled_mm(
            codes, codes8.t(), scale_a=scales, scale_b=row_scales, out_dtype=torch.bfloat16
        )

    works: dict[str, tuple[Work, float, float]] = {
        "bfloat16": (lambda: hidden @ plain.t(), 2, 1),
        "fp8": (in_fp8, 1, 2),
        "int4": (lambda: groupwise.linear(hidden, packed, None), 0.5, 1),
        "int4 decoded first": (
            lambda: hidden @ groupwise.dequantize(packed, torch.bfloat16).t(),
            0.5,
            1,
        ),
    }
    figures, bound = {}, {}
    for name, (work, element_bytes, rate) in works.items():
        figures[f"{name} µs"] = median_seconds(work, device) * 1e6
        bound[f"{name} µs"] = 1e6 * max(
            rows * columns * element_bytes / ceilings.read_bytes_per_s,
            2 * tokens * rows * columns / (rate * ceilings.gemm_flops_per_s),
        )
    results.add(Result(7, f"product with {rows} x {columns}, {tokens} tokens", figures, bound))
