"""Why can a schema not be used? One exception, which names the keyword and where it stands."""

from radixrt.errors import RadixrtError


class SchemaError(RadixrtError):
    """A JSON schema that cannot be read, or that no value satisfies.

    Attributes:
        keyword: the keyword at fault, ``$ref`` for example.
        pointer: JSON pointer to it in the schema that the user sent; empty: the whole schema.
        reason: one sentence that says what is wrong and what to change.
    """

    def __init__(self, keyword: str, pointer: str, reason: str) -> None:
        where = pointer or "the root"
        super().__init__(f"JSON schema, {keyword} at {where}: {reason}")
        self.keyword = keyword
        self.pointer = pointer
        self.reason = reason
