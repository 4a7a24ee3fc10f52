"""``radixrt bench cache``: exact hits against simulators that are a screen long, and what the
command prints.

``make test`` replays a third of the cases, and shorter traces; ``make test-tree`` all.
"""

import gzip
import json
import os
from collections import OrderedDict
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from radixrt.base.errors import ConfigError
from radixrt.bench.cache.bounds import belady, infinite_cache
from radixrt.bench.cache.engine import NO_DISK, DiskModel
from radixrt.bench.cache.replay import Replay, Setup, replay
from radixrt.bench.cache.result import prefill_flops
from radixrt.bench.cache.trace import BLOCK_TOKENS, Trace, TraceRequest, read_trace
from radixrt.cli.main import main


def recorded_traces() -> Path:
    """The folder ``shared/data/traces`` beside the checkout or above it."""
    candidates = [above / "shared" / "data" / "traces" for above in Path(__file__).parents[3:]]
    return next((path for path in candidates if path.is_dir()), candidates[0])


TRACES = recorded_traces()
SYMBOL = 8
IN_FULL = "RADIXRT_TREE_OPERATIONS" in os.environ


def request(blocks: list[int], tail: int = 100, output: int = 30, arrival: float = 0.0):
    """A prompt of whole blocks but for the last, which holds ``tail`` tokens."""
    length = BLOCK_TOKENS * (len(blocks) - 1) + tail
    return TraceRequest(arrival, length, output, np.array(blocks, dtype=np.int64))


def conversations(seed: int, num_requests: int, num_users: int = 40) -> Trace:
    """Users behind one system prompt, whose prompts grow, and who now and then begin anew."""
    random = np.random.default_rng(seed)
    next_block, system, history = 10, [0, 1], {}
    requests = []
    for number in range(num_requests):
        user = int(random.integers(num_users))
        old = history.get(user, system) if random.random() < 0.8 else system
        added = int(random.integers(1, 12))
        blocks = [*old, *range(next_block, next_block + added)]
        next_block += added
        history[user] = blocks[: -1 if random.random() < 0.5 else None]
        tail, output = int(random.integers(1, 513)), int(random.integers(1, 900))
        requests.append(request(blocks, tail, output, arrival=2.0 * number))
    return Trace("conversations", requests)


def one_at_a_time(trace: Trace) -> Trace:
    """The same prompts, so far apart that they never meet."""
    return Trace(
        trace.name,
        [
            TraceRequest(1000.0 * number, r.input_tokens, r.output_tokens, r.blocks)
            for number, r in enumerate(trace.requests)
        ],
    )


def simulate_lru(trace: Trace, num_pages: int) -> list[int]:
    """Cached tokens of each prompt with an LRU of pages, for prompts that never meet.

    A page is its block id, or a name of its own if an answer has a part in it. What a request holds
    is locked.
    """
    cache: OrderedDict[object, None] = OrderedDict()
    hits = []
    per_page = BLOCK_TOKENS // SYMBOL
    for number, r in enumerate(trace.requests):
        prompt, answer = max(1, r.input_tokens // SYMBOL), max(1, r.output_tokens // SYMBOL)
        pages: list[object] = r.blocks[: prompt // per_page].tolist()
        computed = prompt + answer - 1  # the last token is nobody's input
        pages += [(number, i) for i in range(len(pages), computed // per_page)]
        found = 0
        while found < (prompt - 1) // per_page and pages[found] in cache:
            found += 1
        hits.append(found * BLOCK_TOKENS)
        touch(cache, pages[:found])
        needed = -(-computed // per_page) - found
        while num_pages - len(cache) < needed:
            cache.popitem(last=False)
        touch(cache, pages)
    return hits


def touch(cache: OrderedDict[object, None], pages: list[object]) -> None:
    for page in reversed(pages):  # the end of a prefix is evicted before what it continues
        cache[page] = None
        cache.move_to_end(page)


# ------------------------------------------------------------ exact hits


@pytest.mark.parametrize(
    ("seed", "num_pages"), [(0, 60), (1, 200), (2, 500)] if IN_FULL else [(1, 200)]
)
def test_lru_replay_finds_what_a_simulation_of_lru_finds(seed: int, num_pages: int) -> None:
    trace = one_at_a_time(conversations(seed, 300 if IN_FULL else 120, num_users=12))
    fits = [r for r in trace.requests if len(r.blocks) < 40]
    trace = Trace(trace.name, fits)
    run = replay(trace, Setup(pool_tokens=num_pages * BLOCK_TOKENS))
    assert run.cached_tokens == simulate_lru(trace, num_pages)
    assert sum(run.cached_tokens) > 0


@pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are not in this checkout")
@pytest.mark.parametrize(
    ("name", "num_pages"),
    [("conversation_first60", 1024), ("synthetic", 4096), ("agent_dev", 1024)],
)
def test_lru_replay_of_recorded_traffic_has_the_exact_hits(name: str, num_pages: int) -> None:
    limit = 700 if IN_FULL else 200
    trace = one_at_a_time(read_trace(TRACES / f"{name}.jsonl.gz", limit=limit))
    fits = [r for r in trace.requests if len(r.blocks) < num_pages - 8]
    trace = Trace(trace.name, fits)
    run = replay(trace, Setup(pool_tokens=num_pages * BLOCK_TOKENS))
    assert run.cached_tokens == simulate_lru(trace, num_pages)
    assert sum(run.cached_tokens) > 0 and run.evicted_tokens > 0


POLICIES = [("lru", "lpm"), ("fifo", "fcfs"), ("priority", "lpm")]
OTHERS = [("lru", "fcfs"), ("fifo", "lpm"), ("priority", "fcfs")]


@pytest.mark.parametrize(("policy", "schedule_policy"), POLICIES + IN_FULL * OTHERS)
def test_no_policy_finds_more_than_an_infinite_cache(policy: str, schedule_policy: str) -> None:
    trace = conversations(7, 200)
    run = replay(trace, Setup(200 * BLOCK_TOKENS, policy, schedule_policy))  # type: ignore[arg-type]
    admitted = [trace.requests[number] for number in run.order]
    assert sorted(run.order) == list(range(200)) and None not in run.ttft_s
    bound = infinite_cache(admitted)
    assert all(run.cached_tokens[n] <= most for n, most in zip(run.order, bound, strict=True))
    assert 0 < sum(run.cached_tokens) <= sum(belady(admitted, 200))
    assert run.duration_s >= trace.requests[-1].arrival_s


# ------------------------------------------------------------ the bounds


def belady_by_search(requests: list[TraceRequest], num_pages: int) -> list[int]:
    cache: set[int] = set()
    hits = []
    full = [r.blocks[: r.input_tokens // BLOCK_TOKENS].tolist() for r in requests]

    def next_use(page: int, after: int) -> int:
        return next((n for n in range(after + 1, len(full)) if page in full[n]), len(full))

    for number, r in enumerate(requests):
        found = 0
        while found < len(full[number]) and full[number][found] in cache:
            found += 1
        hits.append(min(found, (r.input_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS)
        others = cache - set(full[number])
        used = -(-(r.input_tokens + r.output_tokens) // BLOCK_TOKENS)
        depth = {page: i for pages in full for i, page in enumerate(pages)}
        while others and len(others) + used > num_pages:
            others.remove(max(others, key=lambda page: (next_use(page, number), depth[page])))
        cache = others | set(full[number])
    return hits


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), num_pages=st.integers(30, 90))
def test_belady_by_counting_is_belady_by_search(seed: int, num_pages: int) -> None:
    requests = conversations(seed, 40, num_users=4).requests
    requests = [r for r in requests if len(r.blocks) < 28]
    assert belady(requests, num_pages) == belady_by_search(requests, num_pages)
    assert belady(requests, 10**6) == infinite_cache(requests)


def test_flops_weigh_late_tokens_more() -> None:
    assert prefill_flops(0) == 0
    first, second = prefill_flops(50_000), prefill_flops(100_000) - prefill_flops(50_000)
    assert second > 1.5 * first


# ------------------------------------------------------------ reading traces


def test_three_ways_to_write_a_trace_are_the_same_trace(tmp_path: Path) -> None:
    head = {"input_length": 1100, "output_length": 9}
    runs = [
        {"timestamp": 0, **head, "runs": [[4, 3]]},
        {"timestamp": 1500, **head, "runs": [[4, 2], [9, 1]]},
    ]
    ids = [
        {"timestamp": 0, **head, "hash_ids": [2**63, 17, 3]},
        {"timestamp": 1500, **head, "hash_ids": [2**63, 17, 1]},
    ]
    (tmp_path / "runs.jsonl").write_text("\n".join(map(json.dumps, runs)))
    with gzip.open(tmp_path / "ids.jsonl.gz", "wt") as stream:
        stream.write("\n".join(map(json.dumps, ids)))
    by_runs = read_trace(tmp_path / "runs.jsonl", speed=2.0)
    by_ids = read_trace(tmp_path / "ids.jsonl.gz", speed=2.0)
    for a, b in zip(by_runs.requests, by_ids.requests, strict=True):
        assert (a.arrival_s, a.input_tokens, a.output_tokens) == (b.arrival_s, 1100, 9)
    assert [r.arrival_s for r in by_runs.requests] == [0.0, 0.75]
    assert infinite_cache(by_runs.requests) == infinite_cache(by_ids.requests) == [0, 1024]
    assert len(read_trace(tmp_path / "runs.jsonl", limit=1).requests) == 1


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"timestamp": 0}', "line 1"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}', "neither hash_ids nor runs"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}', "1 blocks"),
        ("", "holds no request"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(
    tmp_path: Path, line: str, complaint: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=complaint):
        read_trace(path)


# ------------------------------------------------------------ the command


def write_trace(file: Path, trace: Trace) -> None:
    """As :func:`read_trace` reads it."""
    rows = [
        {
            "timestamp": 1e3 * r.arrival_s,
            "input_length": r.input_tokens,
            "output_length": r.output_tokens,
            "hash_ids": r.blocks.tolist(),
        }
        for r in trace.requests
    ]
    file.write_text("\n".join(map(json.dumps, rows)))


def test_the_command_writes_table_json_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.jsonl"
    write_trace(path, conversations(1, 60))
    arguments = ["bench", "cache", str(path), "--tokens", "64K", "0.5M", "--policy", "lru", "fifo"]
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--schedule-policy", "fcfs", "lpm", *files])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert "Belady" in printed and "a minute" in printed
    results = json.loads((tmp_path / "out.json").read_text())
    assert len(results) == 8 and os.path.getsize(tmp_path / "out.png") > 1000
    for result in results:
        assert 0 < result["hit_percent"] <= result["infinite_percent"]
        assert result["lru_gap_closed_percent"] is not None or result["pool_tokens"] == 2**19


def test_a_missing_trace_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "cache", "nowhere.jsonl"])
    assert exit_.value.code == 1
    assert "nowhere.jsonl can't be read" in capsys.readouterr().err


def test_a_disk_gives_back_what_memory_has_lost_unless_it_is_slow() -> None:
    """Twelve documents, twice in turn: LRU has always evicted the next one."""
    blocks = [np.arange(10 * number, 10 * number + 10) for number in range(12)]
    requests = [
        TraceRequest(float(turn), 10 * BLOCK_TOKENS, 8, blocks[turn % 12]) for turn in range(24)
    ]
    trace = Trace("documents", requests)

    def run(disk: DiskModel) -> Replay:
        return replay(trace, Setup(40 * BLOCK_TOKENS, disk=disk))

    room = 400 * BLOCK_TOKENS
    assert sum(run(NO_DISK).cached_tokens) == 0
    fast = run(DiskModel(room))
    assert sum(fast.cached_tokens) == fast.disk_tokens >= 0.8 * trace.prompt_tokens / 2
    assert fast.written_tokens >= fast.disk_tokens
    assert run(DiskModel(room, tokens_per_s=1000.0)).disk_tokens < fast.disk_tokens / 4
    assert run(DiskModel(20 * BLOCK_TOKENS)).disk_tokens < fast.disk_tokens / 4
