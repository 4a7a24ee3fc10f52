"""What does a validator say of a value that is not valid?"""

import msgspec

Path = tuple[str | int, ...]
"""Property names and indices, from the value that was validated."""


class SpanError(msgspec.Struct, frozen=True, array_like=True):
    """One way in which a value breaks its schema."""

    path: Path
    """To the sub-value that breaks it, as deep as is known."""
    keyword: str
    message: str
    culprits: tuple[Path, ...] = ()
    """Sub-values without which, or with another in their place, this error would not be: the repeated item of ``uniqueItems``, the property that
    makes a second branch of ``oneOf`` match. Where the answer parts from the failed one first. May be empty."""
