"""Learns which of the pages that leave memory return, by their depth in the prompt and by whether
an answer is in them.

A page that was used once is worth a write if its like often return: the next turns of long
conversations do, single questions seldom, and answers not at all where a template leaves the
reasoning out of the next prompt. What is learned are *hazards*: the share of the pages of an age
that return before they reach the next one. An age counts the pages that have left memory since and
were not on disk, so it says how much of the disk newer pages would have taken. The chance of a
return before the disk is full of newer pages is 1 minus the product over all ages of the shares that
do not return. So pages that have had no time to return count only for the ages that they have
reached.
"""

from collections.abc import Container, Iterable, Iterator

from radixrt.scheduler.disk.index import PageName

MAX_REMEMBERED = 1 << 16
"""Pages; some 200 bytes each."""
MIN_CHANCE = 0.1
"""Of a return, below which a page that was used once is not written."""
_PRIOR = 8.0
"""Pages, half of which have returned at once, that stand for those of a class of which nothing is
known."""
_KEPT = 0.999
"""Weight of a page for each page of its class and age that is counted after it."""
_DEPTHS = 32
_FACTOR_BITS = 2
"""Each age is 4 times the one before."""
_AGES = MAX_REMEMBERED.bit_length() // _FACTOR_BITS + 1


class Returns:
    """The chances that pages return.

    Args:
        horizon: pages that may leave memory before one counts as lost.
    """

    def __init__(self, horizon: int) -> None:
        self._horizon = max(1, min(horizon, MAX_REMEMBERED))
        self._gone: dict[bytes, tuple[int, int]] = {}
        """The class of each page that has left, and its number, by digest."""
        self._digests: list[bytes] = [b""] * self._horizon
        """The last pages that have left, each in the place of its number modulo the horizon."""
        self._count = 0
        self._reached = [[_PRIOR] + [0.0] * (_AGES - 1) for _ in range(2 * _DEPTHS)]
        """Pages by class and age."""
        self._returned = [[_PRIOR / 2] + [0.0] * (_AGES - 1) for _ in range(2 * _DEPTHS)]

    def left(self, name: PageName, is_answer: bool) -> None:
        """A page has left memory that is not on disk.

        Args:
            is_answer: it holds tokens that were generated.
        """
        number, self._count = self._count, self._count + 1
        place, kind = number % self._horizon, _class_of(name, is_answer)
        if (oldest := self._entry(number - self._horizon)) is not None:
            del self._gone[oldest]
        self._digests[place] = name.digest
        self._gone[name.digest] = kind, number
        self._reach(kind, 0)
        for age, passed in self._ages():
            if (digest := self._entry(number - passed)) is not None:
                self._reach(self._gone[digest][0], age)

    def needed(self, names: Iterable[PageName], on_disk: Container[bytes]) -> None:
        """A prompt needs these pages, in order, which are not in memory.

        Args:
            on_disk: digests of pages on disk.
        """
        for name in names:
            if (gone := self._gone.pop(name.digest, None)) is not None:
                kind, number = gone
                age = sum(self._count - number > passed for _, passed in self._ages())
                self._returned[kind][age] += 1.0
            elif name.digest not in on_disk:
                return

    def chance(self, name: PageName, is_answer: bool) -> float:
        """The chance that a page returns."""
        kind, stays_away = _class_of(name, is_answer), 1.0
        for returned, reached in zip(self._returned[kind], self._reached[kind], strict=True):
            stays_away *= 1.0 - min(1.0, returned / reached) if reached else 1.0
        return 1.0 - stays_away

    def _ages(self) -> Iterator[tuple[int, int]]:
        """The ages within the horizon, and the pages that have left since at each."""
        for age in range(1, _AGES):
            if (passed := 1 << (_FACTOR_BITS * (age - 1))) >= self._horizon:
                return
            yield age, passed

    def _entry(self, number: int) -> bytes | None:
        """The digest of the page of this number, if it has not returned or left again."""
        if number < 0:
            return None
        digest = self._digests[number % self._horizon]
        gone = self._gone.get(digest)
        return digest if gone is not None and gone[1] == number else None

    def _reach(self, kind: int, age: int) -> None:
        self._reached[kind][age] = _KEPT * self._reached[kind][age] + 1.0
        self._returned[kind][age] *= _KEPT


def _class_of(name: PageName, is_answer: bool) -> int:
    return 2 * min(name.depth.bit_length(), _DEPTHS - 1) + is_answer
