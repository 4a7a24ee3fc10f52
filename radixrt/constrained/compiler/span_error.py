"""The error that a validator reports for an invalid value."""

import msgspec

Path = tuple[str | int, ...]
"""Property names and indices, from the value that was validated."""


class SpanError(msgspec.Struct, frozen=True, array_like=True):
    """One way in which a value breaks its schema."""

    path: Path
    """To the sub-value that breaks it, as deep as is known."""
    keyword: str
    message: str
    unsuited: tuple[Path, ...] = ()
    """Parts of it with another of which in their place this error would not be: the repeated item of
    ``uniqueItems``, the number that a branch of ``oneOf`` forbids."""
    superfluous: tuple[Path, ...] = ()
    """Parts of it without which this error would not be: the property that makes a second branch of ``oneOf``
    match, or on which others depend. These and ``unsuited`` only guide the search, and may be empty."""
