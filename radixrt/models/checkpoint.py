"""Reads and checks a checkpoint folder without torch, so that a bad one is refused before anything
starts."""

import json
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from radixrt.base.config import DEMO_MODEL
from radixrt.base.errors import ConfigError, NotCachedError, RequestError, shown
from radixrt.base.sampling_params import SamplingParams
from radixrt.layers.quantization.scheme import QuantizationScheme, fp8_block, quantization_scheme
from radixrt.models.gguf.folder import checkpoint_folder, gguf_tensors
from radixrt.models.gguf.hub import PREFIX, hub_file, refuse
from radixrt.models.refusals import check_rope, damaged, no_checkpoint
from radixrt.models.registry import check_architecture

log = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_OTHER_HUB_NAME = re.compile(
    r"(?:(?:https?://)?(?:hf\.co|huggingface\.co)/)?([\w-][\w.-]*/[\w.-]+?)(:[\w.-]+|/?)"
)
"""Names of GGUF files of the hub as llama.cpp (USER/REPO:Q4_K_M) and Ollama (hf.co/USER/REPO) have
them, and addresses of their pages."""
_HUB_FILES = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    "tokenizer*",
    "tiktoken.model",
    "merges.txt",
    "vocab.txt",
]
_NOT_FROM_HUB = ["consolidated*", "original/*"]
"""Second copies of the weights in their makers' own formats."""
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
_COUNTED = (
    *_SIZES,
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
    "max_position_embeddings",
)
"""Integers that memory or time grows with."""
MAX_LAYERS = 1024
MAX_POSITIONS = 1 << 26
"""Tokens of a context; the longest that is known has 10 million."""
RECURRENT_CONTEXT = 1 << 17
"""Tokens of a context where nothing but memory limits it."""
MAX_END_TOKENS = 256
MAX_DIMENSION = 1 << 24
"""Limit of a size where no weights show what is possible."""
_MAX_PACKED = 8
"""Weights in one element of a quantized tensor, whose dimension is shorter by that."""
MAX_JSON_BYTES = 64 << 20
MAX_REASON_CHARS = 300
_PLAIN_DTYPES = {"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"}
"""Dtypes of weights, and of the index tables that some checkpoints keep beside them. I32 are also
the words of quantized ones."""
_EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight")
"""Ends of the names of the tensors [vocab_size, hidden_size]."""
_DTYPES = ("float32", "bfloat16", "float16")


def resolve_model_path(
    path_or_hub_id: str,
    flag: str = "--model-path",
    *,
    with_weights: bool = True,
    download: bool = True,
    check_room: bool = False,
    progress: type | None = None,
    mmproj: str | None = None,
) -> Path:
    """The folder of a checkpoint; a hub id is downloaded into the Hugging Face cache first, a GGUF
    file, here or on the hub, gets a folder.

    Args:
        flag: the setting that errors name.
        with_weights: download the weights of a hub id, too.
        download: otherwise the hub's cache must have it.
        check_room: refuse a GGUF file of the hub that does not fit the memory before it is
            downloaded.
        progress: class of tqdm that is told the bytes of a download.
        mmproj: the file of a GGUF model's vision tower.

    Raises:
        NotCachedError: it would have to be downloaded.
        ConfigError: neither a folder nor a GGUF file that can be served, nor a hub id that can be
            downloaded.
    """
    tower = None if mmproj is None else Path(mmproj).expanduser()
    if tower is not None and not tower.is_file():
        raise ConfigError(f"--mmproj {mmproj}: there is no such file.")
    if (
        tower is not None
        and not path_or_hub_id.startswith(PREFIX)
        and not path_or_hub_id.endswith(".gguf")
    ):
        raise ConfigError(f"--mmproj is for a GGUF model, and {flag} {path_or_hub_id} is none.")
    if path_or_hub_id == DEMO_MODEL:
        return Path(__file__).parent.parent / "demo_model"
    if path_or_hub_id.startswith(PREFIX):
        return checkpoint_folder(
            hub_file(
                path_or_hub_id, flag, download=download, check_room=check_room, progress=progress
            ),
            tower,
        )
    folder = Path(path_or_hub_id).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file() and folder.suffix == ".gguf":
        return checkpoint_folder(folder, tower)
    if folder.exists():
        raise ConfigError(f"{flag} {path_or_hub_id} is a file; give the folder that holds it.")
    if _HUB_ID.fullmatch(path_or_hub_id) is None:
        raise ConfigError(
            f"{flag} {path_or_hub_id}: there is no such folder or file. {_advice(path_or_hub_id)}"
        )
    ignored = [] if with_weights else ["*.safetensors"]
    if "tokenizer" not in flag:
        _check_on_hub(path_or_hub_id)
    return _download(path_or_hub_id, flag, ignored, only_cached=not download, progress=progress)


def _advice(name: str) -> str:
    """The form of names on the hub, for one that has another form."""
    packed = _OTHER_HUB_NAME.fullmatch(name)
    if packed is not None:
        quantization = packed[2].rstrip("/")
        is_packed = quantization or "gguf" in name.lower()
        return f"Did you mean {PREFIX if is_packed else ''}{packed[1]}{quantization}?"
    if name.startswith((".", "/", "~")) or name.endswith(".gguf"):
        return "Check the path."
    return f"Names on the hub look like USER/NAME, or {PREFIX}USER/REPO:Q4_K_M for a GGUF file; `radixrt models` lists those on this machine."


def _check_on_hub(hub_id: str) -> None:
    """Check what the hub says of a model before it is downloaded.

    Raises:
        ConfigError: its architecture is not supported, or it is an adapter.
    """
    try:
        from huggingface_hub import HfApi, try_to_load_from_cache

        if isinstance(try_to_load_from_cache(hub_id, "config.json"), str):
            return  # it is checked there
        info = HfApi().model_info(hub_id)
    except Exception:  # the download says what is wrong
        return
    config = info.config or {}
    names = {file.rfilename for file in info.siblings or ()}
    if "adapter_config.json" in names and "config.json" not in names:
        raise ConfigError(no_checkpoint(hub_id, names))
    if config.get("architectures"):
        check_architecture(config)


def _download(
    hub_id: str, flag: str, ignored: list[str], *, only_cached: bool, progress: type | None
) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(
            f"{flag} {hub_id} is no folder here, and downloading it needs huggingface_hub, which is not installed."
        ) from None
    try:
        folder = Path(
            snapshot_download(
                hub_id,
                allow_patterns=_HUB_FILES,
                ignore_patterns=[*_NOT_FROM_HUB, *ignored],
                local_files_only=only_cached,
                tqdm_class=progress,
            )
        )
    except Exception as error:  # any failure of the network, the hub or the id
        if only_cached and isinstance(error, LocalEntryNotFoundError):
            raise NotCachedError(f"{hub_id} is not in the hub's cache on this machine.") from error
        refuse(hub_id, error, f"{flag} {hub_id}")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{flag} {hub_id} holds no config.json, so no checkpoint in safetensors; if it has GGUF files, its name is "
            f"{PREFIX}{hub_id}:Q4_K_M."
        )
    return folder


def read_config(model_dir: Path) -> dict[str, Any]:
    """The content of config.json.

    Raises:
        ConfigError: it is missing or not a JSON object.
    """
    if not model_dir.is_dir():
        raise ConfigError(f"The model folder {model_dir} does not exist.")
    if not (model_dir / "config.json").is_file():
        raise ConfigError(no_checkpoint(model_dir, {file.name for file in model_dir.iterdir()}))
    return read_json(model_dir / "config.json")


def unreadable(model_dir: Path, error: Exception) -> ConfigError:
    """One sentence about an error at the content of a checkpoint that no check foresaw."""
    reason = (str(error).strip().splitlines() or [""])[0]
    log.debug("An error at a checkpoint.", exc_info=error)
    return ConfigError(
        f"The checkpoint in {model_dir} can't be loaded: a value of its config.json does not fit this version, or a file is damaged "
        f"({type(error).__name__}: {reason[:MAX_REASON_CHARS]}). --log-level debug shows where."
    )


def read_json(path: Path, kind: type = dict) -> Any:
    """The content of a JSON file.

    Raises:
        ConfigError: it cannot be read, or is not of this kind.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB.")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(content, kind):
        raise ConfigError(f"{path} holds no JSON {'list' if kind is list else 'object'}.")
    return content


def check_checkpoint(
    model_dir: Path, load_format: str = "auto", quantization: str = "auto"
) -> dict[str, Any]:
    """Check a checkpoint as far as that is possible without reading its tensors.

    Args:
        load_format: ``dummy`` needs no weight files.
        quantization: see ``quantization_scheme``.

    Returns:
        the content of config.json

    Raises:
        ConfigError: something is wrong; the message names it.
    """
    config = read_config(model_dir)
    check_architecture(config)
    scheme = quantization_scheme(config, quantization)
    checkpoint_dtype(config)
    longest = MAX_DIMENSION
    if load_format != "dummy" and gguf_tensors(model_dir) is None:
        files = weight_files(model_dir)
        longest = _MAX_PACKED * max(_longest_dimension(file, scheme, config) for file in files)
    _check_sizes(text_config(config), longest)
    check_rope(text_config(config))
    context_length(config)
    return config


def _check_sizes(config: Mapping[str, Any], longest: int) -> None:
    """
    Args:
        longest: the largest size of which the checkpoint's tensors could be, so that nothing larger
            is ever allocated.
    """
    limits = {"num_hidden_layers": MAX_LAYERS, "max_position_embeddings": MAX_POSITIONS}
    for name in _COUNTED:
        value = config.get(name)
        if name in _SIZES and value is not None and not (isinstance(value, int) and value > 0):
            raise ConfigError(
                f"The checkpoint's config.json has {name!r}: {shown(value)}, no valid size."
            )
        if isinstance(value, int) and value > (most := limits.get(name, longest)):
            raise ConfigError(
                f"The checkpoint's config.json has {name!r}: {value}, which does not fit its tensors or is beyond all bounds: at most "
                f"{most} is possible."
            )


def checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """The dtype of a checkpoint's weights by its config: float32 where it does not say.

    Raises:
        ConfigError: a dtype that is not served.
    """
    text = text_config(config)
    candidates = (c.get(key) for c in (config, text) for key in ("dtype", "torch_dtype"))
    name = str(next((c for c in candidates if c), "float32")).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(
            f"The checkpoint's dtype {name} is not supported; give --dtype one of {', '.join(_DTYPES)}."
        )
    return name


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model: its ``text_config``, or all of it."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def context_length(config: Mapping[str, Any]) -> int:
    """The longest sequence, in tokens, that a checkpoint is made for.

    Raises:
        ConfigError: config.json does not say.
    """
    text = text_config(config)
    longest = text.get("max_position_embeddings")
    if longest is None and text.get("model_type") == "mamba2":
        return RECURRENT_CONTEXT
    if not isinstance(longest, int) or not 1 <= longest <= MAX_POSITIONS:
        raise ConfigError("The checkpoint's config.json has no usable 'max_position_embeddings'.")
    if text.get("model_type") in ("roberta", "xlm-roberta"):
        return longest - int(text.get("pad_token_id") or 0) - 1  # the first rows stand for padding
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) == "yarn":
        # Qwen's YaRN recipe leaves max_position_embeddings as it was before the stretch.
        original = rope.get("original_max_position_embeddings") or longest
        stretched = original * (rope.get("factor") or 1)
        if not 0 < stretched <= MAX_POSITIONS:
            raise ConfigError(
                f"The checkpoint's config.json stretches its context to {stretched:g} positions; at most {MAX_POSITIONS} are possible."
            )
        longest = max(longest, int(stretched))
    return longest


def served_context_length(
    config: Mapping[str, Any], wanted: int | None, usual: int | None = None
) -> int:
    """The longest sequence that is served, in tokens: ``wanted``, or by default ``usual`` or the
    checkpoint's limit.

    Raises:
        ConfigError: ``wanted`` is more than that limit.
    """
    limit = context_length(config)
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"--context-length {wanted} is more than the {limit} positions that this model was made for; "
            "answers beyond them would be noise."
        )
    return wanted or min(usual or limit, limit)


def check_ranks(config: Mapping[str, Any], tp: int) -> None:
    """Check that ``tp`` ranks can share a model, before a process is started for each.

    Raises:
        ConfigError: its heads cannot be split evenly.
    """
    text = text_config(config)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = text.get(name)
        if isinstance(heads, int) and heads % tp:
            raise ConfigError(
                f"The model's {name} ({heads}) cannot be split over --tp {tp} ranks; choose a --tp that divides it."
            )


def generation_config(model_dir: Path) -> dict[str, Any]:
    """A checkpoint's own sampling defaults.

    Returns:
        those of temperature, top_p, top_k, min_p and repetition_penalty that generation_config.json
        sets, and ``eos_token_ids``: the sorted end-of-sequence ids of both files.

    Raises:
        ConfigError: a default is out of its range.
    """
    config = read_config(model_dir)
    path = model_dir / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    defaults = {name: generation[name] for name in names if generation.get(name) is not None}
    if isinstance(defaults.get("top_k"), float) and defaults["top_k"].is_integer():
        defaults["top_k"] = int(defaults["top_k"])
    try:
        SamplingParams(**defaults).validate()
    except RequestError as error:
        raise ConfigError(f"{path} sets defaults that no request may have: {error}") from error
    ends: set[int] = set()
    for source in (config, text_config(config), generation):
        ids = source.get("eos_token_id")
        ends.update(i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))
    if len(ends) > MAX_END_TOKENS:
        raise ConfigError(
            f"The checkpoint names {len(ends)} end tokens (eos_token_id); at most {MAX_END_TOKENS} are possible."
        )
    return {**defaults, "eos_token_ids": sorted(ends)}


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a checkpoint.

    Raises:
        ConfigError: there are none, or the index names files that are missing.
    """
    index = model_dir / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index} holds no 'weight_map'.")
        files = [model_dir / name for name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ConfigError(
                f"{model_dir} lacks {len(missing)} of the {len(files)} weight files in its index: "
                f"{_some(missing)}. Download them too."
            )
        return files
    if (model_dir / SINGLE_FILE).is_file():
        return [model_dir / SINGLE_FILE]
    if any(model_dir.glob("*.bin")) or any(model_dir.glob("*.pt*")):
        raise ConfigError(
            f"{model_dir} holds its weights as pickle (.bin), which can run code when it is loaded and is not read; "
            "convert it once with transformers: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR) "
            "(AutoModel for an embedding model)."
        )
    raise ConfigError(
        f"{model_dir} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}. Download them, or give another folder."
    )


def _longest_dimension(
    file: Path, scheme: QuantizationScheme | None, config: Mapping[str, Any]
) -> int:
    """Check the header of a file. Returns the longest dimension of its tensors."""
    method = "" if scheme is None else scheme.method
    method = "fp8" if fp8_block(config) else method
    served = _PLAIN_DTYPES | {"fp8": {"F8_E4M3"}, "mxfp4": {"U8"}}.get(method, set())
    tensors = read_header(file)
    packed = {name: dtype for name, (dtype, _) in tensors.items() if dtype not in served}
    if packed:
        raise ConfigError(
            f"{file} holds {next(iter(packed.values()))} tensors ({_some(packed)}): weights of this form are "
            "not supported; choose the float32, bfloat16 or float16 original, or one quantized by AWQ or GPTQ."
        )
    size = text_config(config).get("hidden_size")
    for name, (_, shape) in tensors.items():
        if name.endswith(_EMBEDDINGS) and size is not None and shape[1:] != [size]:
            raise ConfigError(
                f"{file} does not fit its config.json: {name} has the shape {shape}, and 'hidden_size' is {shown(size)}. Take both "
                "files from one checkpoint."
            )
    return max((max(shape, default=1) for _, shape in tensors.values()), default=1)


def read_header(file: Path) -> dict[str, tuple[str, list[int]]]:
    """Return, by name, the dtype (``F32``, ``BF16``, ``F16``, ...) and the shape of each tensor of
    a safetensors file.

    Raises:
        ConfigError: it is no such file, or not as long as its header says.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (safe_open is no mapping)
            return {name: (one.get_dtype(), one.get_shape()) for name, one in slices.items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(damaged(file, "safetensors", error)) from error


def _some(names: Iterable[str], most: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
