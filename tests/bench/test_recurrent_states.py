"""The simulation of states counts the tokens of one branch, once."""

import numpy as np

from bench.recurrent_states import M, measured
from radixrt.bench.cache.trace import BLOCK_TOKENS, Trace, TraceRequest

STATE = 4 * BLOCK_TOKENS


def request(number: int, shared: int) -> TraceRequest:
    """One of 14 blocks, of which the first ``shared`` are those of all."""
    own = 1000 * (number + 1) + np.arange(14 - shared)
    blocks = np.concatenate((np.arange(shared), own))
    return TraceRequest(100.0 * number, 14 * BLOCK_TOKENS, 16, blocks)


def test_a_branch_behind_the_last_state_is_computed_again_once() -> None:
    trace = Trace("branches", [request(0, 10), request(1, 10), request(2, 10)])
    row = measured(trace, 1 * M, STATE)
    computed = (14 + (14 - 8) + (14 - 10)) * BLOCK_TOKENS
    assert row["computed"] == f"{computed / 1e6:.1f}M"
    assert row["again %"] == f"{100 * 2 * BLOCK_TOKENS / computed:.2f}"
    assert row["cut short"] == 1
