"""The state of a program: its transcript, its variables, and its forks."""

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from radixrt.lang.backends.protocol import PartialValue
from radixrt.lang.errors import ProgramError, UnknownVariable
from radixrt.lang.expressions import (
    Documents,
    Expression,
    Gen,
    Message,
    Picture,
    Role,
    Select,
    Text,
    parts_of,
)
from radixrt.lang.runtime.calls import CallSite, arrange, choose, compute_ahead, generate
from radixrt.lang.runtime.placeholder import Completion, Placeholder
from radixrt.lang.runtime.reading import Pieces, TextSoFar, text_of_call, values_of_call
from radixrt.lang.runtime.run import Run
from radixrt.lang.runtime.transcript import Transcript, Turn, text_of
from radixrt.lang.tools import as_tools
from radixrt.lang.tracing.recorder import Trace
from radixrt.lang.tracing.records import CallRecord


class State:
    """The text or conversation of a program so far. ``+=`` appends; ``s["name"]`` waits for a
    variable's value.

    Calls of the model run in the background, each as soon as everything before it is computed. A
    state is either a conversation (everything in roles) or plain text (no roles).

    >>> import radixrt.lang as rl
    >>> from tests.lang.scripted_backend import ScriptedBackend
    >>> @rl.function
    ... def program(s):
    ...     s += rl.user("Where?")
    ...     s += rl.assistant(rl.gen("answer"))
    ...     forks = s.fork(2)
    ...     for fork, question in zip(forks, ["When?", "Why?"]):
    ...         fork += rl.user(question) + rl.assistant(rl.gen("answer"))
    ...     return forks.gather("answer")
    >>> program.run(backend=ScriptedBackend(str.upper)).result
    ['WHEN?', 'WHY?']
    """

    error: None = None
    """Set in the failed runs of a batch: see :class:`radixrt.lang.FailedRun`."""

    def __init__(self, run: Run, branch: str = "0") -> None:
        """Programs do not create states; :meth:`Function.run` and :meth:`fork` do."""
        self.result: Any = None
        """The result of the program's function."""
        self._run = run
        self._branch = branch
        self._transcript = Transcript()
        self._variables: dict[str, Placeholder | Completion] = {}
        """Variables that the program set itself are completions."""
        self._own_calls: list[Placeholder] = []
        self._in_block = False
        self._num_forks = 0
        self._next_use_s: float | None = None
        """Seconds of the pause that the program expects after its next calls."""

    # ------------------------------------------------------------ appending

    def __iadd__(self, expression: Expression | str) -> "State":
        for part in parts_of(expression):
            self._append(part)
        self._run.changes.increment()
        return self

    def system(self) -> contextlib.AbstractContextManager[None]:
        """``with s.system():`` puts everything that is appended inside into one system message."""
        return self._role("system")

    def user(self) -> contextlib.AbstractContextManager[None]:
        """``with s.user():`` puts everything that is appended inside into one user message."""
        return self._role("user")

    def assistant(self) -> contextlib.AbstractContextManager[None]:
        """``with s.assistant():`` puts everything that is appended inside into one assistant
        message."""
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
            case Picture():
                self._transcript = self._transcript.with_picture(expression)
            case Documents() if expression.is_fixed:
                ranks = range(len(expression.passages))
                self._transcript = self._transcript.with_part(expression.text(ranks))
                if expression.name is not None:
                    self[expression.name] = list(ranks)
            case Gen() | Select():
                self._transcript.check_model_may_speak()
                self._call(expression)
            case Documents():
                self._call(expression)
            case Message():
                with self._role(expression.role, expression.fields):
                    for part in expression.parts:
                        self._append(part)

    def _call(self, expression: Gen | Select | Documents) -> None:
        """Start a call of the backend, and append the placeholder of its answer."""
        if isinstance(expression, Gen) and expression.tools:
            self._transcript.check_tools_may_be_called()
        kind = type(expression).__name__.lower()
        what = f"{kind}({expression.name!r})" if expression.name else kind
        before = self._transcript.placeholders()
        after = before[-1].record if before else None
        record = CallRecord(expression.name, what, expression.source, self._branch, after)
        placeholder = Placeholder(record)
        site = CallSite(self._run, self._transcript, placeholder, self._next_use_s)
        transcript = self._transcript.with_part(placeholder)
        if isinstance(expression, Gen):
            placeholder.tells_values = expression.stream_values
            placeholder.python_type = expression.kind.python_type
            work = generate(site, expression, as_tools(expression.tools))
        elif isinstance(expression, Select):
            work = choose(site, expression)
        else:
            work = arrange(site, expression)
        self._run.start(placeholder, work)
        self._run.record.calls.append(record)
        self._transcript = transcript
        self._own_calls.append(placeholder)
        if expression.name is not None:
            self._variables[expression.name] = placeholder

    # ------------------------------------------------------------ reading

    def __getitem__(self, name: str) -> Any:
        """Wait for the value of a variable.

        Raises:
            UnknownVariable: the state has no such variable.
            LangError: the call failed; the error names the line of its gen.
        """
        return self._completion(name).value

    async def value(self, name: str) -> Any:
        """``await s.value("x")`` is ``s["x"]`` without blocking the event loop."""
        variable = self._variable(name)
        completion = variable if isinstance(variable, Completion) else await variable.read_async()
        return completion.value

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a variable; the transcript does not change."""
        self._variables[name] = Completion("", value)

    def __contains__(self, name: object) -> bool:
        return name in self._variables

    def variables(self) -> list[str]:
        """The names of the variables, in the order of their creation."""
        return list(self._variables)

    def text(self) -> str:
        """Wait for all calls; the text of the state. Of a conversation: a line for each message,
        after its role."""
        self.wait_for_all()
        if not self._transcript.turns:
            return text_of(self._transcript.text)
        return "\n".join(f"{turn.role}: {text_of(turn.parts)}" for turn in self._transcript.turns)

    def messages(self) -> list[dict[str, Any]]:
        """Wait for all calls; the messages of the conversation in OpenAI's form."""
        self.wait_for_all()
        return self._transcript.messages()

    def wait_for_all(self) -> None:
        """Wait until everything that was appended so far is computed.

        Raises:
            LangError: the first failure, in the order of the transcript.
        """
        for placeholder in self._transcript.placeholders():
            placeholder.wait()

    def finish_reason(self, name: str) -> str | None:
        """Wait for a variable; the reason why its answer ended: "stop", "length" or "tool_calls".
        None for other variables."""
        return self._completion(name).finish_reason

    def reasoning(self, name: str) -> str:
        """Wait for a variable; the model's reasoning before it, "" if the backend reports none."""
        return self._completion(name).reasoning

    def text_iter(self, name: str) -> Iterator[str]:
        """The pieces of a variable's text as they are generated. In a program that is not streamed,
        only a gen with ``stream=True`` has several pieces."""
        return iter(Pieces(self._text_of(name), self._run.changes))

    def text_aiter(self, name: str) -> AsyncIterator[str]:
        """:meth:`text_iter` for ``async for``."""
        return aiter(Pieces(self._text_of(name), self._run.changes))

    def values_iter(self, name: str) -> Iterator[PartialValue]:
        """The values inside the answer of a ``gen`` with ``stream_values=True``, each as soon as it
        is complete: those of objects and arrays after their parts, the whole last."""
        return iter(Pieces(self._values_of(name), self._run.changes))

    def values_aiter(self, name: str) -> AsyncIterator[PartialValue]:
        """:meth:`values_iter` for ``async for``."""
        return aiter(Pieces(self._values_of(name), self._run.changes))

    def calls(self) -> list[CallRecord]:
        """Records of the calls of the whole run so far, in program order."""
        return list(self._run.record.calls)

    def trace(self) -> Trace:
        """The trace of the whole run so far: ``print(state.trace())``,
        ``state.trace().save("out.json")``."""
        return Trace([self._run.record])

    def _text_of(self, name: str) -> TextSoFar:
        variable = self._variable(name)
        if isinstance(variable, Completion):
            raise ProgramError(f"{name!r} was set by the program, so it has no text that streams.")
        return text_of_call(variable)

    def _values_of(self, name: str) -> Iterator[PartialValue | None]:
        variable = self._variable(name)
        if isinstance(variable, Completion) or not variable.tells_values:
            raise ProgramError(f"values_iter({name!r}) needs a gen with stream_values=True.")
        return values_of_call(variable)

    def _completion(self, name: str) -> Completion:
        variable = self._variable(name)
        return variable if isinstance(variable, Completion) else variable.read()

    def _variable(self, name: str) -> Placeholder | Completion:
        try:
            return self._variables[name]
        except KeyError:
            there = ", ".join(map(repr, self._variables)) or "none yet"
            raise UnknownVariable(
                f"This state has no variable {name!r}. Its variables: {there}."
            ) from None

    # ------------------------------------------------------------ branches

    def fork(self, n: int = 1) -> "Forks":
        """Make copies that continue from here concurrently. Their common prefix is computed once.

        A copy has the variables of this state so far. Later changes to one state are not seen by
        the others.

        Raises:
            ProgramError: n is below 1.
        """
        if n < 1:
            raise ProgramError(f"fork needs at least one branch, not {n}.")
        return Forks(self, [self._branch_off() for _ in range(n)])

    def copy(self) -> "State":
        """One copy that continues from here."""
        copy: State = self.fork(1)[0]
        return copy

    def cancel(self) -> None:
        """Cancel the calls that this state started. Other branches continue, unless they wait for
        these calls."""
        for placeholder in self._own_calls:
            placeholder.future.cancel()

    def compute_ahead(self) -> None:
        """Let the server compute what was appended so far, in idle time, while the program does
        something else, such as a search. Waits for nothing, and changes no answer."""
        self._run.start_aside(compute_ahead(self._run, self._transcript))

    @contextlib.contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """``with s.waiting(30):`` tells the server's cache that the calls inside are followed by a
        pause, such as a slow tool.

        Args:
            seconds: the expected length of the pause.
        """
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
    """The copies of one :meth:`State.fork`. As a context manager it joins them, or cancels them
    after an error."""

    def __init__(self, parent: State, branches: list[State]) -> None:
        self._parent = parent
        self._branches = branches
        self._inherited = dict(parent._variables)

    def __getitem__(self, index: Any) -> Any:
        return self._branches[index]

    def __setitem__(self, index: int, branch: State) -> None:
        """Needed by ``forks[0] += ...``, which assigns the same branch again.

        Raises:
            ProgramError: another branch is assigned.
        """
        if branch is not self._branches[index]:
            raise ProgramError("The branches of a fork can't be replaced; append to them with +=.")

    def __iadd__(self, expression: Expression | str) -> "Forks":
        """``forks += ...`` appends to each branch; each makes its own calls."""
        for branch in self._branches:
            branch += expression
        return self

    def __len__(self) -> int:
        return len(self._branches)

    def gather(self, name: str) -> list[Any]:
        """Wait for a variable of all branches; its values, in the order of the branches.

        Raises:
            LangError: a branch has no such variable, or its call failed.
        """
        return [branch[name] for branch in self._branches]

    async def gather_async(self, name: str) -> list[Any]:
        """:meth:`gather` without blocking the event loop."""
        return [await branch.value(name) for branch in self._branches]

    def join(self) -> None:
        """Wait for all branches. The parent gets each variable that all of them made, as the list
        of its values.

        Raises:
            LangError: the first failure, in the order of the branches.
        """
        for branch in self._branches:
            branch.wait_for_all()
        for name in self._common_names():
            self._parent[name] = [branch[name] for branch in self._branches]

    def cancel(self) -> None:
        """Cancel the calls of all branches."""
        for branch in self._branches:
            branch.cancel()

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.join()
        else:
            self.cancel()

    def _common_names(self) -> list[str]:
        """Variables that all branches made."""
        names = self._branches[0].variables()
        return [name for name in names if all(self._made(name, one) for one in self._branches)]

    def _made(self, name: str, branch: State) -> bool:
        """Whether a branch made a variable itself, new or in the place of an inherited one."""
        own = branch._variables.get(name)
        return own is not None and own is not self._inherited.get(name)
