"""The examples and the load generator print the promised results with a real model."""

import argparse
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixrt.bench.arguments import add_arguments
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.command_line import run_program
from tests.servers.engine_in_threads import engines_in_threads
from tests.servers.servers_in_process import serving_in_process

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and a context long enough for the examples' documents."""
    folder = tmp_path_factory.mktemp("long-llama")
    return make_tokenizer(make_checkpoint("llama", folder, max_position_embeddings=2048))


@pytest.fixture(scope="module")
def base_url(long_checkpoint: Path) -> Iterator[str]:
    with serving_in_process(long_checkpoint, max_total_tokens=32768) as server:
        yield f"{server.url}/v1"


def run_example(name: str, *flags: str) -> str:
    """What the example prints."""
    with engines_in_threads():
        return run_program(EXAMPLES / name, *flags)


def test_from_the_second_question_on_nine_tenths_of_the_prompt_are_cached(base_url: str) -> None:
    output = run_example("rag_shared_document.py", "--base-url", base_url)
    shares = [int(share) for share in re.findall(r"^ *\d+ +\d+ +(\d+)% ", output, re.MULTILINE)]
    assert len(shares) == 8
    assert min(shares[1:]) >= 90


def test_each_turn_of_the_chat_finds_at_least_the_prompt_before_it(base_url: str) -> None:
    output = run_example("multi_turn_chat.py", "--base-url", base_url)
    turns = [(int(c), int(p)) for c, p in re.findall(r"\[(\d+) of (\d+) prompt tokens", output)]
    assert len(turns) == 6
    for (_, previous), (cached, _) in itertools.pairwise(turns):
        assert cached > previous - 2 * 16  # whole pages, and the end of the template


def test_texts_sent_at_the_same_time_share_their_examples(base_url: str) -> None:
    output = run_example("batch_classification.py", "--base-url", base_url)
    assert "40 texts" in output
    assert int(re.search(r"(\d+)% of prompt tokens cached", output)[1]) >= 80  # type: ignore[index]


def test_the_offline_example_needs_no_server(long_checkpoint: Path) -> None:
    output = run_example("offline_batch.py", "--model-path", str(long_checkpoint))
    cached = [int(c) for c in re.findall(r"^ *(\d+) of \d+ cached", output, re.MULTILINE)]
    # The first prompt's chunk may end before its text does: all that was planned is shared.
    assert len(cached) == 9 and min(cached[1:]) >= 128


def test_with_hints_an_agent_finds_its_conversation_after_its_tool(long_checkpoint: Path) -> None:
    with serving_in_process(long_checkpoint, max_total_tokens=6144) as server:
        output = run_example("cache_hints.py", "--base-url", f"{server.url}/v1")
    counts = re.findall(r"(\d+) of the next turn's (\d+) prompt tokens", output)
    (without, _), (with_hints, prompt) = [(int(cached), int(total)) for cached, total in counts]
    assert without < 0.1 * prompt and with_hints > 0.6 * prompt
    assert int(re.search(r"(\d+) tokens are free to go", output)[1]) > 0  # type: ignore[index]


@pytest.mark.parametrize("workload", ["shared-prefix", "random", "multi-turn"])
def test_bench_serve_measures_every_workload(base_url: str, workload: str, tmp_path: Path) -> None:
    from radixrt.bench.serve import run

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    small = "--num-prompts 8 --input-len 24 --output-len 6 --prefix-len 200 --groups 2 --turns 2"
    flags = ["--base-url", base_url, "--workload", workload, "--flush-cache", *small.split()]
    out = tmp_path / "run.json"
    assert run(parser.parse_args([*flags, "--json", str(out)])) == 0
    summary = json.loads(out.read_text())["summary"]
    assert summary["output_tokens"] == 8 * 6
    share = summary["cached_tokens"] / summary["prompt_tokens"]
    assert share == 0 if workload == "random" else share > 0.5
