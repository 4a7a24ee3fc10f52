"""``radixrt bench structured``: measures accepted schemas, accepted instances and the cost of
grammars.

Each schema of a file goes through the router and through each library alone; its instances are fed
token by token to the matcher, and to the checks beside it.
"""

import argparse
import contextlib
import gc
import gzip
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from radixrt.base.config import DEMO_MODEL
from radixrt.base.errors import ConfigError
from radixrt.bench.output import console_beside, write_json
from radixrt.bench.structured_engines import ENGINES, Engine, Held, Refused
from radixrt.bench.structured_report import Record, print_tables, report
from radixrt.constrained.bitmask import bitmask_words
from radixrt.constrained.errors import GrammarExhausted
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.models.checkpoint import resolve_model_path


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; see :func:`radixrt.bench.arguments.add_structured_arguments`.

    The exit status is 1 if the router accepted an invalid instance.
    """
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
