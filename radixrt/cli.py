"""The ``radixrt`` command. Subcommands import what they need only when they run."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from radixrt import __version__
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
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    from radixrt.launch import serve

    return serve(config_from_arguments(arguments))


if __name__ == "__main__":
    main()
