"""What did these runs do? All that is known of them, as records, as plain data, as text and as a page."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixrt.lang.records import CallRecord, RunRecord
from radixrt.lang.tracing.data import data_of
from radixrt.lang.tracing.page import frame_of, page_of
from radixrt.lang.tracing.text import text_of


class Trace:
    """A timeline of one run or many.

    ``print(trace)`` shows it as text, :meth:`save` writes a page for the browser, and notebooks show that page.
    """

    def __init__(self, runs: Sequence[RunRecord]) -> None:
        self.runs = list(runs)
        self.made_at = time.monotonic()
        """Where what has not ended yet is cut off; of ``time.monotonic()``, as all times."""

    @property
    def calls(self) -> list[CallRecord]:
        """Of all runs, each run's in the order in which they were written."""
        return [call for run in self.runs for call in run.calls]

    def data(self) -> dict[str, Any]:
        """All of it as JSON takes it: what the page is made of."""
        return data_of(self.runs, self.made_at)

    def save(self, path: str | Path) -> None:
        """Write the page: one HTML file that needs nothing else."""
        Path(path).write_text(page_of(self.data()), encoding="utf-8", errors="replace")

    def __str__(self) -> str:
        return text_of(self.data())

    def _repr_html_(self) -> str:
        """For notebooks: the page in a frame of its own, where it can touch nothing of theirs."""
        return frame_of(self.data())
