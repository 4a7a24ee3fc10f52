"""A kept config has the attributes of transformers' config, or the config is not kept."""

import json
import pwd
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from radixrt.base.errors import ConfigError
from radixrt.models import loader
from radixrt.models.loader import KeptConfig, load_model, transformers_config
from tests.checkpoints import CONFIGS, _config


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "radixrt" / "configs"


def kept(folder: Path) -> KeptConfig | None:
    """The config of a second start; None: it comes from transformers again."""
    transformers_config(folder, False)
    config = transformers_config(folder, False)
    return config if isinstance(config, KeptConfig) else None


def test_a_kept_config_of_each_architecture_has_transformers_attributes(tmp_path: Path) -> None:
    unkept = set()
    for architecture in CONFIGS:
        _config(architecture, {}).save_pretrained(tmp_path / architecture)
        config = kept(tmp_path / architecture)
        if config is None:
            unkept.add(architecture)
            continue
        original = AutoConfig.from_pretrained(tmp_path / architecture)
        assert config.get_text_config() is config
        for name in {*dir(original), *original.attribute_map} - loader._NOT_READ:
            if name.startswith("_") or callable(value := getattr(original, name)):
                continue
            assert getattr(config, name) == value, (architecture, name)
            assert type(getattr(config, name)) is type(value), (architecture, name)
        with pytest.raises(AttributeError):
            config.no_such_attribute  # noqa: B018
        with pytest.raises(TypeError, match="not kept"):
            getattr(config, "dtype", None)
    assert {"llama", "qwen2", "qwen3", "gemma2"} <= set(CONFIGS) - unkept
    assert {"phi3", "gemma4"} <= unkept, "they need more than attributes"


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_a_model_of_a_kept_config_is_the_same_without_transformers(
    architecture: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(architecture)
    first = load_model(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    second = load_model(folder)
    assert isinstance(second.config, KeptConfig) and not isinstance(first.config, KeptConfig)
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(one, other) for (a, one), (b, other) in pairs)


def test_a_changed_or_damaged_config_is_read_again(tmp_path: Path, cache: Path) -> None:
    _config("qwen2", {}).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = kept(tmp_path)
    assert config is not None
    file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": 0.25}))
    assert transformers_config(tmp_path, False).rms_norm_eps == 0.25
    for end in (b"", b"\xff" * 5):
        for each in cache.iterdir():
            each.write_bytes(each.read_bytes()[:-5] + end)
        assert not isinstance(transformers_config(tmp_path, False), KeptConfig)
        assert isinstance(transformers_config(tmp_path, False), KeptConfig)
    assert not isinstance(transformers_config(tmp_path, True), KeptConfig), "code may read any file"
    file.write_text('{"model_type": "nothing"}')
    with pytest.raises(ConfigError, match="not a valid config"):
        transformers_config(tmp_path, False)


def test_a_config_with_a_value_that_is_no_json_is_not_kept(tmp_path: Path) -> None:
    _config("qwen2", {}).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert loader._attributes(config) is not None
    config.sizes = [(1, 2)]
    assert loader._attributes(config) is None


@pytest.mark.parametrize("odd", [10**30, "\ud800"])
def test_a_config_with_a_value_that_is_too_odd_is_not_kept(
    odd: object, tmp_path: Path, cache: Path
) -> None:
    _config("qwen2", {}).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "odd": odd}))
    assert kept(tmp_path) is None and not cache.exists()


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    _config("qwen2", {}).save_pretrained(tmp_path / "model")
    assert kept(tmp_path / "model") is None


def test_a_user_without_a_home_folder_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    _config("qwen2", {}).save_pretrained(tmp_path)
    assert kept(tmp_path) is None
