"""The terminal of a chat: reads questions and commands, prints answers as they come."""

import contextlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from radixrt.cli.chat.client import ChatError, Conversation

_HELP = """\
/system TEXT   set the system prompt; without TEXT: remove it
/schema FILE   hold the answers to a JSON schema; without FILE: remove it
/image FILE    send an image with the next question
/stats         show the tokens of this chat, and their cached share
/clear         forget the messages
/save FILE     write the chat as the body of a chat request
/bye           end the chat, as Ctrl-D does
A question of several lines begins and ends with \"\"\". Ctrl-C stops an answer."""

_NO_TEMPLATE = (
    "This model has no chat template, so it is no chat: it continues each text that you type. --chat-template FILE gives it a "
    "template."
)

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters but tab and newline: in an answer, they could change the terminal."""

_QUOTES = '"""'


class Terminal:
    """A chat between a terminal and a conversation."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._answers = Console(highlight=False, soft_wrap=True)
        self._notes = Console(highlight=False, soft_wrap=True, stderr=True)
        self._progress = ""
        """What stands in the line of the cursor, while a long prompt is computed."""

    # ------------------------------------------------------------ one answer

    def answer_once(self, question: str) -> int:
        """Print one answer; returns the exit status."""
        try:
            self._print_answer(question)
        except ChatError as error:
            print(f"radixrt: {error}", file=sys.stderr)
            return 1
        return 0

    def _print_answer(self, question: str) -> None:
        """Raises ChatError if there is no answer."""
        reasons, self._progress = False, ""
        for piece in self._conversation.ask(question):
            self._show_progress(piece.text if piece.kind == "progress" else "")
            if piece.kind == "progress":
                continue
            is_reasoning = piece.kind == "reasoning"
            if reasons and not is_reasoning:
                self._notes.print()
            reasons = is_reasoning
            console = self._notes if is_reasoning else self._answers
            self._write(console, piece.text, "dim italic" if is_reasoning else None)
        self._answers.print()
        if self._notes.is_terminal:
            self._notes.print(self._conversation.answers[-1].line(), style="dim", markup=False)

    def _show_progress(self, progress: str) -> None:
        """Show how much of the prompt is computed, in place of what was shown before; "" ends
        it."""
        text = f"Reading the prompt: {progress}" if progress else ""
        if self._notes.is_terminal and text != self._progress:
            self._notes.file.write(f"\r{' ' * len(self._progress)}\r{text}")
            self._notes.file.flush()
            self._progress = text

    @staticmethod
    def _write(console: Console, text: str, style: str | None) -> None:
        if console.is_terminal:
            console.print(
                _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text), end="", style=style, markup=False
            )
        else:
            console.file.write(text)
        console.file.flush()

    # ------------------------------------------------------------ a chat

    def run(self) -> int:
        """Ask and answer until the end of the input; returns the exit status."""
        if self._conversation.completes:
            self._notes.print(_NO_TEMPLATE, style="yellow", markup=False)
        self._notes.print(
            f"Chat with {self._conversation.model}. /help lists the commands; Ctrl-D ends it.",
            markup=False,
        )
        with _line_history():
            while (line := self._read()) is not None:
                try:
                    if line.startswith("/"):
                        if not self._command(line):
                            break
                    elif line.strip():
                        self._print_answer(line)
                except ChatError as error:
                    self._notes.print(str(error), style="yellow", markup=False)
                except KeyboardInterrupt:
                    self._notes.print("\n(stopped)", style="dim")
        return 0

    def _read(self) -> str | None:
        """The next question or command; None at the end of the input."""
        while True:
            try:
                line = input(">>> ")
                if not line.startswith(_QUOTES):
                    return line
                lines = [line.removeprefix(_QUOTES)]
                while not lines[-1].rstrip().endswith(_QUOTES):
                    lines.append(input("... "))
                return "\n".join(lines).rstrip().removesuffix(_QUOTES)
            except EOFError:
                self._notes.print()
                return None
            except KeyboardInterrupt:
                self._notes.print("\nCtrl-D ends the chat.", style="dim")

    def _command(self, line: str) -> bool:
        """Carry out a command.

        Returns:
            False: the chat ends.

        Raises:
            ChatError: it failed.
        """
        name, _, argument = line[1:].partition(" ")
        if name in ("bye", "exit", "quit"):
            return False
        commands: dict[str, Callable[[str], str]] = {
            "system": self._set_system,
            "schema": self._set_schema,
            "image": self._attach,
            "stats": lambda _: self._conversation.totals(),
            "clear": self._clear,
            "save": self._save,
            "help": lambda _: _HELP,
        }
        if name not in commands:
            raise ChatError(f"There is no command /{name}.\n{_HELP}")
        self._notes.print(commands[name](argument.strip()), style="dim", markup=False)
        return True

    def _set_system(self, text: str) -> str:
        self._conversation.system = text or None
        return "System prompt set." if text else "System prompt removed."

    def _set_schema(self, file: str) -> str:
        if file:
            self._conversation.set_schema(file)
            return f"Answers follow {file}."
        self._conversation.schema = None
        return "Schema removed."

    def _attach(self, file: str) -> str:
        if not file:
            raise ChatError("/image needs the name of a file.")
        self._conversation.attach(file)
        return f"{file} goes with the next question."

    def _clear(self, _: str) -> str:
        self._conversation.clear()
        return "History cleared."

    def _save(self, file: str) -> str:
        if not file:
            raise ChatError("/save needs the name of a file.")
        self._conversation.save(file)
        return f"Saved as {file}."


@contextlib.contextmanager
def _line_history():
    """Edit lines with readline where Python has it; the questions of earlier chats come back with
    the arrow keys."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    file = state / "radixrt" / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.set_history_length(1000)
            file.touch(mode=0o600)
            readline.write_history_file(file)
