"""Who holds an answer to this schema? A backend measured to enforce all of it, or one with checks beside it, or nobody.

normalised schema ──▶ prepared for a backend ──▶ faults ──▶ superset without them ──▶ trial compile
                                                    └─────▶ checks on the smallest values that hold them
"""

import dataclasses
from typing import Any, Literal

from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.grammar import SpanCheck, Unenforced
from radixrt.constrained.json_schema.auditing.blame import Budget, blamed, empty_definitions
from radixrt.constrained.json_schema.auditing.capabilities import (
    Capabilities,
    JsonBackend,
    capabilities,
)
from radixrt.constrained.json_schema.auditing.checks import Faults, place_checks, self_contained
from radixrt.constrained.json_schema.auditing.compiling import compile_error
from radixrt.constrained.json_schema.auditing.features import UNREAD, node_features
from radixrt.constrained.json_schema.auditing.normal_form import normal_form
from radixrt.constrained.json_schema.auditing.prepare import prepared
from radixrt.constrained.json_schema.auditing.relax import fewest_to_drop, without
from radixrt.constrained.json_schema.auditing.walk import (
    Place,
    at,
    children,
    pointer_of,
    reachable,
    recursive_targets,
    reference_target,
)
from radixrt.constrained.json_schema.keywords import ORIGIN

BACKENDS: tuple[JsonBackend, ...] = ("llguidance", "xgrammar")
_MOST_ROUNDS = 30
"""Trial compiles that may each find another keyword to leave to a check."""


@dataclasses.dataclass(frozen=True)
class JsonPlan:
    """How a JSON schema is going to be enforced."""

    backend: JsonBackend
    schema: Any
    """What the backend compiles: it allows all that the user's schema allows, and what the checks forbid."""
    checks: tuple[SpanCheck, ...]
    unenforced: tuple[Unenforced, ...]
    """Only where ``strict`` was false."""
    validator: Any
    """The whole schema (2020-12, self-contained), for a finished answer; as far as a validator can read it."""


def plan_json_schema(
    schema_text: str,
    *,
    strict: bool = True,
    backend: Literal["auto", "llguidance", "xgrammar"] = "auto",
    allow_checks: bool = True,
    draft: str | None = None,
) -> JsonPlan:
    """Find a backend that enforces the schema exactly, or one whose grammar and checks do so together.

    ``strict`` false leaves out what can't be enforced, and lists it.

    Raises:
        CannotEnforce: the schema is wrong, no value satisfies it, or a keyword can be neither enforced nor checked.
    """
    schema = normal_form(schema_text, draft)
    return plan_normalised(schema, strict=strict, backend=backend, allow_checks=allow_checks)


def plan_normalised(
    schema: Any, *, strict: bool = True, backend: str = "auto", allow_checks: bool = True
) -> JsonPlan:
    """As :func:`plan_json_schema`, of a schema that is normalised already."""
    table = capabilities()
    candidates = BACKENDS if backend == "auto" else tuple(b for b in BACKENDS if b == backend)
    for name in candidates:
        try:
            attempt = _Attempt(schema, name, table)
        except CannotEnforce:
            continue
        if not attempt.faults and attempt.error is None:
            return JsonPlan(name, attempt.result(), (), (), validator_schema(schema))
    refusals = []
    for name in candidates:
        try:
            attempt = _Attempt(schema, name, table)
            attempt.relax()
            return _with_checks(attempt, strict=strict, allow_checks=allow_checks)
        except CannotEnforce as error:
            refusals.append(error)
    raise refusals[0]


def _with_checks(attempt: "_Attempt", *, strict: bool, allow_checks: bool) -> JsonPlan:
    """The plan of a relaxed schema."""
    validator = validator_schema(attempt.normalised)
    if not attempt.faults:
        return JsonPlan(attempt.backend, attempt.result(), (), (), validator)
    try:
        if not allow_checks:
            raise attempt.refusal(
                "only a validator could hold an answer to it, and inside of tools and tags nothing is validated; change the "
                "schema, or set strict to false"
            )
        checks = place_checks(attempt.original, attempt.normalised, attempt.faults)
    except CannotEnforce:
        if strict:
            raise
        return JsonPlan(attempt.backend, attempt.result(), (), attempt.unenforced(), validator)
    return JsonPlan(attempt.backend, attempt.result(), checks, (), validator)


def validator_schema(schema: Any) -> Any:
    """The whole as a validator reads it; true, which says nothing, where there are parts that none can read."""
    try:
        return self_contained(schema, schema)
    except CannotEnforce:
        return True


def without_origins(schema: Any) -> Any:
    """A copy whose subschemas have no ``$origin``. A property of that name stays: it stands under ``properties``."""
    if not isinstance(schema, dict):
        return schema
    result = {k: v for k, v in schema.items() if k not in (ORIGIN, _PLACE)}
    for _, path, child in children(schema):
        if len(path) == 1:
            result[path[0]] = without_origins(child)
        else:
            if result[path[0]] is schema[path[0]]:
                result[path[0]] = schema[path[0]].copy()
            result[path[0]][path[1]] = without_origins(child)
    if "$defs" in schema:
        result["$defs"] = {name: without_origins(each) for name, each in schema["$defs"].items()}
    return result


_PLACE = "$place"


def _with_places(node: Any, place: Place) -> Any:
    """A copy whose nodes know their places."""
    if not isinstance(node, dict):
        return node
    result = {**node, _PLACE: place}
    for keyword, path, child in children(node):
        if len(path) == 1:
            result[keyword] = _with_places(child, place + path)
            continue
        if result[keyword] is node[keyword]:
            result[keyword] = node[keyword].copy()
        result[keyword][path[1]] = _with_places(child, place + path)
    if "$defs" in node:
        definitions = node["$defs"].items()
        result["$defs"] = {
            name: _with_places(each, (*place, "$defs", name)) for name, each in definitions
        }
    return result


class _Attempt:
    """One backend's way with a schema."""

    def __init__(self, schema: Any, backend: JsonBackend, table: Capabilities) -> None:
        self.normalised = schema
        self.backend: JsonBackend = backend
        self.table = table
        self.original = prepared(schema, backend, table)
        """With all faults in it; checks are cut from here."""
        self.schema = _with_places(self.original, ())
        """Made smaller step by step; each node knows its place in the original, as ``oneOf`` may become ``anyOf``."""
        self.faults: Faults = {}
        self.reasons: dict[Place, str] = {}
        self._recursive = recursive_targets(self.original)
        self._find_faults()
        self.error = None if self.faults else compile_error(backend, self.result())

    def result(self) -> Any:
        """What to compile."""
        return without_origins(self.schema)

    def relax(self) -> None:
        """Take faults out until the backend compiles the rest.

        Raises:
            CannotEnforce: it never does.
        """
        budget = Budget()
        for _ in range(_MOST_ROUNDS):
            error = compile_error(self.backend, self.result())
            if error is None:
                return
            if "nsatisfiable" in error:
                self._deny_empty_definitions(error)
                continue
            found = blamed(self.schema, self.backend, error, budget)
            for place, keywords, message in sorted(found, key=lambda blame: -len(blame[0])):
                self._drop(place, keywords, f"{self.backend} says: {message}")
            self._find_faults()
            if not found:
                break
        raise CannotEnforce(
            "schema", "", f"{self.backend} can't compile it: {error}. Make it smaller or simpler."
        )

    def _deny_empty_definitions(self, error: str) -> None:
        """Write false for references to definitions that no value satisfies: llguidance refuses a schema that has any.

        Raises:
            CannotEnforce: there is none; no value satisfies the whole.
        """
        empty = empty_definitions(self.schema, self.backend)
        denied = [
            place for place, node in reachable(self.schema) if reference_target(node) in empty
        ]
        if not denied or () in denied:
            reason = error.splitlines()[0].removeprefix("Unsatisfiable schema: ")
            raise CannotEnforce("schema", "", f"no value satisfies it: {reason}.")
        for place in denied:
            at(self.schema, place[:-1])[place[-1]] = False

    def _find_faults(self) -> None:
        """Take out what the table doesn't call enforced, from the root down."""
        waiting: list[Place] = [()]
        seen = set()
        while waiting:
            place = waiting.pop()
            if place in seen:
                continue
            seen.add(place)
            self._relax_node(place)
            node = at(self.schema, place)
            waiting += [place + path for _, path, _ in children(node)]
            if (target := reference_target(node)) is not None:
                waiting.append(target)

    def _relax_node(self, place: Place) -> None:
        node = at(self.schema, place)
        bad = self._not_enforced(node)
        if not bad:
            return
        suspects = [keyword for _, keywords in bad for keyword in keywords]
        name = bad[0][0]
        dropped = (
            fewest_to_drop(node, suspects, lambda each: not self._not_enforced(each))
            if isinstance(node, dict)
            else None
        )
        if dropped is None:
            keyword = name.split("/")[0]
            raise CannotEnforce(
                keyword,
                _origin_of(node, place),
                f"{self.backend} was not measured to enforce {name}.",
            )
        self._drop(place, dropped, f"{self.backend} does not enforce {name}")

    def _not_enforced(self, node: Any) -> list[tuple[str, tuple[str, ...]]]:
        recursive = reference_target(node) in self._recursive
        return [
            (feature.name, feature.keywords)
            for feature in node_features(node, recursive=recursive)
            if not self.table.verdict(self.backend, feature.name).enforced
        ]

    def _drop(self, place: Place, keywords: tuple[str, ...], reason: str) -> None:
        """Take keywords out of the node that is at a place of the schema as it is now."""
        node = at(self.schema, place)
        before = node[_PLACE]
        if any(keyword in UNREAD for keyword in keywords):
            raise CannotEnforce(
                keywords[0], self._origin(before), "dynamic references are not supported; use $ref."
            )
        relaxed = without(node, keywords)
        if place:
            at(self.schema, place[:-1])[place[-1]] = relaxed
        else:
            self.schema = relaxed
        self.faults[before] = (*self.faults.get(before, ()), *keywords)
        self.reasons.setdefault(before, reason)

    def _origin(self, place: Place) -> str:
        return _origin_of(at(self.original, place), place)

    def refusal(self, reason: str) -> CannotEnforce:
        """An error about the first fault."""
        first = self.unenforced()[0]
        return CannotEnforce(first.keyword, first.pointer, f"{first.reason}; {reason}.")

    def unenforced(self) -> tuple[Unenforced, ...]:
        """Every fault."""
        return tuple(
            Unenforced(
                keyword=keyword,
                pointer=f"{self._origin(place)}/{keyword}",
                reason=self.reasons[place],
            )
            for place, keywords in self.faults.items()
            for keyword in keywords
        )


def _origin_of(node: Any, place: Place) -> str:
    """Where in the user's schema a node comes from."""
    return node.get(ORIGIN, pointer_of(place)) if isinstance(node, dict) else pointer_of(place)


def schema_features(schema: Any) -> set[str]:
    """Names of all features of a normalised schema, for reports."""
    recursive = recursive_targets(schema)
    return {
        feature.name
        for _, node in reachable(schema)
        for feature in node_features(node, recursive=reference_target(node) in recursive)
    }
