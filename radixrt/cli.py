"""The ``radixrt`` command. Subcommands import what they need only when they run."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from radixrt import __version__
from radixrt.bench.arguments import add_arguments as add_bench_serve_arguments
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
    bench = commands.add_parser("bench", help="measure")
    benchmarks = bench.add_subparsers(required=True, metavar="BENCHMARK")
    bench_serve = benchmarks.add_parser("serve", help="load a server and measure its latencies")
    add_bench_serve_arguments(bench_serve)
    bench_serve.set_defaults(run=_bench_serve)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    from radixrt.launch import serve

    return serve(config_from_arguments(arguments))


def _bench_serve(arguments: argparse.Namespace) -> int:
    try:
        from radixrt.bench.serve import run
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"radixrt bench needs {error.name}: pip install 'radixrt[bench]'."
        ) from error
    return run(arguments)


if __name__ == "__main__":
    main()
