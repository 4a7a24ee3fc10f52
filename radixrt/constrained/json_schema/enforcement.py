"""Finds how a schema is enforced: by a grammar alone, by a grammar and checks, or not at all.

normal form ──▶ form for llguidance ──▶ superset of the keywords that are enforced ──▶ grammar
                                          └──▶ checks of the other keywords, on the smallest values
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

from radixrt.constrained.backends.llguidance import compile_without_tokenizer
from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.grammar import SpanCheck, Unenforced
from radixrt.constrained.json_schema.checks import KeywordsByPlace, place_checks, self_contained
from radixrt.constrained.json_schema.enforced import constraining, unenforced_uses
from radixrt.constrained.json_schema.keywords import ORIGIN, PLACE
from radixrt.constrained.json_schema.llguidance_form import in_llguidance_form
from radixrt.constrained.json_schema.normal.normalize import normalize
from radixrt.constrained.json_schema.position import note
from radixrt.constrained.json_schema.superset import RefusalSearch, fewest_to_drop, without
from radixrt.constrained.json_schema.walk import (
    Place,
    holder,
    mapped,
    met_with,
    pointer_of,
    reference_target,
    subschema,
    without_origins,
)

_MAX_ROUNDS = 30
"""Compilations that may each find another keyword to leave to a check."""

CompileText = Callable[[str], tuple[Any, str | None]]
"""Compiles the text of a schema; returns (grammar, None), or (anything, llguidance's error)."""


@dataclasses.dataclass(frozen=True)
class EnforcedSchema:
    """A JSON schema, in the parts that enforce it."""

    schema: Any
    """The schema for llguidance. It also allows the values that the checks reject."""
    grammar: Any
    """The result of compiling ``schema``."""
    checks: tuple[SpanCheck, ...]
    checked: tuple[Unenforced, ...]
    """The keywords that the checks enforce."""
    unenforced: tuple[Unenforced, ...]
    """The keywords that nothing enforces. Only where ``strict`` was false."""
    normal_form: Any

    @property
    def validator(self) -> Any:
        """The whole schema (2020-12, self-contained), for a finished answer. True, which says
        nothing, where no validator can read a part of it."""
        try:
            return self_contained(self.normal_form)
        except CannotEnforce:
            return True


def enforce_json_schema(
    schema_text: str,
    *,
    strict: bool = True,
    allow_checks: bool = True,
    compile_text: CompileText = compile_without_tokenizer,
) -> EnforcedSchema:
    """Find a grammar that enforces the schema exactly, or one that does so together with checks.

    ``strict`` false leaves out the keywords that can't be enforced, and lists them.

    Raises:
        CannotEnforce: the schema is wrong, no value satisfies it, or a keyword can be neither
            enforced nor checked.
    """
    try:
        schema = json.loads(schema_text)
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        reason = "it holds half of a surrogate pair, which no text can."
        raise CannotEnforce.whole(reason) from error
    except (ValueError, RecursionError) as error:
        raise CannotEnforce.whole(f"it is no JSON that can be read: {error}.") from error
    return enforce_normal_form(normalize(schema), strict, allow_checks, compile_text)


def enforce_normal_form(
    schema: Any,
    strict: bool = True,
    allow_checks: bool = True,
    compile_text: CompileText = compile_without_tokenizer,
) -> EnforcedSchema:
    """As :func:`enforce_json_schema`, of a schema in normal form."""
    whole = in_llguidance_form(schema)
    if whole is False and schema is not False:
        reason = "all of its values have control characters, which the grammar can't write; leave them out."
        raise CannotEnforce("enum" if "enum" in schema else "const", "", reason)
    superset = _Superset(whole, compile_text)
    superset.reduce()
    parts = superset.schema, superset.grammar
    left = superset.unenforced()
    try:
        if left and not allow_checks:
            reason = (
                f"{left[0].reason}; only a validator could hold an answer to it, and the values of this schema can't be "
                "found in the answer for sure; change the schema, or set strict to false."
            )
            raise CannotEnforce(left[0].keyword, left[0].pointer, reason)
        checks = place_checks(whole, schema, superset.dropped) if left else ()
        return EnforcedSchema(*parts, checks, left, (), schema)
    except CannotEnforce:
        if strict:
            raise
        return EnforcedSchema(*parts, (), (), left, schema)


class _Superset:
    """A schema from which keywords are dropped until llguidance enforces and compiles the rest."""

    def __init__(self, whole: Any, compile_text: CompileText) -> None:
        self._whole = whole
        self._compile_text = compile_text
        self.schema: Any = None
        self.grammar: Any = None
        self.dropped: KeywordsByPlace = {}
        self._reasons: dict[Place, str] = {}
        self._reduced: Any = None
        """The schema with the places of nodes in the whole: ``oneOf`` may become ``anyOf``."""

    def unenforced(self) -> tuple[Unenforced, ...]:
        """The keywords that were dropped."""
        return tuple(
            Unenforced(
                keyword=keyword,
                pointer=f"{_origin_of(subschema(self._whole, place), place)}/{keyword}",
                reason=self._reasons[place],
            )
            for place, keywords in self.dropped.items()
            for keyword in keywords
        )

    def reduce(self) -> None:
        """Drop keywords. Raises CannotEnforce if llguidance compiles no superset that was found."""
        error: str | None = None
        is_whole = not any(unenforced_uses(node) for _, node in met_with(self._whole))
        if is_whole and (error := self._compile(self._whole)) is None:
            return
        self._reduced = _with_places(self._whole, ())
        self._drop_unenforced(met_with(self._reduced))
        search = RefusalSearch()
        refusal = error
        for _ in range(_MAX_ROUNDS):
            if (error := refusal or self._compile(self._reduced)) is None:
                return
            refusal = None
            if "nsatisfiable" in error:
                if not self._write_false(search.unsatisfiable_definition(self._reduced)):
                    reason = error.splitlines()[0].removeprefix("Unsatisfiable schema: ")
                    raise CannotEnforce.whole(f"no value satisfies it, or a part of it: {reason}.")
            else:
                found = search.refused_nodes(self._reduced, error)
                for place, keywords, message in sorted(found, key=lambda node: -len(node.place)):
                    self._drop(place, keywords, f"llguidance says: {message}")
                self._look_again([node.place for node in found])
                if not found:
                    break
        raise CannotEnforce.whole(
            f"llguidance can't compile it: {error}. Make it smaller or simpler."
        )

    def _compile(self, schema: Any) -> str | None:
        """Compile the schema; returns llguidance's error."""
        note("compile")
        self.schema = without_origins(schema)
        self.grammar, error = self._compile_text(json.dumps(self.schema, ensure_ascii=False))
        return error

    def _write_false(self, definition: Place) -> bool:
        """Write ``false``, which says the same and can be compiled, for a definition that nothing
        satisfies and each reference to it. Returns false if there is no such definition."""
        places = [p for p, node in met_with(self._reduced) if reference_target(node) == definition]
        if not definition or () in places:
            return False
        for place in [*places, definition]:
            subschema(self._reduced, place[:-1])[place[-1]] = False
        return True

    def _drop_unenforced(self, nodes: Iterable[tuple[Place, Any]]) -> None:
        """Drop the keywords of these nodes that are not listed as enforced."""
        changed: list[Place] = []
        for place, node in nodes:
            if not (uses := unenforced_uses(node)):
                continue
            name = uses[0].name
            suspects = [keyword for use in uses for keyword in use.keywords]
            # Without these the rest may be of another use that is not listed.
            dropped = _fewest(node, suspects) or _fewest(node, constraining(node))
            if dropped is None:
                reason = f"llguidance was not measured to enforce {name}."
                raise CannotEnforce(name.split("/")[0], _origin_of(node, place), reason)
            self._drop(place, dropped, f"llguidance does not enforce {name}")
            changed.append(place)
        if changed:
            self._look_again(changed)

    def _look_again(self, changed: list[Place]) -> None:
        """Look at changed nodes again, and at those above them: the use of a keyword may depend on
        whether a subschema says anything."""
        nodes: list[tuple[Place, Any]] = []
        for place in sorted({*changed, *map(holder, changed)}, key=len, reverse=True):
            with contextlib.suppress(KeyError, IndexError, TypeError):  # it was dropped
                nodes.append((place, subschema(self._reduced, place)))
        self._drop_unenforced(nodes)

    def _drop(self, place: Place, keywords: tuple[str, ...], reason: str) -> None:
        """Take keywords out of the node that is at a place of the schema as it is now."""
        node = subschema(self._reduced, place)
        before = node[PLACE]
        rest = without(node, keywords)
        node.clear()
        node.update(rest)
        self.dropped[before] = (*self.dropped.get(before, ()), *keywords)
        self._reasons.setdefault(before, reason)


def _fewest(node: Any, suspects: list[str]) -> tuple[str, ...] | None:
    return fewest_to_drop(node, suspects, lambda each: not unenforced_uses(each))


def _origin_of(node: Any, place: Place) -> str:
    """The pointer into the user's schema where a node comes from."""
    return node.get(ORIGIN, pointer_of(place)) if isinstance(node, dict) else pointer_of(place)


def _with_places(node: Any, place: Place) -> Any:
    """A copy in which every node carries its place."""
    if not isinstance(node, dict):
        return node
    return {**mapped(node, lambda path, child: _with_places(child, place + path)), PLACE: place}
