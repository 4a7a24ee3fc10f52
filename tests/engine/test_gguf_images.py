"""GGUF models that see images: a text file, and the file ``mmproj-*.gguf`` of its tower."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from radixrt.base.errors import ConfigError
from radixrt.models.checkpoint import read_config, resolve_model_path
from radixrt.models.gguf.folder import gguf_tensors
from radixrt.models.images import why_no_images
from radixrt.models.loader import load_model
from radixrt.models.memory_need import memory_need
from tests.checkpoints.image_checkpoints import make_image_checkpoint, picture, user
from tests.engine.seeing import Sees
from tests.engine.test_images import CHATS, EVERY
from tests.models.gguf_files import write_gguf
from tests.models.gguf_towers import write_mmproj

Kind = gguf.GGMLQuantizationType
CHAT = CHATS["four of different sizes, between text"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for checkpoints, and a cache of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield tmp_path_factory.mktemp("towers")


def packed(checkpoint: Path) -> Path:
    """The folder of a checkpoint in two GGUF files; what their metadata do not say has the values
    of all published ones."""
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] == "qwen2_5_vl":
        config["vision_config"]["window_size"] = 112
    if config["model_type"] == "gemma3":
        config["text_config"]["query_pre_attn_scalar"] = config["text_config"]["head_dim"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    folder = checkpoint / "gguf"
    folder.mkdir()
    write_mmproj(checkpoint, folder / "mmproj-F32.gguf")
    return resolve_model_path(str(write_gguf(checkpoint, folder / "m-F32.gguf")))


@pytest.mark.parametrize(
    "family",
    ["gemma3", "gemma4", "gemma4_e", "llava", "llava_siglip", "smolvlm", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"],
)  # fmt: skip
def test_logits_are_those_of_transformers(folder: Path, family: str) -> None:
    sees, chat = Sees(family, folder / family, packed), CHAT
    if family.startswith("gemma4"):  # whose images have up to 280 tokens each
        sees.processor.pictures.max_soft_tokens = 280
        chat = [user("First ", picture(1), " then ", picture(2, 20, 60), "?")]
    prompt = sees.encode(chat)
    ids, logits = sees.reference(chat)
    assert prompt.token_ids == ids
    (found,) = sees.engine(dtype="float32").pool([prompt], EVERY)
    assert np.abs(found - logits).max() < 1e-4


@pytest.fixture(scope="module")
def gemma3(folder: Path) -> Path:
    """A checkpoint, and its language model as ``gguf/m-F32.gguf`` without a tower."""
    checkpoint = make_image_checkpoint("gemma3", folder / "alone")
    (checkpoint / "gguf").mkdir()
    write_gguf(checkpoint, checkpoint / "gguf/m-F32.gguf")
    return checkpoint


def served(checkpoint: Path, tower: Path | None = None) -> Path:
    mmproj = None if tower is None else str(tower)
    return resolve_model_path(str(checkpoint / "gguf/m-F32.gguf"), mmproj=mmproj)


def tower_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_model(folder, dtype="float32").vision.state_dict()


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0])
def test_a_tower_is_dequantized(gemma3: Path, tmp_path: Path, kind: Kind) -> None:
    """As the package ``gguf`` does, and in files with the older names too."""
    packed = write_mmproj(gemma3, tmp_path / "mmproj-a.gguf", kind, swapped=kind == Kind.F16)
    plain = write_mmproj(gemma3, tmp_path / "mmproj-b.gguf", kind, rounded=True)
    exact = write_mmproj(gemma3, tmp_path / "mmproj-c.gguf")
    found, expected, other = (tower_weights(served(gemma3, one)) for one in (packed, plain, exact))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert not all(torch.equal(found[name], other[name]) for name in found)


def test_the_tower_beside_a_model_is_the_one_that_fits(gemma3: Path) -> None:
    """It is looked for again when files have changed."""

    def lacks() -> str | None:
        folder = served(gemma3)
        return why_no_images(folder, read_config(folder), "cpu")

    assert "mmproj-*.gguf, or --mmproj FILE" in str(lacks())
    text = memory_need(served(gemma3))
    other = gemma3 / "gguf/mmproj-1.gguf"
    write_mmproj(gemma3, other, projection_dim=96)
    reason = str(lacks())
    assert "mmproj-1.gguf is no tower of" in reason and "embeddings of 96" in reason
    with pytest.raises(ConfigError, match="no tower of"):
        served(gemma3, other)
    tower = write_mmproj(gemma3, gemma3 / "gguf/mmproj-2.gguf", Kind.F16)
    assert lacks() is None
    entries = [one for one in gguf_tensors(served(gemma3)) or [] if one.file == str(tower)]
    need = memory_need(served(gemma3), dtype="float32")
    numbers = sum(math.prod(entry.shape) for entry in entries)
    assert need.in_memory - memory_need(served(gemma3, tower)).in_memory == 0
    assert need.in_memory == text.in_memory + 4 * numbers


def test_a_tower_of_another_llava_is_refused(folder: Path) -> None:
    """A file that lacks the name of its projector is LLaVA's."""
    checkpoint = make_image_checkpoint("llava", folder / "next")
    (checkpoint / "gguf").mkdir()
    write_gguf(checkpoint, checkpoint / "gguf/m-F32.gguf")
    for key, value, reason in (
        ("image_grid_pinpoints", [336, 672], "LLaVA-NeXT"),
        ("feature_layer", [1, 2], "several layers"),
    ):
        tower = folder / f"mmproj-{key}.gguf"
        write_mmproj(checkpoint, tower, arrays={f"clip.vision.{key}": value})
        with pytest.raises(ConfigError, match=reason):
            served(checkpoint, tower)


def test_a_tower_that_is_not_served_is_named(gemma3: Path, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mmproj-x.gguf", "clip")
    writer.add_clip_projector_type("resampler")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="a projector of the kind 'resampler'; served: gemma3"):
        served(gemma3, tmp_path / "mmproj-x.gguf")
    with pytest.raises(ConfigError, match="there is no such file"):
        served(gemma3, tmp_path / "gone.gguf")
    with pytest.raises(ConfigError, match="--mmproj is for a GGUF model"):
        resolve_model_path(str(gemma3), mmproj=str(tmp_path / "mmproj-x.gguf"))
