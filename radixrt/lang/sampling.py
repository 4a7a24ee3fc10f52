"""Sampling settings of a gen, a run and a function."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from radixrt.lang.errors import ProgramError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings. None: the run's setting applies, then the function's, then the server's
    default.

    >>> Sampling(temperature=0).over(Sampling(temperature=1.0, max_tokens=8)).given()
    {'max_tokens': 8, 'temperature': 0}
    """

    max_tokens: int | None = None
    """Most tokens of an answer. Default: 128 in plain text, in a conversation the rest of the
    context."""
    min_tokens: int | None = None
    temperature: float | None = None
    """0: greedy."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    """The answer ends before the first of these texts."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, list):
            object.__setattr__(self, "stop", tuple(self.stop))

    def given(self) -> dict[str, Any]:
        """The settings that are not None, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def over(self, other: "Sampling") -> "Sampling":
        """These settings, and the other's where these are None."""
        return Sampling(**(other.given() | self.given()))


def sampling_of(what: str, settings: dict[str, Any]) -> Sampling:
    """Settings from keyword arguments.

    Args:
        what: the called function's name, for errors.

    Raises:
        ProgramError: a setting is unknown.
    """
    unknown = sorted(settings.keys() - Sampling.__dataclass_fields__.keys())
    if unknown:
        known = ", ".join(Sampling.__dataclass_fields__)
        raise ProgramError(
            f"{what} has no setting {', '.join(unknown)}; its sampling settings are {known}."
        )
    return Sampling(**settings)
