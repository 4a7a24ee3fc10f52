"""The scheduler process in threads, with a worker that has no model and answers as it is told."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.base.ipc import Inbox, Outbox, Poller
from radixrt.base.liveness.link import SupervisorLink
from radixrt.messages.answers import EngineInfo
from radixrt.messages.grammars import DropGrammar, GrammarLoaded, LoadGrammar
from radixrt.messages.links import ToWorker
from radixrt.messages.steps import StepPlan
from radixrt.scheduler.process import SchedulerProcess
from tests.scheduler.fake_worker import FakeWorker, _Slot

Script = Callable[[list[int]], list[int]]
"""The answer to a prompt, in tokens."""


class ScriptedWorker(FakeWorker):
    """Checks the KV of each row as its base does, and samples the tokens of the script. It drafts
    nothing."""

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info.page_size, has_states=info.kept_states > 0)
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


class InThreads:
    """The scheduler process in one thread and a worker in another, until they are closed."""

    def __init__(self, channels: Channels, info: EngineInfo, config: ServerConfig) -> None:
        self._channels, self._info, self._config = channels, info, config
        self._stop = threading.Event()
        self.failure: Exception | None = None
        """What has ended one of the threads."""
        self._threads = [
            threading.Thread(target=self._run, args=(target,), daemon=True)
            for target in (self._work, self._schedule)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        except Exception as error:
            self.failure = error
            raise

    def _schedule(self) -> None:
        self.process = StoppableScheduler(self._config, self._channels, SupervisorLink())
        self.process.stop = self._stop
        with contextlib.suppress(SystemExit):
            self.process.run()
        disk = self.process.scheduler.state.kv.disk
        if disk is not None:  # of a process, the system closes the files
            disk.close()

    def _work(self) -> None:
        raise NotImplementedError

    def _messages(self, inbox: Inbox[Any]) -> Iterator[Any]:
        """What the scheduler sends to the worker, until the end."""
        poller = Poller(inbox)
        while not self._stop.is_set():
            poller.wait(0.05)
            yield from inbox.receive_waiting()


class RealScheduler(InThreads):
    """A real scheduler, and a worker that answers as a script says.

    Attributes:
        worker: its script may be changed at any time.
    """

    def __init__(self, channels: Channels, info: EngineInfo, config: ServerConfig) -> None:
        self.worker = ScriptedWorker(info)
        super().__init__(channels, info, config)

    def _work(self) -> None:
        inbox: Inbox[ToWorker] = Inbox(self._channels.address("scheduler", "worker0"), ToWorker)
        outbox = Outbox(self._channels.address("worker", "scheduler"))
        outbox.send(self._info)
        for message in self._messages(inbox):
            match message:
                case StepPlan():
                    outbox.send(self.worker.step(message))
                case LoadGrammar():
                    outbox.send(GrammarLoaded(key=message.grammar.key, error=None))
                case DropGrammar():
                    pass
        inbox.close()
        outbox.close()
