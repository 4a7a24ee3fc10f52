"""``--config FILE``: settings from YAML, under the names of the flags."""

import argparse
from pathlib import Path

import pytest

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.cli.config_flags import add_arguments, config_from_arguments


def parsed(text: str, folder: Path, *flags: str) -> ServerConfig:
    file = folder / "server.yaml"
    file.write_text(text)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return config_from_arguments(parser.parse_args(["--config", str(file), *flags]))


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    text = "page-size: 32\nport: 1234\ndisable_radix_cache: true\nserved-model-name: [one, two]\n"
    config = parsed(text, tmp_path, "--port", "30000")
    assert (config.page_size, config.port, config.disable_radix_cache) == (32, 30000, True)
    assert config.model_names == ["one", "two"]
    assert config.context_length == ServerConfig().context_length


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "prot is not a setting. Did you mean port?"),
        ("colour: red", "colour is not a setting."),
        ("port: many", "--port must be of type int, not 'many'."),
        ("- port", "must hold names and values"),
        ("port: [", "cannot be read"),
        ("port: !!python/object/apply:os.getpid []", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_with_the_name_to_change(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        parsed(text, tmp_path)
    assert message in str(refusal.value)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert parsed("# nothing yet\n", tmp_path) == ServerConfig()
