"""What does a run tell the cache about its future? Advice, sent in the background, that changes no answer.

A fork's prefix is not warmed ahead of its branches: the server computes what requests of one step have in common once,
so eight branches over 7,800 new tokens computed 7,920 tokens either way, and warming cost one more round trip. Nor is
it retained above others: retention counts tokens, which only the server knows, and would keep the branches' answers too.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from radixrt.lang.backends.protocol import Backend, CacheHints
from radixrt.lang.background import BACKGROUND


class Hints:
    """The hints of one run."""

    def __init__(self, session: str, backend: Backend, is_one_of_many: bool) -> None:
        """
        Args:
            is_one_of_many: other runs of a batch want the room that this one leaves. A run of its own releases
                nothing, since the next one is likely to begin with the same instructions.
        """
        self._session = session
        self._releases = is_one_of_many
        self._backend = backend
        self._was_used = False

    def of_call(self, next_use_s: float | None) -> CacheHints:
        """Those that go with a call.

        Args:
            next_use_s: how long the program expects to do something else after it.
        """
        self._was_used = True
        return CacheHints(session=self._session, next_use_s=next_use_s)

    def program_ended(self) -> None:
        """Nothing of the run is needed any more, but for what other runs use too. Returns at once."""
        if self._was_used and self._releases:
            BACKGROUND.submit(self._backend.program_ended(self._session))


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
