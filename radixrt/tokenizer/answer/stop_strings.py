"""Finds stop strings in the text of an answer, also across token borders."""


class StopStringFinder:
    """Passes text through, but holds back an end that may be the beginning of a stop string.

    >>> stops = StopStringFinder(("END",))
    >>> stops.push("a cat E"), stops.push("ND and more")
    (('a cat ', None), ('', 'END'))

    The answer ends before the stop string that is complete first; of several that are complete at
    the same character, before the longest. The outcome does not depend on how the text is cut in
    pieces.
    """

    def __init__(self, stops: tuple[str, ...], include_in_output: bool = False) -> None:
        self._stops = stops
        self._include_in_output = include_in_output
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is now certain to belong to the answer, and the stop string if one
        is complete. After a stop string, nothing more may be pushed."""
        if not self._stops:
            return text, None
        text = self._held + text
        found = self._first_match(text)
        if found is not None:
            start, stop = found
            self._held = ""
            return text[: start + len(stop)] if self._include_in_output else text[:start], stop
        certain = len(text) - self._undecided_length(text)
        self._held = text[certain:]
        return text[:certain], None

    def flush(self) -> str:
        """The text that was held back: no more will come, so it is not a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _undecided_length(self, text: str) -> int:
        """Length of the longest end of the text that begins some stop string."""
        earliest = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < earliest:
                if stop.startswith(text[start:]):
                    earliest = start
                else:
                    start = text.find(stop[0], start + 1)
        return len(text) - earliest
