"""Learns which of the pages that leave memory return, by their depth in the prompt.

A page that was used once is worth a write if its like often return: the next turns of long
conversations do, single questions seldom. Each page that leaves memory is remembered until a prompt
needs it again or as many others have left as the disk holds; only then it counts, so that pages
which have had no time to return are not taken for lost.
"""

from collections import OrderedDict
from collections.abc import Iterable

from radixrt.scheduler.disk.index import PageName

MAX_REMEMBERED = 1 << 16
"""Pages; some 150 bytes each."""
MIN_CHANCE = 0.1
"""Of a return, below which a page that was used once is not written."""
_PRIOR = 8.0
"""Pages, half of which have returned, that stand for those of a depth of which nothing is known."""
_KEPT = 0.999
"""Weight of a page for each page of its depth that is counted after it."""
_CLASSES = 32


class Returns:
    """The chances that pages return.

    Args:
        horizon: pages that may leave memory before one counts as lost.
    """

    def __init__(self, horizon: int) -> None:
        self._horizon = min(horizon, MAX_REMEMBERED)
        self._gone: OrderedDict[bytes, int] = OrderedDict()
        """The class of each page that has left, by digest, the first first."""
        self._returned = [_PRIOR / 2] * _CLASSES
        self._counted = [_PRIOR] * _CLASSES

    def left(self, name: PageName) -> None:
        """A page has left memory."""
        self._gone[name.digest] = _class_of(name)
        self._gone.move_to_end(name.digest)
        if len(self._gone) > self._horizon:
            _, kind = self._gone.popitem(last=False)
            self._count(kind, 0.0)

    def needed(self, names: Iterable[PageName]) -> None:
        """A prompt needs these pages, in order, which are not in memory."""
        for name in names:
            if (kind := self._gone.pop(name.digest, None)) is None:
                return
            self._count(kind, 1.0)

    def chance(self, name: PageName) -> float:
        """The chance that a page returns."""
        kind = _class_of(name)
        return self._returned[kind] / self._counted[kind]

    def _count(self, kind: int, returned: float) -> None:
        self._returned[kind] = _KEPT * self._returned[kind] + returned
        self._counted[kind] = _KEPT * self._counted[kind] + 1.0


def _class_of(name: PageName) -> int:
    return min(name.depth.bit_length(), _CLASSES - 1)
