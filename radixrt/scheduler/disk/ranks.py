"""Joins the answers of tensor-parallel ranks: a page is there when every rank has its part of it."""

from collections import deque

from msgspec.structs import replace

from radixrt.messages.ids import pack_ids, unpack_ids
from radixrt.messages.moves import CHECKSUM_BYTES, PagesRead, PagesWritten


class RankAnswers:
    """The answers to orders to move pages that not all ranks have given.

    Each rank answers all writes in their order, and all reads in theirs.
    """

    def __init__(self, num_ranks: int) -> None:
        self._written: list[deque[PagesWritten]] = [deque() for _ in range(num_ranks)]
        self._read: list[deque[PagesRead]] = [deque() for _ in range(num_ranks)]

    def add(self, message: PagesWritten | PagesRead) -> PagesWritten | PagesRead | None:
        """Take one rank's answer; returns that of all when it is the last, else None."""
        if isinstance(message, PagesWritten):
            self._written[message.rank].append(message)
            return all_written([w.popleft() for w in self._written]) if all(self._written) else None
        self._read[message.rank].append(message)
        return all_read([r.popleft() for r in self._read]) if all(self._read) else None


def all_written(answers: list[PagesWritten]) -> PagesWritten:
    """What every rank has written: the leading pages of the order, with the ranks' checksums of
    each side by side."""
    if len(answers) == 1:
        return answers[0]
    shortest = min(answers, key=lambda one: len(one.slots))
    count = len(unpack_ids(shortest.slots))
    checksums = (
        one.checksums[n * CHECKSUM_BYTES : (n + 1) * CHECKSUM_BYTES]
        for n in range(count)
        for one in answers
    )
    failed = unpack_ids(answers[0].slots + answers[0].failed)[count:]
    return PagesWritten(
        slots=shortest.slots,
        checksums=b"".join(checksums),
        failed=pack_ids(failed),
        error=next((one.error for one in answers if one.error), ""),
    )


def all_read(answers: list[PagesRead]) -> PagesRead:
    """What every rank has read, as the one that has read least says it, in the time of the
    slowest."""
    shortest = min(answers, key=lambda one: (one.num_pages, not one.is_damaged))
    return replace(shortest, rank=0, seconds=max(one.seconds for one in answers))
