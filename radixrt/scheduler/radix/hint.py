"""What do clients want of a node's pages, and when do they expect to need them again?

Most nodes have been hinted by nobody: then a node has no :class:`Hint` at all.
"""

import msgspec

from radixrt.messages.requests import RetentionLevel

NONE, DEFAULT, HIGH = 0, 1, 2
"""Levels of retention; what is of a lower one goes first."""

LEVELS: dict[RetentionLevel, int] = {"none": NONE, "default": DEFAULT, "high": HIGH}


class Hint(msgspec.Struct, frozen=True, gc=False):
    """What is known of a node from its clients. Times are in seconds on the tree's clock."""

    level: int = DEFAULT
    expires: float | None = None
    """When ``level`` becomes DEFAULT again; None: never."""
    next_use: float | None = None
    """When a client has said that it will go on from the end of this node."""
    priority: int = 0
    """Of the request that used the node last; only the policy of that name asks for it. The smallest is the most urgent."""

    @property
    def says_something(self) -> bool:
        return self != _NOTHING

    def at(self, now: float) -> "Hint | None":
        """What still holds: a level may have expired, a use may be due."""
        hint = self
        if hint.expires is not None and hint.expires <= now:
            hint = Hint(DEFAULT, None, hint.next_use, hint.priority)
        if hint.next_use is not None and hint.next_use <= now:
            hint = hint.without_next_use()
        return hint if hint.says_something else None

    def next_change(self) -> float | None:
        """When :meth:`at` will say something else; None: never."""
        return min((t for t in (self.expires, self.next_use) if t is not None), default=None)

    def without_next_use(self) -> "Hint":
        return Hint(self.level, self.expires, None, self.priority)

    def with_next_use(self, next_use: float | None) -> "Hint":
        return Hint(self.level, self.expires, next_use, self.priority)


_NOTHING = Hint()


def is_kept_alike(one: Hint | None, other: Hint | None) -> bool:
    """Whether two hints agree in all but the next use, which is only ever asked of the end of a chain."""
    if one is other:
        return True
    a, b = one or _NOTHING, other or _NOTHING
    return (a.level, a.expires, a.priority) == (b.level, b.expires, b.priority)


def earliest_next_use(one: Hint | None, other: Hint | None, now: float) -> float | None:
    """The first of two stated uses that is not due yet."""
    stated = [hint.next_use for hint in (one, other) if hint is not None]
    return min((use for use in stated if use is not None and use > now), default=None)
