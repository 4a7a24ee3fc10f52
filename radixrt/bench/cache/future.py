"""Cache hints that a program would send, for a trace with known sessions.

A program knows the session of a request, the end of the session, and its tool calls. It can
estimate the duration of a tool, but it cannot know the next action of a human. The levels are:

- ``none``: no hints.
- ``session``: the session's name, and its end after the last request.
- ``program``: also the time of the next request. After a tool call, this is the recorded pause
  times a log-normal error (``--hint-error``: 0.5 is wrong by a factor of 1.65 or more in one case
  of three). After any other request it is the typical pause of humans in this trace, a constant.
- ``exact``: every pause as recorded. No program knows these times; they give the upper bound for
  hints of time.
"""

import math
from dataclasses import dataclass

import numpy as np

from radixrt.base.errors import ConfigError
from radixrt.bench.arguments import HintLevel
from radixrt.bench.cache.trace import Trace
from radixrt.messages.requests import CacheHints

SEED = 1


@dataclass(frozen=True)
class Future:
    """The next requests after each request of a trace."""

    following: list[int | None]
    """Next request of the session of each request; None: it was the last, or has no session."""
    pause_s: list[float]
    """For each request, the time from the end of its answer to the next request, as recorded; 0 if
    there is none."""
    hints: list[CacheHints]
    """Hints of each request."""

    def is_last_of_session(self, number: int) -> bool:
        return bool(self.hints[number].session) and self.following[number] is None


def look_ahead(trace: Trace, level: HintLevel, error: float, decode_step_s: float) -> Future:
    """Find the next request of each request, and the hints of each request.

    Args:
        error: standard deviation of the logarithm of the stated duration of a tool over the
            recorded one.
        decode_step_s: pauses were recorded from arrival to arrival; the time per token of the
            answer between them.

    Raises:
        ConfigError: the level needs sessions, and the trace has none.
    """
    requests = trace.requests
    if level != "none" and all(request.session is None for request in requests):
        raise ConfigError(
            f"The trace {trace.name} has no sessions, so --hints {level} has nothing to say. Use --hints none."
        )
    following = _following(trace)
    pauses = [0.0] * len(requests)
    for number, after in enumerate(following):
        if after is not None:
            gap_s = requests[after].arrival_s - requests[number].arrival_s
            pauses[number] = max(0.0, gap_s - requests[number].output_tokens * decode_step_s)
    said = _said(trace, following, pauses, level, error)
    hints = [
        CacheHints(next_use_s=said[number], session=_name(requests[number].session, level))
        for number in range(len(requests))
    ]
    return Future(following, pauses, hints)


def _following(trace: Trace) -> list[int | None]:
    latest: dict[int, int] = {}
    following: list[int | None] = [None] * len(trace.requests)
    for number, request in enumerate(trace.requests):
        if request.session is not None:
            if request.session in latest:
                following[latest[request.session]] = number
            latest[request.session] = number
    return following


def _said(
    trace: Trace,
    following: list[int | None],
    pauses: list[float],
    level: HintLevel,
    error: float,
) -> list[float | None]:
    """Seconds after which the client of each request says to go on."""
    goes_on = [number for number, after in enumerate(following) if after is not None]
    said: list[float | None] = [None] * len(pauses)
    if level == "exact":
        for number in goes_on:
            said[number] = pauses[number]
    if level == "program":
        random = np.random.default_rng(SEED)
        errors = np.exp(error * random.standard_normal(len(pauses)))
        human = [pauses[n] for n in goes_on if not trace.requests[n].called_tool]
        typical = math.exp(float(np.mean(np.log(np.maximum(human, 1.0))))) if human else None
        for number in goes_on:
            called_tool = trace.requests[number].called_tool
            said[number] = pauses[number] * float(errors[number]) if called_tool else typical
    return said


def _name(session: int | None, level: HintLevel) -> str:
    return "" if session is None or level == "none" else str(session)
