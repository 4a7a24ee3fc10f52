"""What did a run do, and when? One record a call of the model, for those who look at a program afterwards."""

import time
from dataclasses import dataclass, field

from radixrt.lang.backends.protocol import Usage
from radixrt.lang.source_line import SourceLine


@dataclass
class CallRecord:
    """One gen or select. Times are of ``time.monotonic()``, in seconds; None: not yet, or never."""

    name: str | None
    what: str
    """Such as ``gen("verdict")``."""
    source: SourceLine
    branch: str
    """The state it belongs to: "0" is the program's own, "0.2" its third fork."""
    written_at: float = field(default_factory=time.monotonic)
    """The program appended it."""
    sent_at: float | None = None
    """What comes before it was there, and the call was sent."""
    first_piece_at: float | None = None
    """Of an answer that does not stream: when it came."""
    ended_at: float | None = None
    usage: Usage = field(default_factory=Usage)
    error: str | None = None
