"""Finds the tokens that spell the beginning of a given text, so that a forbidden text can't come back in other tokens."""

import bisect
from collections.abc import Iterable

_MAX_BEYOND = 64
"""Tokens that end a value and go on behind it; more would make the message long."""


class TokenTexts:
    """The texts of a vocabulary, searchable by prefix."""

    def __init__(self, texts: Iterable[tuple[int, str]]) -> None:
        """``texts``: token ids with the text each adds in the middle of an answer; special tokens left out."""
        self._ids: dict[str, list[int]] = {}
        for token_id, text in texts:
            if text and "\ufffd" not in text:
                self._ids.setdefault(text, []).append(token_id)
        self._sorted = sorted(self._ids)
        self._longest = max(map(len, self._ids), default=0)

    def along(self, text: str) -> list[tuple[int, int]]:
        """Tokens whose text is a prefix of ``text``, and tokens that contain all of it and continue as JSON does after a value.

        Returns:
            Token ids, with the lengths of their texts in characters.
        """
        if not text:
            return []
        found: list[tuple[int, int]] = []
        for length in range(1, min(len(text), self._longest) + 1):
            found += [(token, length) for token in self._ids.get(text[:length], ())]
        if len(text) < self._longest:
            found += self._beyond(text)
        return found

    def _beyond(self, text: str) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        at = bisect.bisect_right(self._sorted, text)
        while at < len(self._sorted) and self._sorted[at].startswith(text):
            candidate = self._sorted[at]
            if candidate[len(text)] in ",]} \n\r\t":
                found += [(token, len(candidate)) for token in self._ids[candidate]]
            if len(found) >= _MAX_BEYOND:
                break
            at += 1
        return found
