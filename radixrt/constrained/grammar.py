"""The result of compiling a constraint: a grammar for the worker, and the checks it leaves."""

import hashlib
from typing import Any, Literal

import msgspec

from radixrt.constrained.constraint import ParameterStyle

Backend = Literal["llguidance", "fsm"]


GrammarKey = bytes
"""SHA-256 of a grammar's backend and source: equal grammars have equal keys."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A compiled constraint, in the form that a worker loads within milliseconds. Made by
    :meth:`compiled`."""

    backend: Backend
    """The library of the matcher: llguidance, or fsm (a token-level finite-state machine made by
    outlines-core)."""
    source: bytes
    """The backend's own form: llguidance's grammar text, or the machine's transition table."""

    key: GrammarKey
    loaded_bytes: int
    """Memory that it takes in a worker, as far as the backend tells."""
    is_ambiguous: bool = False
    """A user wrote its rules, so one text may have many derivations and each call of the library
    may take seconds: only threads that hold neither Python's lock nor a step may make them."""

    @classmethod
    def compiled(
        cls, backend: Backend, source: bytes, loaded_bytes: int = 0, *, is_ambiguous: bool = False
    ) -> "Grammar":
        """A grammar with its key. Only the process that compiles it computes the digest.

        Args:
            loaded_bytes: if it takes more than its source.
        """
        key = hashlib.sha256(b"%s\0%d" % (backend.encode(), is_ambiguous) + source).digest()
        return cls(backend, source, key, max(loaded_bytes, len(source)), is_ambiguous)


class Unenforced(msgspec.Struct, frozen=True, kw_only=True):
    """A keyword of a schema that the grammar does not hold the answer to."""

    keyword: str
    pointer: str
    """JSON pointer into the schema that the user sent, e.g. ``/properties/tags/uniqueItems``."""
    reason: str


class SpanCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A sub-value to be validated as soon as it is complete."""

    path: tuple[str | None, ...]
    """Path of such values, one step per level: a property name, or None for any array element or
    any other property. The empty path is the whole value."""
    schema: Any
    """A self-contained JSON schema (2020-12) that the value must satisfy."""
    pointer: str
    """JSON pointer of the subschema that the user sent."""
    keywords: tuple[str, ...]
    """Keywords that the grammar leaves to this check."""
    tag: str = ""
    """Beginning of the tag whose content has the value; empty where the whole answer is JSON."""


class CheckedParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a tag, each written by itself, for the search for their values."""

    style: ParameterStyle
    texts: tuple[str, ...]
    """Names of those that stand without quotes; "" of all, if the tool declares none."""
    end: str
    """End of the call."""


class CheckedTag(msgspec.Struct, frozen=True, kw_only=True):
    """A tag, for the search for its content in an answer."""

    begin: str
    end: str
    """End of the tag; empty with ``parameters``, which have their own."""
    is_json: bool
    """The content is JSON, or parameters; otherwise any text without the end in it."""
    checks: tuple[SpanCheck, ...]
    """Checks of the content."""
    parameters: CheckedParameters | None = None


class CheckedTags(msgspec.Struct, frozen=True, kw_only=True):
    """The tags of an answer that has checks in some of them; see
    :class:`radixrt.constrained.constraint.StructuralTag`."""

    tags: tuple[CheckedTag, ...]
    triggers: tuple[str, ...]
    free_text: bool
    separator: str
    lists: tuple[tuple[str, str], ...] = ()
    """All tags stand in one list, between one of these openings and its closing; a tag without a
    beginning in place of the list."""
    begins_answer: bool = False
    """The list stands at the beginning of the answer; an answer that does not begin with its
    opening and a tag is free text."""


Checks = tuple[SpanCheck, ...] | CheckedTags
"""The checks of an answer that is one JSON value, or of the contents of its tags; empty where the
grammar enforces everything."""


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """The result of compiling a constraint."""

    grammar: Grammar
    checks: Checks = ()
    checked: tuple[Unenforced, ...] = ()
    """The keywords that the checks enforce."""
    unenforced: tuple[Unenforced, ...] = ()
    """The keywords that nothing enforces; only of a JSON schema with ``strict`` false."""
    validator: Any = None
    """The JSON schema (2020-12) that validates a finished answer; None: it is not validated."""


Path = tuple[str | int, ...]
"""Property names and indices, from the value that was validated."""


class SpanError(msgspec.Struct, frozen=True, array_like=True):
    """One way in which a value breaks its schema."""

    path: Path
    """Path to the sub-value that breaks it, as deep as is known."""
    keyword: str
    message: str
    unsuited: tuple[Path, ...] = ()
    """Parts of it with another of which in their place this error would not be: the repeated item
    of ``uniqueItems``, the number that a branch of ``oneOf`` forbids."""
    superfluous: tuple[Path, ...] = ()
    """Parts of it without which this error would not be: the property that makes a second branch of
    ``oneOf`` match, or on which others depend. These and ``unsuited`` only guide the search, and
    may be empty."""
