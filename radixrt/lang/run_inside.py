"""What does a batch know of a run that had its turn?"""

import asyncio
from dataclasses import dataclass, field

from radixrt.lang.backends.protocol import Prompt, Usage


@dataclass(eq=False)
class RunInside:
    """What it has sent and got, and whether it has something under way."""

    first: Prompt
    """What its first call answers."""
    first_texts: list[str]
    """What the calls that waited for its turn answer, as texts; the first one's first."""
    later_texts: list[str] = field(default_factory=list)
    """What the calls after those answer."""
    under_way: int = 0
    """Calls that were sent and have not ended."""
    was_answered: bool = False
    """One of them has ended."""
    usages: list[Usage] = field(default_factory=list)
    """Of its calls that have ended, and of those of programs that it ran."""
    rests: bool = False
    """It has had no call under way for some time."""
    will_rest: "asyncio.TimerHandle | None" = None
    """What tells when that is so."""

    @property
    def texts(self) -> list[str]:
        return [*self.first_texts, *self.later_texts]
