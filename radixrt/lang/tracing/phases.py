"""Where did the time of a call go? From what the program saw, and from what the server tells."""

from dataclasses import dataclass
from typing import Literal

from radixrt.lang.records import CallRecord

PhaseName = Literal[
    "waiting", "held", "sending", "queued", "prefill", "first token", "decoding", "answering"
]
"""waiting: for what comes before it. held: until its run's turn in a batch. sending: the way there and the encoding.
queued: on the server. prefill: until the first token, where the server tells; first token: where only the stream does.
decoding: all further tokens. answering: all of it, where nobody tells more."""


SHORTEST_S = 1e-5
"""Shorter ones are left out."""


@dataclass(frozen=True)
class Phase:
    name: PhaseName
    start: float
    end: float


def phases_of(call: CallRecord, now: float) -> list[Phase]:
    """The phases of a call in order, without gaps that anybody could see.

    Args:
        now: where a call that has not ended is cut off.
    """
    end = now if call.ended_at is None else call.ended_at
    ready = end if call.ready_at is None else call.ready_at
    sent = end if call.sent_at is None else call.sent_at
    phases = [Phase("waiting", call.written_at, ready), Phase("held", ready, sent)]
    if call.sent_at is not None:
        phases += _on_the_way(call, sent, end)
    return [phase for phase in phases if phase.end - phase.start >= SHORTEST_S]


def first_token_after_s(call: CallRecord) -> float | None:
    """Seconds from sending a call to its first token, if anybody tells."""
    if call.sent_at is None:
        return None
    for phase in phases_of(call, call.sent_at):
        if phase.name in ("prefill", "first token"):
            return phase.end - call.sent_at
    return None


def _on_the_way(call: CallRecord, sent: float, end: float) -> list[Phase]:
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
