"""The scheduler process in threads, with a worker that has no model and answers as it is told."""

import contextlib
import threading
from collections.abc import Callable

from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.base.ipc import Inbox, Outbox, Poller
from radixrt.messages.answers import EngineInfo
from radixrt.messages.grammars import DropGrammar, GrammarLoaded, LoadGrammar
from radixrt.messages.links import ToWorker
from radixrt.messages.steps import StepPlan
from radixrt.scheduler.process import SchedulerProcess
from tests.scheduler.fake_worker import FakeWorker, _Slot

Script = Callable[[list[int]], list[int]]
"""The answer to a prompt, in tokens."""


class ScriptedWorker(FakeWorker):
    """Checks the KV of each row as its base does, and samples the tokens of the script. It drafts nothing."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self.script: Script = lambda prompt: [1]

    def _advance(self, slot: int) -> int:
        self.slots[slot].end = 0
        return super()._advance(slot)

    def _sample(self, slot: int, value: int, slots: list[int], tokens: list[int]) -> None:
        state: _Slot = self.slots[slot]
        answer = self.script(state.tokens[: state.num_known])
        new = answer[(len(state.tokens) - state.num_known) % len(answer)]
        state.tokens.append(new)
        slots.append(slot)
        tokens.append(new)


class StoppableScheduler(SchedulerProcess):
    """A scheduler process in a thread; ``stop`` ends it."""

    stop: threading.Event

    def _seconds_to_next_deadline(self) -> float | None:
        return 0.05

    def _drop_expired(self) -> None:
        if self.stop.is_set():
            raise SystemExit
        super()._drop_expired()


class RealScheduler:
    """Runs until it is closed.

    Attributes:
        worker: its script may be changed at any time.
    """

    def __init__(self, channels: Channels, info: EngineInfo, config: ServerConfig) -> None:
        self.worker = ScriptedWorker(info.page_size)
        self._stop = threading.Event()
        self._run = (channels, info, config)
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._work, self._schedule)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _schedule(self) -> None:
        channels, _, config = self._run
        process = StoppableScheduler(config, channels)
        process.stop = self._stop
        self.process = process
        with contextlib.suppress(SystemExit):
            process.run()

    def _work(self) -> None:
        channels, info, _ = self._run
        inbox: Inbox[ToWorker] = Inbox(channels.address("scheduler", "worker0"), ToWorker)
        outbox = Outbox(channels.address("worker", "scheduler"))
        outbox.send(info)
        poller = Poller(inbox)
        while not self._stop.is_set():
            poller.wait(0.05)
            for message in inbox.receive_waiting():
                match message:
                    case StepPlan():
                        outbox.send(self.worker.step(message))
                    case LoadGrammar():
                        outbox.send(GrammarLoaded(key=message.grammar.key, error=None))
                    case DropGrammar():
                        pass
        inbox.close()
        outbox.close()
