"""Measures the engines by turns, in rounds; the failure of one does not stop the others."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.peers_cpu.agreement import TOKENS, Greedy, leading_agreement, reference
from bench.peers_cpu.checkpoints import Checkpoint
from bench.peers_cpu.converting import converted
from bench.peers_cpu.engines import Engine
from bench.peers_cpu.measuring import Run, measure
from bench.peers_cpu.serving import EngineFailedError, serving
from bench.peers_cpu.tasks import Workload
from radixrt.models.checkpoint import resolve_model_path


class Comparison:
    """Engines, their workloads and their results."""

    def __init__(
        self,
        engines: Sequence[Engine],
        workloads: Sequence[Workload],
        checkpoint: Checkpoint,
        prompts: Sequence[str],
        peers: Path,
    ) -> None:
        self._engines = engines
        self._workloads = workloads
        self._checkpoint = checkpoint
        self._prompts = prompts
        self._built_in = Checkpoint(resolve_model_path("demo"))
        self._peers = peers
        self._reference: list[Greedy] = []
        self.results: dict[tuple[str, str], list[Run | str]] = {}
        """Runs by workload and engine, one a round, or why there is none."""

    def run(self, rounds: int) -> None:
        """Compare tokens before the first round's measurements, then measure."""
        self._reference = reference(self._checkpoint.folder, self._prompts)
        for number in range(rounds):
            for engine in self._engines:
                chosen = [w for w in self._workloads if w.name[0] in engine.workloads]
                mine = [w for w in chosen if not w.built_in_model]
                self._turn(engine, mine, self._checkpoint, compare=number == 0)
                built_in = [w for w in chosen if w.built_in_model]
                self._turn(engine, built_in, self._built_in, compare=False)
            print(f"round {number + 1} of {rounds} done", flush=True)

    def _turn(
        self, engine: Engine, workloads: list[Workload], checkpoint: Checkpoint, *, compare: bool
    ) -> None:
        """One engine, started on one checkpoint."""
        left = list(workloads)
        if not left:
            return
        folder = checkpoint.folder
        log = Path(tempfile.gettempdir()) / f"radixrt-peers-{engine.name}-{folder.name}.log"
        try:
            model = converted(engine, checkpoint, self._peers)
            with serving(engine, folder, model, self._peers, log) as url:
                if compare:
                    self._compare(engine, url)
                while left:
                    self._note(left[0], engine, asyncio.run(measure(url, engine, left[0])))
                    left.pop(0)
        except EngineFailedError as error:
            print(f"{engine.name} failed: {error}", flush=True)
            for workload in left:
                self._note(workload, engine, str(error))

    def _compare(self, engine: Engine, url: str) -> None:
        agreed = leading_agreement(url, engine, self._reference)
        counts = f"{' and '.join(map(str, agreed))} of {TOKENS}"
        print(f"{engine.name}: {counts} tokens as in float32 before the first other", flush=True)

    def _note(self, workload: Workload, engine: Engine, outcome: Run | str) -> None:
        self.results.setdefault((workload.name, engine.name), []).append(outcome)
        if isinstance(outcome, Run):
            summary = outcome.summary
            failed = f", {summary.failed} failed: {summary.errors}" if summary.failed else ""
            speed = f"{summary.output_tokens_per_s:.1f} tokens/s"
            print(f"{engine.name} ({workload.name}): {speed}{failed}", flush=True)
