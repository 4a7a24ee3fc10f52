"""The result of one engine of structured output for one schema."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Record:
    """Its verdict, its times, and how it treated the schema's instances."""

    engine: str
    schema_id: str
    backend: str = ""
    """Empty: refused."""
    refusal: str = ""
    keyword: str = ""
    """To which the refusal is due, if it is known."""
    checks: list[dict[str, Any]] = field(default_factory=list)
    compile_s: float = 0.0
    """To a matcher that is ready."""
    first_mask_s: float = 0.0
    mask_s: list[float] = field(default_factory=list)
    """One for each token of an instance."""
    tokens: int = 0
    forced: int = 0
    """Tokens that were the only ones allowed."""
    valid: int = 0
    valid_accepted: int = 0
    invalid: int = 0
    invalid_accepted: int = 0
    format_only_accepted: int = 0
    """Accepted instances that are invalid only if ``format`` is asserted."""
    unverified_accepted: int = 0
    """Accepted instances whose label no validator confirms."""
    exhausted: int = 0
    """Instances in whose middle the library ran into a limit of its own."""
    wrong: list[str] = field(default_factory=list)
    """Wrongly treated instances, each with its error."""

    @property
    def covered(self) -> bool:
        """The schema is taken and all its valid instances with it."""
        return bool(self.backend) and self.valid_accepted == self.valid
