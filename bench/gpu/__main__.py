"""``python -m bench.gpu``: the measurements of docs/internals/gpu.md, each beside its roofline.

    python -m bench.gpu                        everything, within --budget seconds
    python -m bench.gpu --only 1 3             two parts
    python -m bench.gpu --dry-run              the same on a CPU with tiny shapes: does it run?

Writes results.jsonl as it goes, results.json and results.md after each session, into --out; all of
it also as one archive beside it, --out with ``.tar.gz`` at the end.
"""

import argparse
import shutil
import sys
from pathlib import Path

from bench.gpu.results import LINES, PARTS, TABLE
from bench.gpu.sessions import Options, run_all, run_session

BUDGET_S = 300.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description="Measure radixrt on a GPU, each result beside its roofline.",
        epilog="\n".join(f"{number}: {title}" for number, title in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="default: %(default)s")  # fmt: skip
    parser.add_argument("--only", type=int, nargs="+", default=[], choices=list(PARTS), metavar="PART")  # fmt: skip
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for everything (default: %(default)s)")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of every engine, such as page_size=1")  # fmt: skip
    parser.add_argument("--session", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    options = Options(
        folder=parsed.out,
        only=tuple(parsed.only),
        dry_run=parsed.dry_run,
        budget_s=parsed.budget,
        settings=dict(_setting(text) for text in parsed.set),
    )
    if parsed.session:
        run_session(parsed.session, options)
        return 0
    if (options.folder / LINES).exists():
        sys.exit(f"{options.folder / LINES} is there already; choose another --out.")
    failed = run_all(options, arguments)
    print(f"\n{(options.folder / TABLE).read_text()}")
    print(
        f"All of it in one file: {shutil.make_archive(str(options.folder), 'gztar', options.folder)}"
    )
    return failed


def _setting(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    if value in ("True", "False"):
        return name, value == "True"
    return name, int(value) if value.isdigit() else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
