"""The scheduler and the worker of a server in threads, with the model of a checkpoint, or one that
wants to write what a script says."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.messages.answers import EngineInfo
from radixrt.messages.ids import unpack_ids
from radixrt.messages.steps import Admit, StepPlan
from radixrt.worker.batch import StepInputs
from radixrt.worker.drafts.price import DraftPrice
from radixrt.worker.process import WorkerProcess
from tests.servers.real_scheduler import InThreads

Script = Callable[[list[int]], list[int]]
"""The tokens that the model wants to write after a prompt."""
DRAFT_PRICE = 0.1
"""The price of a draft row in each step, so that there are drafts, whatever the load of the
machine."""


def fixed_draft_price() -> DraftPrice:
    price = DraftPrice()
    price.next = lambda rows: DRAFT_PRICE  # type: ignore[method-assign]
    price.beside_prompts = lambda rows, saving: DRAFT_PRICE  # type: ignore[method-assign]
    return price


class StoppableWorker(WorkerProcess):
    """A worker process in a thread; ``stop`` ends it."""

    stop: threading.Event

    def _beat(self) -> None:
        if self.stop.is_set():
            raise SystemExit
        super()._beat()


class RealModel(InThreads):
    """The scheduler and the worker as they are in a server, with the model of the checkpoint."""

    def _work(self) -> None:
        torch.set_num_threads(1)
        process = StoppableWorker(self._config, self._channels, 0)
        process.stop = self._stop
        with contextlib.suppress(SystemExit):
            process.run()
        process._inbox.close()
        process._outbox.close()


class RealEngine(InThreads):
    """Everything between the logits and the scheduler's tokens is the server's own: matchers,
    masks, drafts, budgets, sampler.

    A row's logits depend on its prompt and its position alone: the script's token there has the
    largest, then those of ``wishes``.

    Attributes:
        script: may be changed at any time; it is asked when a sequence is admitted.
        wishes: what the model writes where it may not write the script's token: tokens, the dearest
            first.
    """

    def __init__(self, channels: Channels, info: EngineInfo, config: ServerConfig) -> None:
        self.script: Script = lambda prompt: [info.eos_token_ids[0]]
        self.wishes: list[int] = list(info.eos_token_ids)
        super().__init__(channels, info, config)

    def _work(self) -> None:
        torch.set_num_threads(1)
        process = WorkerProcess(self._config, self._channels, 0)
        runner: Any = process._runner
        written = _Written(self, runner._model.vocab_size)
        admit = runner._admit

        def watch(admitted: Admit) -> None:
            written.admit(admitted)
            admit(admitted)

        runner._admit = watch
        runner.drafts.price = fixed_draft_price()
        runner._forward.run = written.forward  # type: ignore[method-assign]
        for message in self._messages(process._inbox):
            if isinstance(message, StepPlan):
                # Unknown times: plans would depend on the load of the machine.
                process._answer([replace(r, step_s=0.0) for r in runner.step(message)])
            else:
                runner.order(message)
        process._inbox.close()
        process._outbox.close()


class _Written:
    """The model: what it wants to write in each slot."""

    def __init__(self, engine: RealEngine, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._by_slot: dict[int, tuple[int, list[int]]] = {}
        """The length of the prompt, and the script."""

    def admit(self, admitted: Admit) -> None:
        tokens = unpack_ids(admitted.token_ids).tolist()
        prompt = tokens[: len(tokens) - admitted.num_output]
        self._by_slot[admitted.slot] = len(prompt), self._engine.script(prompt)

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """No hidden states, and the logits [rows, vocab] of the rows that sample."""
        rows = np.zeros((len(inputs.sampling_slots), self._vocab_size), dtype=np.float32)
        for rank, token in enumerate(reversed(self._engine.wishes)):
            rows[:, token] = 1.0 + rank
        for row, slot, position in zip(
            rows, inputs.sampling_slots.tolist(), inputs.sampling_positions.tolist(), strict=True
        ):
            num_prompt, script = self._by_slot[slot]
            if position - num_prompt < len(script):
                row[script[position - num_prompt]] = 1000.0
        return torch.empty(len(rows), 0), torch.from_numpy(rows)
