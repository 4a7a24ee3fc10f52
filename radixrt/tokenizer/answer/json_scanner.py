"""Where does a JSON object end whose text comes in pieces?"""

import re

_OUTSIDE = re.compile(r'[{}\[\]"]')
_INSIDE_STRING = re.compile(r'["\\]')


class JsonScanner:
    """Counts brackets outside strings; what stands between them is not looked at."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._at = 0

    def end(self, text: str) -> int | None:
        """The offset after the closing bracket of the object with which ``text`` begins, once it is there.

        Args:
            text: all of it so far; later calls bring the same text, and more.
        """
        while found := (_INSIDE_STRING if self._in_string else _OUTSIDE).search(text, self._at):
            character, self._at = found.group(), found.end()
            if character == '"':
                self._in_string = not self._in_string
            elif character == "\\":
                if self._at == len(text):  # what it escapes has yet to come
                    self._at -= 1
                    return None
                self._at += 1
            else:
                self._depth += 1 if character in "{[" else -1
                if self._depth == 0:
                    return self._at
        self._at = len(text)
        return None
