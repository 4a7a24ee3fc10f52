"""What does a program hold in its hands? A state: what has been said, and the variables in it; and the branches of one."""

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from radixrt.lang.backends.protocol import CacheHints
from radixrt.lang.calling import Site, generating, selecting
from radixrt.lang.errors import ProgramError, UnknownVariable
from radixrt.lang.expressions import Expression, Gen, Message, Role, Select, Text, parts_of
from radixrt.lang.hole import Filling, Hole
from radixrt.lang.reading import Pieces, TextSoFar, text_of_hole
from radixrt.lang.records import BranchesRecord, CallRecord
from radixrt.lang.run import Run
from radixrt.lang.tools import as_tools
from radixrt.lang.tracing.trace import Trace
from radixrt.lang.transcript import Transcript, Turn, text_of


class State:
    """Append to it with ``+=``; ``s["name"]`` waits for a variable's value.

    Nothing waits before that: calls of the model run in the background, each as soon as what comes before it is
    there. A state is either a conversation (all of it in roles) or plain text (no roles).
    """

    error: None = None
    """A failed run of a batch has one: see :class:`radixrt.lang.FailedRun`."""

    def __init__(self, run: Run, branch: str = "0") -> None:
        """Programs do not make states: :meth:`Function.run` and :meth:`fork` do."""
        self.result: Any = None
        """What the program's function returned."""
        self._run = run
        self._branch = branch
        self._transcript = Transcript()
        self._variables: dict[str, Hole | Filling] = {}
        """Those that the program set itself are filled from the start."""
        self._own_holes: list[Hole] = []
        self._in_block = False
        self._num_forks = 0
        self._next_use_s: float | None = None
        """For how long the program expects to do something else after its next calls."""

    # ------------------------------------------------------------ appending

    def __iadd__(self, expression: Expression | str) -> "State":
        for part in parts_of(expression):
            self._append(part)
        self._run.changes.tell()
        return self

    def system(self) -> contextlib.AbstractContextManager[None]:
        """``with s.system():``: what is appended inside is one message."""
        return self._role("system")

    def user(self) -> contextlib.AbstractContextManager[None]:
        """``with s.user():``: what is appended inside is one message."""
        return self._role("user")

    def assistant(self) -> contextlib.AbstractContextManager[None]:
        """``with s.assistant():``: what is appended inside is one message."""
        return self._role("assistant")

    @contextlib.contextmanager
    def _role(self, role: Role, fields: tuple[tuple[str, str], ...] = ()) -> Iterator[None]:
        if self._in_block:
            raise ProgramError(
                f"A message can't stand inside another: end the block before the {role} message."
            )
        self._transcript = self._transcript.closed().with_turn(Turn(role, fields=fields))
        self._in_block = True
        try:
            yield
        finally:
            self._in_block = False
            self._transcript = self._transcript.closed()

    def _append(self, expression: Expression) -> None:
        match expression:
            case Text():
                self._transcript = self._transcript.with_part(expression.text)
            case Gen() | Select():
                self._call(expression)
            case Message():
                with self._role(expression.role, expression.fields):
                    for part in expression.parts:
                        self._append(part)

    def _call(self, expression: Gen | Select) -> None:
        """Start a call of the model, and leave a hole for what it says."""
        self._transcript.check_model_may_speak()
        if isinstance(expression, Gen) and expression.tools:
            self._transcript.check_tools_may_be_called()
        kind = "gen" if isinstance(expression, Gen) else "select"
        what = f"{kind}({expression.name!r})" if expression.name else kind
        record = CallRecord(expression.name, what, expression.source, self._branch)
        hole = Hole(record)
        hints = CacheHints(session=self._run.id, next_use_s=self._next_use_s)
        site = Site(self._run, self._transcript, hole, hints)
        after = self._transcript.with_part(hole)
        if isinstance(expression, Gen):
            self._run.start(hole, generating(site, expression, as_tools(expression.tools)))
        else:
            self._run.start(hole, selecting(site, expression))
        self._run.record.calls.append(record)
        self._transcript = after
        self._own_holes.append(hole)
        if expression.name is not None:
            self._variables[expression.name] = hole

    # ------------------------------------------------------------ reading

    def __getitem__(self, name: str) -> Any:
        """Wait for the value of a variable.

        Raises:
            UnknownVariable: there is none of that name.
            LangError: it could not be computed; the error names the line of its gen.
        """
        return self._filling(name).value

    async def value(self, name: str) -> Any:
        """``await s.value("x")``: as ``s["x"]``, without blocking the event loop."""
        variable = self._variable(name)
        filling = variable if isinstance(variable, Filling) else await variable.read_async()
        return filling.value

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a variable of the program's own; the transcript does not change."""
        self._variables[name] = Filling("", value)

    def __contains__(self, name: object) -> bool:
        return name in self._variables

    def variables(self) -> list[str]:
        """Names, in the order in which they first appeared."""
        return list(self._variables)

    def text(self) -> str:
        """Wait for all of the state. Of a conversation: each message after its role, one a line."""
        self.wait_for_all()
        if not self._transcript.turns:
            return text_of(self._transcript.text)
        return "\n".join(f"{turn.role}: {text_of(turn.parts)}" for turn in self._transcript.turns)

    def messages(self) -> list[dict[str, Any]]:
        """Wait for all of the conversation; its messages in OpenAI's form."""
        self.wait_for_all()
        return self._transcript.messages()

    def wait_for_all(self) -> None:
        """Wait until all that was appended so far is computed.

        Raises:
            LangError: the first failure, in the order of the transcript.
        """
        for hole in self._transcript.holes():
            hole.wait()

    def finish_reason(self, name: str) -> str | None:
        """Wait for a variable; why its answer ended: "stop", "length", "tool_calls"; None: it is no gen's."""
        return self._filling(name).finish_reason

    def reasoning(self, name: str) -> str:
        """Wait for a variable; what the model thought before it, where the backend tells: "" if nothing."""
        return self._filling(name).reasoning

    def text_iter(self, name: str) -> Iterator[str]:
        """The pieces of a variable's text, as they come: in a streamed program, or of ``gen(..., stream=True)``; the
        text of others comes as a whole."""
        return iter(Pieces(self._text_of(name), self._run.changes))

    def text_aiter(self, name: str) -> AsyncIterator[str]:
        """The same for ``async for``."""
        return aiter(Pieces(self._text_of(name), self._run.changes))

    def calls(self) -> list[CallRecord]:
        """What the whole run has asked of the model so far, in the order in which it was written."""
        return list(self._run.record.calls)

    def trace(self) -> Trace:
        """What the whole run has done so far, to look at: ``print(state.trace())``, ``state.trace().save("out.html")``."""
        return Trace([self._run.record])

    def _text_of(self, name: str) -> TextSoFar:
        variable = self._variable(name)
        if isinstance(variable, Filling):
            raise ProgramError(f"{name!r} was set by the program, so it has no text that streams.")
        return text_of_hole(variable)

    def _filling(self, name: str) -> Filling:
        variable = self._variable(name)
        return variable if isinstance(variable, Filling) else variable.read()

    def _variable(self, name: str) -> Hole | Filling:
        try:
            return self._variables[name]
        except KeyError:
            there = ", ".join(map(repr, self._variables)) or "none yet"
            raise UnknownVariable(
                f"This state has no variable {name!r}. Its variables: {there}."
            ) from None

    # ------------------------------------------------------------ branches

    def fork(self, n: int = 1) -> "Forks":
        """Copies that go on from here, side by side; what they have in common is computed once.

        They see the variables that there are so far. What happens in one is seen by no other.
        """
        if n < 1:
            raise ProgramError(f"fork needs at least one branch, not {n}.")
        branches = [self._branch_off() for _ in range(n)]
        self._run.record.forks.append(BranchesRecord(tuple(one._branch for one in branches)))
        return Forks(self, branches)

    def copy(self) -> "State":
        """One copy that goes on from here."""
        copy: State = self.fork(1)[0]
        return copy

    def cancel(self) -> None:
        """Give up the calls that this state started. Other branches go on, unless they wait for these."""
        for hole in self._own_holes:
            hole.future.cancel()

    @contextlib.contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """``with s.waiting(30):``: the calls inside are followed by a pause, such as that of a slow tool, so that
        the cache can plan for it."""
        before, self._next_use_s = self._next_use_s, seconds
        try:
            yield
        finally:
            self._next_use_s = before

    def _branch_off(self) -> "State":
        branch = State(self._run, f"{self._branch}.{self._num_forks}")
        self._num_forks += 1
        branch._transcript = self._transcript
        branch._variables = dict(self._variables)
        branch._next_use_s = self._next_use_s
        return branch


class Forks(Sequence[State]):
    """The branches of one :meth:`State.fork`. As a context manager it joins them, or cancels them at an error."""

    def __init__(self, parent: State, branches: list[State]) -> None:
        self._parent = parent
        self._branches = branches
        self._inherited = dict(parent._variables)

    def __getitem__(self, index: Any) -> Any:
        return self._branches[index]

    def __setitem__(self, index: int, branch: State) -> None:
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.join()
        else:
            self.cancel()

    def _note_join(self) -> None:
        branches = tuple(branch._branch for branch in self._branches)
        self._parent._run.record.joins.append(BranchesRecord(branches))

    def _common_names(self) -> list[str]:
        """Variables that the branches made, and all of them have."""
        names = self._branches[0].variables()
        return [name for name in names if all(self._made(name, one) for one in self._branches)]

    def _made(self, name: str, branch: State) -> bool:
        """Whether a branch has a variable that is its own: a new one, or another in the place of an inherited one."""
        own = branch._variables.get(name)
        return own is not None and own is not self._inherited.get(name)
