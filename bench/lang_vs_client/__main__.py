"""Compares the language's programs with their twins in the openai client: ``python -m bench.lang_vs_client``.

Runs each program of examples/lang and its twin on one server with the built-in model, by turns, with an empty cache before each
run. The server's KV pool holds a quarter of the working set: of the tokens that the twin leaves in a cache without a limit.
Prints a table; docs/lang_comparison.md has one.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.lang_vs_client.code_lines import code_lines
from bench.lang_vs_client.measuring import Cost, player
from bench.lang_vs_client.player import FOLDER
from bench.local_server import local_server
from bench.markdown import markdown

PROGRAMS = sorted(path.stem.removesuffix("_plain") for path in FOLDER.glob("*_plain.py"))
LONGEST_SEQUENCE = 1024
"""Tokens: a pool can't be smaller than the longest prompt and its answer."""
QUIET = ("--log-level", "warning")


def main() -> None:
    arguments = _parse()
    rows, runs = [], {}
    for program in arguments.programs or PROGRAMS:
        pool = max(int(working_set(program) * arguments.share) // 16 * 16, LONGEST_SEQUENCE)
        lang, client = by_turns(program, pool, arguments.rounds)
        rows.append(row(program, pool, lang, client))
        runs[program] = {"lang": [asdict(c) for c in lang], "client": [asdict(c) for c in client]}
        print("\n".join(markdown(rows[-1:])), file=sys.stderr)
    print("\n".join(["", f"Load of the machine: {os.getloadavg()}", "", *markdown(rows)]))
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "runs": runs}, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.lang_vs_client", description=__doc__)
    parser.add_argument("programs", nargs="*", help="default: all eight")
    parser.add_argument("--rounds", type=int, default=5, help="measured runs of each version")
    parser.add_argument("--share", type=float, default=0.25, help="of the working set in the pool")
    parser.add_argument("--json", type=Path, help="write all runs to this file")
    return parser.parse_args()


def working_set(program: str) -> int:
    """Tokens in the cache when the client's version has run with room for all."""
    with local_server("demo", *QUIET) as url, player(f"{program}_plain", url) as client:
        return client.play().held_tokens


def by_turns(program: str, pool: int, rounds: int) -> tuple[list[Cost], list[Cost]]:
    """Costs of the language's version and of the client's; who goes first changes with each round."""
    lang_costs: list[Cost] = []
    client_costs: list[Cost] = []
    with (
        local_server("demo", *QUIET, "--max-total-tokens", str(pool)) as url,
        player(program, url) as lang,
        player(f"{program}_plain", url) as client,
    ):
        turns = [(lang, lang_costs), (client, client_costs)]
        for playing, _ in turns:
            playing.play()  # not measured: it opens connections
        for _ in range(rounds):
            for playing, costs in turns:
                costs.append(playing.play())
            turns.reverse()
    return lang_costs, client_costs


def row(program: str, pool: int, lang: Sequence[Cost], client: Sequence[Cost]) -> dict:
    lang_tokens, client_tokens = (
        statistics.median(cost.prefill_tokens for cost in costs) for costs in (lang, client)
    )
    return {
        "program": program.replace("_", " "),
        "pool": pool,
        "lines": f"{code_lines(FOLDER / f'{program}.py')} / {code_lines(FOLDER / f'{program}_plain.py')}",
        "prefill tokens": f"{lang_tokens:,.0f} / {client_tokens:,.0f}",
        "of the client's": f"{lang_tokens / client_tokens:.0%}",
        "seconds": f"{_spread([c.seconds for c in lang])} / {_spread([c.seconds for c in client])}",
        "CPU seconds": f"{_spread([c.cpu_seconds for c in lang])} / {_spread([c.cpu_seconds for c in client])}",
        "retractions": f"{statistics.median(c.retractions for c in lang):.0f} / {statistics.median(c.retractions for c in client):.0f}",
    }


def _spread(values: Sequence[float]) -> str:
    """The median, and the least and the most."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()
