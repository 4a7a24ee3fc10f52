"""The request log: a trace that the cache benchmark reads, and no word of anybody's text."""

import json
from pathlib import Path

import numpy as np
import pytest

from radixrt.base.errors import ConfigError
from radixrt.base.sampling_params import SamplingParams
from radixrt.bench.cache.bounds import infinite_cache
from radixrt.bench.cache.trace import read_trace
from radixrt.messages.answers import AnswerReport
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import RequestOptions
from radixrt.messages.sequences import SequenceRequest, TokenBatch
from radixrt.scheduler.request_log import RequestLog


def arrive(log: RequestLog, seq_id: int, tokens: np.ndarray, salt: str = "") -> None:
    log.arrived(
        SequenceRequest(
            seq_id=seq_id,
            token_ids=pack_ids(tokens),
            options=RequestOptions(sampling=SamplingParams(max_tokens=9), cache_salt=salt),
        )
    )


def answer(log: RequestLog, *seq_ids: int, finished: tuple[int, ...] = ()) -> None:
    ends = dict.fromkeys(finished, AnswerReport(finish_reason="stop"))
    ids = pack_ids(seq_ids)
    log.answered(TokenBatch(seq_ids=ids, token_ids=ids, finished=ends))


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


def test_a_log_that_can_not_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--request-log"):
        RequestLog(tmp_path / "no folder" / "log.jsonl", lambda: 0.0)
