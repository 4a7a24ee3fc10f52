"""``python -m bench.structured``: measures accepted schemas, accepted instances and the cost of
grammars.

Each schema of a file goes through the engines: the router, and llguidance alone. Its instances are
fed token by token to the matcher, and to the checks beside it.
"""

import argparse
import contextlib
import gc
import gzip
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from radixrt.base.config import DEMO_MODEL
from radixrt.base.errors import ConfigError
from radixrt.bench.arguments import not_negative, positive
from radixrt.bench.report import console_beside, write_json
from radixrt.constrained.backends import llguidance
from radixrt.constrained.bitmask import bitmask_words
from radixrt.constrained.compiler.compilation import compile_json_schema
from radixrt.constrained.compiler.jobs import CompileOptions
from radixrt.constrained.constraint import JsonSchema
from radixrt.constrained.errors import CannotCompile, CannotEnforce, GrammarExhausted
from radixrt.constrained.grammar import SpanCheck
from radixrt.constrained.json_schema.enforcement import enforce_json_schema
from radixrt.constrained.json_schema.validation import SchemaValidator
from radixrt.constrained.loader import load_grammar
from radixrt.constrained.matcher import Matcher
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.models.checkpoint import resolve_model_path


@dataclass
class Record:
    """The result of one engine for one schema: verdict, times, treatment of the instances."""

    engine: str
    schema_id: str
    backend: str = ""
    """Empty: refused."""
    refusal: str = ""
    keyword: str = ""
    """The keyword to which the refusal is due, if it is known."""
    checks: list[dict[str, Any]] = field(default_factory=list)
    compile_s: float = 0.0
    """Time until a matcher is ready."""
    first_mask_s: float = 0.0
    mask_s: list[float] = field(default_factory=list)
    """One for each token of an instance."""
    tokens: int = 0
    forced: int = 0
    """Tokens that were the only ones allowed."""
    valid: int = 0
    valid_accepted: int = 0
    invalid: int = 0
    invalid_accepted: int = 0
    format_only_accepted: int = 0
    """Accepted instances that are invalid only if ``format`` is asserted."""
    unverified_accepted: int = 0
    """Accepted instances whose label no validator confirms."""
    exhausted: int = 0
    """Instances in whose middle the library ran into a limit of its own."""
    wrong: list[str] = field(default_factory=list)
    """Wrongly treated instances, each with its error."""

    @property
    def covered(self) -> bool:
        """The schema is taken and all its valid instances with it."""
        return bool(self.backend) and self.valid_accepted == self.valid


class Refused(Exception):
    """A schema is not taken; says why, and by which keyword if that is known."""

    def __init__(self, reason: str, keyword: str = "") -> None:
        super().__init__(reason)
        self.keyword = keyword


@dataclass
class Held:
    """A schema that an engine has taken."""

    backend: str
    matcher: Matcher
    """Before the first token."""
    checks: tuple[SpanCheck, ...] = ()
    _validators: list[SchemaValidator] = field(default_factory=list)

    def checks_pass(self, text: str) -> bool:
        """Whether every value that has a check passes it."""
        if not self._validators:
            self._validators = [SchemaValidator(check.schema) for check in self.checks]
        value = json.loads(text)
        return all(
            validator.first_error(json.dumps(part, ensure_ascii=False)) is None
            for check, validator in zip(self.checks, self._validators, strict=True)
            for part in values_at(value, check.path)
        )


def values_at(value: Any, path: tuple[str | None, ...]) -> list[Any]:
    """The parts of a value that a check's path names."""
    found = [value]
    for step in path:
        below: list[Any] = []
        for each in found:
            if isinstance(each, dict) and step is not None:
                below += [each[step]] if step in each else []
            elif step is None and isinstance(each, dict | list):
                below += each.values() if isinstance(each, dict) else each
        found = below
    return found


Engine = Callable[[str, TokenizerFacts], Held]


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raises Refused if the schema cannot be enforced or compiled."""
    try:
        yield
    except CannotEnforce as error:
        raise Refused(f"{error.pointer}: {error.reason}", error.keyword) from error
    except CannotCompile as error:
        raise Refused(str(error)) from error


@_refusing()
def router(schema: str, facts: TokenizerFacts) -> Held:
    """Compile as the server does; refused is what it would answer with a 400."""
    compiled = compile_json_schema(JsonSchema(schema=schema), facts, CompileOptions())
    grammar = compiled.grammar
    assert isinstance(compiled.checks, tuple)  # of a JSON schema, not of tags
    return Held(grammar.backend, load_grammar(grammar, facts), compiled.checks)


@_refusing()
def any_order(schema: str, facts: TokenizerFacts) -> Held:
    """Compile as the server does for a schema with ``"x-property-order": "any"``."""
    enforced = enforce_json_schema(schema)
    grammar = llguidance.compile_in_any_order(enforced.schema, facts, "flexible")
    return Held(grammar.backend, load_grammar(grammar, facts), enforced.checks)


@_refusing()
def alone(schema: str, facts: TokenizerFacts) -> Held:
    """Compile by llguidance alone, given the schema as it is."""
    grammar = llguidance.compile_json_schema(schema, facts, "flexible")
    return Held(grammar.backend, load_grammar(grammar, facts))


ENGINES: dict[str, Engine] = {"router": router, "any-order": any_order, "llguidance": alone}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. The exit status is 1 if the router accepted an invalid instance."""
    arguments = parsed(argv)
    console = console_beside(arguments.json)
    facts = TokenizerFacts.from_folder(
        resolve_model_path(arguments.tokenizer or DEMO_MODEL, "--tokenizer")
    )
    rows = list(read_schemas(Path(arguments.schemas)))
    if arguments.sample:
        rows = random.Random(arguments.seed).sample(rows, min(arguments.sample, len(rows)))
    _warm_up(arguments.backends, facts)
    records = [
        measure(name, ENGINES[name], row, facts)
        for row in track(rows, "Schemas", console=console, transient=True)
        for name in arguments.backends
    ]
    gc.unfreeze()
    summary = report(records)
    print_tables(summary, console, f"{len(rows)} schemas of {arguments.schemas}")
    content = {"summary": summary, "schemas": [_row(record) for record in records]}
    write_json(arguments.json, content)
    return int(any(r.invalid_accepted for r in records if r.engine == "router"))


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.structured", description="Hold schemas' instances against the router and each grammar library.")  # fmt: skip
    parser.add_argument("--schemas", required=True, metavar="FILE", help="jsonl, gzipped or not: {id, source, schema, tests: [{data, valid}]} a line")  # fmt: skip
    parser.add_argument("--sample", type=positive, metavar="N", help="number of schemas, drawn at random (default: all)")  # fmt: skip
    parser.add_argument("--seed", type=not_negative, default=0, help="of the sample (default: %(default)s)")  # fmt: skip
    parser.add_argument("--backends", nargs="+", choices=ENGINES, default=["router", "llguidance"], help="the router, the router with properties in any order, and llguidance alone (default: router and llguidance)")  # fmt: skip
    parser.add_argument("--tokenizer", metavar="DIR", help="folder with tokenizer.json and config.json (default: the built-in model)")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the summary and every schema to a file; - is standard output")  # fmt: skip
    return parser.parse_args(argv)


def _warm_up(backends: list[str], facts: TokenizerFacts) -> None:
    """Load the libraries, and keep what was loaded out of garbage collections, as a compile helper
    of the server does."""
    for name in backends:
        for schema in ('{"type": "object"}', '{"const": "\\u0001"}'):
            with contextlib.suppress(Refused):
                ENGINES[name](schema, facts)
    gc.collect()
    gc.freeze()


def read_schemas(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a jsonl file, gzipped or not: ``{id, source, schema, tests: [{data, valid, ...}]}``.

    Raises:
        ConfigError: it can't be read.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            yield from map(json.loads, lines)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Can't read the schemas in {path}: {error}") from error


def measure(name: str, engine: Engine, row: dict[str, Any], facts: TokenizerFacts) -> Record:
    """Compile one schema and feed it its instances."""
    record = Record(name, row["id"])
    schema = row["schema"]
    if "draft7" in row.get("source", "") and isinstance(schema, dict):
        schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    begin = time.perf_counter()
    try:
        held = engine(json.dumps(schema, ensure_ascii=False), facts)
    except Refused as refused:
        record.refusal, record.keyword = str(refused)[:300], refused.keyword
        return record
    record.compile_s = time.perf_counter() - begin
    record.backend = held.backend
    record.checks = [{"path": c.path, "keywords": c.keywords} for c in held.checks]
    mask = np.zeros(bitmask_words(facts.vocab_size), dtype=np.int32)
    begin = time.perf_counter()
    held.matcher.fork().fill_mask(mask)
    record.first_mask_s = time.perf_counter() - begin
    for test in row.get("tests", ()):
        _count(record, test, held, facts, mask)
    return record


def _count(
    record: Record, test: dict[str, Any], held: Held, facts: TokenizerFacts, mask: np.ndarray
) -> None:
    text = json.dumps(test["data"], ensure_ascii=False)
    try:
        accepted = _feed(record, text, held, facts, mask) and held.checks_pass(text)
    except GrammarExhausted as error:
        accepted = False
        record.exhausted += 1
        record.wrong.append(f"exhausted ({error}): {text[:300]}")
    if test["valid"]:
        record.valid += 1
        record.valid_accepted += accepted
        if not accepted:
            record.wrong.append(f"valid, rejected: {text[:300]}")
        return
    record.invalid += 1
    if not accepted:
        return
    if test.get("fmt_only"):
        record.format_only_accepted += 1
    elif test.get("unverified"):
        record.unverified_accepted += 1
        record.wrong.append(f"invalid by an unverified label, accepted: {text[:300]}")
    else:
        record.invalid_accepted += 1
        record.wrong.append(f"invalid ({', '.join(test.get('kw', ()))}), accepted: {text[:300]}")


def _feed(record: Record, text: str, held: Held, facts: TokenizerFacts, mask: np.ndarray) -> bool:
    """Whether the grammar takes every token and then the end."""
    matcher = held.matcher.fork()
    for token_id in (*facts.encode(text), facts.eos_token_ids[0]):
        begin = time.perf_counter()
        matcher.fill_mask(mask)
        record.mask_s.append(time.perf_counter() - begin)
        record.tokens += 1
        record.forced += int.from_bytes(mask.tobytes(), "little").bit_count() == 1
        if matcher.advance([token_id]) != 1:
            return False
    return True


def _row(record: Record) -> dict[str, Any]:
    """One schema in the JSON report; of the masks, the worst alone."""
    row = dict(vars(record))
    row["mask_s"] = max(record.mask_s, default=None)
    return row


_COUNTS = (
    "valid", "valid_accepted", "invalid", "invalid_accepted", "format_only_accepted", "unverified_accepted", "exhausted",
)  # fmt: skip
"""Numbers of a record that are summed up."""


def report(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """The numbers of each engine."""
    engines = dict.fromkeys(record.engine for record in records)
    return {name: _of_engine([r for r in records if r.engine == name]) for name in engines}


def _of_engine(records: Sequence[Record]) -> dict[str, Any]:
    taken = [record for record in records if record.backend]
    covered = [record for record in taken if record.covered]
    tokens = sum(record.tokens for record in taken)
    return {
        "schemas": len(records),
        "taken": len(taken),
        "covered": len(covered),
        "covered_without_checks": sum(not record.checks for record in covered),
        "with_checks": sum(bool(record.checks) for record in taken),
        "with_a_check_of_the_whole": sum(
            any(not check["path"] for check in record.checks) for record in taken
        ),
        "backends": dict(Counter(record.backend for record in taken)),
        **{name: sum(getattr(record, name) for record in records) for name in _COUNTS},
        "forced_share": sum(record.forced for record in taken) / tokens if tokens else 0.0,
        "compile_ms": _percentiles([record.compile_s for record in taken], 1e3),
        "first_mask_ms": _percentiles([record.first_mask_s for record in taken], 1e3),
        "mask_us": _percentiles([s for record in taken for s in record.mask_s], 1e6),
        "checked_keywords": dict(
            Counter(
                k for r in taken for k in {k for c in r.checks for k in c["keywords"]}
            ).most_common()
        ),
        "refusals": dict(
            Counter(r.keyword or r.refusal[:80] for r in records if not r.backend).most_common(12)
        ),
    }


def _percentiles(seconds: Sequence[float], scale: float) -> dict[str, float]:
    if not seconds:
        return {}
    p50, p90, p99, most = np.percentile(np.asarray(seconds) * scale, (50, 90, 99, 100)).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "max": most}


def print_tables(summary: dict[str, dict[str, Any]], console: Console, title: str) -> None:
    """One column an engine."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column(style="dim")
    for name in summary:
        table.add_column(name, justify="right")
    for label, cells in _rows(list(summary.values())):
        table.add_row(label, *cells)
    console.print(table)
    for name, numbers in summary.items():
        for label in ("checked_keywords", "refusals"):
            if numbers[label]:
                listed = ", ".join(f"{key} {count}" for key, count in numbers[label].items())
                console.print(
                    f"{name}, {label.replace('_', ' ')}: {listed}", highlight=False, markup=False
                )


def _rows(engines: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    def share(part: str, whole: str) -> list[str]:
        return [f"{e[part]:,} ({e[part] / e[whole]:.2%})" if e[whole] else "-" for e in engines]

    def times(key: str) -> list[str]:
        return [
            " / ".join(f"{e[key][p]:.1f}" for p in ("p50", "p99", "max")) if e[key] else "-"
            for e in engines
        ]

    return [
        ("schemas taken", share("taken", "schemas")),
        ("schemas covered", share("covered", "schemas")),
        ("  without checks", share("covered_without_checks", "schemas")),
        ("  taken with checks", share("with_checks", "schemas")),
        ("  of the whole answer", share("with_a_check_of_the_whole", "schemas")),
        ("valid accepted", share("valid_accepted", "valid")),
        ("invalid accepted", share("invalid_accepted", "invalid")),
        ("  invalid by format alone", share("format_only_accepted", "invalid")),
        ("  label unverified", share("unverified_accepted", "invalid")),
        ("ran into a limit", [f"{e['exhausted']:,}" for e in engines]),
        ("forced tokens", [f"{e['forced_share']:.1%}" for e in engines]),
        ("compile ms, p50/p99/max", times("compile_ms")),
        ("first mask ms, p50/p99/max", times("first_mask_ms")),
        ("mask µs, p50/p99/max", times("mask_us")),
        ("backends", [", ".join(f"{b} {n}" for b, n in e["backends"].items()) for e in engines]),
    ]


if __name__ == "__main__":
    sys.exit(main())
