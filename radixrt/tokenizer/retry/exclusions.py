"""Forbids the token paths that failed, from the point where an answer was taken back.

A trie holds the failed paths. A path is forbidden *early*: when the text ``red`` failed, every
token that begins to spell it (``r``, ``re``, ``red``) is forbidden, so the model leaves the path at
its first decision. This forbids too much where ``rose`` is the only other value. The worker ignores
a set that would forbid every token. If a forbidden token comes nevertheless, the trie is corrected
from the end of the path to its start:

- if some of the tokens forbidden there only begin a failed text, that text is forbidden one token
  later from now on;
- if all of them end failed texts, the token before them leads only to failures, and is forbidden
  for good.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence

from radixrt.tokenizer.retry.backtracking import BacktrackPoint, FailedSpan

_MAX_BEYOND = 64
"""Tokens that end a value and go on behind it; more would make the message long."""


class TokenTexts:
    """The texts of a vocabulary, searchable by prefix."""

    def __init__(self, texts: Iterable[tuple[int, str]]) -> None:
        """``texts``: token ids with the text each adds in the middle of an answer; special tokens
        left out."""
        self._ids: dict[str, list[int]] = {}
        for token_id, text in texts:
            if text and "\ufffd" not in text:
                self._ids.setdefault(text, []).append(token_id)
        self._sorted = sorted(self._ids)
        self._longest = max(map(len, self._ids), default=0)

    def along(self, text: str) -> list[tuple[int, int]]:
        """Tokens whose text is a prefix of ``text``, and tokens that contain all of it and continue
        as JSON does after a value.

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


TokensAlong = Callable[[str], Sequence[tuple[int, int]]]
"""See :meth:`radixrt.tokenizer.retry.exclusions.TokenTexts.along`."""
MAX_SPELLINGS = 64
"""Spellings of one text; only long runs of characters have more."""
MAX_PATH_TOKENS = 128
"""Longer paths are not sent to the worker; a value that they would forbid fails its check again."""


class _Node:
    """A token after those on the way to it."""

    __slots__ = ("after", "forbidden", "later", "rest")

    def __init__(self) -> None:
        self.after: dict[int, _Node] = {}
        self.forbidden = False
        self.later = False
        """Must not be forbidden itself: later tokens decide."""
        self.rest = ""
        """What the failed text has behind this token."""

    def child(self, token: int) -> "_Node":
        return self.after.setdefault(token, _Node())

    def forbid(self, rest: str) -> None:
        self.rest = rest if not self.forbidden else min(rest, self.rest, key=len)
        self.forbidden = True


class Exclusions:
    """The failed paths of one answer, from the earliest point of return on."""

    def __init__(self, tokens_along: TokensAlong | None) -> None:
        self._tokens_along = tokens_along
        self._root = _Node()
        self._base = -1  # output tokens before the root; -1: there is nothing yet

    def add(self, tokens: list[int], first: int, failed: FailedSpan, point: BacktrackPoint) -> None:
        """Forbid the failed path at each depth of ``point``, however it is spelled in tokens.

        Args:
            tokens: of the answer, including the failed value.
            first: number of tokens before the failed value.
        """
        self._reach_back_to(first + point.depths[0], tokens)
        start = first + point.depths[0]
        for depth in point.depths:
            node = self._walk(tokens[self._base : first + depth])
            rest = failed.text[failed.token_starts[depth] : point.end]
            lead = point.lead if first + depth == start else 0
            length = self._token_length(failed, depth)
            if length > lead or lead == 0 or self._tokens_along is None:
                self._forbid(node, failed.token_ids[depth], rest[length:])
            self._forbid_text(node, rest, lead)
        for text in point.others:
            self._forbid_text(self._walk(tokens[self._base : start]), text, point.lead)

    def conclude(self, tokens: list[int]) -> frozenset[int]:
        """Learn from forbidden tokens that came nevertheless.

        Returns:
            Positions in ``tokens`` at which nothing else can come.
        """
        if self._base < 0:
            return frozenset()
        way = [self._root]
        for token in tokens[self._base :]:
            if token not in way[-1].after:
                break
            way.append(way[-1].after[token])
        dead = set()
        for index in [index for index in range(len(way) - 1, 0, -1) if way[index].forbidden]:
            siblings = [node for node in way[index - 1].after.values() if node.forbidden]
            too_early = [node for node in siblings if node.rest]
            for node in too_early:
                node.forbidden, node.later = False, True
                self._forbid_text(node, node.rest, 0)
            if not too_early:
                dead.add(self._base + index - 1)
                if index > 1:
                    way[index - 1].forbidden, way[index - 1].rest = True, ""
        return frozenset(dead)

    def after(self, tokens: list[int]) -> list[list[int]]:
        """The forbidden paths behind ``tokens``, from there on."""
        node = self._find(tokens[self._base :]) if 0 <= self._base <= len(tokens) else None
        paths: list[list[int]] = []
        todo: list[tuple[list[int], _Node]] = [([], node)] if node else []
        while todo:
            path, node = todo.pop()
            if path and node.forbidden:
                paths.append(path)
            if len(path) < MAX_PATH_TOKENS:
                todo += [([*path, token], child) for token, child in node.after.items()]
        return paths

    def forget_before(self, confirmed: int, tokens: list[int]) -> None:
        """No rewind will go back before the first ``confirmed`` tokens."""
        if 0 <= self._base < confirmed:
            self._root = self._find(tokens[self._base : confirmed]) or _Node()
            self._base = confirmed

    # ------------------------------------------------------------ the trie

    def _reach_back_to(self, start: int, tokens: list[int]) -> None:
        """Tokens from ``start`` on may change: write them into the trie if it begins behind."""
        if self._base < 0:
            self._base = start
        while self._base > start:
            self._base -= 1
            root = _Node()
            root.after[tokens[self._base]] = self._root
            self._root = root

    def _find(self, path: Sequence[int]) -> _Node | None:
        node: _Node | None = self._root
        for token in path:
            node = node.after.get(token) if node else None
        return node

    def _walk(self, path: Sequence[int]) -> _Node:
        node = self._root
        for token in path:
            node = node.child(token)
        return node

    # ------------------------------------------------------------ spelling

    def _forbid(self, node: _Node, token: int, rest: str) -> None:
        child = node.child(token)
        if child.later and rest:
            self._forbid_text(child, rest, 0)
        else:
            child.forbid(rest)

    def _forbid_text(self, node: _Node, text: str, lead: int) -> None:
        """Forbid the tokens along ``text`` that reach beyond its first ``lead`` characters."""
        for child, rest in self._spellings(node, text, lead):
            child.forbid(rest)

    def _spellings(self, node: _Node, text: str, lead: int) -> Iterator[tuple[_Node, str]]:
        if self._tokens_along is None:
            return
        todo = [(node, 0)]
        for _ in range(MAX_SPELLINGS):
            if not todo:
                return
            node, at = todo.pop()
            for token, length in self._tokens_along(text[at:]):
                child, rest = node.child(token), text[at + length :]
                if rest and (at + length <= lead or child.later):
                    todo.append((child, at + length))
                else:
                    yield child, rest

    @staticmethod
    def _token_length(failed: FailedSpan, depth: int) -> int:
        """Characters of the text of one token."""
        ends = [*failed.token_starts[depth + 1 :], len(failed.text)]
        return ends[0] - failed.token_starts[depth]
