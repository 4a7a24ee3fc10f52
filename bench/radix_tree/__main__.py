"""Speed and memory of the radix tree: ``python -m bench.radix_tree``.

Times match, lock, insert and evict on prompts and trees of several sizes, for the project's tree and for two published
designs written anew (see sglang.py and mini_sglang.py beside this file), and weighs the trees.
"""

import argparse
import json
from pathlib import Path

from bench.radix_tree.memory import weigh
from bench.radix_tree.shapes import SHAPES
from bench.radix_tree.speed import OPERATIONS, Case, measure
from bench.radix_tree.subjects import NAMES


def main() -> None:
    arguments = _parse()
    report: dict[str, list[dict]] = {"speed_us": [], "memory": []}
    if not arguments.skip_speed:
        report["speed_us"] = speed(arguments)
    if not arguments.skip_memory:
        report["memory"] = memory(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.radix_tree", description=__doc__)
    add = parser.add_argument
    add("--trees", nargs="+", choices=NAMES, default=list(NAMES))
    add("--nodes", nargs="+", type=int, default=[1_000, 100_000], help="default: %(default)s")
    add("--tokens", nargs="+", type=int, default=[1_000, 10_000, 100_000], help="of the prompt")
    add("--page-sizes", nargs="+", type=int, default=[1, 16])
    add("--rounds", type=int, default=21, help="medians are over these; default: %(default)s")
    add("--weigh-nodes", type=int, default=100_000, help="nodes of the weighed trees")
    add(
        "--weigh-trace",
        nargs="+",
        type=Path,
        default=[],
        help="weigh trees of recorded prompts, too",
    )
    add("--published-nodes", type=int, default=100_000, help="the published designs get no more")
    add("--skip-speed", action="store_true")
    add("--skip-memory", action="store_true")
    add("--json", type=Path, help="write the numbers to this file too")
    return parser.parse_args()


def speed(arguments: argparse.Namespace) -> list[dict]:
    """Medians in microseconds, one row a tree and case."""
    rows = []
    print(f"{'page':>4} {'nodes':>8} {'tokens':>7} {'shape':9} {'tree':12}", end="")
    print("".join(f"{name:>15}" for name in OPERATIONS))
    for page_size in arguments.page_sizes:
        for num_nodes in arguments.nodes:
            for num_tokens in arguments.tokens:
                for branches in (False, True):
                    names = _names(arguments, num_nodes)
                    cases = [Case(n, page_size, num_nodes, num_tokens, branches) for n in names]
                    measure(cases, arguments.rounds)
                    rows += [_speed_row(case) for case in cases]
    return rows


def _names(arguments: argparse.Namespace, num_nodes: int) -> list[str]:
    return [n for n in arguments.trees if n == "radixrt" or num_nodes <= arguments.published_nodes]


def _speed_row(case: Case) -> dict:
    medians, shape = case.medians(), "branches" if case.branches else "chain"
    print(
        f"{case.page_size:4} {case.num_nodes:8} {case.num_tokens:7} {shape:9} {case.name:12}",
        end="",
    )
    print("".join(f"{medians[name]:15.1f}" for name in OPERATIONS), flush=True)
    return {
        "tree": case.name,
        "page_size": case.page_size,
        "nodes": case.num_nodes,
        "tokens": case.num_tokens,
        "shape": shape,
        **medians,
    }


def memory(arguments: argparse.Namespace) -> list[dict]:
    """Bytes a page, one row a tree and shape."""
    rows = []
    names = ("nodes", "pages", "overhead/page", "queue/page")
    print(f"\n{'page':>4} {'shape':16} {'tree':12}" + "".join(f"{name:>15}" for name in names))
    for page_size in arguments.page_sizes:
        for shape in (*SHAPES, *map(str, arguments.weigh_trace)):
            for name in _names(arguments, arguments.weigh_nodes):
                weight = weigh(name, shape, arguments.weigh_nodes, page_size)
                print(f"{page_size:4} {Path(shape).name[:16]:16} {name:12}", end="")
                print(f"{weight.num_nodes:15}{weight.num_pages:15}", end="")
                print(f"{weight.overhead:15.0f}{weight.queue:15.0f}", flush=True)
                rows.append(
                    {
                        "tree": name,
                        "page_size": page_size,
                        "shape": shape,
                        "nodes": weight.num_nodes,
                        "pages": weight.num_pages,
                        "overhead_per_page": weight.overhead,
                        "queue_per_page": weight.queue,
                    }
                )
    return rows


if __name__ == "__main__":
    main()
