"""The models of one server: where they come from, their names, and their parts of the memory."""

import argparse
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.cli.config_flags import add_arguments, configs_from_arguments
from radixrt.supervisor.launch import prepare
from radixrt.supervisor.served_models import are_several, served_models
from tests.checkpoints import make_tokenizer


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two models and of one that cannot be served."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "qwen3"):
        shutil.copytree(make_tokenizer(checkpoint(name)), folder / name)
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{}")
    return folder


def configs_of(*flags: str) -> tuple[list[ServerConfig], int | None]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return configs_from_arguments(parser.parse_args(flags))


def test_each_model_of_a_command_line_has_the_shared_settings() -> None:
    configs, total = configs_of(
        *("--model", "a", "--model-path", "b", "--port", "1", "--served-model-name", "x", "y"),
        *("--max-total-tokens", "4096"),
    )
    assert [(one.model_path, one.served_model_name) for one in configs] == [("a", "x"), ("b", "y")]
    assert [(one.port, one.max_total_tokens) for one in configs] == [(1, None)] * 2
    assert total == 4096 and are_several(configs)
    (one,), total = configs_of("--model", "a", "--max-total-tokens", "4096")
    assert one.max_total_tokens == 4096 and total is None and not are_several([one])
    with pytest.raises(ConfigError, match="gives 1 names to 2 models"):
        configs_of("--model", "a", "--model", "b", "--served-model-name", "x")


def test_the_settings_file_has_settings_of_each_model(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "port: 1\nmax-total-tokens: 4096\nmodels:\n"
        "  - {model-path: a, context-length: 256}\n"
        "  - {model-path: b, max-total-tokens: 512}\n"
    )
    configs, total = configs_of("--config", str(file))
    assert [one.context_length for one in configs] == [256, None]
    assert [one.max_total_tokens for one in configs] == [None, 512] and total == 4096
    file.write_text("models:\n  - {model-path: a, port: 1}\n  - {model-path: b}\n")
    with pytest.raises(ConfigError, match="port is a setting of the server"):
        configs_of("--config", str(file))
    file.write_text("models: [a, b]\n")
    with pytest.raises(ConfigError, match="models must be a list of settings"):
        configs_of("--config", str(file))
    file.write_text("model-path: [a, b]\n")
    assert [one.model_path for one in configs_of("--config", str(file))[0]] == ["a", "b"]


def test_a_folder_of_models_serves_those_that_can_be(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ServerConfig(model_path=str(folder), max_total_tokens=4096)
    assert are_several([config]) and not are_several([ServerConfig()])
    models = served_models([config], None, prepare)
    assert [model.config.model_name for model in models] == ["llama", "qwen3"]
    assert [model.config.max_total_tokens for model in models] == [2048, 2048]
    assert "broken is not served" in caplog.text


def test_pools_are_divided_by_contexts_and_otherwise_by_memory(folder: Path) -> None:
    paths = [str(folder / name) for name in ("llama", "qwen3")]
    short, long = (
        ServerConfig(model_path=path, context_length=length)
        for path, length in zip(paths, (128, 384), strict=True)
    )
    models = served_models([short, long], 4096, prepare)
    assert [model.config.max_total_tokens for model in models] == [1024, 3072]
    models = served_models([short, long], None, prepare)
    assert [model.config.mem_fraction_static for model in models] == [0.425, 0.425]
    needs = [model.need_bytes for model in models]
    assert min(needs) > 512 << 20 and models[0].config.model_memory_mb


def test_what_does_not_fit_or_cannot_be_told_apart_is_refused(folder: Path) -> None:
    one, other = (ServerConfig(model_path=str(folder / name)) for name in ("llama", "qwen3"))
    with pytest.raises(ConfigError, match="Two models are called llama"):
        served_models([one, one], None, prepare)
    small = ServerConfig(model_path=one.model_path, model_memory_mb=100)
    with pytest.raises(ConfigError, match=r"llama needs .* GB of memory.*raise --model-memory-mb"):
        served_models([small, other], None, prepare)
    logging = dataclasses.replace(one, request_log="log")
    bundled = dataclasses.replace(one, cache_dir="kv", cache_bundle="file")
    for own, flag in ((logging, "--request-log"), (bundled, "--cache-bundle")):
        with pytest.raises(ConfigError, match=f"{flag} is for a server of one model"):
            served_models([own, other], None, prepare)
