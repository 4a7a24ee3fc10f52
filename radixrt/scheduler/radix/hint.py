"""Cache hints on a node of the radix tree: retention level, expiry, next use, priority.

Most nodes have no :class:`Hint`.
"""

import msgspec

from radixrt.messages.requests import RetentionLevel

NONE, DEFAULT, HIGH = 0, 1, 2
"""Retention levels; the lower ones are evicted first."""

LEVELS: dict[RetentionLevel, int] = {"none": NONE, "default": DEFAULT, "high": HIGH}


class Hint(msgspec.Struct, frozen=True, gc=False):
    """Hints for one node. Times are in seconds on the tree's clock."""

    level: int = DEFAULT
    expires: float | None = None
    """Time at which ``level`` becomes DEFAULT again; None: never."""
    next_use: float | None = None
    """Time at which a client expects to continue from the end of this node."""
    priority: int = 0
    """The priority of the request that used the node last, for policies that order by it; the
    smallest is the most urgent."""

    @property
    def says_something(self) -> bool:
        return self != NO_HINT

    def valid_at(self, now: float) -> "Hint | None":
        """The part that still holds at ``now``: not an expired level, not a next use that is
        due."""
        hint = self
        if hint.expires is not None and hint.expires <= now:
            hint = Hint(DEFAULT, None, hint.next_use, hint.priority)
        if hint.next_use is not None and hint.next_use <= now:
            hint = hint.with_next_use(None)
        return hint if hint.says_something else None

    def next_change(self) -> float | None:
        """Time at which :meth:`valid_at` changes; None: never."""
        return min((t for t in (self.expires, self.next_use) if t is not None), default=None)

    def with_next_use(self, next_use: float | None) -> "Hint":
        return Hint(self.level, self.expires, next_use, self.priority)


NO_HINT = Hint()


def is_kept_alike(one: Hint | None, other: Hint | None) -> bool:
    """Whether two hints agree in all but the next use."""
    if one is other:
        return True
    a, b = one or NO_HINT, other or NO_HINT
    return (a.level, a.expires, a.priority) == (b.level, b.expires, b.priority)


def earliest_next_use(one: Hint | None, other: Hint | None, now: float) -> float | None:
    """The earlier of two next uses that is not due yet."""
    uses = [hint.next_use for hint in (one, other) if hint is not None]
    return min((use for use in uses if use is not None and use > now), default=None)
