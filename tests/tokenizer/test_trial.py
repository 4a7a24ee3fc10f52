"""A tokenizer.json that takes too much time or memory is refused at the start, with a sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.tokenizer import trial
from radixrt.tokenizer.trial import try_tokenizer
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.checkpoints.tiny_tokenizers import save_byte_level

Content = dict[str, Any]


def normalizer(**one: Any) -> Callable[[Content], None]:
    return lambda content: content.update(normalizer=one)


def splits(content: Content) -> None:
    regex = {"Regex": "(x+x+)+y|(a|aa)+$"}
    content["pre_tokenizer"] = {
        "type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False,
    }  # fmt: skip


def doubles(content: Content) -> None:
    one = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [one] * 40}


def adds(content: Content) -> None:
    first = content["added_tokens"][0]
    content["added_tokens"] += [
        {**first, "id": 5000 + number, "content": f"<|{number}|>"} for number in range(70_000)
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (normalizer(type="Replace", pattern={"Regex": "(a+)+$"}, content="b"), "did not load"),
        (normalizer(type="Replace", pattern={"String": ""}, content="aa"), "did not load"),
        (splits, "did not load"),
        (doubles, "did not load"),
        (adds, "at most 65536"),
    ],
    ids=["replaces", "replaces nothing", "splits", "doubles", "adds"],
)
def test_a_hostile_tokenizer_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Content], None],
    reason: str,
) -> None:
    monkeypatch.setattr(trial, "BASE_CPU_S", 1)
    config = ServerConfig(model_path=str(save_byte_level(tmp_path)))
    try_tokenizer(config)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=reason) as refused:
        try_tokenizer(config)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["{", '{"added_tokens": null}', "[" * 100_000])
def test_a_damaged_file_is_left_to_the_loading_which_says_so(tmp_path: Path, text: str) -> None:
    config = ServerConfig(model_path=str(save_byte_level(tmp_path)))
    (tmp_path / "tokenizer.json").write_text(text)
    try_tokenizer(config)
    with pytest.raises(ConfigError, match="tokenizer"):
        Vocabulary.load(config)
