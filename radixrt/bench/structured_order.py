"""Is a value rejected for its order of properties alone? The order is the grammar's policy, not the schema's word."""

import json
from collections.abc import Iterator
from typing import Any

from radixrt.constrained.matcher import Matcher
from radixrt.constrained.tokenizer_facts import TokenizerFacts

MOST_STEPS = 10_000
"""Names and scalars tried before a search ends without a result."""


def accepted_order(
    value: Any, matcher: Matcher, facts: TokenizerFacts, schema: Any = True
) -> str | None:
    """The value as JSON text in an order that the grammar takes, if one is found; ``schema`` is a hint to it."""
    search = _Search(facts, _declared(schema))
    for text, after in search.write(value, matcher):
        if after.fork().advance([facts.eos_token_ids[0]]) == 1:
            return text
    return None


def _declared(schema: Any) -> dict[str, int]:
    """Property names in the order in which a schema first declares them."""
    names: dict[str, int] = {}
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += reversed(node)
        elif isinstance(node, dict):
            for name in node.get("properties", {}):
                names.setdefault(name, len(names))
            waiting += reversed(node.values())
    return names


class _Search:
    """Depth first, names in the order of the schema first, undeclared ones last."""

    def __init__(self, facts: TokenizerFacts, declared: dict[str, int]) -> None:
        self.facts = facts
        self.declared = declared
        self.left = MOST_STEPS

    def take(self, text: str, matcher: Matcher) -> Matcher | None:
        """The matcher after a text, if it takes it."""
        self.left -= 1
        if self.left < 0:
            return None
        after, tokens = matcher.fork(), self.facts.encode(text)
        return after if after.advance(tokens) == len(tokens) else None

    def write(self, value: Any, matcher: Matcher) -> Iterator[tuple[str, Matcher]]:
        """Spellings of the value that the grammar takes, each with the matcher after it."""
        if isinstance(value, dict) and value:
            names = sorted(value, key=lambda name: self.declared.get(name, len(self.declared)))
            yield from self.properties("{", value, names, matcher)
        elif isinstance(value, list) and value:
            yield from self.items("[", value, 0, matcher)
        else:
            text = json.dumps(value, ensure_ascii=False)
            after = self.take(text, matcher)
            if after is not None:
                yield text, after

    def items(
        self, before: str, values: list[Any], index: int, matcher: Matcher
    ) -> Iterator[tuple[str, Matcher]]:
        opened = self.take(before, matcher)
        if opened is None:
            return
        for text, after in self.write(values[index], opened):
            if index + 1 < len(values):
                for rest, end in self.items(", ", values, index + 1, after):
                    yield before + text + rest, end
            elif (closed := self.take("]", after)) is not None:
                yield before + text + "]", closed

    def properties(
        self, before: str, values: dict[str, Any], names: list[str], matcher: Matcher
    ) -> Iterator[tuple[str, Matcher]]:
        for name in names:
            opening = f"{before}{json.dumps(name, ensure_ascii=False)}: "
            named = self.take(opening, matcher)
            if named is None:
                continue
            others = [other for other in names if other != name]
            for text, after in self.write(values[name], named):
                if others:
                    for rest, end in self.properties(", ", values, others, after):
                        yield opening + text + rest, end
                elif (closed := self.take("}", after)) is not None:
                    yield opening + text + "}", closed
