"""The request log: a trace that the cache benchmark reads, and no word of anybody's text."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from radixrt.base.errors import ConfigError
from radixrt.base.sampling_params import SamplingParams
from radixrt.bench.cache.bounds import infinite_cache
from radixrt.bench.cache.trace import read_trace
from radixrt.messages.answers import AnswerReport
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import RequestOptions
from radixrt.messages.sequences import SequenceRequest, TokenBatch
from radixrt.scheduler.request_log import RequestLog


def arrive(log: RequestLog, seq_id: int, tokens: np.ndarray, salt: str = "") -> None:
    log.arrived(
        SequenceRequest(
            seq_id=seq_id,
            token_ids=pack_ids(tokens),
            options=RequestOptions(
                sampling=SamplingParams(max_tokens=9), root=CacheRoot(salt=salt)
            ),
        )
    )


def answer(log: RequestLog, *seq_ids: int, finished: tuple[int, ...] = ()) -> None:
    batch = TokenBatch()
    for seq_id in seq_ids:
        batch.output_of(seq_id).token_ids.append(seq_id)
    for seq_id in finished:
        batch.output_of(seq_id).finished = AnswerReport(finish_reason="stop")
    log.answered(batch)


def test_a_log_is_a_trace_with_the_prefixes_that_the_requests_shared(tmp_path: Path) -> None:
    now = [5.0]
    log = RequestLog(tmp_path / "log.jsonl", lambda: now[0])
    document = np.random.default_rng(0).integers(0, 32_000, 1500)
    arrive(log, 0, document)
    now[0] = 6.25
    arrive(log, 1, np.concatenate((document[:1030], document[:100])))
    arrive(log, 2, document, salt="tenant")
    arrive(log, 3, document)
    answer(log, 0, 1, 1, 2)
    answer(log, 0, 1, finished=(1,))
    log.ended(2)
    log.refused(3)
    answer(log, 0, finished=(0,))
    trace = read_trace(tmp_path / "log.jsonl")
    assert [r.arrival_s for r in trace.requests] == [0.0, 1.25, 1.25]
    assert [r.input_tokens for r in trace.requests] == [1500, 1130, 1500]
    assert [r.output_tokens for r in trace.requests] == [3, 3, 1]
    assert infinite_cache(trace.requests) == [0, 1024, 0]


def test_ids_of_two_logs_can_not_be_compared(tmp_path: Path) -> None:
    for name in ("a", "b"):
        log = RequestLog(tmp_path / name, lambda: 0.0)
        arrive(log, 0, np.arange(2000))
        log.ended(0)
    ids = [set(json.loads((tmp_path / name).read_text())["hash_ids"]) for name in ("a", "b")]
    assert len(ids[0]) == len(ids[1]) == 4 and not ids[0] & ids[1]


def test_the_scheduler_of_the_next_engine_goes_on_with_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("of an earlier server\n")
    for now in (5.0, 7.0):
        log = RequestLog(path, lambda now=now: now, tmp_path / "kept")
        arrive(log, 0, np.arange(600))
        log.ended(0)
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["timestamp"], second["timestamp"]) == (0, 2000)
    assert first["hash_ids"] == second["hash_ids"]


def test_a_log_that_can_not_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--request-log"):
        RequestLog(tmp_path / "no folder" / "log.jsonl", lambda: 0.0)


def test_a_full_disk_drops_lines_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = RequestLog(Path("/dev/full"), lambda: 0.0)
    for seq_id in range(5):
        arrive(log, seq_id, np.arange(600))
        log.ended(seq_id)
    assert log.dropped == 5
    assert [record.args[0] for record in caplog.records] == [1, 2, 4]


def test_a_line_that_fits_in_part_leaves_no_part(tmp_path: Path) -> None:
    """The size of files is bounded, as a disk's free space is; a process of its own, since the
    bound stays."""
    path = tmp_path / "log.jsonl"
    code = f"""
import resource, signal
from pathlib import Path
import numpy as np
from radixrt.scheduler.request_log import RequestLog
from tests.scheduler.test_request_log import arrive
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (150, 150))
log = RequestLog(Path({str(path)!r}), lambda: 0.0)
for seq_id in range(4):
    arrive(log, seq_id, np.arange(600))
    log.ended(seq_id)
print(log.dropped)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    lines = path.read_text().splitlines()
    assert int(done.stdout) + len(lines) == 4 and lines
    assert len(read_trace(path).requests) == len(lines)
