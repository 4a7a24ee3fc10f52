"""What does a run tell the cache about its future? Advice, sent in the background, that changes no answer.

A fork's prefix is not warmed ahead of its branches: the server computes what requests of one step have in common once,
so eight branches over 7,800 new tokens computed 7,920 tokens either way, and warming cost one more round trip. Nor is
it retained above others: retention counts tokens, which only the server knows, and would keep the branches' answers too.
What the runs of a batch share is kept by leases (:mod:`radixrt.lang.pins`), and given up run by run
(:mod:`radixrt.lang.releases`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from radixrt.lang.backends.protocol import CacheHints


class Hints:
    """The hints of one run."""

    def __init__(self, session: str) -> None:
        self._session = session

    def of_call(self, next_use_s: float | None) -> CacheHints:
        """Those that go with a call.

        Args:
            next_use_s: how long the program expects to do something else after it.
        """
        return CacheHints(session=self._session, next_use_s=next_use_s)


class ExpectedWaits:
    """For how long a state's next calls will leave its KV unused."""

    def __init__(self) -> None:
        self.next_use_s: float | None = None

    @contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        before, self.next_use_s = self.next_use_s, seconds
        try:
            yield
        finally:
            self.next_use_s = before
