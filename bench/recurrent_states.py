"""Measures what a hybrid model's cache computes again for lack of a state: ``python -m
bench.recurrent_states TRACE... [--pools 2M 8M] [--state-tokens 1570 300 32]``.

The traces of :mod:`radixrt.bench.cache` go through the real scheduler and tree, with a simulated
worker that keeps the states that it is told to keep. *computed* are the prompt tokens that it
computes, *again* the share of them that the tree had as keys and values, without a state behind
them. An engine that also kept the recurrence's inputs of all tokens, and replayed these, would
save at most *again*: it is the bound, for inputs without end.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from bench.markdown import markdown
from radixrt.bench.cache import engine as simulated
from radixrt.bench.cache import replay as replays
from radixrt.bench.cache.trace import BLOCK_TOKENS, Trace, read_trace
from radixrt.messages.ids import pack_ids
from radixrt.messages.steps import KeepState, StepPlan, StepResult
from radixrt.scheduler.limits import SchedulerLimits

K, M = 1 << 10, 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.recurrent_states", description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--pools", type=int, nargs="+", default=[2, 8], help="in 2^20 tokens")
    parser.add_argument(
        "--state-tokens",
        type=int,
        nargs="+",
        default=[1570, 300, 32],
        help="tokens whose KV takes the memory of a state",
    )
    parser.add_argument("--requests", type=int)
    arguments = parser.parse_args()
    rows = [
        measured(read_trace(trace, limit=arguments.requests), pool * M, state_tokens)
        for trace in arguments.traces
        for pool in arguments.pools
        for state_tokens in arguments.state_tokens
    ]
    print("\n".join(markdown(rows)))


def measured(trace: Trace, pool_tokens: int, state_tokens: int) -> dict[str, object]:
    """One row: half of the memory of ``pool_tokens`` goes to states."""
    setup = replays.Setup(pool_tokens=pool_tokens // 2, schedule_policy="lpm")
    run = StatefulRun(trace, setup, state_tokens)
    computed = sum(run.run().computed_tokens)
    counters = run._engines[0].scheduler.state.counters
    again = counters.stateless_tokens * setup.service.tokens_per_symbol
    return {
        "trace": trace.name,
        "pool": f"{pool_tokens // M}M",
        "state": state_tokens,
        "kept": len(run._engines[0].scheduler.state.kv.states),
        "computed": f"{computed / 1e6:.1f}M",
        "cut short": counters.stateless_hits,
        "again %": f"{100 * again / computed:.2f}",
    }


class StatefulRun(replays._Run):
    """A replay whose worker has states."""

    def __init__(self, trace: Trace, setup: replays.Setup, state_tokens: int) -> None:
        super().__init__(trace, setup)
        limits = _with_states(self._limits, setup, state_tokens)
        (engine,) = self._engines
        engine.scheduler = type(engine.scheduler)(limits, self._clock)
        engine._worker = StatefulWorker()


def _with_states(
    limits: SchedulerLimits, setup: replays.Setup, state_tokens: int
) -> SchedulerLimits:
    blocks = -(-state_tokens // BLOCK_TOKENS)
    return replace(
        limits,
        kept_states=min(setup.pool_tokens // state_tokens, limits.num_pages),
        state_interval=blocks * limits.page_size,
    )


class StatefulWorker(simulated.SimulatedWorker):
    """Keeps the states of answers that it is told to keep; those of prompts are certain."""

    def __init__(self) -> None:
        super().__init__()
        self._orders: dict[int, list[KeepState]] = {}
        self._length: dict[int, int] = {}
        """Tokens of which the state of a slot knows."""

    def begin(self, plan: StepPlan, answer_lengths: dict[int, int]) -> int:
        for slot in (*plan.release, *(admit.slot for admit in plan.admit)):
            self._orders.pop(slot, None)
        for keep in plan.keep:
            self._orders.setdefault(keep.slot, []).append(keep)
        return super().begin(plan, answer_lengths)

    def finish(self, plan: StepPlan, step_s: float = 0.0) -> StepResult:
        decoding = list(self._decoding)
        for slot in decoding:
            self._length[slot] += 1
        for chunk in plan.prefill:
            self._length[chunk.slot] = chunk.start + chunk.num_tokens
        kept: list[int] = []
        for slot, orders in self._orders.items():
            kept += [one.state for one in orders if one.position <= self._length[slot]]
            self._orders[slot] = [one for one in orders if one.position > self._length[slot]]
        result = super().finish(plan, step_s)
        return StepResult(
            step_id=result.step_id,
            slots=result.slots,
            token_ids=result.token_ids,
            kept_states=pack_ids(kept),
            step_s=result.step_s,
        )


if __name__ == "__main__":
    main()
