"""Rewrites a schema into the normal form, which accepts exactly the same values.

Each keyword of a normalised schema stands in few places, which makes it easy to say which keywords
a backend enforces. A schema is one of

- ``{"anyOf": [...]}``, of schemas that are not ``anyOf`` themselves;
- ``{"enum": [...]}`` or ``{"const": ...}``, already filtered by everything else;
- ``{"type": T}`` with keywords of this one type, or ``{"type": [...]}`` without any;
- ``{"$ref": "#/$defs/..."}``; true, and below ``properties`` or ``additionalProperties`` false;
- ``{"oneOf": [...]}``, where branches may overlap.

Keywords that this form cannot express are kept beside it: ``not``, ``if``, ``allOf``, ``contains``,
``uniqueItems``, ...
"""

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.json_schema.keywords import (
    ANY_TYPE,
    OF_TYPE,
    ORIGIN,
    TYPES,
    Schema,
    mapped,
    type_of,
    value_key,
)
from radixrt.constrained.json_schema.normal.containers import ArrayForm, ObjectForm
from radixrt.constrained.json_schema.normal.document import Document, Translator, check_progress
from radixrt.constrained.json_schema.normal.emptiness import (
    Alternatives,
    Emptiness,
    Judge,
    RawWriter,
)
from radixrt.constrained.json_schema.normal.flatten import Flat, Flattener, Raw
from radixrt.constrained.json_schema.normal.node import (
    Node,
    Written,
    deny_endless,
    write,
    write_alone,
)
from radixrt.constrained.json_schema.normal.scalars import literal_forms, number_forms, string_forms
from radixrt.constrained.json_schema.position import note

MAX_NODES = 50_000
"""Different schemas that one normalised schema may be made of."""
_RECURSION_LIMIT = 20_000


def normalize(schema: Any) -> Any:
    """An equivalent, self-contained schema of 2020-12 in the forms above.

    Every object of it carries ORIGIN. Without ``$schema`` it is read as 2020-12 in which keywords
    of older drafts keep their meaning.

    Raises:
        CannotEnforce: it is not a valid schema, has a reference without a target, no value
            satisfies it, or it is too large.
    """
    translator = Translator(Document(schema))
    with _deep_recursion():
        try:
            check_progress(translator)
            normalizer = Normalizer(translator)
            root = normalizer.node([translator.translated("")])
            if root.is_never:
                raise CannotEnforce.whole("No value satisfies it. Remove the contradiction.")
            deny_endless(root)
            return write(root, normalizer.raw_writer.defs)
        except RecursionError:
            raise CannotEnforce.whole("Its definitions are nested too deeply.") from None


@contextlib.contextmanager
def _deep_recursion() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _RECURSION_LIMIT))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


class Normalizer:
    """Makes a node of each conjunction of translated schemas; equal conjunctions share one."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        self._flattener = Flattener(translator)
        self._judge = Judge(translator)
        self._emptiness = Emptiness(self._flattener, self._judge)
        self._alternatives = Alternatives(self._flattener, self._emptiness.is_certain)
        self.raw_writer = RawWriter(translator, "as_sent_")
        self._nodes: dict[tuple[int, ...], Node] = {}
        self._keys: dict[int, tuple[Schema, int]] = {}
        self._numbers: dict[str, int] = {}

    def node(self, conjuncts: list[Schema]) -> Node:
        """The node of the values that satisfy all of these. Raises CannotEnforce if too many
        different conjunctions were asked for."""
        conjuncts = [raw for raw in conjuncts if raw is not True and raw != {}]
        if any(raw is False for raw in conjuncts):
            return Node("", False)
        while len(conjuncts) == 1 and conjuncts[0].keys() <= {"$ref", ORIGIN}:  # type: ignore[union-attr]
            raw = conjuncts[0]
            if isinstance(raw, bool) or "$ref" not in raw:
                break
            conjuncts = [self._translator.translated(raw["$ref"][1:])]
            if isinstance(conjuncts[0], bool):
                return Node("", conjuncts[0])
        unique = {self._key(raw): raw for raw in conjuncts}
        key = tuple(unique)
        if not key:
            return Node("", True)
        if key not in self._nodes:
            if len(self._nodes) >= MAX_NODES:
                raise CannotEnforce.whole(f"Normalised, it has more than {MAX_NODES} different parts. Make it simpler."
                )  # fmt: skip
            first = next(iter(unique.values()))
            node = self._nodes[key] = Node(first.get(ORIGIN, "") if isinstance(first, dict) else "")
            node.schema = self._build(node.origin, list(unique.values()))
        return self._nodes[key]

    def _key(self, raw: Schema) -> int:
        """Equal for equal schemas; made of the subschemas' keys: each is written once."""
        if isinstance(raw, bool):
            return raw
        if id(raw) not in self._keys:
            words = mapped(raw, lambda _, child: self._key(child))
            words.pop(ORIGIN, None)
            kind = words.get("type") if len(words) == 1 else None
            text = kind if isinstance(kind, str) else json.dumps(words)  # no JSON is a bare word
            key = self._numbers.setdefault(text, len(self._numbers))
            self._keys[id(raw)] = (raw, key)
        return self._keys[id(raw)][1]

    def _build(self, origin: str, conjuncts: list[Schema]) -> dict[str, Any] | bool:
        note("rewrite", origin)
        flat = self._flattener.flatten(conjuncts)
        if flat.never or not flat.types():
            return False
        if flat.values() is not None:
            return self._of_values(origin, flat)
        self._alternatives.simplify(flat)
        if flat.never:
            return False
        if flat.exclusives:
            return self._one_of(origin, flat)
        combinations = self._alternatives.combine(flat)
        if not combinations:
            return False
        if combinations == [[]]:
            nodes = self._by_type(origin, flat)
        else:
            nodes = [self.node([*flat.simple, *chosen]) for chosen in combinations]
        return self._with_opaque(origin, union(origin, nodes), flat.opaque)

    # Forms

    def _one_of(self, origin: str, flat: Flat) -> dict[str, Any] | bool:
        """Exactly one branch, each together with all that holds besides."""
        branches, flat.exclusives = flat.exclusives[0], flat.exclusives[1:]
        opaque, flat.opaque = flat.opaque, []
        nodes = [self.node([*flat.conjuncts(), branch]) for branch in branches]
        nodes = [node for node in nodes if not node.is_never]
        if not nodes:
            return False
        result = nodes[0].schema if len(nodes) == 1 else exactly_one(nodes)
        assert result is not None
        return self._with_opaque(origin, result, opaque)

    def _of_values(self, origin: str, flat: Flat) -> dict[str, Any] | bool:
        values = flat.values()
        assert values is not None
        types = flat.types()
        rest = [_without_values(raw, values) for raw in flat.simple]
        others = [
            raw
            for raw in Flat(rest, flat.choices, flat.exclusives, flat.opaque).conjuncts()
            if not isinstance(raw, dict) or raw.keys() - {"type", ORIGIN}
        ]
        kept, certain = self._judge.sort([v for v in values if _has_type(v, types)], others)
        if certain or not kept:
            return {"enum": kept} if kept else False
        # Normalised, the rest is simpler, so this one may be certain.
        node = self.node(others)
        if (plain := write_alone(node)) is not None:
            kept, certain = self._judge.sort(kept, [plain])
        if not kept:
            return False
        return {"enum": kept} if certain else {"enum": kept, "allOf": [node]}

    def _by_type(self, origin: str, flat: Flat) -> list[Node]:
        """One alternative for each type; types without keywords share one."""
        types = flat.types()
        order = [*(kind for raw in flat.simple for kind in _listed(raw)), *TYPES]
        plain: list[str] = []
        nodes: list[Node] = []
        for kind in dict.fromkeys(order):
            if kind not in types:
                continue
            for node in self._of_type(origin, kind, flat.simple):
                if node.schema == {"type": kind}:
                    plain.append(kind)
                else:
                    nodes.append(node)
        if len(plain) == len(TYPES):
            return [Node(origin, True)]
        if plain:
            kinds = plain[0] if len(plain) == 1 else plain
            nodes.append(Node(origin, {"type": kinds}))
        return nodes

    def _of_type(self, origin: str, kind: str, simple: list[Raw]) -> list[Node]:
        words = {ORIGIN, *ANY_TYPE, *OF_TYPE.get("number" if kind == "integer" else kind, ())}
        about = [{word: raw[word] for word in raw if word in words} for raw in simple]
        if kind == "object":
            return ObjectForm(self.node, about).nodes()
        if kind == "array":
            return ArrayForm(self.node, about).nodes()
        if kind == "string":
            forms = string_forms(about)
        elif kind in ("number", "integer"):
            forms = number_forms(about, kind == "integer")
        else:
            forms = literal_forms(about, kind)
        return [Node(origin, form) for form in forms]

    def _with_opaque(
        self, origin: str, schema: dict[str, Any] | bool, opaque: list[Raw]
    ) -> dict[str, Any] | bool:
        """Put the keywords that the form can't express beside it."""
        for raw in opaque:
            if raw.keys() <= {"not", ORIGIN}:
                schema = without_denied(schema, self.node([raw["not"]]))
        if schema is False or not opaque:
            return schema
        words = dict(schema) if isinstance(schema, dict) else {}
        for raw in opaque:
            form = self._opaque_form(raw)
            if words.keys() & form.keys():
                words["allOf"] = [*words.get("allOf", ()), Node(raw.get(ORIGIN, origin), form)]
            else:
                words.update(form)
        return words

    def _opaque_form(self, raw: Raw) -> dict[str, Any]:
        words = {word: value for word, value in raw.items() if word != ORIGIN}
        if words.keys() <= {"not", "if", "then", "else"}:
            return {word: self.node([value]) for word, value in words.items()}
        if words.keys() == {"anyOf"}:
            return {"anyOf": [self.node([branch]) for branch in words["anyOf"]]}
        # Keywords that depend on the evaluation of their neighbours must keep their neighbours.
        return {"allOf": [Written(self.raw_writer.write(part)) for part in words["allOf"]]}


def union(origin: str, nodes: list[Node]) -> dict[str, Any] | bool:
    """The form of the values that at least one of the nodes accepts."""
    parts = [part for node in nodes for part in node.alternatives()]
    if any(part.is_any for part in parts):
        return True
    distinct: list[Node] = []
    seen: set[str] = set()
    for part in parts:
        text = _text(part)
        if text not in seen:
            seen.add(text)
            distinct.append(part)
    if not distinct:
        return False
    if len(distinct) == 1 and distinct[0].schema is not None:
        return distinct[0].schema
    return {"anyOf": distinct}


def exactly_one(nodes: list[Node]) -> dict[str, Any] | bool:
    """The form of the values that one of the nodes alone accepts: none of them is in an alternative
    that two nodes have."""
    parts = [part for node in nodes for part in node.alternatives()]
    times = Counter(map(_text, parts))
    alone = [part for part in parts if times[_text(part)] == 1]
    if not alone:
        return False
    return {"oneOf": nodes} if len(alone) == len(parts) else {"oneOf": nodes, "anyOf": alone}


def without_denied(schema: dict[str, Any] | bool, denied: Node) -> dict[str, Any] | bool:
    """The schema without the alternatives that are denied as a whole."""
    parts = Node("", schema).alternatives()
    left = [part for part in parts if not any(_covers(one, part) for one in denied.alternatives())]
    return schema if len(left) == len(parts) else union("", left)


def _covers(whole: Node, part: Node) -> bool:
    """Whether it is plain that the first node accepts all that the second one does."""
    if whole.is_any or _text(whole) == _text(part):
        return True
    if not isinstance(whole.schema, dict) or whole.schema.keys() != {"type"}:
        return False
    if not isinstance(part.schema, dict) or "type" not in part.schema:
        return False
    kinds = set(_listed(whole.schema))
    return set(_listed(part.schema)) <= kinds | ({"integer"} if "number" in kinds else set())


def _text(node: Node) -> str:
    """Equal only for equal nodes. Nodes inside are compared by identity."""
    return repr(node if node.schema is None else node.schema)


def _listed(raw: Raw) -> list[str]:
    kinds = raw.get("type", [])
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _has_type(value: Any, types: set[str]) -> bool:
    kind = type_of(value)
    if kind == "number" and "number" not in types:
        return "integer" in types and float(value).is_integer()
    return kind in types


def _without_values(raw: Raw, values: list[Any]) -> Raw:
    """The schema without the list of values that are looked at one by one anyway."""
    keys = {value_key(value) for value in values}
    listed = {"enum": raw.get("enum", ()), "const": [raw.get("const")]}
    looked_at = {word for word, some in listed.items() if {*map(value_key, some)} == keys}
    return {word: value for word, value in raw.items() if word not in looked_at}
