"""The files of sentence-transformers and the architectures decide what a checkpoint gives."""

import json
from pathlib import Path
from typing import Any

import pytest

from radixrt.base.errors import ConfigError
from radixrt.models.checkpoint import context_length, served_context_length
from radixrt.models.pooling import Pooling, read_pooling, read_score_tokens

DECODER, ENCODER = {"architectures": ["Qwen3ForCausalLM"]}, {"architectures": ["BertModel"]}
OLD, NEW = "sentence_transformers.models.", "sentence_transformers.base.modules.transformer."


def write(folder: Path, modules: Any, **files: Any) -> Path:
    """``modules``: kinds of modules, or the content of modules.json; ``files``: of the folders of
    these kinds."""
    if modules and isinstance(modules[0], str):
        modules = [
            {"path": "" if kind.endswith("Transformer") else kind.rpartition(".")[2], "type": kind}
            for kind in modules
        ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for name, content in files.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True, "word_embedding_dimension": 8}, "cls"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
@pytest.mark.parametrize("names", [OLD, NEW])
def test_both_forms_of_the_pooling_config(
    tmp_path: Path, names: str, pooling: dict[str, Any], mode: str
) -> None:
    kinds = [f"{names}Transformer", f"{names}Pooling", f"{names}Normalize"]
    write(tmp_path, kinds, Pooling=pooling)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    found = read_pooling(tmp_path, {**ENCODER, "matryoshka_dimensions": [8, 4]})
    assert found == Pooling(
        "embed",
        mode,
        normalize=True,
        dimensions=(8, 4),
        usual_length=256,  # type: ignore[arg-type]
    )


def test_dense_layers_keep_their_order(tmp_path: Path) -> None:
    modules = [{"path": path, "type": kind} for path, kind in (
        ("", "x.Transformer"), ("Pooling", "x.Pooling"), ("2", "x.Dense"), ("3", "x.Dense"),
    )]  # fmt: skip
    found = read_pooling(write(tmp_path, modules, Pooling={"pooling_mode": "mean"}), ENCODER)
    assert found and found.dense == (tmp_path / "2", tmp_path / "3") and not found.normalize


def test_a_decoder_without_such_files_generates_text(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, DECODER) is None
    assert read_pooling(tmp_path, ENCODER) == Pooling("embed", "mean")
    bare = {"architectures": ["Qwen3Model"]}
    assert read_pooling(tmp_path, bare) == Pooling("embed", "last", normalize=True)


def test_a_judge_by_two_tokens_generates_text_and_names_them(tmp_path: Path) -> None:
    kinds = [f"{NEW}Transformer", "sentence_transformers.cross_encoder.modules.LogitScore"]
    write(tmp_path, kinds, LogitScore={"true_token_id": 9693, "false_token_id": 2152})
    assert read_pooling(tmp_path, DECODER) is None
    assert read_score_tokens(tmp_path) == (9693, 2152)
    (tmp_path / "LogitScore/config.json").write_text('{"true_token_id": 5, "false_token_id": null}')
    assert read_score_tokens(tmp_path) == (5,)


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({"id2label": {"0": "LABEL_0"}}, "sigmoid"),
        ({"id2label": {"0": "a", "1": "b"}}, "softmax"),
        ({"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"id2label": {"0": "a"}, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
        ({"id2label": {"0": "a"}, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
        ({}, "softmax"),
    ],
)  # fmt: skip
def test_classifiers(tmp_path: Path, fields: dict[str, Any], activation: str) -> None:
    config = {"architectures": ["BertForSequenceClassification"], **fields}
    found = read_pooling(tmp_path, config)
    assert found and (found.task, found.mode, found.activation) == ("classify", "cls", activation)
    assert len(found.labels) == len(fields.get("id2label", "ab"))


@pytest.mark.parametrize(
    ("config", "kinds", "pooling", "words"),
    [
        (DECODER, ["Transformer", "Pooling"], {"pooling_mode": "mean"}, "mean pooling over a decoder"),
        (ENCODER, ["Transformer", "Pooling"], {"pooling_mode": "max"}, "asks for max pooling"),
        (ENCODER, ["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "and"),
        (ENCODER, ["Transformer", "Pooling"], {}, "asks for no pooling"),
        (ENCODER, ["Transformer", "Pooling", "Magic"], {"pooling_mode": "mean"}, "Magic"),
        (ENCODER, ["Transformer"], {}, "names no pooling"),
    ],
)  # fmt: skip
def test_other_ways_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], kinds: list[str], pooling: Any, words: str
) -> None:
    write(tmp_path, [f"{OLD}{kind}" for kind in kinds], Pooling=pooling)
    with pytest.raises(ConfigError, match=words):
        read_pooling(tmp_path, config)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ConfigError, match=r"modules\.json cannot be read"):
        read_pooling(tmp_path, ENCODER)
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no JSON list"):
        read_pooling(tmp_path, ENCODER)


def test_lengths_of_encoders() -> None:
    roberta = {"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}
    assert context_length(roberta) == 512
    assert served_context_length(roberta, None, usual=256) == 256
    assert served_context_length(roberta, 400, usual=256) == 400
    assert served_context_length(roberta, None, usual=9000) == 512
