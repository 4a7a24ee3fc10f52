"""The load generator sends the load of its flags and measures the server's answers."""

import argparse
import asyncio
import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from radixrt.base.errors import ConfigError
from radixrt.bench import client, serve
from radixrt.bench.arguments import add_arguments
from radixrt.bench.client import RequestRecord
from radixrt.bench.report import print_summary, summarize
from radixrt.bench.workloads import Conversation, WorkloadSettings, make_workload
from tests.bench.fake_openai_server import FakeServer


def bench(server: FakeServer, tmp_path, *flags: str) -> tuple[int, dict]:
    """Exit status and JSON of a run."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    out = tmp_path / "run.json"
    small = ["--num-prompts", "12", "--input-len", "10", "--output-len", "5", "--warmup", "0"]
    arguments = ["--base-url", server.base_url, "--json", str(out), *small, *flags]
    status = serve.run(parser.parse_args(arguments))
    return status, json.loads(out.read_text())


def settings(name: str, **changes) -> WorkloadSettings:
    fields = dict(
        num_prompts=24, input_len=10, output_len=6, length_spread=0.0,
        prefix_len=40, groups=3, turns=4, seed=1,
    )  # fmt: skip
    return WorkloadSettings(name=name, **fields | changes)


# ---------------------------------------------------------------- workloads


def test_shared_prefix_asks_each_document_equally_often_and_no_question_twice():
    workload = make_workload(settings("shared-prefix"), vocab_size=10_000)
    documents = [tuple(conversation.context) for conversation in workload]
    assert sorted(documents.count(each) for each in set(documents)) == [8, 8, 8]
    assert len({tuple(c.turns[0].question) for c in workload}) == 24
    assert all(len(c.context) == 40 and len(c.turns[0].question) == 10 for c in workload)


def test_chats_share_a_system_prompt_and_have_as_many_turns_as_asked_for():
    workload = make_workload(settings("multi-turn"), vocab_size=10_000)
    assert [len(conversation.turns) for conversation in workload] == [4] * 6
    assert len({tuple(conversation.context) for conversation in workload}) == 1


@pytest.mark.parametrize("vocab_size", [None, 500])
def test_a_seed_makes_the_same_workload_again_and_another_seed_another(vocab_size):
    def made(seed: int) -> list[Conversation]:
        return make_workload(settings("random", seed=seed), vocab_size)

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_lengths_are_fixed_without_spread_and_log_normal_around_the_mean_with_it():
    fixed = make_workload(settings("random"), 1000)
    assert {(len(c.turns[0].question), c.turns[0].output_len) for c in fixed} == {(10, 6)}
    spread = make_workload(
        settings("random", num_prompts=3000, input_len=200, length_spread=0.5), 1000
    )
    lengths = np.log([len(c.turns[0].question) for c in spread])
    assert np.exp(lengths + 0).mean() == pytest.approx(200, rel=0.05)
    assert lengths.std() == pytest.approx(0.5, rel=0.05)


def test_token_ids_stay_inside_a_tiny_vocabulary():
    for vocab_size in (1, 2, 7, 300):
        workload = make_workload(settings("random"), vocab_size)
        assert all(0 <= t < vocab_size for c in workload for t in c.turns[0].question)


# ---------------------------------------------------------------- what is sent


def test_token_prompts_are_sent_where_the_server_says_its_vocabulary(tmp_path):
    with FakeServer() as server:
        status, _ = bench(server, tmp_path, "--prefix-len", "20")
    assert status == 0
    assert len(server.bodies) == 12
    for body in server.bodies:
        assert len(body["prompt"]) == 30 and all(isinstance(t, int) for t in body["prompt"])
        assert body["max_tokens"] == 5 and body["ignore_eos"] and body["model"] == "fake"


def test_text_is_sent_to_servers_that_do_not(tmp_path):
    with FakeServer(vocab_size=None) as server:
        _, result = bench(server, tmp_path, "--respect-eos")
    assert all(isinstance(body["prompt"], str) for body in server.bodies)
    assert not any("ignore_eos" in body or "return_token_ids" in body for body in server.bodies)
    assert result["summary"]["output_tokens"] == 60


def test_each_turn_of_a_chat_continues_from_the_answer_before_it(tmp_path):
    flags = ("--workload", "multi-turn", "--turns", "3", "--prefix-len", "8", "--concurrency", "1")
    with FakeServer() as server:
        bench(server, tmp_path, *flags)
    first, second = server.bodies[0]["prompt"], server.bodies[1]["prompt"]
    assert second[: len(first) + 5] == first + [7] * 5
    assert [len(body["prompt"]) for body in server.bodies[:3]] == [18, 33, 48]


def test_the_chat_endpoint_gets_roles(tmp_path):
    flags = ("--workload", "multi-turn", "--turns", "2", "--endpoint", "chat", "--concurrency", "1")
    with FakeServer() as server:
        bench(server, tmp_path, *flags)
    messages = server.bodies[1]["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == "la la la la la "


def test_chats_in_token_ids_need_a_server_that_names_its_tokens(tmp_path):
    with FakeServer(vocab_size=None) as server:
        status, result = bench(server, tmp_path, "--workload", "multi-turn", "--vocab-size", "100")
    assert status == 1
    assert "use --prompts text" in next(iter(result["summary"]["errors"]))


def test_closed_loop_keeps_the_asked_number_of_requests_running(tmp_path):
    with FakeServer(first_token_s=0.03) as server:
        bench(server, tmp_path, "--concurrency", "4")
    assert server.most_running == 4


def test_open_loop_starts_requests_at_the_asked_rate_whether_answered_or_not(tmp_path):
    with FakeServer(first_token_s=1.0) as server:
        bench(server, tmp_path, "--rate", "100", "--num-prompts", "40", "--output-len", "1")
    span = server.arrivals[-1] - server.arrivals[0]
    assert 0.15 < span < 2.5  # one after the other they would take 40 s
    assert server.most_running > 15


def test_warmup_is_not_measured_and_flush_cache_comes_after_it(tmp_path):
    with FakeServer() as server:
        _, result = bench(server, tmp_path, "--warmup", "3", "--flush-cache")
    assert len(server.bodies) == 15 and server.flushes == 1
    assert result["summary"]["succeeded"] == len(result["requests"]) == 12


def test_bursts_have_the_mean_rate_and_a_larger_spread():
    def gaps(burstiness: float) -> np.ndarray:
        due: list[float] = []

        async def note_all() -> None:
            loop = asyncio.get_running_loop()
            start = loop.time()

            async def note() -> None:
                due.append(loop.time() - start)

            await serve.open_loop(400, 3, burstiness)([note] * 400)

        asyncio.run(note_all())
        return np.diff(sorted(due))

    even, bursts = gaps(20.0), gaps(0.1)
    assert bursts.std() / bursts.mean() > 2 > even.std() / even.mean()


# ---------------------------------------------------------------- datasets


def write_lines(path, *lines: dict) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_sharegpt_questions_are_asked_in_turn_with_answers_of_the_recorded_length(tmp_path):
    said = [("human", "first?"), ("gpt", "x" * 40), ("human", "second?"), ("gpt", "y" * 8)]
    entry = {"conversations": [{"from": who, "value": text} for who, text in said]}
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([{"conversations": []}, entry]))
    with FakeServer() as server:
        status, _ = bench(server, tmp_path, "--dataset", str(file), "--endpoint", "chat")
    assert status == 0
    assert [body["max_tokens"] for body in server.bodies] == [10, 2]
    contents = [message["content"] for message in server.bodies[1]["messages"]]
    assert (contents[0], contents[2]) == ("first?", "second?")


def test_recorded_chat_requests_are_sent_with_their_history(tmp_path):
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    file = write_lines(
        tmp_path / "log.jsonl",
        {"messages": messages, "max_tokens": 3},
        {"body": {"messages": messages[:2]}},
    )
    with FakeServer() as server:
        bench(server, tmp_path, "--dataset", file, "--endpoint", "chat", "--concurrency", "1")
        assert [(body["messages"], body["max_tokens"]) for body in server.bodies] == [
            (messages, 3),
            (messages[:2], 5),
        ]
        with pytest.raises(ConfigError, match="--endpoint chat"):
            bench(server, tmp_path, "--dataset", file)


def test_a_trace_keeps_its_times_and_its_shared_prefixes(tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 700, "output_length": 2, "hash_ids": [1, 2]},
        {"timestamp": 2000, "input_length": 600, "output_length": 1, "hash_ids": [1, 3]},
    ]
    file = write_lines(tmp_path / "trace.jsonl", *lines)
    with FakeServer() as server:
        bench(server, tmp_path, "--dataset", file, "--trace-speed", "10")
    first, second = (body["prompt"] for body in server.bodies)
    assert (len(first), len(second)) == (700, 600)
    assert first[:512] == second[:512] and first[512:600] != second[512:600]
    assert [body["max_tokens"] for body in server.bodies] == [2, 1]
    assert 0.19 < server.arrivals[1] - server.arrivals[0] < 1.9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{]", "no ShareGPT file"),
        ("{}\n", "neither prompt nor messages"),
        ("prompt\n", "line 1 is no JSON"),
        ("[]", "holds no request"),
        ("\xff\xfe bad", "line 1 is no JSON"),
    ],
)
def test_a_file_that_is_no_dataset_is_refused(tmp_path, text: str, message: str):
    file = tmp_path / "bad"
    file.write_bytes(text.encode("latin-1"))
    with FakeServer() as server, pytest.raises(ConfigError, match=message):
        bench(server, tmp_path, "--dataset", str(file))


# ---------------------------------------------------------------- what is measured


def test_latencies_are_those_of_the_server(tmp_path):
    """At most twice those that the server itself sees, which grow with the load of the machine."""
    with FakeServer(first_token_s=0.06, gap_s=0.02) as server:
        _, result = bench(server, tmp_path, "--concurrency", "2")
    summary = result["summary"]
    first_ms, *_, last_ms = 1000 * np.median(server.sent, axis=0)
    gap_ms = (last_ms - first_ms) / 4
    assert 60 <= first_ms <= summary["ttft_ms"]["p50"] < 2 * first_ms
    assert 19 <= summary["itl_ms"]["p50"] < 2.5 * gap_ms
    assert 19 <= summary["tpot_ms"]["p50"] < 2.5 * gap_ms
    assert 140 <= last_ms <= summary["e2e_ms"]["p50"] < 2.3 * last_ms
    assert summary["output_tokens"] == 60
    assert summary["cached_tokens"] * 2 == summary["prompt_tokens"]


def test_tokens_that_come_in_one_chunk_share_its_gap(tmp_path):
    with FakeServer(gap_s=0.04, tokens_per_chunk=4) as server:
        _, result = bench(server, tmp_path, "--output-len", "9", "--concurrency", "1")
    assert 9 <= result["summary"]["itl_ms"]["p50"] < 30
    assert result["summary"]["tpot_ms"]["p50"] < 30


def test_percentiles_and_rates_from_records_made_by_hand():
    records = []
    for number in range(1, 101):
        record = RequestRecord(sent=10.0, conversation=number, turn=0)
        record.token_times = [10.0 + number / 100, 10.0 + number / 100 + 0.5]
        record.token_counts, record.output_tokens, record.prompt_tokens = [1, 1], 2, 7
        record.finished = record.token_times[-1]
        records.append(record)
    records.append(RequestRecord(sent=10.0, conversation=0, turn=0, finished=10.1, error="boom"))
    summary = summarize(records)
    assert summary.ttft_ms.p50 == pytest.approx(505)
    assert summary.ttft_ms.p90 == pytest.approx(901)
    assert summary.itl_ms.p99 == pytest.approx(500)
    assert summary.duration_s == pytest.approx(1.5)
    assert summary.output_tokens_per_s == pytest.approx(200 / 1.5)
    assert summary.total_tokens_per_s == pytest.approx(900 / 1.5)
    assert (summary.succeeded, summary.failed, summary.errors) == (100, 1, {"boom": 1})


def test_goodput_counts_the_requests_that_meet_all_objectives(tmp_path):
    with FakeServer(first_token_s=0.05, gap_s=0.001, fail_every=4) as server:
        _, lax = bench(server, tmp_path, "--slo", "ttft=2000", "tpot=1000")
        _, strict = bench(server, tmp_path, "--slo", "ttft=20", "tpot=1000")
    assert (lax["summary"]["goodput"]["requests"], lax["summary"]["goodput"]["share"]) == (9, 0.75)
    assert strict["summary"]["goodput"]["requests_per_s"] == 0


def test_two_runs_are_compared_by_their_files(tmp_path, capsys):
    with FakeServer(gap_s=0.002) as server:
        bench(server, tmp_path, "--concurrency", "2")
        (tmp_path / "a.json").write_text((tmp_path / "run.json").read_text())
        run = json.loads((tmp_path / "run.json").read_text())
        run["summary"]["ttft_ms"]["p99"] *= 2
        run["settings"]["seed"] = 9
        (tmp_path / "b.json").write_text(json.dumps(run))
        sent = len(server.bodies)
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        files = [str(tmp_path / name) for name in ("a.json", "b.json")]
        assert serve.run(parser.parse_args(["--compare", *files])) == 0
        assert len(server.bodies) == sent
    told = capsys.readouterr().out
    assert re.search(r"TTFT p99, ms .* 2\.000", told) and re.search(r"ITL p99, ms .* 1\.000", told)
    assert "The runs differ in --seed" in told


def test_failed_requests_are_counted_by_message_and_set_the_exit_status(tmp_path):
    with FakeServer(fail_every=4) as server:
        status, result = bench(server, tmp_path)
    assert status == 1
    summary = result["summary"]
    assert (summary["succeeded"], summary["failed"]) == (9, 3)
    ((message, count),) = summary["errors"].items()
    assert count == 3 and "503" in message and "queue is full" in message


# ---------------------------------------------------------------- output and bad input


def test_json_goes_to_stdout_alone(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with FakeServer(api_key="s3cret") as server:
        flags = ["--base-url", server.base_url, "--num-prompts", "3", "--output-len", "2"]
        serve.run(parser.parse_args([*flags, "--api-key", "s3cret", "--json", "-"]))
    captured = capsys.readouterr()
    assert json.loads(captured.out)["summary"]["succeeded"] == 3
    assert "TTFT" in captured.err
    assert "s3cret" not in captured.out


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.png"
    with FakeServer() as server:
        bench(server, tmp_path, "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_server_that_is_not_there_is_one_clear_sentence(tmp_path):
    with FakeServer() as server:
        pass
    with pytest.raises(ConfigError, match="Cannot reach"):
        bench(server, tmp_path)


def test_a_wrong_key_is_one_clear_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("RADIXRT_API_KEY", "right")
    with FakeServer(api_key="right") as server:
        assert bench(server, tmp_path)[0] == 0
        with pytest.raises(ConfigError, match="api-key"):
            bench(server, tmp_path, "--api-key", "wrong")


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_before_the_measurement(tmp_path, flag: str):
    with FakeServer() as server:
        with pytest.raises(ConfigError, match="nowhere is missing"):
            bench(server, tmp_path, flag, str(tmp_path / "nowhere" / "file"))
        assert not server.bodies


def test_an_error_with_brackets_is_printed_as_it_is():
    failed = RequestRecord(sent=0.0, conversation=0, turn=0, error="HTTP 500: [/v1] [red]")
    console = Console(file=io.StringIO(), width=200)
    print_summary(summarize([failed]), console, "a[/b].jsonl")
    told = console.file.getvalue()
    assert "1 failed: HTTP 500: [/v1] [red]" in told and "a[/b].jsonl" in told


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning"])
def test_tokens_of_reasoning_count(field: str):
    record, event = RequestRecord(sent=0.0, conversation=0, turn=0), {"delta": {field: "so"}}
    client._absorb(client._decode(json.dumps({"choices": [event]})), record)
    assert record.token_counts == [1]
