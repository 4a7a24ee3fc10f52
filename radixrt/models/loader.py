"""Loads the model of a checkpoint folder onto a device, without a second copy of the weights in
memory."""

import logging
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from radixrt.base.errors import ConfigError
from radixrt.layers.kernels.interface import LayerKernels, use_kernels
from radixrt.layers.linear import allocate_matrices, pack_matrices
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.quantization.formats import check_experts, matrix_formats, rounded_alike
from radixrt.layers.quantization.scheme import quantization_scheme
from radixrt.layers.weights import num_weights, weight_slots
from radixrt.models import checkpoint
from radixrt.models.config_cache import transformers_config
from radixrt.models.decoder import CausalLM
from radixrt.models.gguf.folder import gguf_tensors
from radixrt.models.gguf.weights import BlockFormats, read_weights, warn_of_dequantization
from radixrt.models.loading_progress import LoadingProgress
from radixrt.models.pooling import read_pooling
from radixrt.models.registry import check_architecture, is_recurrent, model_class

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    model_dir: Path,
    *,
    load_format: str = "auto",
    dtype: str = "auto",
    quantization: str = "auto",
    device: torch.device | str = "cpu",
    tp: TensorParallel | None = None,
    seed: int = 0,
    context_length: int | None = None,
    trust_remote_code: bool = False,
    kernels: LayerKernels | None = None,
) -> Any:
    """Load the model of a checkpoint, ready to run: a ``CausalLM`` or, of an encoder, an
    ``Encoder``.

    Args:
        load_format: ``auto`` or ``safetensors`` to read the weights, ``dummy`` for random ones.
        dtype: ``float32``, ``bfloat16`` or ``float16``; ``auto``: the checkpoint's.
        quantization: ``auto``: the checkpoint's; ``int8``, ``int4`` or ``fp8`` to round a plain
            one's weights.
        tp: this rank's place; only its shards are kept.
        seed: of dummy weights, which are the same for any number of ranks.
        context_length: longest sequence that will be served; default, and at most: the
            checkpoint's.
        trust_remote_code: let transformers run the checkpoint's own config code.
        kernels: by which the layers compute; default: PyTorch's.

    Raises:
        ConfigError: the checkpoint cannot be served; the message names the reason.
    """
    raw_config = checkpoint.check_checkpoint(model_dir, load_format, quantization)
    config = transformers_config(model_dir, trust_remote_code)
    torch_dtype = _DTYPES[checkpoint.checkpoint_dtype(raw_config) if dtype == "auto" else dtype]
    limit = checkpoint.context_length(raw_config)
    longest = min(context_length or limit, limit)
    kernels = kernels or LayerKernels()
    architecture = check_architecture(raw_config)
    if is_recurrent(architecture) and torch.device(device).type == "cuda":
        raise ConfigError(
            f"Models with recurrent layers ({architecture}) run on a CPU; on a GPU they are not "
            "supported yet. Use --device cpu."
        )
    model_type = model_class(architecture)
    pooling = read_pooling(model_dir, raw_config)
    with torch.device(device), _default_dtype(torch_dtype):
        model = model_type(config, tp or TensorParallel(), longest).eval()
        if pooling is not None:
            model.replace_head(len(pooling.labels))
        scheme = quantization_scheme(raw_config, quantization)
        if scheme is not None:
            check_experts(model, scheme, kernels)
            if load_format == "dummy":
                scheme = rounded_alike(scheme)
        tied_head = model.generates and model.lm_head is None
        formats = matrix_formats(scheme, tied_head=tied_head)
        entries = gguf_tensors(model_dir) if load_format != "dummy" else None
        kept: set[str] = set()
        if entries and quantization == "auto" and kernels.multiplies_blocks:
            blocks = BlockFormats(entries, raw_config, model.translate)
            formats, kept = blocks.format_of, blocks.kept
        allocate_matrices(model, formats)
    model.num_parameters = num_weights(model)
    is_first = tp is None or tp.rank == 0
    progress_level = logging.INFO if is_first else logging.DEBUG
    if is_first and checkpoint.text_config(raw_config) is not raw_config:
        log.info("The language model alone is loaded: images and audio are not served.")
    if load_format == "dummy":
        fill_with_dummy_weights(model, seed)
    elif entries is None:
        model.load_weights(read_tensors(model_dir, progress_level))
    else:
        if quantization == "auto" and is_first:
            warn_of_dequantization(entries, kept, torch_dtype)
        model.load_weights(read_weights(entries, raw_config, torch_dtype, kept, progress_level))
    use_kernels(model, kernels)
    pack_matrices(model, kernels)
    _find_children_at_once(model)
    return model


def _find_children_at_once(model: nn.Module) -> None:
    """Make each module's children and weights plain attributes too: torch looks them up by a
    function in Python, twenty times a layer, while a GPU waits for the host."""
    for module in model.modules():
        vars(module).update(module.named_children())
        vars(module).update(module.named_parameters(recurse=False))
        vars(module).update(module.named_buffers(recurse=False))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def read_tensors(
    model_dir: Path, progress_level: int = logging.INFO
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint, one at a time; the file is mapped, so a shard reads only its
    part.

    A tensor counts as loaded when the next one is asked for.

    Args:
        progress_level: of the lines of the log that tell the progress.
    """
    from safetensors import SafetensorError, safe_open

    files = checkpoint.weight_files(model_dir)
    progress = LoadingProgress(files, progress_level)
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                    tensor = tensors.get_tensor(name)
                    yield name, tensor
                    progress.add_tensor(tensor.nbytes)
        except SafetensorError as error:
            raise ConfigError(f"{file} is no readable safetensors file: {error}.") from error
        progress.add_file()


def fill_with_dummy_weights(model: CausalLM, seed: int) -> None:
    """Fill ``model`` with seeded random matrices that keep activations near unit scale; norms and
    biases stay unchanged.

    Each tensor is drawn whole from a seed of its own and cut like a checkpoint's, so the model does
    not depend on the number of ranks.
    """
    for name, slot in weight_slots(model).items():
        if len(slot.shape) == 1:
            continue
        device = slot.target.device
        generator = torch.Generator(device)
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # the CPU's takes 32 bits
        values = torch.randn(slot.shape, generator=generator, dtype=model.dtype, device=device)
        slot.load(values.mul_(slot.shape[-1] ** -0.5))
