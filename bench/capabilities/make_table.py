"""Makes the table of the features that each grammar library enforces: ``python -m bench.capabilities.make_table [--check] [--why FEATURE]``.

Writes ``radixrt/constrained/json_schema/auditing/capabilities.json``. Nothing in it is random and nothing is timed.
"""

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

from bench.capabilities.hand_probes import by_hand
from bench.capabilities.libraries import COMPILERS, Acceptor, versions
from bench.capabilities.probes import Probe, by_rule
from radixrt.constrained.json_schema import auditing
from radixrt.constrained.json_schema.auditing.capabilities import Verdict
from radixrt.constrained.json_schema.validation import SchemaValidator, parse_exact

_PRECISE = Context(prec=1000)
TABLE = Path(auditing.__file__).parent / "capabilities.json"


@dataclass
class Outcome:
    """What was seen of one backend at one feature; each list holds (schema, text)."""

    compiled: int = 0
    refused: int = 0
    accepted_invalid: list[tuple[Any, str]] = field(default_factory=list)
    unwritable: list[tuple[Any, str]] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        if self.accepted_invalid:
            return Verdict.DROPS
        if not self.compiled:
            return Verdict.REFUSES
        return Verdict.NARROW if self.unwritable else Verdict.EXACT


def measure() -> dict[str, dict[str, Outcome]]:
    """Run every probe through every backend: feature → backend → outcome."""
    outcomes: dict[str, dict[str, Outcome]] = defaultdict(
        lambda: {name: Outcome() for name in COMPILERS}
    )
    for probe in itertools.chain(by_rule(), by_hand()):
        judged = _judge(probe)
        for name, compile_schema in COMPILERS.items():
            _run(probe, judged, compile_schema(probe.schema), outcomes[probe.feature][name])
    return outcomes


def _judge(probe: Probe) -> dict[str, bool]:
    """Whether each text is valid; a text with repeated names is valid if it is, whichever of them count."""
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


def table(outcomes: dict[str, dict[str, Outcome]]) -> dict[str, Any]:
    """The content of the file."""
    return {
        "versions": versions(),
        "features": {
            feature: {name: str(outcome.verdict) for name, outcome in outcomes[feature].items()}
            for feature in sorted(outcomes)
        },
    }


def table_text(content: dict[str, Any]) -> str:
    """JSON with a line for each feature."""
    rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in content["features"].items())
    return f'{{\n"versions": {json.dumps(content["versions"])},\n"features": {{\n{rows}\n}}\n}}\n'


def reasons(outcomes: dict[str, dict[str, Outcome]], part: str) -> Iterator[str]:
    """Lines that tell what was seen, of the features whose names contain ``part``."""
    for feature in sorted(outcomes):
        if part not in feature:
            continue
        for name, outcome in outcomes[feature].items():
            yield f"{feature} {name}: {outcome.verdict} ({outcome.compiled} compiled, {outcome.refused} refused)"
            for kind in ("accepted_invalid", "unwritable"):
                for schema, text in getattr(outcome, kind)[:3]:
                    yield f"    {kind}: {text!r} under {json.dumps(schema)[:300]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare instead of writing; 1 if the table is out of date",
    )
    parser.add_argument(
        "--why", metavar="FEATURE", help="print what was seen of features with this in their name"
    )
    arguments = parser.parse_args()
    outcomes = measure()
    if arguments.why is not None:
        print("\n".join(reasons(outcomes, arguments.why)))
        return 0
    text = table_text(table(outcomes))
    if arguments.check:
        return int(TABLE.read_text("utf-8") != text)
    TABLE.write_text(text, "utf-8")
    print(f"{len(outcomes)} features in {TABLE}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
