"""The comparison with other engines: what is asked, how answers are judged, how servers are started
and reported."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import httpx
import pytest
import torch
from safetensors.torch import load_file

from bench import speculation
from bench.byte_tokenizer import byte_tokenizer
from bench.dummy_checkpoint import write_random_latents
from bench.markdown import markdown, median_and_range
from bench.peers_cpu import measuring
from bench.peers_cpu.agreement import common_length
from bench.peers_cpu.checkpoints import Checkpoint, CheckpointName, write_dequantized
from bench.peers_cpu.comparison import Comparison
from bench.peers_cpu.converting import converted
from bench.peers_cpu.engines import ENGINES, Engine, limited_to_avx2
from bench.peers_cpu.environments import ENVIRONMENTS
from bench.peers_cpu.measuring import Run
from bench.peers_cpu.pseudo_words import ANSWER_SCHEMA
from bench.peers_cpu.serving import EngineFailedError, first_line_of_why, serving
from bench.peers_cpu.table import table
from bench.peers_cpu.tasks import JudgedAnswers, Task, is_right, is_valid
from bench.peers_cpu.workloads import make_workloads
from radixrt.bench.client import RequestRecord
from radixrt.bench.report import summarize
from radixrt.bench.workloads import Turn
from radixrt.layers.mlp import SparseMoE
from radixrt.models.loader import load_model

VALID = '{"name": "Ada", "age": 36, "colours": ["red"], "married": true}'


def record(start: float, *, answer: str = "", finish_reason: str | None = None) -> RequestRecord:
    """A request of three tokens: the first after half a second, a gap of a tenth between them."""
    return RequestRecord(
        sent=start,
        conversation=0,
        turn=0,
        token_times=[start + 0.5, start + 0.6, start + 0.7],
        token_counts=[1, 1, 1],
        finished=start + 1,
        output_tokens=3,
        cached_tokens=7,
        answer=answer,
        finish_reason=finish_reason,
    )


def test_questions_come_in_the_order_of_documents_again_and_again() -> None:
    conversations = make_workloads()["a"].conversations
    documents = [conversation.context for conversation in conversations]
    assert len(set(documents)) == 4
    assert documents == documents[:4] * 8
    assert len({conversation.turns[0].question for conversation in conversations}) == 32


@pytest.mark.parametrize("checkpoint", get_args(CheckpointName))
def test_quick_workloads_ask_the_same_in_small(checkpoint: CheckpointName) -> None:
    full, quick = make_workloads(checkpoint), make_workloads(checkpoint, quick=True)
    assert full.keys() == quick.keys()
    for letter, small in quick.items():
        large = full[letter]
        assert small.endpoint == large.endpoint
        assert _tokens_asked(small.conversations) < _tokens_asked(large.conversations)
        for ours, theirs in zip(small.conversations, large.conversations, strict=False):
            assert str(theirs.context).startswith(str(ours.context))


def _tokens_asked(conversations: list) -> int:
    return sum(turn.output_len for each in conversations for turn in each.turns)


@pytest.mark.parametrize(
    ("answer", "valid"),
    [
        (VALID, True),
        (VALID.replace("36", "121"), False),  # over the maximum
        (VALID.replace('"red"', '"mauve"'), False),
        (VALID[:-1], False),  # cut off
        (VALID.replace("Ada", "A\nda"), False),  # a raw control character
        (VALID.replace("Ada", "A" * 21), False),
    ],
)
def test_an_answer_is_valid_if_it_is_json_and_satisfies_the_schema(
    answer: str, valid: bool
) -> None:
    assert is_valid(answer, ANSWER_SCHEMA) is valid


def test_answers_are_counted_as_finished_and_as_valid() -> None:
    failed = replace(record(0, answer=VALID, finish_reason="stop"), error="HTTP 500")
    records = [
        record(0, answer=VALID, finish_reason="stop"),
        record(0, answer=VALID, finish_reason="length"),
        record(0, answer=VALID[:-1], finish_reason="length"),
        record(0, answer='"A\n"', finish_reason="stop"),
        failed,
    ]
    tasks = [Task("", [Turn("", 9)], schema=ANSWER_SCHEMA)]
    assert JudgedAnswers.judge(records, tasks) == JudgedAnswers(5, finished=2, valid=2, right=None)
    tasks = [Task("", [Turn("", 9)], right=(VALID.replace(" ", ""),))]
    assert JudgedAnswers.judge(records, tasks) == JudgedAnswers(5, finished=2, valid=None, right=2)
    run = Run(summarize(records), JudgedAnswers.judge(records, tasks))  # of one second
    row = table([make_workloads()["d"]], [ENGINES["vllm"]], {("d", "vllm"): [run]}).splitlines()[2]
    assert row.endswith("| 2, - of 5 | 2 of 5; 2.00 |")


@pytest.mark.parametrize(
    ("answer", "right"),
    [(" The owner is Vidur.\n", True), ("The owner is Noval.", False), ("", False)],
)
def test_an_answer_is_right_if_it_is_the_same_text(answer: str, right: bool) -> None:
    assert is_right(answer, "The owner is Vidur.") is right


def test_lookups_have_right_answers_that_are_valid() -> None:
    """And in the documents, where the model has to find them."""
    workloads = make_workloads("padded")
    assert [len(workload.conversations) for workload in workloads.values()] == [32, 32, 8, 8, 16]
    for workload in workloads.values():
        for task in workload.conversations:
            assert isinstance(task, Task) and len(task.right) == len(task.turns)
            for answer in task.right:
                assert is_right(answer, answer)
                assert task.schema is None or is_valid(answer, task.schema)
    documents = [task.context for task in workloads["a"].conversations]
    assert len(set(documents)) == 4 and documents == documents[:4] * 8


def test_documentation_workloads_ask_about_the_text_that_they_show() -> None:
    workloads = make_workloads("gemma")
    heads = [str(conversation.context) for conversation in workloads["a"].conversations]
    assert len(set(heads)) == 4 and heads == heads[:4] * 8
    assert all(len(head) > 4000 for head in heads)
    for task in workloads["e"].conversations:
        assert isinstance(task, Task) and is_valid(task.right[0], task.schema or {})
        facts = json.loads(task.right[0])
        assert f"{facts['name']} {facts['version']}" in str(task.turns[0].question)


def test_dequantized_weights_are_those_of_the_gguf_file(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    from tests.models.gguf_files import write_gguf

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kind = gguf.GGMLQuantizationType.Q8_0
    file = write_gguf(model_dir, tmp_path / "tiny.gguf", kind)
    folder = write_dequantized(file, tmp_path / "bf16")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    original = load_file(model_dir / "model.safetensors")[name]
    rounded = gguf.dequantize(gguf.quantize(original.numpy(), kind), kind)
    assert torch.equal(tensors[name], torch.from_numpy(rounded.copy()).bfloat16())
    assert load_model(folder).dtype == torch.bfloat16
    assert converted(ENGINES["llama.cpp-q4_k_m"], Checkpoint(folder, file), tmp_path) == file


def test_the_checkpoint_of_latents_has_the_cache_and_the_experts_of_v2_lite(tmp_path: Path) -> None:
    small = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48}
    write_random_latents(tmp_path, byte_tokenizer(), num_hidden_layers=2, **small)
    model = load_model(tmp_path)
    assert [kept.bytes_per_token for kept in model.kv_specs(torch.bfloat16)] == [1152, 1152]
    (mixture,) = [module for module in model.modules() if isinstance(module, SparseMoE)]
    assert (mixture.gate.top_k, mixture.experts.num_experts) == (6, 16)


def test_leading_tokens_agree_up_to_the_first_other_one() -> None:
    assert common_length([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert common_length([1, 2], [1, 2, 3]) == 2
    assert common_length([], [1]) == 0


@pytest.mark.parametrize("engine", ENGINES.values(), ids=lambda engine: engine.name)
def test_every_command_names_its_model_and_port(engine: Engine) -> None:
    def filled(text: str) -> str:
        folders = {name: Path("/", name) for name in ("peers", "checkpoint", "model")}
        return engine.filled(text, **folders, port=4711)

    command = [filled(part) for part in engine.command]
    assert "4711" in command
    assert {"/model", "/checkpoint"} & set(command)
    assert not any("{" in part for part in [*command, *map(filled, engine.variables.values())])
    if engine.environment:
        assert engine.environment in ENVIRONMENTS
        assert command[0].startswith(f"/peers/{engine.environment}/bin/")
    else:
        assert command[0] == sys.executable
    for part in command:
        assert not part.endswith("_server.py") or Path(part).is_file()


def test_engines_limited_to_avx2_are_told_so_or_compiled_for_it() -> None:
    ours, theirs = (limited_to_avx2(ENGINES[n]) for n in ("radixrt-q4_k_m", "llama.cpp-q4_k_m"))
    assert ours.variables["RADIXRT_KERNELS_ISA"] == "avx2"
    assert ours.variables["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert theirs.environment == "llama.cpp-avx2" in ENVIRONMENTS
    assert limited_to_avx2(ENGINES["vllm"]).variables.items() > ENGINES["vllm"].variables.items()


def test_medians_are_over_rounds_and_what_a_server_does_not_say_is_blank() -> None:
    workload, engine = make_workloads()["d"], replace(ENGINES["radixrt"], name="one")
    silent = replace(engine, name="silent", reports_cached_tokens=False)
    rounds = [Run(summarize([record(0)] * count), None) for count in (1, 2, 9)]
    results = {("d", "one"): rounds, ("d", "silent"): rounds}
    _, _, one, other = table([workload], [engine, silent], results).splitlines()
    cells = [cell.strip() for cell in one.strip("|").split("|")]
    # three tokens a request, all within one second
    assert cells[2:7] == ["6.0 (3.0-27.0)", "500", "100.0", "14", "0"]
    assert [cell.strip() for cell in other.strip("|").split("|")][5] == ""


def test_an_engine_that_failed_has_a_row_that_says_why() -> None:
    workload, engine = make_workloads()["d"], ENGINES["vllm"]
    lines = table([workload], [engine], {("d", "vllm"): ["no | model"]}).splitlines()
    assert lines[2].startswith(f"| (d) {workload.what} | vllm | failed: no \\| model |")
    assert lines[2].replace("\\|", "").count("|") == lines[0].count("|")


def test_requests_that_failed_are_counted_with_the_reason() -> None:
    refused = replace(record(0), error="HTTP 400: no such thing")
    run = Run(summarize([record(0), refused]), None)
    row = table([make_workloads()["d"]], [ENGINES["vllm"]], {("d", "vllm"): [run, "crashed"]})
    assert "| 1 and 1 rounds: crashed |" in row


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("INFO ok\nTraceback\n  x\nValueError: no head\nRuntimeError: see above", "ValueError: no head"),
        ("loading\nerror: unknown model architecture\nbye", "error: unknown model architecture"),
        ("one\ntwo\n", "two"),
        ("", "it said nothing"),
    ],
)  # fmt: skip
def test_the_first_error_of_a_log_is_the_reason(log: str, why: str) -> None:
    assert first_line_of_why(log) == why


def test_a_server_that_ends_instead_of_serving_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    engine = Engine("broken", ("{python}", "-c", "raise ValueError('no such layer')"))
    with (
        pytest.raises(EngineFailedError, match="ValueError: no such layer"),
        serving(engine, tmp_path, tmp_path, tmp_path, tmp_path / "log"),
    ):
        pass


def test_an_engine_that_is_not_installed_says_how_to(tmp_path: Path) -> None:
    for name in ("vllm", "llama.cpp"):
        engine = ENGINES[name]
        with pytest.raises(EngineFailedError, match=rf"bench.peers_cpu install {name}"):
            model = converted(engine, Checkpoint(tmp_path), tmp_path)
            with serving(engine, tmp_path, model, tmp_path, tmp_path / "log"):
                pass


def test_one_engine_that_fails_does_not_end_the_comparison(tmp_path: Path) -> None:
    """The second engine has its turn in every round, although the first one never starts."""
    (tmp_path / "greedy_float32.json").write_text("[]")
    broken = Engine("broken", ("{python}", "-c", "raise ValueError('no such layer')"))
    workloads = [make_workloads(quick=True)[letter] for letter in "df"]
    missing = ENGINES["vllm"]
    comparison = Comparison(
        [broken, missing], workloads, Checkpoint(tmp_path), [], tmp_path / "peers"
    )
    comparison.run(2)
    assert {key: len(rounds) for key, rounds in comparison.results.items()} == {
        (letter, engine.name): 2 for letter in "df" for engine in (broken, missing)
    }
    whys = json.dumps(list(comparison.results.values()))
    assert "no such layer" in whys and "not installed" in whys


def test_tables_have_a_column_a_field() -> None:
    rows = [
        {"a_b": 1.234, "c": median_and_range([3, 1, 2])},
        {"a_b": 2, "c": median_and_range([5])},
    ]
    assert markdown(rows) == ["| a b | c |", "|---|---|", "| 1.23 | 2.0 (1.0-3.0) |", "| 2 | 5.0 |"]


def test_a_replayed_answer_ends_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    async def replayed(*_: object) -> AsyncIterator[RequestRecord]:
        yield replace(record(0.0), replayed_tokens=3)

    monkeypatch.setattr(measuring, "converse", replayed)
    workload = next(iter(make_workloads().values()))
    with pytest.raises(RuntimeError, match="3 tokens were replayed"):
        asyncio.run(
            measuring.measure("http://127.0.0.1:1/v1", next(iter(ENGINES.values())), workload)
        )


def test_a_replayed_answer_ends_a_measurement_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/get_server_info":
            return httpx.Response(200, json={"stats": {}})
        details = {"accepted_prediction_tokens": 0}
        usage = {"completion_tokens": 9, "replayed_tokens": 9, "completion_tokens_details": details}
        event = json.dumps({"usage": usage, "choices": []})
        return httpx.Response(200, text=f"data: {event}\n\ndata: [DONE]\n\n")

    client = partial(httpx.Client, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "Client", client)
    work = speculation.Work("work", 1, [{}])
    with pytest.raises(RuntimeError, match="9 tokens were replayed"):
        speculation.measure("http://127.0.0.1:1", work, "salt", speculation=True)
