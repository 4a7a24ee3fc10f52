"""Learns how answers go on where a copied stretch of their prompts ends.

An answer that copies a value out of "The color of X is blue." and goes on with `",` meets the
source's full stop each time. So of each token at which copies have ended it is noted which token
came in its place, and whether it did so again.
"""

from collections import OrderedDict
from dataclasses import dataclass

MAX_TOKENS = 256
"""Tokens whose exits are remembered under a salt: those met last."""

MAX_SALTS = 32
"""Salts whose exits are remembered: those used last."""

MIN_TRUST, MAX_TRUST = 2, 4
"""Between these, an exit is drafted."""


@dataclass(slots=True)
class CopyExit:
    """The token that comes in place of another where a copy ends."""

    token: int
    trust: int = 1
    """More after each time that it came, less after each time that another did."""


class CopyExits:
    """The exits under one cache salt."""

    def __init__(self) -> None:
        self.by_token: OrderedDict[int, CopyExit] = OrderedDict()
        """The exits by the token of the source."""

    def first_in(self, token_ids: list[int]) -> int | None:
        """The place of the first of these tokens at which a copy is expected to end; None: there is
        none."""
        for place, token in enumerate(token_ids):
            if (found := self.by_token.get(token)) is not None and found.trust >= MIN_TRUST:
                return place
        return None

    def observe(self, expected: int, token: int, *, copies: bool) -> None:
        """Note the token that came where the source has another one, or the same.

        Args:
            expected: the token of the source.
            token: the token of the answer.
            copies: the tokens before agreed with the source, and not by chance.
        """
        known = self.by_token.get(expected)
        if known is None:
            if copies and token != expected:
                self.by_token[expected] = CopyExit(token)
                if len(self.by_token) > MAX_TOKENS:
                    self.by_token.popitem(last=False)
        elif known.token == token:
            known.trust = min(known.trust + 1, MAX_TRUST)
            self.by_token.move_to_end(expected)
        elif known.trust > 1:
            known.trust -= 1
        elif token == expected:
            del self.by_token[expected]
        else:
            known.token = token


class CopyExitsBySalt:
    """The exits of all salts. None is shared by two of them: a token that is drafted can be learned
    from the time of an answer."""

    def __init__(self) -> None:
        self._by_salt: OrderedDict[str, CopyExits] = OrderedDict()

    def for_salt(self, salt: str | None) -> CopyExits:
        """The exits of a salt; new ones for None."""
        if salt is None:
            return CopyExits()
        exits = self._by_salt.pop(salt, None) or CopyExits()
        self._by_salt[salt] = exits
        if len(self._by_salt) > MAX_SALTS:
            self._by_salt.popitem(last=False)
        return exits
