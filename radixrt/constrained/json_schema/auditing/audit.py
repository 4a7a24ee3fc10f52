"""Plans the enforcement of a schema: by a grammar that enforces all of it, by a grammar and checks, or a refusal.

normal form ──▶ prepared for llguidance ──▶ faults ──▶ superset without them ──▶ trial compile
                                               └─────▶ checks on the smallest values that hold them
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.grammar import SpanCheck, Unenforced
from radixrt.constrained.json_schema.auditing.blame import Search
from radixrt.constrained.json_schema.auditing.checks import Faults, place_checks, self_contained
from radixrt.constrained.json_schema.auditing.compiling import Trial, dry_run
from radixrt.constrained.json_schema.auditing.enforced import is_enforced
from radixrt.constrained.json_schema.auditing.features import Feature, constraints, node_features
from radixrt.constrained.json_schema.auditing.prepare import prepared
from radixrt.constrained.json_schema.auditing.relax import fewest_to_drop, without
from radixrt.constrained.json_schema.keywords import ORIGIN
from radixrt.constrained.json_schema.normal.normalize import normalize
from radixrt.constrained.json_schema.position import note
from radixrt.constrained.json_schema.walk import (
    PLACE,
    Place,
    at,
    holder,
    mapped,
    met_with,
    pointer_of,
    reference_target,
    without_origins,
)

_MAX_ROUNDS = 30
"""Trial compiles that may each find another keyword to leave to a check."""


@dataclasses.dataclass(frozen=True)
class JsonPlan:
    """How a JSON schema is going to be enforced."""

    schema: Any
    """The schema for llguidance. It allows all values of the user's schema, and values that the checks reject."""
    grammar: Any
    """Of this schema; made by the trial."""
    checks: tuple[SpanCheck, ...]
    checked: tuple[Unenforced, ...]
    """The keywords that the checks enforce."""
    unenforced: tuple[Unenforced, ...]
    """Only where ``strict`` was false."""
    normalised: Any

    @property
    def validator(self) -> Any:
        """The whole schema (2020-12, self-contained), for a finished answer. True, which says nothing, where no validator can read a
        part of it."""
        try:
            return self_contained(self.normalised)
        except CannotEnforce:
            return True


def plan_json_schema(
    schema_text: str, *, strict: bool = True, allow_checks: bool = True, trial: Trial = dry_run
) -> JsonPlan:
    """Find a grammar that enforces the schema exactly, or one that does so together with checks.

    ``strict`` false leaves out the keywords that can't be enforced, and lists them. The last ``trial`` is that of the plan's schema.

    Raises:
        CannotEnforce: the schema is wrong, no value satisfies it, or a keyword can be neither enforced nor checked.
    """
    try:
        schema = json.loads(schema_text)
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        reason = "it holds half of a surrogate pair, which no text can."
        raise CannotEnforce("schema", "", reason) from error
    except (ValueError, RecursionError) as error:
        raise CannotEnforce("schema", "", f"it is no JSON that can be read: {error}.") from error
    return plan_normalised(normalize(schema), strict=strict, allow_checks=allow_checks, trial=trial)


def plan_normalised(
    schema: Any, *, strict: bool = True, allow_checks: bool = True, trial: Trial = dry_run
) -> JsonPlan:
    """As :func:`plan_json_schema`, of a schema that is normalised already."""
    attempt = _Attempt(schema, trial)
    if attempt.original is False and schema is not False:
        word = "enum" if "enum" in schema else "const"
        raise CannotEnforce(
            word,
            "",
            "all of its values have control characters, which the grammar can't write; leave them out.",
        )
    if attempt.is_exact():
        return attempt.plan()
    attempt.relax()
    return _with_checks(attempt, strict=strict, allow_checks=allow_checks)


def _with_checks(attempt: "_Attempt", *, strict: bool, allow_checks: bool) -> JsonPlan:
    """The plan of a relaxed schema."""
    try:
        if attempt.faults and not allow_checks:
            raise attempt.refusal(
                "only a validator could hold an answer to it, and the values of this schema can't be found in the answer for sure; "
                "change the schema, or set strict to false"
            )
        checks = place_checks(attempt.original, attempt.normalised, attempt.faults)
        return attempt.plan(checks, checked=attempt.unenforced())
    except CannotEnforce:
        if strict:
            raise
        return attempt.plan(unenforced=attempt.unenforced())


class _Attempt:
    """The attempt to enforce a schema."""

    def __init__(self, schema: Any, trial: Trial) -> None:
        self.normalised = schema
        self.original = prepared(schema)
        """With all faults in it; checks are cut from here."""
        self.schema = self.original
        """Made smaller step by step by :meth:`relax`, in which each node knows its place in the original, as ``oneOf`` may become
        ``anyOf``."""
        self.faults: Faults = {}
        self.reasons: dict[Place, str] = {}
        self._trial = trial
        self._made: tuple[Any, Any] = (None, None)
        """The schema of the last trial, and its grammar."""
        self._error: str | None = None
        """Of the trial of the original."""

    def is_exact(self) -> bool:
        """The grammar enforces all of it."""
        if any(_not_enforced(node) for _, node in met_with(self.original)):
            return False
        self._error = self._compile_error()
        return self._error is None

    def plan(
        self,
        checks: tuple[SpanCheck, ...] = (),
        *,
        checked: tuple[Unenforced, ...] = (),
        unenforced: tuple[Unenforced, ...] = (),
    ) -> JsonPlan:
        return JsonPlan(*self._made, checks, checked, unenforced, self.normalised)

    def _compile_error(self) -> str | None:
        note("compile")
        schema = without_origins(self.schema)
        grammar, error = self._trial(json.dumps(schema, ensure_ascii=False))
        self._made = schema, grammar
        return error

    def relax(self) -> None:
        """Take faults out until llguidance compiles the rest.

        Raises:
            CannotEnforce: it never does.
        """
        search = Search()
        self.schema = _with_places(self.original, ())
        self._find_faults(met_with(self.schema))
        for _ in range(_MAX_ROUNDS):
            error = (not self.faults and self._error) or self._compile_error()
            if error is None:
                return
            if "nsatisfiable" in error:
                if self._forbid_all_of(search.unsatisfiable(self.schema)):
                    continue
                reason = error.splitlines()[0].removeprefix("Unsatisfiable schema: ")
                raise CannotEnforce(
                    "schema", "", f"no value satisfies it, or a part of it: {reason}."
                )
            found = search.blamed(self.schema, error)
            found = sorted(found, key=lambda blame: -len(blame[0]))
            for place, keywords, message in found:
                self._drop(place, keywords, f"llguidance says: {message}")
            self._find_faults_above([place for place, _, _ in found])
            if not found:
                break
        raise CannotEnforce(
            "schema", "", f"llguidance can't compile it: {error}. Make it smaller or simpler."
        )

    def _forbid_all_of(self, definition: Place) -> bool:
        """Write ``false``, which says the same and can be compiled, for a definition that nothing satisfies and each reference to it. False
        if there is no such definition."""
        self._error = None
        places = [
            place for place, node in met_with(self.schema) if reference_target(node) == definition
        ]
        if not definition or () in places:
            return False
        for place in [*places, definition]:
            at(self.schema, place[:-1])[place[-1]] = False
        return True

    def _find_faults(self, nodes: Iterable[tuple[Place, Any]]) -> None:
        """Remove the keywords of these nodes that are not listed as enforced."""
        changed: list[Place] = []
        for place, node in nodes:
            faults = _not_enforced(node)
            if not faults:
                continue
            name = faults[0].name
            suspects = [keyword for feature in faults for keyword in feature.keywords]
            # The rest may contain further faults.
            dropped = self._fewest(node, suspects) or self._fewest(node, constraints(node))
            if dropped is None:
                raise CannotEnforce(
                    name.split("/")[0],
                    _origin_of(node, place),
                    f"llguidance was not measured to enforce {name}.",
                )
            self._drop(place, dropped, f"llguidance does not enforce {name}")
            changed.append(place)
        if changed:
            self._find_faults_above(changed)

    def _find_faults_above(self, changed: list[Place]) -> None:
        """Look at changed nodes again, and at those above them, of which some features depend on whether a subschema says anything."""
        places = {*changed, *map(holder, changed)}
        self._find_faults(self._there(sorted(places, key=len, reverse=True)))

    def _there(self, places: Iterable[Place]) -> Iterator[tuple[Place, Any]]:
        """The nodes at those of the places that the schema still has."""
        for place in places:
            with contextlib.suppress(KeyError, IndexError, TypeError):
                yield place, at(self.schema, place)

    def _fewest(self, node: Any, suspects: list[str]) -> tuple[str, ...] | None:
        return fewest_to_drop(node, suspects, lambda each: not _not_enforced(each))

    def _drop(self, place: Place, keywords: tuple[str, ...], reason: str) -> None:
        """Take keywords out of the node that is at a place of the schema as it is now."""
        node = at(self.schema, place)
        before = node[PLACE]
        relaxed = without(node, keywords)
        node.clear()
        node.update(relaxed)
        self.faults[before] = (*self.faults.get(before, ()), *keywords)
        self.reasons.setdefault(before, reason)

    def refusal(self, reason: str) -> CannotEnforce:
        """An error about the first fault."""
        first = self.unenforced()[0]
        return CannotEnforce(first.keyword, first.pointer, f"{first.reason}; {reason}.")

    def unenforced(self) -> tuple[Unenforced, ...]:
        """Every fault."""
        return tuple(
            Unenforced(
                keyword=keyword,
                pointer=f"{_origin_of(at(self.original, place), place)}/{keyword}",
                reason=self.reasons[place],
            )
            for place, keywords in self.faults.items()
            for keyword in keywords
        )


_TYPED_VALUES = frozenset(("enum", "const"))
"""Keywords of which 1 and true are different values."""


def _not_enforced(node: Any) -> tuple[Feature, ...]:
    """The features of a node that the grammar does not enforce."""
    if isinstance(node, dict) and not _TYPED_VALUES & node.keys():
        words = tuple((word, node[word]) for word in node if word not in (ORIGIN, PLACE))
        if all(isinstance(value, str | int | float) for _, value in words):
            return _not_enforced_of_scalars(words)
    return _not_enforced_of(node)


@functools.lru_cache(maxsize=4096)
def _not_enforced_of_scalars(words: tuple[tuple[str, str | float], ...]) -> tuple[Feature, ...]:
    return _not_enforced_of(dict(words))


def _not_enforced_of(node: Any) -> tuple[Feature, ...]:
    return tuple(feature for feature in node_features(node) if not is_enforced(feature.name))


def _origin_of(node: Any, place: Place) -> str:
    """Where in the user's schema a node comes from."""
    return node.get(ORIGIN, pointer_of(place)) if isinstance(node, dict) else pointer_of(place)


def _with_places(node: Any, place: Place) -> Any:
    """A copy in which every node carries its place."""
    if not isinstance(node, dict):
        return node
    return {**mapped(node, lambda path, child: _with_places(child, place + path)), PLACE: place}
