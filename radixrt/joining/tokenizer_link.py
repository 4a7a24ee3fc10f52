"""The scheduler's end of the link to the tokenizer process of its machine, and to the next one when
that has died."""

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from radixrt.base.channels import Channels
from radixrt.base.ipc import Inbox, Outbox, Poller
from radixrt.messages.answers import EngineInfo
from radixrt.messages.links import ToScheduler
from radixrt.messages.replicas import Attach

log = logging.getLogger(__name__)


class TokenizerLink:
    """A channel in each direction. Each tokenizer process has channels of its own, so that no
    message of one reaches the next.

    Args:
        channels: of the replica; their engine is the one that the scheduler was started for.
        poller: waits for messages of the tokenizer process, too.
        forget: called when the tokenizer process is another: its sequences are sent again.
    """

    def __init__(self, channels: Channels, poller: Poller, forget: Callable[[], None]) -> None:
        self._channels = channels
        self._poller = poller
        self._forget = forget
        self._info: EngineInfo | None = None
        self._attaching: Inbox[Attach] = Inbox(channels.attach_address, Attach)
        poller.add(self._attaching.socket)
        self._open()

    @property
    def malformed_frames(self) -> int:
        return self._inbox.malformed_frames + self._attaching.malformed_frames

    def join(self, info: EngineInfo) -> None:
        """Report the facts about this engine, to each tokenizer process."""
        self._info = info
        self.send(info)

    def note(self, info: EngineInfo) -> None:
        """Report other facts to the tokenizer processes to come."""
        self._info = info

    def send(self, message: msgspec.Struct) -> None:
        """Raises FrameTooLargeError if the message exceeds the receiver's limit."""
        self._outbox.send(message)

    def receive_waiting(self) -> list[ToScheduler]:
        """All messages that have arrived, without waiting."""
        for attach in self._attaching.receive_waiting():
            if attach.engine > self._channels.engine:
                self._attach(attach.engine)
        return self._inbox.receive_waiting()

    def close(self) -> None:
        self._attaching.close()
        self._inbox.close()
        self._outbox.close()

    def _open(self) -> None:
        self._inbox: Inbox[ToScheduler] = Inbox(
            self._channels.address("tokenizer", "scheduler"), ToScheduler
        )
        self._outbox = Outbox(self._channels.address("scheduler", "tokenizer"))
        self._poller.add(self._inbox.socket)

    def _attach(self, engine: int) -> None:
        log.warning("The tokenizer process has died; its sequences are dropped.")
        old = self._channels
        self._poller.remove(self._inbox.socket)
        self._inbox.close()
        self._outbox.close()
        Path(old.address("tokenizer", "scheduler").removeprefix("ipc://")).unlink(missing_ok=True)
        self._channels = Channels(old.run_dir, engine, old.replica, old.start)
        self._open()
        self._forget()
        if self._info is not None:
            self.send(self._info)
