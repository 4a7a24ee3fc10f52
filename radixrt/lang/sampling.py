"""How are tokens to be chosen? Settings of one gen, of a function and of a run, the nearest winning."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from radixrt.lang.errors import ProgramError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings; None leaves one to whoever comes next: the gen, the run, the function, the server."""

    max_tokens: int | None = None
    """Most tokens of an answer. In plain text the default is 128; in a conversation, what the context leaves."""
    min_tokens: int | None = None
    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    """The answer ends before the first of these."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, list):
            object.__setattr__(self, "stop", tuple(self.stop))

    def given(self) -> dict[str, Any]:
        """The settings that are set, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def over(self, other: "Sampling") -> "Sampling":
        """These settings, and the other's where these are silent."""
        return Sampling(**(other.given() | self.given()))


def sampling_of(what: str, settings: dict[str, Any]) -> Sampling:
    """The settings that something of the language was called with.

    Args:
        what: its name.

    Raises:
        ProgramError: there is no such setting.
    """
    unknown = sorted(settings.keys() - Sampling.__dataclass_fields__.keys())
    if unknown:
        known = ", ".join(Sampling.__dataclass_fields__)
        raise ProgramError(
            f"{what} has no setting {', '.join(unknown)}; its sampling settings are {known}."
        )
    return Sampling(**settings)
