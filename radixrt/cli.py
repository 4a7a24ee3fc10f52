"""The ``radixrt`` command. Subcommands import what they need only when they run."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from radixrt import __version__
from radixrt.bench import arguments as bench_arguments
from radixrt.config import add_arguments, config_from_arguments
from radixrt.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Parse the command line and run one subcommand; exits with its status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        status = arguments.run(arguments)
    except ConfigError as error:
        print(f"radixrt: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="radixrt", description="An LLM serving engine with a radix-tree KV cache."
    )
    parser.add_argument("--version", action="version", version=f"radixrt {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model over an OpenAI-compatible HTTP API")
    add_arguments(serve)
    serve.set_defaults(run=_serve)
    top = commands.add_parser("top", help="watch a server's KV cache")
    _add_top_arguments(top)
    top.set_defaults(run=_top)
    bench = commands.add_parser("bench", help="measure")
    benchmarks = bench.add_subparsers(required=True, metavar="BENCHMARK")
    bench_serve = benchmarks.add_parser("serve", help="load a server and measure its latencies")
    bench_arguments.add_arguments(bench_serve)
    bench_serve.set_defaults(run=_bench_serve)
    overhead = benchmarks.add_parser(
        "overhead", help="measure what the engine costs beside the model"
    )
    bench_arguments.add_overhead_arguments(overhead)
    overhead.set_defaults(run=_bench_overhead)
    constrained = benchmarks.add_parser(
        "constrained", help="measure what grammars cost, and what forced tokens save"
    )
    bench_arguments.add_constrained_arguments(constrained)
    constrained.set_defaults(run=_bench_constrained)
    model = benchmarks.add_parser("model", help="write an untrained 0.5 B Llama to measure with")
    bench_arguments.add_model_arguments(model)
    model.set_defaults(run=_bench_model)
    structured = benchmarks.add_parser(
        "structured", help="hold schemas' instances against the router and each grammar library"
    )
    bench_arguments.add_structured_arguments(structured)
    structured.set_defaults(run=_bench_structured)
    cache = benchmarks.add_parser(
        "cache", help="replay recorded traffic through the scheduler and compare cache policies"
    )
    bench_arguments.add_cache_arguments(cache)
    cache.set_defaults(run=_bench_cache)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    from radixrt.launch import serve

    return serve(config_from_arguments(arguments))


def _add_top_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:30000", help="of the server (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key", help="what the server was started with; else the environment's RADIXRT_API_KEY"
    )
    parser.add_argument(
        "--interval", type=float, default=1.0, help="seconds between frames (default: %(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end")


def _top(arguments: argparse.Namespace) -> int:
    try:
        from radixrt.top.command import run
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"radixrt top needs {error.name}: pip install 'radixrt[server]'."
        ) from error
    return run(arguments)


def _bench_serve(arguments: argparse.Namespace) -> int:
    try:
        from radixrt.bench.serve import run
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"radixrt bench needs {error.name}: pip install 'radixrt[bench]'."
        ) from error
    return run(arguments)


def _bench_overhead(arguments: argparse.Namespace) -> int:
    from radixrt.bench.overhead import run

    return run(arguments)


def _bench_constrained(arguments: argparse.Namespace) -> int:
    from radixrt.bench.constrained import run

    return run(arguments)


def _bench_model(arguments: argparse.Namespace) -> int:
    from radixrt.bench.dummy_checkpoint import run

    return run(arguments)


def _bench_structured(arguments: argparse.Namespace) -> int:
    from radixrt.bench.structured import run

    return run(arguments)


def _bench_cache(arguments: argparse.Namespace) -> int:
    from radixrt.bench.cache.benchmark import run

    return run(arguments)


if __name__ == "__main__":
    main()
