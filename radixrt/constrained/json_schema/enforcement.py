"""Finds how a schema is enforced: by a grammar alone, by a grammar and checks, or not at all.

normal form ──▶ form for llguidance ──▶ superset of the keywords that are enforced ──▶ grammar
                                          └──▶ checks of the other keywords, on the smallest values
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from radixrt.constrained.backends.llguidance import compile_without_tokenizer, schema_error
from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.grammar import SpanCheck, Unenforced
from radixrt.constrained.json_schema.checks import KeywordsByPlace, place_checks, self_contained
from radixrt.constrained.json_schema.enforced import constraining, unenforced_uses
from radixrt.constrained.json_schema.keywords import (
    ORIGIN,
    PLACE,
    Node,
    Place,
    children,
    holder,
    mapped,
    met_with,
    places_below,
    pointer_of,
    reference_target,
    subschema,
    without_origins,
)
from radixrt.constrained.json_schema.llguidance_form import in_llguidance_form
from radixrt.constrained.json_schema.normal.normalize import normalize
from radixrt.constrained.json_schema.position import note

MAX_CHARACTERS = 2_000_000
"""Characters of JSON text that are compiled at most to find what one schema is refused for (a
second of work); then the schema is refused."""

_TAKEN_ALONG = {
    "prefixItems": ("items", "unevaluatedItems"),
    "properties": ("additionalProperties", "unevaluatedProperties"),
    "patternProperties": ("additionalProperties", "unevaluatedProperties"),
    "contains": ("minContains", "maxContains"),
    "if": ("then", "else"),
    "$ref": ("unevaluatedItems", "unevaluatedProperties"),
    "anyOf": ("unevaluatedItems", "unevaluatedProperties"),
    "allOf": ("unevaluatedItems", "unevaluatedProperties"),
    "dependentSchemas": ("unevaluatedProperties",),
}
"""Keywords that depend on another keyword: without it they would forbid more than before."""

MIN_MISSED = (
    "not", "if", "uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties",
    "dependentRequired", "dependentSchemas", "propertyNames", "minProperties", "maxProperties", "multipleOf",
    "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minimum", "maximum", "format", "pattern",
    "oneOf", "minItems", "maxItems", "patternProperties", "additionalProperties", "allOf", "anyOf", "$ref", "required",
    "prefixItems", "items", "const", "enum", "properties",
)  # fmt: skip
"""Order in which keywords are removed, where one of several has to be."""


def without(node: Node, keywords: Iterable[str]) -> Node:
    """A superset of the node that makes no use of these keywords; ``oneOf`` becomes ``anyOf``."""
    result = dict(node)
    for keyword in keywords:
        value = result.pop(keyword, None)
        for other in _TAKEN_ALONG.get(keyword, ()):
            result.pop(other, None)
        if keyword == "oneOf" and value is not None and "anyOf" not in result:
            result["anyOf"] = value
    return result


def fewest_to_drop(
    node: Node, suspects: Iterable[str], is_fine: Callable[[Any], bool], budget: int = 200
) -> tuple[str, ...] | None:
    """The smallest set of keywords without which the node is fine; None if it never is."""
    present = [keyword for keyword in MIN_MISSED if keyword in set(suspects)]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(present, size) for size in range(1, len(present) + 1)
    )
    for keywords in itertools.islice(subsets, budget):
        if is_fine(without(node, keywords)):
            return keywords
    return tuple(present) if present and is_fine(without(node, present)) else None


class Refused(NamedTuple):
    """A node that llguidance refuses though it compiles all below it."""

    place: Place
    keywords: tuple[str, ...]
    """Keywords without which the node compiles."""
    error: str


class RefusalSearch:
    """Finds what llguidance refuses one schema for, by compiling parts of it. The schema is reduced
    between two searches."""

    def __init__(self) -> None:
        self._left = MAX_CHARACTERS
        self._schema: Any = None
        self._with_origins: Any = None
        self._open: set[Place] = set()
        self._searched: set[Place] = set()
        self._errors: dict[str, str | None] = {}

    def refused_nodes(self, schema: Any, error: str) -> list[Refused]:
        """The nodes that ``error`` is about; empty if none is found within the budget."""
        self._set_schema(schema)
        return (self._each_one_of() if "oneOf" in error else []) or self._deepest(())

    def unsatisfiable_definition(self, schema: Any) -> Place:
        """The place of a definition that no value satisfies; empty if there is none."""
        self._set_schema(schema)
        places: Iterable[Place] = (("$defs", name) for name in self._definitions)
        return next((p for p in places if "nsatisfiable" in (self._error_of_place(p) or "")), ())

    def _set_schema(self, schema: Any) -> None:
        self._with_origins = schema
        self._schema = without_origins(schema)
        self._searched = set()

    @property
    def _definitions(self) -> dict[str, Any]:
        return self._schema.get("$defs", {}) if isinstance(self._schema, dict) else {}

    def _each_one_of(self) -> list[Refused]:
        """All ``oneOf`` that don't compile alone, so that a schema of many needs few rounds."""
        nodes = dict(met_with(self._schema))
        places = [p for p, node in nodes.items() if isinstance(node, dict) and "oneOf" in node]
        found: list[Refused] = []
        for place in places:
            self._note(place)
            node = nodes[place]
            error = self._error_of({"oneOf": node["oneOf"]}) or self._error_of(node) or ""
            # A branch that alone is refused for a oneOf comes first.
            if "oneOf" in error and not any(
                "oneOf" in (self._error_of(branch) or "") for branch in node["oneOf"]
            ):
                found.append(Refused(place, ("oneOf",), error))
        # Each may compile alone, but not together with the other keywords for the same value.
        return found or [Refused(p, ("oneOf",), "its branches may overlap") for p in places]

    def _deepest(self, place: Place) -> list[Refused]:
        """The nodes from a place on that don't compile though all below them do."""
        self._open.add(place)
        node = subschema(self._schema, place)
        failing = [
            below
            for below in places_below(node, place)
            if below not in self._open
            and (error := self._error_of_place(below)) is not None
            and "nsatisfiable" not in error
        ]
        found: list[Refused] = []
        for below in failing:
            if below not in self._searched:
                found += self._deepest(below)
        self._open.remove(place)
        self._searched.add(place)
        if failing:
            return found
        error = self._error_of_place(place)
        if not isinstance(node, dict) or error is None:
            return []
        dropped = fewest_to_drop(
            node, constraining(node), lambda each: self._error_of(each) is None
        )
        return [Refused(place, dropped, error)] if dropped else []

    def _note(self, place: Place) -> None:
        node = subschema(self._with_origins, place)
        note("search", node.get(ORIGIN, "") if isinstance(node, dict) else "")

    def _error_of_place(self, place: Place) -> str | None:
        self._note(place)
        return self._error_of(subschema(self._schema, place))

    def _error_of(self, node: Any) -> str | None:
        """llguidance's error for a node compiled as a schema of its own."""
        if isinstance(node, bool) or self._left <= 0:
            return None
        text = json.dumps(self._with_definitions(node), ensure_ascii=False)
        if text not in self._errors:
            self._left -= len(text)
            self._errors[text] = schema_error(text)
        return self._errors[text]

    def _with_definitions(self, node: Any) -> Any:
        """The node with the definitions that it can reach."""
        names: set[str | int] = set()
        waiting = [node]
        while waiting:
            each = waiting.pop()
            if (target := reference_target(each)) is not None and target[1] not in names:
                names.add(target[1])
                waiting.append(self._definitions[str(target[1])])
            waiting += [child for _, child in children(each)]
        kept = {name: self._definitions[name] for name in self._definitions if name in names}
        return {**node, "$defs": kept} if kept else node


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
