"""Scheduler and worker in one process, two steps in flight: what a profiler can look at."""

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.gpu.shapes import ModelShape
from bench.gpu.workloads import token_ids
from radixrt.base.config import ServerConfig
from radixrt.base.sampling_params import SamplingParams
from radixrt.device.device import make_device
from radixrt.layers.parallel import TensorParallel
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import RequestOptions
from radixrt.messages.sequences import SequenceRequest
from radixrt.messages.steps import StepPlan
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.scheduler import Scheduler
from radixrt.worker.build import build_runner

MAX_STEPS_OF_PROMPTS = 1000


@dataclass
class HostTimes:
    """Seconds on the host, a step each."""

    plan: list[float] = field(default_factory=list)
    launch: list[float] = field(default_factory=list)
    """Applying the plan, preparing attention, launching, and taking in the tokens of the step
    ahead."""
    absorb: list[float] = field(default_factory=list)


class InProcess:
    """An engine without sockets, driven step by step."""

    def __init__(self, model_dir: Path, device: torch.device, settings: dict[str, object]) -> None:
        # No bound in time: a step is as large as the settings allow from the first on.
        settings = {"load_format": "dummy", "max_step_ms": 0, **settings}
        config = ServerConfig(model_path=str(model_dir), **settings)  # type: ignore[arg-type]
        self.device = device
        self._runner, info = build_runner(
            config,
            make_device(device),
            TensorParallel(),
            model_dir / "tokenizer.json",
            lambda loaded: None,
        )
        self._scheduler = Scheduler(SchedulerLimits.from_config(config, info))
        self._sent: deque[StepPlan] = deque()
        self._next_id = 0
        self.times = HostTimes()

    def begin(self, shape: ModelShape, count: int, prompt: int, output: int) -> None:
        """Ask for answers, and compute their prompts.

        Raises:
            RuntimeError: not all of them decode after :data:`MAX_STEPS_OF_PROMPTS` steps.
        """
        sampling = SamplingParams(temperature=1.0, max_tokens=output, ignore_eos=True, seed=0)
        for tokens in token_ids([prompt] * count, shape.vocab_size, seed=self._next_id):
            request = SequenceRequest(
                seq_id=self._next_id,
                token_ids=pack_ids(tokens),
                options=RequestOptions(sampling=sampling),
            )
            self._next_id += 1
            refused = self._scheduler.add(request)
            if refused is not None:
                raise RuntimeError(f"the scheduler refused a request: {refused}")
        left = MAX_STEPS_OF_PROMPTS
        while self.num_decoding() < count:
            if not left:
                raise RuntimeError(f"{self.num_decoding()} of {count} sequences decode")
            self.advance(1)
            left -= 1
        self.advance(2)  # the plans that are made and not launched

    def advance(self, steps: int) -> None:
        """Launch so many steps."""
        for _ in range(steps):
            begin = time.perf_counter()
            while self._scheduler.num_in_flight < 2:
                plan = self._scheduler.plan()
                if plan is None:
                    break
                self._sent.append(plan)
            planned = time.perf_counter()
            results = (
                self._runner.step(self._sent.popleft()) if self._sent else self._runner.collect()
            )
            stepped = time.perf_counter()
            for result in results:
                self._scheduler.absorb(result)
            self.times.plan.append(planned - begin)
            self.times.launch.append(stepped - planned)
            self.times.absorb.append(time.perf_counter() - stepped)

    def num_decoding(self) -> int:
        """Sequences whose prompts are computed and whose answers are not complete."""
        slots = self._scheduler.state.slots
        return int((slots.is_decoding & slots.in_use).sum())

    def context(self) -> int:
        """Tokens of KV that the running sequences have now, all together."""
        batch = self._runner._batch
        return int(batch.computed[batch.is_decoding].sum())

    def finish(self) -> None:
        """Run until nothing is left."""
        while self._scheduler.num_in_flight or self._sent:
            self.advance(1)
