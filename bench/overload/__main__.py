"""Measures the promises about overload: ``python -m bench.overload {prefill,queue} [--quick]``.

Each subcommand measures two states of a server by turns and prints one table for each promise, with
the ratio to the baseline of the same run. See docs/internals/benchmarks.md.
"""

import argparse

from bench.overload import prefill, queue


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overload", description="Measures the promises about overload."
    )
    commands = parser.add_subparsers(required=True)
    for name, module, summary in (
        ("prefill", prefill, "short prompts and running answers beside long prompts"),
        ("queue", queue, "1 and 10 times the sustainable rate with --max-queue-seconds"),
    ):
        command = commands.add_parser(name, help=summary)
        command.add_argument("--quick", action="store_true", help="fewer requests, one round")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
