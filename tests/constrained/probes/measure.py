"""Sends the probes through the installed llguidance: what it accepts of each use of keywords.

``python -m tests.constrained.probes.measure USE`` prints what was seen of the uses with this in
their names.
"""

import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Context, Decimal
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from radixrt.constrained.backends.llguidance import compile_without_tokenizer
from radixrt.constrained.json_schema.validation import SchemaValidator, parse_exact
from tests.constrained.probes.hand_probes import by_hand
from tests.constrained.probes.probes import Probe, by_rule

_PRECISE = Context(prec=1000)
_BYTES = LLTokenizer("byte")

Acceptor = Callable[[bytes], bool]
"""Whether a text is accepted from beginning to end."""


def compile_schema(schema: Any) -> Acceptor | None:
    """None if llguidance refuses the schema. Texts are matched byte by byte: acceptance does not
    depend on the vocabulary."""
    grammar, error = compile_without_tokenizer(json.dumps(schema))
    if error:
        return None
    start = LLMatcher(_BYTES, grammar)

    def accepts(text: bytes) -> bool:
        matcher = start.deep_copy()
        return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()

    return accepts


@dataclass
class Outcome:
    """What was seen of one use; each list holds (schema, text)."""

    compiled: int = 0
    refused: int = 0
    accepted_invalid: list[tuple[Any, str]] = field(default_factory=list)
    unwritable: list[tuple[Any, str]] = field(default_factory=list)


def measure() -> dict[str, Outcome]:
    """Run every probe: use → outcome."""
    outcomes: dict[str, Outcome] = defaultdict(Outcome)
    for probe in itertools.chain(by_rule(), by_hand()):
        _run(probe, _judge(probe), compile_schema(probe.schema), outcomes[probe.use])
    return outcomes


def _judge(probe: Probe) -> dict[str, bool]:
    """Whether each text is valid; a text with repeated names is valid if it is, whichever of them
    count."""
    validator = SchemaValidator(probe.schema)
    return {
        text: probe.known[text] if text in probe.known else _is_valid(validator, text)
        for text in probe.texts
    }


def _is_valid(validator: SchemaValidator, text: str) -> bool:
    try:
        last = not validator.first_error(text)
        return last and (
            not _repeats_names(text) or not validator.first_error(_with_first_of_repeated(text))
        )
    except ValueError:
        return False


def _repeats_names(text: str) -> bool:
    found = False

    def note(pairs: list[tuple[str, Any]]) -> None:
        nonlocal found
        found = found or len(dict(pairs)) < len(pairs)

    json.loads(text, object_pairs_hook=note)
    return found


def _with_first_of_repeated(text: str) -> str:
    """Decoders keep the last of equal names, or the first."""
    return json.dumps(json.loads(text, object_pairs_hook=lambda pairs: dict(reversed(pairs))))


def _run(probe: Probe, judged: dict[str, bool], accepts: Acceptor | None, outcome: Outcome) -> None:
    if accepts is None:
        outcome.refused += 1
        return
    outcome.compiled += 1
    written, valid_values = set(), {}
    for text, valid in judged.items():
        accepted = accepts(text.encode("utf-8"))
        if accepted and not valid:
            outcome.accepted_invalid.append((probe.schema, text))
        if valid and text not in probe.may_be_unwritable:
            key = _value_key(text)
            valid_values[key] = text
            if accepted or any(accepts(other.encode("utf-8")) for other in _reordered(text)):
                written.add(key)
    outcome.unwritable += [
        (probe.schema, text) for key, text in valid_values.items() if key not in written
    ]


def _reordered(text: str) -> Iterator[str]:
    """The other orders of an object's properties: which one is written is a matter of policy."""
    value = parse_exact(text)
    if isinstance(value, dict) and 1 < len(value) < 5:
        for names in itertools.permutations(value):
            yield json.dumps({name: value[name] for name in names}, default=str)


def _value_key(text: str) -> str:
    """Equal for all spellings of a value, in whichever order its properties are."""
    return json.dumps(_canonical(parse_exact(text)), sort_keys=True)


def _canonical(value: Any) -> Any:
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {name: _canonical(item) for name, item in value.items()}
    return (
        value
        if value is None or isinstance(value, bool | str)
        else f"number {Decimal(value).normalize(_PRECISE)}"
    )


def reasons(outcomes: dict[str, Outcome], part: str) -> Iterator[str]:
    """Lines that tell what was seen, of the uses whose names contain ``part``."""
    for use, outcome in sorted(outcomes.items()):
        if part not in use:
            continue
        yield f"{use}: {outcome.compiled} compiled, {outcome.refused} refused"
        for kind in ("accepted_invalid", "unwritable"):
            for schema, text in getattr(outcome, kind)[:3]:
                yield f"    {kind}: {text!r} under {json.dumps(schema)[:300]}"


if __name__ == "__main__":
    print("\n".join(reasons(measure(), sys.argv[1])))
