"""``radixrt bench cache --replicas``: routing rules on made traffic, and what the command
prints. ``make test`` takes shorter traffic, ``make test-tree`` all."""

import json
from pathlib import Path

import numpy as np
import pytest

from radixrt.bench.cache.bounds import infinite_cache
from radixrt.bench.cache.engine import ServiceModel
from radixrt.bench.cache.replay import Replay, Setup, replay
from radixrt.bench.cache.routing import RULES
from radixrt.bench.cache.trace import BLOCK_TOKENS, Trace
from radixrt.cli.main import main
from tests.bench.test_bench_cache import IN_FULL, conversations, request, write_trace


def hot_prefix(num_requests: int, per_second: float) -> Trace:
    """Of ten requests, nine share a prefix of 40,000 tokens."""
    random = np.random.default_rng(3)
    prefix, fresh, arrival = list(range(78)), 1000, 0.0
    requests = []
    for _ in range(num_requests):
        arrival += random.exponential(1 / per_second)
        own = int(random.integers(2, 5))
        shared = prefix if random.random() < 0.9 else list(range(fresh, fresh + 15))
        blocks = [*shared, *range(fresh + 15, fresh + 15 + own)]
        fresh += 20
        requests.append(request(blocks, 100, int(random.integers(100, 500)), arrival))
    return Trace("hot prefix", requests)


def routed(
    trace: Trace, router: str, replicas: int = 8, pool_tokens: int = 8 << 20, symbol: int = 64
) -> Replay:
    service = ServiceModel(100_000 * replicas, tokens_per_symbol=symbol)
    return replay(
        trace,
        Setup(pool_tokens, "lru", "lpm", service=service, replicas=replicas, router=router),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("per_second", [20, 100])
def test_a_prefix_of_most_requests_overloads_no_replica(per_second: float) -> None:
    run = routed(hot_prefix(1200, per_second), "radixrt", symbol=16)
    requests = np.bincount(run.replica_of, minlength=8)
    assert requests.max() <= 1.3 * requests.mean()
    assert max(run.computed_tokens) <= 1.3 * np.mean(run.computed_tokens)
    assert sum(run.cached_tokens) > 0.9 * 0.9 * 1200 * 78 * BLOCK_TOKENS


BY_FIRST_PAGE = ("session-hash",)
"""All requests begin with the same page, and have no sessions: these rules send all of them to one
replica."""


@pytest.mark.parametrize("router", RULES)
def test_every_rule_serves_all_requests(router: str) -> None:
    trace = conversations(5, 200)
    run = routed(trace, router, replicas=3, pool_tokens=3 << 19)
    assert sorted(run.order) == list(range(200)) and None not in run.ttft_s
    assert set(run.replica_of) == ({run.replica_of[0]} if router in BY_FIRST_PAGE else {0, 1, 2})
    bound = infinite_cache([trace.requests[number] for number in run.order])
    assert 0 < sum(run.cached_tokens) <= sum(bound)


def test_conversations_stay_where_their_pages_are() -> None:
    trace = conversations(5, 400) if IN_FULL else conversations(5, 160, num_users=12)
    # With steps of 64 tokens, an answer would hold up its replica for so long that it is right to
    # leave.
    hits = {
        router: sum(routed(trace, router, 4, 4 << 20, symbol=8).cached_tokens)
        for router in ("radixrt", "random")
    }
    one = sum(routed(trace, "radixrt", 1, 4 << 20, symbol=8).cached_tokens)
    assert hits["random"] < 0.7 * one < 0.85 * one < hits["radixrt"]


def test_the_command_compares_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "traffic.jsonl"
    write_trace(trace, conversations(1, 60))
    out = tmp_path / "out.json"
    flags = ["--tokens", "1M", "--replicas", "1", "2", "--router", "radixrt", "power-of-two"]
    flags += ["--plot", str(tmp_path / "rules.svg")]
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "cache", str(trace), *flags, "--json", str(out)])
    rows = json.loads(out.read_text())
    assert [(row["replicas"], row["router"]) for row in rows] == [
        (1, ""),
        (2, "radixrt"),
        (2, "power-of-two"),
    ]
    printed = capsys.readouterr().out
    assert "Mean of all cells" in printed and "power-of-two" in printed
    drawn = (tmp_path / "rules.svg").read_text()
    assert "2 replicas" in drawn and "power-of-two" in drawn
