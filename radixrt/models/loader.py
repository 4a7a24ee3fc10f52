"""Loads the model of a checkpoint folder onto a device, without a second copy of the weights in
memory; and keeps transformers' form of a config.json in the user's cache.

The models read attributes of a transformers config. To import transformers for them takes half a
CPU second, a fourth of the start of a worker with a small model.
"""

import gc
import hashlib
import importlib.metadata
import logging
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from radixrt.base.errors import ConfigError
from radixrt.base.user_cache import drop_oldest, sealed, unsealed, user_cache
from radixrt.device.first_calls import call_functions_once
from radixrt.layers.kernels.interface import LayerKernels, use_kernels
from radixrt.layers.linear import allocate_matrices, pack_matrices
from radixrt.layers.matrix import DenseMatrix, MatrixFormat
from radixrt.layers.mlp import check_expert_groups
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.quantization.formats import check_experts, matrix_formats, rounded_alike
from radixrt.layers.quantization.fp8_blocks import decoded
from radixrt.layers.quantization.scheme import fp8_block, quantization_scheme
from radixrt.layers.weights import num_weights, weight_slots
from radixrt.models import checkpoint
from radixrt.models.decoder import CausalLM
from radixrt.models.gguf.folder import gguf_tensors
from radixrt.models.gguf.form import is_of_tower
from radixrt.models.gguf.tower_weights import read_tower
from radixrt.models.gguf.weights import BlockFormats, read_weights, warn_of_dequantization
from radixrt.models.images import why_no_images
from radixrt.models.loading_progress import LoadingProgress
from radixrt.models.pooling import read_pooling
from radixrt.models.registry import check_architecture, is_recurrent, model_class
from radixrt.models.vision.tower import weights_digest

log = logging.getLogger(__name__)

_FORM = 3
"""Raised whenever the content of the files changes."""
_MAX_FILES = 64
_NOT_READ = frozenset({
    "base_model_pp_plan", "dtype", "extra_config_files", "extra_files", "ignore_keys_at_rope_validation", "name_or_path",
    "per_layer_config", "torch_dtype", "use_return_dict",
})  # fmt: skip
"""Attributes that are not kept, since no model here reads them: they are no JSON, are not of the
config.json, or log a warning."""


class KeptConfig:
    """Has the attributes of a transformers config, and of its methods one."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        """Raises TypeError if the attribute was not kept; ``getattr`` with a default must not hide
        that."""
        if name in _NOT_READ:
            raise TypeError(f"The attribute {name} of a config is not kept.")
        raise AttributeError(name)

    def get_text_config(self) -> "KeptConfig":
        """Itself; others are not kept."""
        return self


def transformers_config(model_dir: Path, trust_remote_code: bool) -> Any:
    """The config of a checkpoint, by transformers or as it was kept.

    Raises:
        ConfigError: config.json is not valid.
    """
    if trust_remote_code:  # code may read any file
        return _load(model_dir, trust_remote_code)
    version = importlib.metadata.version("transformers")
    key = f"{_FORM} {version} ".encode() + (model_dir / "config.json").read_bytes()
    try:
        file = user_cache("configs") / f"{hashlib.sha256(key).hexdigest()[:32]}.msgpack"
    except OSError as error:
        log.info("The config is not kept for the next start: %s", error)
        return _load(model_dir, trust_remote_code)
    try:
        content = unsealed(file.read_bytes())
        return KeptConfig(msgspec.msgpack.decode(content, type=dict[str, Any]))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        log.warning("Ignored %s, which cannot be read: %s", file, error)
    config = _load(model_dir, trust_remote_code)
    if (attributes := _attributes(config)) is not None:
        _write(file, attributes)
    return config


def _load(model_dir: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    collects = gc.isenabled()
    gc.disable()  # it imports hundreds of modules, see radixrt/base/child.py
    try:
        raw = checkpoint.read_config(model_dir)
        if (known := _as_known_type(raw)) is not None:
            return AutoConfig.for_model(**known)
        own_code = trust_remote_code and raw.get("model_type") not in CONFIG_MAPPING_NAMES
        return AutoConfig.from_pretrained(
            model_dir, trust_remote_code=own_code, local_files_only=True
        )
    except Exception as error:  # transformers validates configs with many exception types
        reason = " ".join(str(error).split())
        raise ConfigError(f"{model_dir}/config.json is not a valid config: {reason}") from error
    finally:
        if collects:
            gc.enable()


def _as_known_type(config: dict[str, Any]) -> dict[str, Any] | None:
    """A config whose model type transformers does not know, as that of the type that has the same
    architecture: Kimi K2's is DeepSeek V3's under another name. None: transformers knows it, or no
    such type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.get("model_type") in CONFIG_MAPPING_NAMES:
        return None
    architecture = check_architecture(config)
    types = [t for t, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == architecture]
    without_code = {name: value for name, value in config.items() if name != "auto_map"}
    return {**without_code, "model_type": types[0]} if types else None


def _attributes(config: Any) -> dict[str, Any] | None:
    """What to keep of a config; None if its model needs more than attributes: parts of it are
    configs of their own, transformers computes its rotary frequencies, or a value is no JSON."""
    if config.get_text_config() is not config or getattr(config, "is_heterogeneous", False):
        return None
    names = {name for name in {*dir(config), *config.attribute_map} if not name.startswith("_")}
    try:
        values = {name: getattr(config, name) for name in names - _NOT_READ}
    except Exception:  # a property may raise any
        return None
    values = {name: value for name, value in values.items() if not callable(value)}
    if not _is_json(values) or set(_rope_types(values)) - {"default", "llama3"}:
        return None
    return values


def _is_json(value: Any) -> bool:
    """Whether a value is the same after it was written and read; a tuple would become a list."""
    if isinstance(value, dict):
        return all(type(key) in (str, int) and _is_json(value[key]) for key in value)
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or type(value) in (bool, int, float, str)


def _rope_types(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "rope_type" in value:
            yield value["rope_type"]
        for part in value.values():
            yield from _rope_types(part)


def _write(file: Path, attributes: dict[str, Any]) -> None:
    try:
        content = sealed(msgspec.msgpack.encode(attributes))
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, made = tempfile.mkstemp(dir=file.parent)
        try:
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(content)
            Path(made).replace(file)
        finally:
            Path(made).unlink(missing_ok=True)
        drop_oldest(file.parent, _MAX_FILES)
    except (OSError, OverflowError, ValueError) as error:  # an integer or a string that is too odd
        log.info("The config is not kept for the next start: %s", error)


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
            one's weights, or those of 8-bit floats in blocks; ``plain`` to decode these.
        seed: of dummy weights, which are the same for any number of ranks.
        context_length: longest sequence that will be served; default, and at most: the
            checkpoint's.
        trust_remote_code: let transformers run the checkpoint's own config code, of a model type
            that it does not know.
        kernels: by which the layers compute; default: PyTorch's.

    Raises:
        ConfigError: the checkpoint cannot be served; the message names the reason.
    """
    call_functions_once()
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
    with torch.device(device), default_dtype(torch_dtype):
        tp = tp or TensorParallel()
        model = model_type(config, tp, longest).eval()
        check_expert_groups(model, tp)
        if pooling is not None:
            model.replace_head(len(pooling.labels))
        lacking = why_no_images(model_dir, raw_config, torch.device(device).type)
        if lacking is None:
            model.add_encoder()
        scheme = quantization_scheme(raw_config, quantization)
        if scheme is not None:
            check_experts(model, scheme, kernels)
            if load_format == "dummy":
                scheme = rounded_alike(scheme)
        tied_head = model.generates and model.lm_head is None
        formats = matrix_formats(scheme, tied_head=tied_head)
        all_entries = gguf_tensors(model_dir) if load_format != "dummy" else None
        entries = [entry for entry in all_entries or [] if not is_of_tower(entry)]
        text_config, kept = dict(checkpoint.text_config(raw_config)), set[str]()
        if entries and quantization == "auto" and kernels.multiplies_blocks:
            blocks = BlockFormats(entries, text_config, model.translate)
            formats, kept = blocks.format_of, blocks.kept
        allocate_matrices(model, _plain_tower(formats))
    model.num_parameters = num_weights(model)
    is_first = tp.rank == 0
    progress_level = logging.INFO if is_first else logging.DEBUG
    if is_first and lacking and "text_config" in raw_config:
        log.info("The language model alone is loaded. %s", lacking)
    if load_format == "dummy":
        fill_with_dummy_weights(model, seed)
    elif all_entries is None:
        tensors = read_tensors(model_dir, progress_level)
        if (block := fp8_block(raw_config)) is not None:
            tensors = decoded(tensors, block)
        model.load_weights(tensors)
    else:
        if quantization == "auto" and is_first:
            warn_of_dequantization(entries, kept, torch_dtype)
        tower = read_tower(
            [one for one in all_entries if is_of_tower(one)], raw_config, torch_dtype
        )
        text = read_weights(entries, text_config, torch_dtype, kept, progress_level)
        model.load_weights(chain(text, tower))
    if lacking is None:
        model.vision_digest = weights_digest(model.vision)
    use_kernels(model, kernels)
    pack_matrices(model, kernels)
    _find_children_at_once(model)
    return model


def model_without_weights(model_dir: Path) -> CausalLM:
    """The layers of a checkpoint's model, whose matrices are not even allocated: to look at.

    Raises:
        ConfigError: the checkpoint cannot be served, or is one of an encoder.
    """
    raw_config = checkpoint.check_checkpoint(model_dir)
    architecture = check_architecture(raw_config)
    model = model_class(architecture)(
        transformers_config(model_dir, trust_remote_code=False), TensorParallel(), 1
    )
    if not isinstance(model, CausalLM):
        raise ConfigError(f"{architecture} is an encoder, and generates nothing.")
    return model


def _plain_tower(
    format_of: Callable[[str, Sequence[str]], MatrixFormat],
) -> Callable[[str, Sequence[str]], MatrixFormat]:
    """The formats of a model's matrices; those of its vision tower stay plain."""
    return lambda path, names: DenseMatrix if path.startswith("vision.") else format_of(path, names)


def _find_children_at_once(model: nn.Module) -> None:
    """Make each module's children and weights plain attributes too: torch looks them up by a
    function in Python, twenty times a layer, while a GPU waits for the host."""
    for module in model.modules():
        vars(module).update(module.named_children())
        vars(module).update(module.named_parameters(recurse=False))
        vars(module).update(module.named_buffers(recurse=False))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def read_tensors(
    model_dir: Path,
    progress_level: int = logging.INFO,
    wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint, one at a time; the file is mapped, so a shard reads only its
    part.

    A tensor counts as loaded when the next one is asked for.

    Args:
        progress_level: of the lines of the log that tell the progress.
        wanted: whether a tensor of this name is read.
    """
    from safetensors import SafetensorError, safe_open

    files = checkpoint.weight_files(model_dir)
    progress = LoadingProgress(files, progress_level)
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in filter(wanted, tensors.keys()):
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
    not depend on the number of ranks, but for recurrent blocks that ranks split.
    """
    for name, slot in weight_slots(model).items():
        if len(slot.shape) == 1 or not slot.held:
            continue
        device = slot.target.device
        generator = torch.Generator(device)
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # the CPU's takes 32 bits
        values = torch.randn(slot.shape, generator=generator, dtype=model.dtype, device=device)
        slot.load(values.mul_(slot.shape[-1] ** -0.5))
