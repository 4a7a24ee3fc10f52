"""Sends what sequences name by a key, grammars and images, to a scheduler once, and drops it there
when it has been unused for longest.

The tokenizer process owns the life of such a part because it knows both its source and all answers
that use it. It counts users by key, so that neither scheduler nor workers have to, and no message
has to be awaited: on the one ordered link, the message that loads it is ahead of the first sequence
that names the key, and the one that drops it behind the end or release of the last one. A part is
therefore never dropped while a sequence may still be admitted with it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec


@dataclass(eq=False, slots=True)
class _Sent:
    num_bytes: int
    num_users: int = 0
    is_lost: bool = False
    """The scheduler has refused to use it: it is dropped as soon as it is unused, not kept."""


class SentParts:
    """The parts of one kind that a scheduler has. Every :meth:`use` is followed by one
    :meth:`release`."""

    def __init__(
        self,
        to_scheduler: Callable[[msgspec.Struct], None],
        drop_order: Callable[[bytes], msgspec.Struct],
        *,
        max_idle_bytes: int,
        max_idle: int,
    ) -> None:
        """
        Args:
            drop_order: makes the message that drops a key.
            max_idle_bytes: memory of unused parts that stay for the next requests.
            max_idle: their number.
        """
        self._to_scheduler = to_scheduler
        self._drop_order = drop_order
        self._max_idle_bytes = max_idle_bytes
        self._max_idle = max_idle
        self._sent: dict[bytes, _Sent] = {}
        self._idle: dict[bytes, int] = {}
        """Bytes of those without users, least recently used first."""
        self._idle_bytes = 0
        self.used_bytes = 0
        """Memory of those with users."""

    def has(self, key: bytes) -> bool:
        """Whether the scheduler has it."""
        return key in self._sent

    def use_part(
        self, key: bytes, num_bytes: int, load_order: Callable[[], msgspec.Struct]
    ) -> None:
        """Count one more answer that uses a part; send the part if the scheduler does not have it.

        Call it before the answer's first sequence is sent.

        Args:
            load_order: makes the message that loads it.

        Raises:
            FrameTooLargeError: it is too large to be sent.
        """
        sent = self._sent.get(key)
        if sent is None:
            self._to_scheduler(load_order())
            sent = self._sent[key] = _Sent(num_bytes)
        self._idle_bytes -= self._idle.pop(key, 0)
        self.used_bytes += 0 if sent.num_users else sent.num_bytes
        sent.num_users += 1

    def release(self, key: bytes) -> None:
        """Count one answer less. Call it after the scheduler has ended its sequence or was told to
        release it."""
        sent = self._sent[key]
        sent.num_users -= 1
        if sent.num_users:
            return
        self.used_bytes -= sent.num_bytes
        if sent.is_lost:
            self._drop(key)
            return
        self._idle[key] = sent.num_bytes
        self._idle_bytes += sent.num_bytes
        while self._idle_bytes > self._max_idle_bytes or len(self._idle) > self._max_idle:
            oldest = next(iter(self._idle))
            self._idle_bytes -= self._idle.pop(oldest)
            self._drop(oldest)

    def lost(self, key: bytes) -> None:
        """The scheduler can't use a part that has users: send it again for requests after the
        present ones."""
        self._sent[key].is_lost = True

    def _drop(self, key: bytes) -> None:
        del self._sent[key]
        self._to_scheduler(self._drop_order(key))
