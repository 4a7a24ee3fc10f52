"""Cache hints of a request: the public class, its validation and its wire form."""

import math
from typing import Annotated, get_args

import msgspec

from radixrt.base.convert import converted
from radixrt.base.errors import RequestError, shown
from radixrt.messages.requests import CacheHints, Retention, RetentionLevel

LONGEST_SESSION = 256
SESSION_HEADER = "x-radixrt-session"
"""A header of a request that stands for ``session``, unless its body names one."""

"""Characters."""
MAX_PIN_S = 3600.0
"""Longest time of a lease."""
LONGEST_S = 1e9
"""Some thirty years, in seconds: beyond it a number is a mistake."""

_LEVELS: tuple[RetentionLevel, ...] = get_args(RetentionLevel)


class CacheHint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``cache`` field of a request. Hints change the contents of the cache, never an answer.

    Call :meth:`validate` on values from outside.
    """

    retain: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(_LEVELS)})] | None = None
    """Retention level of the KV: "none" is evicted first, "high" last; "default" is the level
    without a hint."""
    ttl_s: float | None = None
    """Seconds from the end of the request until the level is "default" again; None: it stays."""
    until_token: int | None = None
    """Number of leading tokens of prompt and answer that ``retain`` is for; None: all."""
    next_use_s: float | None = None
    """Seconds from the end of the request until the client expects to continue it."""
    session: str | None = None
    """Name of the request's session, whose KV can be released all at once."""
    answers: bool | None = None
    """False: compute the answer, also where an equal request runs or has ended."""
    next_turn: bool | None = None
    """Compute the beginning of a chat's next turn behind the answer, in idle time; None: if the
    server does."""
    explain: bool | None = None
    """Explain in the answer which tokens of the prompt did not come from the cache, and why."""

    def validate(self, field: str = "cache") -> "CacheHint":
        """Return this hint with each value of its declared type.

        Raises:
            RequestError: a value is of another type, out of its range or without effect; names the
                field.
        """
        checked = converted(msgspec.structs.asdict(self), CacheHint, field)
        if checked.retain is None:
            for name in ("ttl_s", "until_token"):
                if getattr(checked, name) is not None:
                    raise RequestError(
                        f"{field}.{name} says for how long or how far to retain, but {field}.retain is missing: set "
                        f'it to "high" or "none", or leave {name} out.',
                        param=f"{field}.{name}",
                    )
        elif checked.retain not in _LEVELS:
            raise RequestError(
                f"{field}.retain must be one of {', '.join(_LEVELS)}, not {shown(checked.retain)}.",
                param=f"{field}.retain",
            )
        check_seconds(checked.ttl_s, f"{field}.ttl_s")
        if checked.until_token is not None and not 1 <= checked.until_token < 2**31:
            raise RequestError(
                f"{field}.until_token must be a number of tokens from 1 to {2**31 - 1}, not "
                f"{checked.until_token}.",
                param=f"{field}.until_token",
            )
        if checked.next_use_s is not None and not 0 <= checked.next_use_s <= LONGEST_S:
            raise RequestError(
                f"{field}.next_use_s must be a number of seconds from 0 to {LONGEST_S:.0f}, not "
                f"{checked.next_use_s}.",
                param=f"{field}.next_use_s",
            )
        if checked.session is not None:
            check_session(checked.session, f"{field}.session")
        return checked

    def as_hints(self) -> CacheHints:
        """The wire form of a valid hint."""
        retain = []
        if self.retain is not None:
            level = next(level for level in _LEVELS if level == self.retain)
            retain.append(Retention(level, self.until_token, self.ttl_s))
        return CacheHints(
            retain=retain,
            next_use_s=self.next_use_s,
            session=self.session or "",
            explain=bool(self.explain),
        )


def hints_of(hint: CacheHint | None) -> CacheHints:
    """The wire form of an optional hint.

    Raises:
        RequestError: the hint is not valid; names the field.
    """
    return CacheHints() if hint is None else hint.validate().as_hints()


def shares_answers(hint: CacheHint | None, disabled: bool) -> bool:
    """Whether a request may get the answer that was computed for an equal one.

    Args:
        disabled: the setting ``disable_shared_answers``.
    """
    return not disabled and (hint is None or hint.answers is not False)


def prepares_next_turn(hint: CacheHint | None, default: bool, idle_share: float) -> bool:
    """Whether the beginning of a chat's next turn is computed behind its answer.

    Args:
        default: the setting ``prepare_next_turns``.
        idle_share: that setting; 0: nothing is computed in idle time.
    """
    asked = None if hint is None else hint.next_turn
    return idle_share > 0 and (default if asked is None else asked)


def check_seconds(seconds: float | None, field: str) -> None:
    """Raises:
    RequestError: the duration is out of its range.
    """
    if seconds is not None and not (0 < seconds <= LONGEST_S and math.isfinite(seconds)):
        raise RequestError(
            f"{field} must be a number of seconds above 0, at most {LONGEST_S:.0f}, not {seconds}.",
            param=field,
        )


def check_pin_seconds(seconds: float) -> None:
    """Raises:
    RequestError: the duration of the lease is out of its range.
    """
    if not 0 < seconds <= MAX_PIN_S:
        raise RequestError(
            f"ttl_s is {seconds:g}; a pin lasts more than 0 and at most {MAX_PIN_S:g} seconds.",
            param="ttl_s",
        )


def check_session(session: str, field: str) -> None:
    """Raises:
    RequestError: the name is empty or too long.
    """
    if not 0 < len(session) <= LONGEST_SESSION:
        raise RequestError(
            f"{field} must have 1 to {LONGEST_SESSION} characters, not {len(session)}.", param=field
        )
