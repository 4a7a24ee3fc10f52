"""Decides from its heartbeat, and from what the system tells about it, whether a process hangs."""

from dataclasses import dataclass, field

from radixrt.base.liveness.heartbeat import Activity, Heartbeat

LOOK_S = 0.5
"""Between two looks at the heartbeats."""

SILENCE_S = 3.0
"""Time without a beat, and without a thread at work, after which a process counts as stopped."""

STUCK_S = 5.0
"""Time within a piece of work, in which nothing is at work for it, after which a process counts as
stuck; more if pieces of work take long, see ``STUCK_PATIENCE``."""

STUCK_PATIENCE = 10
"""The same limit in multiples of the longest of the last pieces of work."""

LOOP_S = 1.5
"""Time without a new promise after which it is asked whether anything is at work: a process that
waits for messages promises more often."""


@dataclass
class Clock:
    """Tells the time in which this process could look: nobody is late after the whole machine stood
    still."""

    now_s: float = 0.0
    _looked_at: float | None = None

    def look(self, at: float) -> None:
        """
        Args:
            at: time of ``time.monotonic()``.
        """
        since_s = 0.0 if self._looked_at is None else at - self._looked_at
        self.now_s += min(since_s, 2 * LOOK_S)
        self._looked_at = at


@dataclass
class Watch:
    """Watches one process.

    Args:
        finds_stopped: a process without a beat is killed, although it may not be late with its
            promise.
        finds_stuck: so is one that beats, and waits for itself in a piece of work.
    """

    heartbeat: Heartbeat
    activity: Activity
    finds_stopped: bool
    finds_stuck: bool = False
    _promise: float = 0.0
    _late_at: float = field(default=float("inf"))
    """Time of the clock at which the promise is broken."""
    _promised_at: float = 0.0
    _at_work_at: float = 0.0
    """Time of the clock at which something was last at work for the promise."""
    _beat: float = 0.0
    _silent_since: float = 0.0

    def look(self, clock: Clock, at: float) -> str:
        """How it hangs, as the rest of a sentence; "": it does not.

        Args:
            at: time of ``time.monotonic()``.
        """
        if (promise := self.heartbeat.record.due_at) != self._promise:
            self._promise, self._late_at = promise, clock.now_s + promise - at
            self._promised_at = self._at_work_at = clock.now_s
        elif not self._is_stuck(clock):
            self._at_work_at = clock.now_s
        if (beat := self.heartbeat.record.beat_at) != self._beat or self.activity.is_seen():
            self._beat, self._silent_since = beat, clock.now_s
        if not promise:
            return ""  # it still starts
        if clock.now_s > self._late_at:
            return "hung for longer than --step-timeout allows"
        if self.finds_stopped and beat and clock.now_s - self._silent_since > SILENCE_S:
            return f"gave no sign of life for {SILENCE_S:g} s"
        limit_s = max(STUCK_S, STUCK_PATIENCE * self.heartbeat.record.recent_s)
        if clock.now_s - self._at_work_at > limit_s:
            return f"waited for itself for {limit_s:g} s"
        return ""

    def _is_stuck(self, clock: Clock) -> bool:
        return (
            self.finds_stuck
            and clock.now_s - self._promised_at > LOOP_S
            and self.activity.is_stuck(self.heartbeat.record.beating)
        )
