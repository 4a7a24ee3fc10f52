"""Learns how answers go on where a copied stretch of their prompts ends.

An answer that copies a value out of "The color of X is blue." and goes on with `",` meets the source's full stop each time. So of
each token at which copies have ended it is noted which token came in its place, and whether it did so again.
"""

from collections import OrderedDict
from dataclasses import dataclass

MAX_TOKENS = 256
"""Tokens whose turns are remembered under a salt: those met last."""

MAX_SALTS = 32
"""Salts whose turns are remembered: those used last."""

MIN_TRUST, MAX_TRUST = 2, 4
"""Between these, a turn is drafted."""


@dataclass(slots=True)
class Turn:
    """The token that comes in place of another."""

    token: int
    trust: int = 1
    """More after each time that it came, less after each time that another did."""


class Turns:
    """Those of one cache salt."""

    def __init__(self) -> None:
        self.by_token: OrderedDict[int, Turn] = OrderedDict()
        """By the token of the source."""

    def first_in(self, token_ids: list[int]) -> int | None:
        """The place of the first of these tokens that a turn is expected to replace; None: there is none."""
        turns = self.by_token
        for place, token in enumerate(token_ids):
            if (turn := turns.get(token)) is not None and turn.trust >= MIN_TRUST:
                return place
        return None

    def observe(self, expected: int, token: int, *, copies: bool) -> None:
        """Note the token that came where the source has another one, or the same.

        Args:
            copies: the tokens before agreed with the source, and not by chance.
        """
        turn = self.by_token.get(expected)
        if turn is None:
            if copies and token != expected:
                self.by_token[expected] = Turn(token)
                if len(self.by_token) > MAX_TOKENS:
                    self.by_token.popitem(last=False)
        elif turn.token == token:
            turn.trust = min(turn.trust + 1, MAX_TRUST)
            self.by_token.move_to_end(expected)
        elif turn.trust > 1:
            turn.trust -= 1
        elif token == expected:
            del self.by_token[expected]
        else:
            turn.token = token


class TurnsBySalt:
    """The turns of all salts. None is shared by two of them: a token that is drafted can be learned from the time of an answer."""

    def __init__(self) -> None:
        self._by_salt: OrderedDict[str, Turns] = OrderedDict()

    def of(self, salt: str | None) -> Turns:
        """Those of a salt; new ones for None."""
        if salt is None:
            return Turns()
        turns = self._by_salt.pop(salt, None) or Turns()
        self._by_salt[salt] = turns
        if len(self._by_salt) > MAX_SALTS:
            self._by_salt.popitem(last=False)
        return turns
