"""``python -m bench.fp8_blocks``: the error and the size of the forms into which 8-bit floats in
blocks of 128 x 128 can be decoded.

The built-in model is written in such blocks, as DeepSeek V3 is published. Errors are those of the
weights, and the mean divergence of next-token distributions over English text from the same 8-bit
floats in float32: by PyTorch in float32, so that nothing but the weights of the layers differs, and
by the native kernels in bfloat16, as a server would choose them.
"""

import copy
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from bench.gguf_oracle.checks import Divergence, divide, logits
from bench.peers_cpu.documentation import installed_packages
from radixrt.base.config import DEMO_MODEL
from radixrt.layers.kernels.native import NativeKernels
from radixrt.layers.quantization.fp8_blocks import FP8
from radixrt.layers.quantization.groupwise import quantize
from radixrt.models.checkpoint import read_config, resolve_model_path
from radixrt.models.decoder import CausalLM
from radixrt.models.loader import load_model

BLOCK = 128
LARGEST = 448.0
PAGES = 10


def _as_integers(group_size: int | None) -> Callable[[Tensor], Tensor]:
    def round_(weight: Tensor) -> Tensor:
        groups = weight.unflatten(1, (-1, group_size or weight.shape[1]))
        codes, scales, zeros = quantize(groups, bits=8, symmetric=True)
        return ((codes.float() - zeros[..., None].float()) * scales[..., None].float()).flatten(1)

    return round_


FORMS: dict[str, tuple[Callable[[Tensor], Tensor], float, str]] = {
    "int8, a scale for 128 columns of a row": (_as_integers(BLOCK), 1 + 3 / BLOCK, "auto"),
    "int8, a scale for a row": (_as_integers(None), 1, ""),
    "bfloat16": (lambda weight: weight.bfloat16().float(), 2, "plain"),
}
"""Rounding, bytes of a weight, and the value of --quantization, if there is one."""


def write_in_blocks(source: Path, folder: Path) -> Path:
    """Write a checkpoint whose matrices in layers are 8-bit floats in blocks."""
    shutil.copytree(source, folder)
    found = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    config = read_config(source) | {"quantization_config": found}
    (folder / "config.json").write_text(json.dumps(config))
    stored = {}
    for name, weight in load_file(source / "model.safetensors").items():
        stored[name] = weight
        if ".layers." in name and weight.ndim == 2:
            blocks = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
            scales = blocks.abs().amax(dim=(1, 3)) / LARGEST
            codes = (blocks / scales[:, None, :, None]).to(FP8)
            stored[name] = codes.flatten(2).flatten(0, 1)
            stored[f"{name}_scale_inv"] = scales
    save_file(stored, folder / "model.safetensors")
    return folder


def layer_weights(model: CausalLM) -> list[Tensor]:
    """The matrices of its layers, which are plain."""
    return [w for name, w in model.named_parameters() if ".layers." in name and w.ndim == 2]


def error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The relative error of a weight, in squares."""
    squares = [
        ((a - b).square().sum(), b.square().sum()) for a, b in zip(ours, theirs, strict=True)
    ]
    return float((sum(s[0] for s in squares) / sum(s[1] for s in squares)) ** 0.5)


def divergence(base: CausalLM, other: CausalLM, pages: list[list[int]]) -> str:
    """Of ``other`` from ``base``."""
    found = Divergence()
    for tokens in pages:
        found.add(*(logits(model, tokens).float().log_softmax(-1) for model in (base, other)))
    return f"{found.mean:.6f} ± {found.standard_error:.6f}"


def main() -> int:
    """Print a table, a form a row."""
    source = resolve_model_path(DEMO_MODEL)
    prose = "\n\n".join(package.prose for package in installed_packages())
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    pages = [page.tokens for page in divide(tokenizer, prose, PAGES)]
    original = load_model(source, dtype="float32")
    print(
        "| form | error of a weight | divergence, weights alone | as served | bytes of a weight |"
    )
    print("|---|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        blocks = write_in_blocks(source, Path(folder) / "blocks")
        exact = load_model(blocks, dtype="float32", quantization="plain")
        cost = error(layer_weights(exact), layer_weights(original))
        print(f"| these 8-bit floats, from bfloat16 | {cost:.2%} | {divergence(original, exact, pages)} | | 1.00 |", flush=True)  # fmt: skip
        for form, (round_, size, quantization) in FORMS.items():
            rounded = copy.deepcopy(exact)
            for weight in layer_weights(rounded):
                weight.copy_(round_(weight))
            cost = error(layer_weights(rounded), layer_weights(exact))
            served = ""
            if quantization:
                model = load_model(blocks, quantization=quantization, kernels=NativeKernels())
                served = divergence(exact, model, pages)
            print(f"| {form} | {cost:.2%} | {divergence(exact, rounded, pages)} | {served} | {size:.2f} |", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
