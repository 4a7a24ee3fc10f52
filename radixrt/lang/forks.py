"""How do branches come back together? In the order in which they were made, whichever ends first."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from radixrt.lang.errors import ProgramError
from radixrt.lang.expressions import Expression

if TYPE_CHECKING:
    from radixrt.lang.state import State


class Forks(Sequence["State"]):
    """The branches of one :meth:`State.fork`. As a context manager it joins them, or cancels them at an error."""

    def __init__(self, parent: "State", branches: list["State"]) -> None:
        self._parent = parent
        self._branches = branches
        self._inherited = dict(parent._variables)

    def __getitem__(self, index: Any) -> Any:
        return self._branches[index]

    def __setitem__(self, index: int, branch: "State") -> None:
        """What ``forks[0] += ...`` does: it puts the branch back where it was.

        Raises:
            ProgramError: it is another.
        """
        if branch is not self._branches[index]:
            raise ProgramError("The branches of a fork can't be replaced; append to them with +=.")

    def __iadd__(self, expression: Expression | str) -> "Forks":
        """``forks += ...``: append it to each branch; every one makes its own calls."""
        for branch in self._branches:
            branch += expression
        return self

    def __len__(self) -> int:
        return len(self._branches)

    def __iter__(self) -> Iterator["State"]:
        return iter(self._branches)

    def gather(self, name: str) -> list[Any]:
        """Wait for a variable of all branches; its values in their order.

        Raises:
            LangError: one has no such variable, or could not compute it.
        """
        values = [branch[name] for branch in self._branches]
        self._note_join()
        return values

    async def gather_async(self, name: str) -> list[Any]:
        """The same without blocking the event loop."""
        values = [await branch.value(name) for branch in self._branches]
        self._note_join()
        return values

    def join(self) -> None:
        """Wait for all branches. The parent gets each variable that they have in common, as the list of its values.

        Raises:
            LangError: the first failure, in the order of the branches.
        """
        for branch in self._branches:
            branch.wait_for_all()
        for name in self._common_names():
            self._parent[name] = [branch[name] for branch in self._branches]
        self._note_join()

    def cancel(self) -> None:
        """Give up what the branches have under way."""
        for branch in self._branches:
            branch.cancel()

    def __enter__(self) -> "Forks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.join()
        else:
            self.cancel()

    def _note_join(self) -> None:
        self._parent._run.record.joined([branch._branch for branch in self._branches])

    def _common_names(self) -> list[str]:
        """Variables that the branches made, and all of them have."""
        return [
            name
            for name in self._branches[0].variables()
            if all(self._made(name, branch) for branch in self._branches)
        ]

    def _made(self, name: str, branch: "State") -> bool:
        """Whether a branch has a variable that is its own: a new one, or another in the place of an inherited one."""
        own = branch._variables.get(name)
        return own is not None and own is not self._inherited.get(name)


def join(forks: Forks) -> None:
    """As :meth:`Forks.join`."""
    forks.join()
