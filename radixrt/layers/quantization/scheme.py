"""Reads from config.json how the weights of a checkpoint are quantized, without torch, so that a
form that is not served is refused before anything starts."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from radixrt.base.errors import ConfigError

DEFAULT_GROUP_SIZE = 128
"""Columns that share a scale where radixrt does the rounding, as in published AWQ and GPTQ
checkpoints."""

HEAD_BITS = 8
"""Bits of the LM head where radixrt does the rounding: an error there is an error of the logits,
and of a tied embedding one of every token that goes in."""


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """The form of the linear layers' weights: codes of ``bits``, with a scale and a zero a
    group."""

    method: Literal["awq", "gptq", "mxfp4", "rounding", "fp8", "fp8_rounding"]
    """``rounding``, ``fp8_rounding``: the checkpoint is plain, and its weights are quantized while
    they are loaded."""
    bits: int
    group_size: int | None
    """Columns (input features) that share a scale and a zero; None: the whole row."""
    symmetric: bool = False
    """Whether rounding makes the zero the middle of the codes."""
    zeros_less_one: bool = False
    """GPTQ's first format stores each zero less one."""
    activation_order: bool = False
    """GPTQ's ``desc_act``: which group a column belongs to is written in a table."""
    kept: tuple[str, ...] = ()
    """Modules that are not quantized, with all that is below them: whole names (``lm_head``,
    ``mlp.gate``, ``model.layers.0``), which may leave out the beginning of the path."""
    experts_only: bool = False
    """Nothing but the experts of a mixture is quantized."""
    quantized_head: bool = False
    """The LM head is quantized like the layers (GPTQ's ``lm_head``)."""
    scale_a_row: bool = True
    """In fp8: each output feature has a scale; else a projection has one."""
    number_shape: tuple[int, ...] = ()
    """In fp8: how the checkpoint stores a single scale."""
    input_scales: bool = False
    """In fp8: the checkpoint has a calibrated scale for the inputs of each projection."""

    def covers(self, path: str, projections: Sequence[str] = ()) -> bool:
        """Whether a linear layer is quantized.

        >>> scheme = QuantizationScheme("awq", 4, 128, kept=("gate", "model.layers.1"))
        >>> scheme.covers("model.layers.0.mlp.gate"), scheme.covers("model.layers.0.mlp.experts.gate_up_proj")
        (False, True)
        >>> scheme.covers("model.layers.1.mlp.down_proj"), scheme.covers("model.layers.10.mlp.down_proj")
        (False, True)

        Args:
            path: of the layer in the model (``model.layers.0.self_attn.qkv_proj``).
            projections: paths in the checkpoint of those that are merged in it (``...q_proj``,
                ``...k_proj``, ...).

        Raises:
            ConfigError: only some of the projections are quantized.
        """
        kept = [name for name in projections if self._keeps(name)]
        if kept and len(kept) < len(projections):
            raise ConfigError(
                f"The checkpoint leaves {', '.join(kept)} unquantized, but not all of {', '.join(projections)}, which are "
                "computed together; choose a checkpoint that treats them alike, or the plain one."
            )
        if self.experts_only and ".experts." not in path:
            return False
        return not kept and not self._keeps(path)

    def _keeps(self, path: str) -> bool:
        return any(f".{name.strip('.')}." in f".{path}." for name in self.kept)


class BlockKind(NamedTuple):
    """A quantization of GGUF files: each block of columns has scales of its own."""

    name: str
    columns: int
    num_bytes: int
    """Bytes of a block in the file."""
    packed_bytes: int
    """In memory."""


BLOCK_KINDS = {
    2: BlockKind("Q4_0", 32, 18, 18),
    3: BlockKind("Q4_1", 32, 20, 20),
    6: BlockKind("Q5_0", 32, 22, 22),
    7: BlockKind("Q5_1", 32, 24, 24),
    8: BlockKind("Q8_0", 32, 34, 34),
    10: BlockKind("Q2_K", 256, 84, 84),
    11: BlockKind("Q3_K", 256, 110, 116),
    12: BlockKind("Q4_K", 256, 144, 148),
    13: BlockKind("Q5_K", 256, 176, 180),
    14: BlockKind("Q6_K", 256, 210, 212),
    16: BlockKind("IQ2_XXS", 256, 66, 108),
    17: BlockKind("IQ2_XS", 256, 74, 108),
    18: BlockKind("IQ3_XXS", 256, 98, 140),
    20: BlockKind("IQ4_NL", 32, 18, 18),
    21: BlockKind("IQ3_S", 256, 110, 140),
    22: BlockKind("IQ2_S", 256, 82, 108),
    23: BlockKind("IQ4_XS", 256, 136, 140),
    39: BlockKind("MXFP4", 32, 17, 17),
}
"""The kinds that the native kernels multiply by, by GGUF's number."""


ROUNDINGS = {
    "int8": QuantizationScheme("rounding", 8, None, symmetric=True),
    "int4": QuantizationScheme("rounding", 4, DEFAULT_GROUP_SIZE),
    "fp8": QuantizationScheme("fp8_rounding", 8, None),
}
"""Schemes by the name that ``--quantization`` has for them."""


def quantization_scheme(
    config: Mapping[str, Any], quantization: str = "auto"
) -> QuantizationScheme | None:
    """The scheme of a checkpoint, or the one it is to be brought into; None: plain weights.

    Args:
        quantization: ``auto`` for the checkpoint's own, a name of ``ROUNDINGS``, or ``plain``.

    Raises:
        ConfigError: a form that is not served, or a checkpoint that would be quantized twice.
    """
    own = _checkpoint_scheme(config)
    if quantization == "auto":
        return own
    if own is not None and fp8_block(config) is None:
        raise ConfigError(
            f"--quantization {quantization} needs a plain checkpoint, and this one is quantized already "
            f"({own.method}, {own.bits} bits); leave the flag out."
        )
    return ROUNDINGS.get(quantization)


def fp8_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The (rows, columns) of the blocks that have a scale each, in a checkpoint of 8-bit floats
    with such blocks, which is decoded while it is read; None: any other checkpoint.

    Raises:
        ConfigError: they are no sizes.
    """
    found = config.get("quantization_config")
    if not isinstance(found, dict) or found.get("quant_method") != "fp8":
        return None
    if not (block := found.get("weight_block_size")):
        return None
    if not (isinstance(block, list) and len(block) == 2 and all(map(_is_size, block))):
        raise ConfigError(
            f"The checkpoint's quantization_config has 'weight_block_size': {block!r}; it must be the rows and columns of a "
            "block, such as [128, 128]."
        )
    return block[0], block[1]


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _checkpoint_scheme(config: Mapping[str, Any]) -> QuantizationScheme | None:
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else "unknown"
    if method == "awq":
        return _awq(found)
    if method == "gptq":
        return _gptq(found)
    if method == "mxfp4":
        return QuantizationScheme("mxfp4", 4, 32, experts_only=True)
    if method == "fp8":
        return _fp8(found)
    if method == "compressed-tensors":
        return _compressed_tensors(found)
    raise ConfigError(
        f"The checkpoint is quantized ({method}), which is not supported; supported are awq, gptq, mxfp4, and fp8 in its own "
        "layout or compressed-tensors'. Choose one of those, or the float32, bfloat16 or float16 original, perhaps with "
        "--quantization int8, int4 or fp8."
    )


_PLAIN_WITH_FP8_BLOCKS = ("lm_head", "embed_tokens", "embed_tokens_per_layer")
"""Modules that are plain in checkpoints with a scale a block, listed or not."""


def _fp8(found: Mapping[str, Any]) -> QuantizationScheme:
    """One scale a projection, with activations by a scale that is calibrated or each token's own;
    or one scale a block, which radixrt rounds to 8-bit integers."""
    if found.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ConfigError(
            f"The checkpoint's weights are {found['fmt']}; of 8-bit floats e4m3 is supported."
        )
    listed = found.get("modules_to_not_convert") or found.get("ignored_layers") or ()
    kept = tuple(name.replace("model.language_model.", "model.") for name in listed)
    if fp8_block({"quantization_config": found}) is not None:
        rounded = QuantizationScheme("rounding", 8, DEFAULT_GROUP_SIZE, symmetric=True)
        return dataclasses.replace(rounded, kept=(*_PLAIN_WITH_FP8_BLOCKS, *kept))
    static = found.get("activation_scheme", "dynamic") == "static"
    return QuantizationScheme("fp8", 8, None, kept=kept, scale_a_row=False, input_scales=static)


def _compressed_tensors(found: Mapping[str, Any]) -> QuantizationScheme:
    """Plain W8A8 of 8-bit floats: one group of layers, scales of the weights a channel or a
    tensor."""
    groups = list((found.get("config_groups") or {}).values())
    weights = (groups[0].get("weights") or {}) if len(groups) == 1 else {}
    inputs = (groups[0].get("input_activations") or {}) if len(groups) == 1 else {}
    strategy = weights.get("strategy")
    plain = (
        found.get("format") in ("float-quantized", "naive-quantized")
        and all(
            part.get("type") == "float" and part.get("num_bits") == 8 for part in (weights, inputs)
        )
        and strategy in ("channel", "tensor")
        and not found.get("kv_cache_scheme")
        and not found.get("sparsity_config")
    )
    kept = tuple(found.get("ignore") or ())
    if not plain or any(name.startswith("re:") for name in kept):
        raise ConfigError(
            "The checkpoint is quantized by compressed-tensors in a form that is not supported: served are 8-bit floats "
            "for weights and activations, with one scale per channel or tensor, in one group of layers that are "
            "excluded by name. Choose such a one, or the original with --quantization fp8."
        )
    return QuantizationScheme(
        "fp8",
        8,
        None,
        kept=kept,
        scale_a_row=strategy == "channel",
        number_shape=(1,),
        input_scales=not inputs.get("dynamic", False),
    )


def _awq(found: Mapping[str, Any]) -> QuantizationScheme:
    version = str(found.get("version", "gemm")).lower()
    if version != "gemm":
        raise ConfigError(
            f"The checkpoint has AWQ's layout {version!r}, which is not supported; choose one with 'gemm'."
        )
    bits = _bits(found, (4,), "bits", "w_bit")
    kept = tuple(found.get("modules_to_not_convert") or ())
    return QuantizationScheme(
        "awq", bits, _group_size(found, "group_size", "q_group_size"), kept=kept
    )


def _gptq(found: Mapping[str, Any]) -> QuantizationScheme:
    layout = str(found.get("checkpoint_format") or "gptq").lower()
    if layout not in ("gptq", "gptq_v2"):
        raise ConfigError(
            f"The checkpoint has GPTQ's layout {layout!r}, which is not supported; choose one with 'gptq' or 'gptq_v2'."
        )
    if found.get("dynamic"):
        raise ConfigError(
            "The checkpoint quantizes its layers in different ways (GPTQ's 'dynamic'), which is not supported."
        )
    return QuantizationScheme(
        "gptq",
        _bits(found, (4, 8), "bits"),
        _group_size(found, "group_size"),
        zeros_less_one=layout == "gptq",
        activation_order=bool(found.get("desc_act", False)),
        quantized_head=bool(found.get("lm_head", False)),
    )


def _bits(found: Mapping[str, Any], served: tuple[int, ...], *names: str) -> int:
    bits = next((found[name] for name in names if name in found), None)
    if bits not in served:
        raise ConfigError(
            f"The checkpoint's quantization_config has {names[0]!r}: {bits!r}; served are "
            f"{' and '.join(map(str, served))}."
        )
    return int(bits)


def _group_size(found: Mapping[str, Any], *names: str) -> int | None:
    size = next((found[name] for name in names if name in found), None)
    if size == -1:
        return None
    if not isinstance(size, int) or size < 8 or size % 8:
        raise ConfigError(
            f"The checkpoint's quantization_config has {names[0]!r}: {size!r}; it must be -1 or a multiple of 8."
        )
    return size
