"""Splits the tool calls off an answer's content."""

from radixrt.messages.message import ToolCall
from radixrt.parsers.scanner import NoCallError, Reading, Scanner
from radixrt.parsers.tool_calls.format import CallSink, ToolCallFormat, ToolSchemas


class ToolCallParser:
    """Splits an answer's text into content and tool calls while it is generated.

    Args:
        written: the model's format of calls; None: the text has no calls.
        in_pieces: return a call as soon as its name is known, and then its arguments in pieces, as
            calls of the same index without a name. Only for text that a grammar constrains to calls
            of this format, because sent deltas are final. Otherwise a call is returned when it is
            complete, and text that only resembles a call stays content.
        calls_alone: an answer that does not begin with a call contains no call. Only for text that
            a grammar constrains so; a string in its JSON may resemble a call.
        stray_marks: further texts that are dropped from the content, such as the closing tag of
            reasoning.
        tools: the schemas of the arguments, which give the types of arguments that the format
            writes without quotes.
    """

    def __init__(
        self,
        written: ToolCallFormat | None,
        *,
        in_pieces: bool = False,
        calls_alone: bool = False,
        stray_marks: tuple[str, ...] = (),
        tools: ToolSchemas | None = None,
    ) -> None:
        self._written = written
        self._calls_alone = calls_alone
        self._stray_marks = stray_marks
        self._tools = tools or {}
        self._calls = CallSink(in_pieces=in_pieces)
        self._scanner = Scanner()
        self._content: list[str] = []
        self._gap: str | None = None
        """Text that may separate the last call from the next one; it is content only if content
        follows."""
        self._num_refused = 0
        """Openings in the content whose closings are not there yet."""
        self._reading = self._read()
        next(self._reading)

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the content and the calls that are now certain."""
        self._scanner.unread += text
        next(self._reading, None)
        content, self._content = "".join(self._content), []
        return content, self._calls.take()

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The rest of a complete answer. Models often omit the last closing tag."""
        self._scanner.is_complete = True
        return self.push("")

    def _read(self) -> Reading[None]:
        text, written = self._scanner, self._written
        openings = () if written is None else written.openings
        closings = () if written is None else written.closings
        strays = self._stray_marks
        if written is not None and (self._calls_alone or written.begins_answer):
            text.record()
            yield from text.blank()
            opening = yield from text.accept(*openings)
            begun = text.recorded()
            if opening:
                self._add_content(begun.removesuffix(opening))
                yield from self._call(written, opening)
            else:
                text.give_back(begun)
            if not opening and self._calls_alone:
                self._drop_begun(openings)
                openings = closings = strays = ()
            elif written.begins_answer:
                openings = ()
        while not text.is_over:
            before, mark = yield from text.piece(*openings, *closings, *strays)
            self._add_content(before)
            if written is not None and mark in openings:
                yield from self._call(written, mark)
            elif mark in closings and self._num_refused:
                self._num_refused -= 1
                self._add_content(mark)

    def _call(self, written: ToolCallFormat, opening: str) -> Reading[None]:
        text, calls = self._scanner, self._calls
        num_calls = calls.num_calls
        text.give_back(opening)
        text.record()
        text.take(len(opening))
        try:
            yield from written.read(text, opening, calls, self._tools)
            text.recorded()
            self._drop_begun(written.closings)
        except NoCallError:
            read = text.recorded()
            if calls.has_sent_a_part or (calls.in_pieces and text.is_complete):
                calls.drop()  # cut off; the grammar lets nothing else happen
                text.take(len(text.unread))
            else:
                calls.drop()
                if calls.num_calls == num_calls:
                    self._num_refused += 1
                    self._add_content(opening)
                    read = read.removeprefix(opening)
                text.give_back(read)
        if calls.num_calls > num_calls:
            self._gap = ""

    def _drop_begun(self, marks: tuple[str, ...]) -> None:
        """Drop the beginning of a mark at which the text of a constrained call is cut off."""
        text, rest = self._scanner, self._scanner.unread.lstrip()
        is_cut_off = self._calls.in_pieces and text.is_complete
        if is_cut_off and any(mark.startswith(rest) for mark in marks):
            text.take(len(text.unread))

    def _add_content(self, text: str) -> None:
        if self._gap is not None:
            self._gap += text
            separator = "" if self._written is None else self._written.separator.strip()
            if separator.startswith(self._gap.strip()):
                return
            text, self._gap = self._gap, None
        self._content.append(text)
