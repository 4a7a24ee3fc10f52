"""Computes the memory that the weights of a checkpoint take at least, from the headers of its
files.

The bound is low on purpose: what fits must never be refused. It is for a CPU, where a process that
takes more memory than there is ends without a word.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from radixrt.base.config import MIN_RUNNING_REQUESTS, ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.device.machine import (
    CPU_POOL_LIMIT,
    CPU_POOL_SHARE,
    MIN_KEPT_STATES,
    MIN_STATE_ROWS,
    OTHER_BYTES,
    available_memory,
    has_gpu,
)
from radixrt.layers.quantization.scheme import (
    BLOCK_KINDS,
    DEFAULT_GROUP_SIZE,
    HEAD_BITS,
    ROUNDINGS,
    fp8_block,
    quantization_scheme,
)
from radixrt.models.cache_need import kv_numbers, state_bytes
from radixrt.models.checkpoint import (
    checkpoint_dtype,
    read_config,
    read_header,
    served_context_length,
    text_config,
    weight_files,
)
from radixrt.models.gguf.folder import gguf_tensors
from radixrt.models.gguf.form import PLAIN_KINDS, TOWER_PREFIXES, is_of_tower
from radixrt.models.head_files import (
    OWN_IDS,
    drafted_ids,
    eagle_folder,
    further_prefix,
    has_mtp,
)
from radixrt.models.images import image_bytes, why_no_images
from radixrt.models.registry import check_architecture, is_encoder

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORED = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2}
"""Bytes of a number by its dtype in a header; others have one."""
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_TOWERS = ("vision", "visual", "multi_modal_projector", "connector.")
"""Parts of the names of tensors that are loaded where images are served."""
_ONE_LAYER = {"num_hidden_layers": 1, "layer_types": None, "layers_block_type": None}
"""Turns a config into that of one layer with attention: a draft head."""
_NOT_LOADED = ("audio", "mtp")
"""Parts of the names of tensors that no model loads."""
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Ends of the names of copies in the layer that predicts further tokens."""


class MemoryNeed(NamedTuple):
    """Bytes of the weights of one engine."""

    in_files: int
    in_memory: int
    """A lower bound."""
    unpacked: int = 0
    """Bytes in memory, of those, of quantized tensors whose kind is kept in 16 bits."""
    head: int = 0
    """Bytes in memory, of those, of a draft head."""

    def with_head(self, in_files: int, in_memory: int) -> "MemoryNeed":
        """The need with a head of this size."""
        return self._replace(
            in_files=self.in_files + in_files,
            in_memory=self.in_memory + in_memory,
            head=in_memory,
        )

    def __str__(self) -> str:
        """What takes the memory."""
        text = f"{self.in_memory / 1e9:.1f} GB of weights"
        return text + (f", {self.head / 1e9:.2g} GB of them a draft head" if self.head else "")


def engine_need(config: ServerConfig) -> MemoryNeed:
    """The memory of the weights of one engine, with those of its draft head.

    Args:
        config: its ``model_path`` is a folder.

    Raises:
        ConfigError: a file cannot be read.
    """
    folder, dtype, quantization = Path(config.model_path), config.dtype, config.quantization
    need = memory_need(folder, dtype=dtype, quantization=quantization)
    if (eagle := eagle_folder(config)) is not None:
        width = _BYTES[checkpoint_dtype(read_config(folder)) if dtype == "auto" else dtype]
        sizes = [
            math.prod(shape)
            for file in weight_files(eagle)
            for name, (_, shape) in read_header(file).items()
            if name not in ("d2t", "t2d")
        ]
        files = sum(file.stat().st_size for file in weight_files(eagle))
        bits = ROUNDINGS[quantization].bits if quantization in ROUNDINGS else 8 * width
        return need.with_head(files, sum(sizes) * bits // 8)
    if not has_mtp(config):
        return need
    further = list(_weights(folder, dtype, quantization, further=True))
    copied = _copied_bytes(text_config(read_config(folder)))
    return need.with_head(
        sum(one.in_files for one in further), sum(one.in_memory for one in further) + copied
    )


def _copied_bytes(text: Mapping[str, Any], own_ids: int = 0) -> int:
    """The memory of the rows that an MTP layer copies from the LM head, in 8 bits.

    Args:
        own_ids: of tokens of texts, beside the frequent ones.
    """
    drafted, columns = drafted_ids(text["vocab_size"]), text["hidden_size"]
    if drafted == text["vocab_size"]:
        return 0
    scales = 3 * math.ceil(columns / DEFAULT_GROUP_SIZE)
    return (drafted + own_ids) * (columns + scales)


def memory_need(model_dir: Path, *, dtype: str = "auto", quantization: str = "auto") -> MemoryNeed:
    """The memory of a checkpoint that :func:`radixrt.models.checkpoint.check_checkpoint` takes,
    without a draft head.

    Raises:
        ConfigError: a file cannot be read.
    """
    weights = list(_weights(model_dir, dtype, quantization))
    return MemoryNeed(
        in_files=sum(one.in_files for one in weights),
        in_memory=sum(one.in_memory for one in weights),
        unpacked=sum(one.in_memory for one in weights if one.is_unpacked),
    )


class TokenWork(NamedTuple):
    """The work of one token, without attention."""

    num_bytes: float
    """Bytes of weights that a decode step of one sequence reads."""
    products: float
    """Multiplications for a prompt token."""


def token_work(model_dir: Path) -> TokenWork:
    """The work of one token: of the experts, those that it selects; without the LM head for a
    prompt token.

    Raises:
        ConfigError: a file cannot be read.
    """
    text = text_config(read_config(model_dir))
    counts = (text.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    selected, count = text.get("num_experts_per_tok") or 1, next(filter(None, counts), 1)
    weights = list(_weights(model_dir, "auto", "auto"))
    has_head = any(one.name in _HEADS for one in weights)
    num_bytes = products = 0.0
    for name, numbers, _, in_memory, _ in weights:
        if name.startswith(TOWER_PREFIXES) or any(part in name for part in _TOWERS):
            continue
        is_selected = _EXPERTS.search(name) is not None
        share = selected / count if is_selected else 1.0
        is_embedding = any(part in name for part in _EMBEDDINGS)
        if not is_embedding or not (has_head or "per_layer" in name):
            num_bytes += share * in_memory
        if not is_embedding and name not in _HEADS:
            products += share * numbers
    return TokenWork(num_bytes, products)


_HEADS = ("lm_head.weight", "output.weight")
_EXPERTS = re.compile(r"\.experts\.|_exps\.")
"""In the names of the weights of which a token selects some."""


class _Weight(NamedTuple):
    name: str
    numbers: int
    in_files: int
    in_memory: int
    is_unpacked: bool = False


def _weights(
    model_dir: Path, dtype: str, quantization: str, *, further: bool = False
) -> Iterator[_Weight]:
    """The tensors of the model, or of the layer that predicts further tokens."""
    config = read_config(model_dir)
    width = _BYTES[checkpoint_dtype(config) if dtype == "auto" else dtype]
    if gguf_tensors(model_dir) is not None:
        last = text_config(config).get("num_hidden_layers")
        for one in _of_gguf(model_dir, width, quantization):
            if one.name.startswith(f"blk.{last}.") == further:
                yield one
        return
    text, scheme = text_config(config), quantization_scheme(config, quantization)
    rounds = scheme is not None and scheme.method in ("rounding", "fp8_rounding")
    has_blocks = fp8_block(config) is not None
    is_tied = text.get("tie_word_embeddings") is not False  # what it is where it is not said
    prefix = further_prefix(model_dir) if further else None
    for name, stored, shape in _tensors(model_dir, text.get("num_hidden_layers"), prefix):
        numbers, size = math.prod(shape), _STORED.get(stored, 1)
        if (is_tied and name == "lm_head.weight") or (has_blocks and name.endswith("_scale_inv")):
            in_memory = 0
        elif (has_blocks and scheme is None) or any(part in name for part in _TOWERS):
            in_memory = numbers * width
        elif rounds and scheme is not None and len(shape) > 1 and scheme.covers(name):
            in_memory = numbers * _rounded_bits(name, scheme.bits, 8 * width, is_tied=is_tied) // 8
        else:
            in_memory = numbers * (width if scheme is None else min(size, width))
        yield _Weight(name, numbers if in_memory else 0, numbers * size, in_memory)


def check_fits(need: MemoryNeed, engines: int = 1) -> None:
    """Check that the weights fit the memory that is available, the limits of cgroups included.

    Args:
        engines: replicas on this machine, each with weights of its own.

    Raises:
        ConfigError: they do not; the message has both numbers.
    """
    available, needed = available_memory(), engines * need.in_memory + OTHER_BYTES
    if needed <= available:
        return
    parts = str(need)
    if engines > 1:
        parts += f" in each of {engines} engines"
    if need.unpacked:
        parts += f", of which {need.unpacked / 1e9:.1f} GB have kinds that are kept in 16 bits"
    raise ConfigError(
        f"The model needs at least {needed / 1e9:.1f} GB of memory ({parts}), and {available / 1e9:.1f} GB are "
        "available. Free memory, raise the limit of the container, or choose a smaller model or one of fewer bits "
        "(--quantization int8, --quantization int4, or a GGUF file of a packed kind)."
        + (" --speculation text leaves the draft head out." if need.head else "")
    )


def room_for_weights() -> int:
    """Bytes of memory that a model's weights may take now; 0: none."""
    return max(0, available_memory() - OTHER_BYTES)


def engine_bytes(config: ServerConfig, available: int) -> int:
    """The memory that the processes of a model take at most: weights, KV pool and the rest.

    Args:
        config: its ``model_path`` is a folder.
        available: bytes for which its pool is sized, if no size is given.
    """
    model_dir = Path(config.model_path)
    checkpoint = read_config(model_dir)
    text = text_config(checkpoint)
    width = _BYTES[checkpoint_dtype(checkpoint) if config.dtype == "auto" else config.dtype]
    kept = 1 if config.kv_cache_dtype != "auto" else width
    per_token, one_state = kv_numbers(text) * kept, state_bytes(text, width)
    if eagle_folder(config) is not None or has_mtp(config):
        kept_states = text.get("hidden_size", 0) * width // config.page_size
        per_token += kv_numbers({**text, **_ONE_LAYER}) * kept + kept_states
    if is_encoder(check_architecture(checkpoint)):
        per_token = 0
    most = int(min(CPU_POOL_LIMIT, int(CPU_POOL_SHARE * available)) * config.mem_fraction_static)
    longest = served_context_length(checkpoint, config.context_length)
    rows = config.max_running_requests or MIN_RUNNING_REQUESTS
    pool = most if config.max_total_tokens is None else per_token * config.max_total_tokens
    pool = min(pool, 2 * rows * longest * per_token)
    if one_state:
        if config.max_running_requests is None:
            rows = min(rows, max(MIN_STATE_ROWS, most // 4 // one_state))
        pool += max(pool, MIN_KEPT_STATES * one_state) + rows * one_state
        pool = min(pool, most) if config.max_total_tokens is None else pool
    weights = 0
    if config.load_format != "dummy":
        weights = engine_need(config).in_memory
        if has_mtp(config):
            weights += _copied_bytes(text, OWN_IDS) - _copied_bytes(text)
    needed = config.dp * (weights + pool) + OTHER_BYTES
    if why_no_images(model_dir, checkpoint, "cpu") is None:
        needed += image_bytes(config.dp * config.tp, config.max_image_pixels)
    return needed


def memory_sentence(config: ServerConfig, available: int) -> str:
    """Say how much memory an engine's weights need; "" if that is not known.

    Args:
        available: bytes that there were when the engine was started.
    """
    try:
        need = engine_need(config)
    except (ConfigError, OSError):  # its files are gone
        return ""
    return (
        f"Its weights need at least {need.in_memory / 1e9:.2f} GB, and {available / 1e9:.2f} GB were available "
        "when it was started."
    )


def loads_weights(config: ServerConfig) -> bool:
    """Whether an engine of this server reads weights from files into this machine's memory."""
    return config.dp > 0 and config.load_format != "dummy" and loads_into_memory(config.device)


def loads_into_memory(device: str) -> bool:
    """Whether weights come into this machine's memory, by ``--device``; asked without torch."""
    return device == "cpu" or (device == "auto" and not has_gpu())


def _of_gguf(model_dir: Path, width: int, quantization: str) -> Iterator[_Weight]:
    for entry in gguf_tensors(model_dir) or []:
        numbers = math.prod(entry.shape)
        size = math.prod(entry.shape[:-1]) * entry.row_bytes
        if quantization == "plain" or is_of_tower(entry):
            yield _Weight(entry.name, numbers, size, numbers * width)
        elif quantization != "auto":
            bits = _rounded_bits(entry.name, ROUNDINGS[quantization].bits, 8 * width, is_tied=True)
            yield _Weight(entry.name, numbers, size, numbers * bits // 8)
        elif (kind := BLOCK_KINDS.get(entry.kind)) is not None:
            packed = numbers // kind.columns * kind.packed_bytes
            yield _Weight(entry.name, numbers, size, packed)
        elif entry.kind in PLAIN_KINDS:
            yield _Weight(entry.name, numbers, size, min(size, numbers * width))
        else:
            yield _Weight(entry.name, numbers, size, numbers * width, is_unpacked=True)


_EMBEDDINGS = ("embed", "token_embd")


def _rounded_bits(name: str, bits: int, plain: int, *, is_tied: bool) -> int:
    """Bits of a weight of a matrix whose checkpoint is rounded to ``bits`` while it is loaded."""
    if any(part in name for part in _EMBEDDINGS):
        return min(plain, HEAD_BITS) if is_tied else plain
    return HEAD_BITS if name in _HEADS else bits


def _tensors(
    model_dir: Path, layers: int | None, prefix: str | None
) -> Iterator[tuple[str, str, list[int]]]:
    """Yield name, stored dtype and shape of each tensor that is loaded.

    Args:
        prefix: of the tensors of the layer that predicts further tokens; None: those of the model.
    """
    skipped: tuple[str, ...] = _NOT_LOADED
    if why_no_images(model_dir, read_config(model_dir), "cpu") is not None:
        skipped += _TOWERS
    for file in weight_files(model_dir):
        for name, (stored, shape) in read_header(file).items():
            if prefix is not None:
                if name.startswith(prefix) and not name.endswith(_COPIES):
                    yield name, stored, shape
                continue
            is_tower = any(part in name for part in _TOWERS)
            layer = None if is_tower else _LAYER.search(name)
            if layer is not None and layers is not None and int(layer[1]) >= layers:
                continue  # it predicts further tokens
            if not any(part in name for part in skipped):
                yield name, stored, shape
