"""Splits the time of a call into phases, from the program's clock and the server's durations."""

from dataclasses import dataclass
from typing import Literal

from radixrt.lang.tracing.records import CallRecord

PhaseName = Literal[
    "waiting", "held", "sending", "queued", "prefill", "first token", "decoding", "answering"
]
"""waiting: for the calls before it. held: until the batch admits its run. sending: transport and
encoding. queued: in the server's queue. prefill: until the first token, by the server's report;
first token: the same, by the stream. decoding: all further tokens. answering: the whole answer,
where neither server nor stream tells more."""

SHORTEST_S = 1e-5
"""Shorter phases are left out."""


@dataclass(frozen=True)
class Phase:
    """A part of a call's time; seconds of ``time.monotonic()``."""

    name: PhaseName
    start: float
    end: float


def phases_of(call: CallRecord, now: float) -> list[Phase]:
    """The phases of a call in order, each beginning where the one before it ends.

    Args:
        now: the end of a call that has not ended.
    """
    end = now if call.ended_at is None else call.ended_at
    ready = end if call.ready_at is None else call.ready_at
    sent = end if call.sent_at is None else call.sent_at
    phases = [Phase("waiting", call.written_at, ready), Phase("held", ready, sent)]
    if call.sent_at is not None:
        phases += _after_sending(call, sent, end)
    return [phase for phase in phases if phase.end - phase.start >= SHORTEST_S]


def _after_sending(call: CallRecord, sent: float, end: float) -> list[Phase]:
    if call.times is not None:
        # Two clocks: the server's durations are laid so that they end with the call.
        arrived = max(sent, end - call.times.total_s)
        planned = min(arrived + call.times.queued_s, end)
        first = min(planned + call.times.prefill_s, end)
        return [
            Phase("sending", sent, arrived),
            Phase("queued", arrived, planned),
            Phase("prefill", planned, first),
            Phase("decoding", first, end),
        ]
    if call.streamed:
        first = end if call.first_piece_at is None else call.first_piece_at
        return [Phase("first token", sent, first), Phase("decoding", first, end)]
    return [Phase("answering", sent, end)]
