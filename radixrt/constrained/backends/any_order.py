"""Writes a JSON schema as a Lark grammar whose objects take their properties in any order.

A rule of an object has a parameter, a bit for each declared property, as llguidance's parametric
grammars have it: a property may come while its bit is clear and sets it, and the object may close
when the bits of all required properties are set. So no required property is missing, none comes
twice, and the grammar has as many rules as the schema has objects.
"""

import json
from typing import Any

from radixrt.constrained.json_schema.keywords import reference_target

MAX_PROPERTIES = 64
"""Declared properties of an object in any order: the bits of a parameter. An object with more keeps
the schema's order."""

_STRING = r'/"([^"\\\x00-\x1F]|\\[nrbtf\\"])*"/'
_OBJECT_WORDS = {"type", "properties", "required", "additionalProperties", "minProperties"}
_ARRAY_WORDS = {"type", "items", "minItems", "maxItems"}


def lark_in_any_order(schema: Any, options: dict[str, Any]) -> str:
    """The Lark text of a schema for which llguidance has a JSON grammar.

    Objects and their values are written in Lark down to schemas without any order left to choose;
    those stay JSON schemas. Where an object with a choice of order is within a keyword that Lark
    can't express, such as ``oneOf``, it keeps the schema's order.

    Args:
        schema: normalised; its references are to its ``$defs``.
        options: of llguidance's converter, with ``whitespace_pattern``.
    """
    return _Writer(schema, options).text()


class _Writer:
    """Writes one rule for each different schema in it."""

    def __init__(self, schema: Any, options: dict[str, Any]) -> None:
        self._options = options
        self._gap = options["whitespace_pattern"]
        self._definitions: dict[str, Any] = (
            schema.get("$defs", {}) if isinstance(schema, dict) else {}
        )
        self._names: dict[str, str] = {}
        """Rules by the text of their schema."""
        self._lines: list[str] = []
        self._root = schema
        if isinstance(schema, dict):
            self._root = {
                word: value for word, value in schema.items() if word not in ("$defs", "x-guidance")
            }
        self._expressible: dict[str, bool] = {}
        self._choices = self._find_choices(self._root)
        self._choices |= self._within_unions()

    def text(self) -> str:
        start = self._rule(self._root)
        return "\n".join([f"start: {start}", *self._lines, ""])

    # ------------------------------------------------------------ which rule

    def _rule(self, node: Any) -> str:
        """The name of the rule of a schema."""
        key = json.dumps(node)
        if key not in self._names:
            name = self._names[key] = f"value_{len(self._names)}"
            self._lines.append(f"{name}: {self._body(node, name)}")
        return self._names[key]

    def _body(self, node: Any, name: str) -> str:
        parts = self._parts(node)
        if _is_any(node) and json.dumps(node) in self._choices:
            return self._any_json()
        if parts is None or json.dumps(node) not in self._choices:
            return f"%json {json.dumps(self._leaf(node), ensure_ascii=False)}"
        if "$ref" in node:
            return self._rule(parts[0])
        if "anyOf" in node:
            leaves = [one for one in parts if json.dumps(one) not in self._choices]
            others = [one for one in parts if json.dumps(one) in self._choices]
            if leaves:
                others.append(leaves[0] if len(leaves) == 1 else {"anyOf": leaves})
            return " | ".join(map(self._rule, others))
        return self._array(node) if node["type"] == "array" else self._object(node, name)

    def _find_choices(self, start: Any) -> set[str]:
        """The texts of the schemas in whose values an order is left to choose."""
        users: dict[str, list[str]] = {}
        waiting, found = [start], set()
        while waiting:
            node = waiting.pop()
            key = json.dumps(node)
            parts = self._parts(node)
            if parts is not None and _members(node) > 1:
                found.add(key)
            for part in parts or ():
                below = json.dumps(part)
                if below not in users:
                    waiting.append(part)
                users.setdefault(below, []).append(key)
        changed = list(found)
        while changed:
            above = set(users.get(changed.pop(), ())) - found
            found |= above
            changed += above
        return found

    def _parts(self, node: Any) -> list[Any] | None:
        """The schemas within a schema that Lark can express; None: it can't."""
        if not isinstance(node, dict):
            return None
        if node.keys() == {"$ref"}:
            target = reference_target(node)
            return None if target is None else [self._definitions[str(target[1])]]
        if node.keys() == {"anyOf"}:
            large = self._large(node)
            is_certain = len(large) < 2 or self._is_expressible(node)
            is_likely = all(isinstance(self._target(one).get("type"), str) for one in large)
            return list(node["anyOf"]) if is_certain or is_likely else None
        if node.get("type") == "array" and node.keys() <= _ARRAY_WORDS and "items" in node:
            return [node["items"]]
        if node.get("type") == "object" and node.keys() <= _OBJECT_WORDS:
            names = _declared(node)
            written = [json.dumps(name, ensure_ascii=False) for name in names]
            plain = not any("\\u" in one or "\x7f" in one for one in written)
            if plain and len(names) <= MAX_PROPERTIES and node.get("minProperties", 0) <= 1:
                return [*names.values(), node.get("additionalProperties", True)]
        return None

    def _large(self, union: dict[str, Any]) -> list[Any]:
        """The branches of a union that are not known to be scalars."""
        return [branch for branch in union["anyOf"] if not self._is_scalar(branch)]

    def _target(self, node: Any) -> dict[str, Any]:
        """A schema itself, or that which it refers to."""
        if (target := reference_target(node)) is not None:
            node = self._definitions[str(target[1])]
        return node if isinstance(node, dict) else {}

    def _is_scalar(self, node: Any) -> bool:
        if not isinstance(node, dict):
            return node is False
        node = self._target(node)
        if _is_union(node):
            return not self._large(node)
        if "enum" in node or "const" in node:
            values = node.get("enum", [node.get("const")])
            return not any(isinstance(value, dict | list) for value in values)
        kinds = node.get("type", "object")
        return not {"object", "array"} & set([kinds] if isinstance(kinds, str) else kinds)

    def _is_expressible(self, node: Any) -> bool:
        """Whether all objects and arrays in the values can be written in Lark. Two branches of a
        union may begin with the same text, and llguidance's lexer leaves one of them at a terminal
        that only the other has. Other unions are written too if the types of their branches are
        known: that loses fewer answers than an order."""
        key = json.dumps(node)
        if key not in self._expressible:
            self._expressible[key] = True  # of a schema within itself
            parts = list(node["anyOf"]) if _is_union(node) else self._parts(node)
            self._expressible[key] = (
                _is_any(node)
                or self._is_scalar(node)
                or (parts is not None and all(map(self._is_expressible, parts)))
            )
        return self._expressible[key]

    def _within_unions(self) -> set[str]:
        """The texts of all schemas within the unions of several objects or arrays in which an order
        is left to choose."""
        waiting, seen, found = [(self._root, False)], set(), set()
        while waiting:
            node, is_within = waiting.pop()
            key = json.dumps(node)
            is_within |= _is_union(node) and key in self._choices and len(self._large(node)) > 1
            if (key, is_within) in seen:
                continue
            seen.add((key, is_within))
            if is_within and not self._is_scalar(node):
                found.add(key)
            waiting += [(part, is_within) for part in self._parts(node) or ()]
        return found

    def _leaf(self, node: Any) -> dict[str, Any]:
        if not isinstance(node, dict):
            node = {} if node else {"enum": []}
        definitions = {"$defs": self._definitions} if "$ref" in json.dumps(node) else {}
        return {**node, **definitions, "x-guidance": self._options}

    # ------------------------------------------------------------ rules

    def _any_json(self) -> str:
        """Any JSON, in the terminals of the other rules."""
        if "any_json" in self._names:
            return "any_value"
        self._names["any_json"] = "any_value"
        scalar = self._leaf({"type": ["string", "number", "boolean", "null"]})
        comma, colon = self._mark(",", before=True), f"/{self._gap}:{self._gap}/"
        self._lines += [
            f"any_scalar: %json {json.dumps(scalar)}",
            f"ANY_NAME: {_STRING}",
            f"any_member: ANY_NAME {colon} any_value",
            f"any_object: {self._mark('{')} (any_member ({comma} any_member)*)? {self._mark('}', before=True)}",
            f"any_array: {self._mark('[')} (any_value ({comma} any_value)*)? {self._mark(']', before=True)}",
            "any_value: any_scalar | any_object | any_array",
        ]
        return "any_value"

    def _array(self, node: dict[str, Any]) -> str:
        item = self._rule(node["items"])
        least, most = node.get("minItems", 0), node.get("maxItems")
        if most == 0:
            return f"{self._mark('[')} {self._mark(']', before=True)}"
        items = item
        if most != 1:
            more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
            items += f" ({self._mark(',', before=True)} {item}){more}"
        items = items if least else f"({items})?"
        return f"{self._mark('[')} {items} {self._mark(']', before=True)}"

    def _object(self, node: dict[str, Any], name: str) -> str:
        declared, required = _declared(node), set(node.get("required", ()))
        additional = node.get("additionalProperties", True)
        # A terminal of its own: a name may be declared in one branch of a union and additional in
        # another.
        colon = f"/{self._gap}:{self._gap}/"
        names = [*(one for one in declared if one in required)]
        names += [one for one in declared if one not in required and declared[one] is not False]
        members = [
            f"/{_escaped(json.dumps(one, ensure_ascii=False))}/ {colon} {self._rule(declared[one])} "
            f"{name}_rest::set_bit({bit}) %if bit_clear({bit})"
            for bit, one in enumerate(names)
        ]
        comma = f"{self._mark(',', before=True)} {name}_member::_"
        if additional is not False:
            taken = "|".join(_escaped(json.dumps(one, ensure_ascii=False)) for one in declared)
            other = f"{_STRING} & ~/({taken})/" if taken else _STRING
            self._lines.append(f"{name.upper()}_OTHER: {other}")
            members.append(f"{name.upper()}_OTHER {colon} {self._rule(additional)} {name}_rest::_")
        else:
            comma += f" %if not(is_ones([0:{len(names)}]))"
        if not members:
            return f"{self._mark('{')} {self._mark('}', before=True)}"
        may_end = f'"" %if is_ones([0:{len(required)}])' if required else '""'
        self._lines.append(f"{name}_member::_: " + "\n | ".join(members))
        self._lines.append(f"{name}_rest::_: {may_end}\n | {comma}")
        first = f"{name}_member::0"
        if not required and not node.get("minProperties"):
            first = f"({first})?"
        return f"{self._mark('{')} {first} {self._mark('}', before=True)}"

    def _mark(self, mark: str, *, before: bool = False) -> str:
        """A mark of JSON with the white space behind it, or before and behind it."""
        gap = self._gap
        behind = "" if mark in "]}" else gap
        return f"/{gap if before else ''}\\{mark}{behind}/"


def _is_union(node: Any) -> bool:
    return isinstance(node, dict) and node.keys() == {"anyOf"}


def _is_any(node: Any) -> bool:
    return node is True or node == {}


def _declared(node: dict[str, Any]) -> dict[str, Any]:
    """The schemas of the properties that are declared or required, by name."""
    additional = node.get("additionalProperties", True)
    required = {name: additional for name in node.get("required", ())}
    return {**required, **node.get("properties", {})}


def _members(node: dict[str, Any]) -> int:
    """Kinds of properties that may stand in an order of their own; 0 without an object."""
    if node.get("type") != "object":
        return 0
    return len(_declared(node)) + (node.get("additionalProperties", True) is not False)


def _escaped(text: str) -> str:
    """A text as a regular expression between slashes."""
    return "".join(f"\\{c}" if c in r"\/.^$|?*+()[]{}&~-#" else c for c in text)
