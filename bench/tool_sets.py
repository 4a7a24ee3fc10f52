"""Measures how long the tools of agents take to compile: ``python -m bench.tool_sets MODEL``.

MODEL is a folder with tokenizer.json and config.json. Each set (tests/constrained/tool_sets.json) is compiled with no schema known
before, and with one tool changed in a set that was.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from radixrt.bench.output import print_rows
from radixrt.constrained.backends.tag_schemas import KeptSchemas, TagSchemas
from radixrt.constrained.compiler.compilation import CompileOptions, compile_constraint
from radixrt.constrained.constraint import StructuralTag
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.constrained.tool_calls import Tool, calls
from radixrt.models.checkpoint import read_config
from radixrt.parsers.tool_calls.registry import FORMATS

SETS = Path(__file__).parent.parent / "tests" / "constrained" / "tool_sets.json"
CHANGED = {"type": "object", "properties": {"changed": {"type": "integer"}}}


@dataclass(frozen=True)
class Row:
    """Milliseconds of one set."""

    tool_set: str
    tools: int
    p50_ms: float
    p95_ms: float
    one_changed_p50_ms: float
    one_changed_p95_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--format", default="hermes", choices=[*FORMATS], help="of tool calls")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    config = read_config(args.model)
    ends = config["eos_token_id"]
    facts = TokenizerFacts.load(
        args.model / "tokenizer.json",
        vocab_size=config["vocab_size"],
        eos_token_ids=tuple(ends) if isinstance(ends, list) else (ends,),
    )

    def constraint_of(tools: dict[str, Any]) -> StructuralTag:
        made = [Tool.from_schema(name, schema, False, name) for name, schema in tools.items()]
        return calls(made, FORMATS[args.format], required=False, most=None)

    def compiled(tools: dict[str, Any], kept: KeptSchemas) -> TagSchemas:
        schemas = TagSchemas(kept)
        compile_constraint(constraint_of(tools), facts, CompileOptions(), schemas)
        return schemas

    rows = []
    for name, one in json.loads(SETS.read_text()).items():
        tools = {tool["name"]: tool["parameters"] for tool in one["tools"]}
        kept = compiled(tools, {}).made
        changed = {**tools, next(reversed(tools)): CHANGED}
        cold = times_ms(partial(compiled, tools, {}), args.rounds)
        warm = times_ms(partial(compiled, changed, kept), args.rounds)
        rows.append(Row(name, len(tools), *middle_and_p95(cold), *middle_and_p95(warm)))
    print_rows(Console(width=120), "Tools of agents", rows)


def times_ms(work: Callable[[], object], rounds: int) -> list[float]:
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        found.append(1000 * (time.perf_counter() - begin))
    return found


def middle_and_p95(values: list[float]) -> tuple[float, float]:
    return statistics.median(values), statistics.quantiles(values, n=20)[-1]


if __name__ == "__main__":
    main()
