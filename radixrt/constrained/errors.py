"""Errors of compiling and matching grammars."""

from radixrt.base.errors import RadixrtError


class CannotCompile(RadixrtError):
    """No backend can enforce the constraint; the message names the necessary change."""


class GrammarExhausted(RadixrtError):
    """A matcher ran into a limit of its library in the middle of an answer. The tokens that may
    come next are unknown, so the answer must end with an error."""


class CannotEnforce(CannotCompile):
    """A keyword that nothing can hold an answer to; the request is refused with a 400."""

    def __init__(self, keyword: str, pointer: str, reason: str) -> None:
        what = "The schema" if keyword == "schema" else f"The schema's {keyword!r}"
        super().__init__(f"{what} at {pointer or 'the root'} can't be enforced: {reason}")
        self.keyword = keyword
        self.pointer = pointer
        """JSON pointer into the schema that the user sent; empty for the whole."""
        self.reason = reason
        """A sentence with the obstacle, or with the change that helps."""

    @classmethod
    def whole(cls, reason: str) -> "CannotEnforce":
        """The error about a whole schema."""
        return cls("schema", "", reason)
