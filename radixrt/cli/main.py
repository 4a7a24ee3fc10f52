"""The ``radixrt`` command. Subcommands import their modules only when they run."""

import argparse
import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from radixrt import __version__
from radixrt.base.errors import ConfigError
from radixrt.base.server_url import local_url
from radixrt.bench import arguments as bench_flags
from radixrt.cli import arguments as flags
from radixrt.cli.arguments import Declare
from radixrt.cli.config_flags import add_arguments, config_from_arguments, configs_from_arguments

Run = Callable[[argparse.Namespace], int]
"""Runs a command; returns its exit status."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Parse the command line and run one subcommand; exits with its status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        arguments = _parsed(argv)
        status = arguments.run(arguments)
    except ConfigError as error:
        print(f"radixrt: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


class _Parser(argparse.ArgumentParser):
    """Says an error in one sentence, without the usage, which fills a screen."""

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith("?") else "."
        self.exit(2, f"radixrt: {message}{end} `{self.prog} --help` says more.\n")


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; exits at what no command knows, with the nearest flag."""
    parser = _parser(argv[0] if argv else "")
    arguments, unknown = parser.parse_known_args(argv)
    if not unknown:
        return arguments
    commands: dict[str, argparse.ArgumentParser] = parser._subparsers._group_actions[0].choices  # type: ignore[union-attr, assignment]
    command = commands[argv[0]]
    word = unknown[0].partition("=")[0]
    flags = [
        flag
        for flag, action in command._option_string_actions.items()
        if action.help != argparse.SUPPRESS
    ]
    near = difflib.get_close_matches(word, flags, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    command.error(
        f"{word} is not {'a flag' if word.startswith('-') else 'an argument'} of {command.prog}{hint}"
    )


class _Command(_Parser):
    """The parser of a command. The arguments of ``launch`` after ``--`` are those of another
    program: ``of_agent``."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        is_launcher = self.prog == "radixrt launch"
        own = args[: args.index("--")] if is_launcher and "--" in args else args
        namespace, unknown = super().parse_known_args(own, namespace)
        if is_launcher:
            namespace.of_agent = args[len(own) + 1 :]
        return namespace, unknown


def _parser(command: str = "") -> argparse.ArgumentParser:
    """
    Args:
        command: the only one whose flags are declared, since those of all take as long as half of the
            imports; "": all have theirs.
    """
    parser = _Parser(
        prog="radixrt", description="An LLM serving engine with a radix-tree KV cache."
    )
    parser.add_argument("--version", action="version", version=f"radixrt {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Command)
    _add_commands(commands, _COMMANDS, command)
    cache = commands.add_parser("cache", help="show KV on disk, and ship it as files")
    if command in ("", "cache"):
        _add_commands(cache.add_subparsers(required=True, metavar="ACTION"), _CACHE_ACTIONS)
    bench = commands.add_parser("bench", help="measure")
    if command in ("", "bench"):
        _add_commands(bench.add_subparsers(required=True, metavar="BENCHMARK"), _BENCHMARKS)
    return parser


def _add_commands(
    parent: Any, table: "dict[str, tuple[str, tuple[Declare, ...], Run]]", only: str = ""
) -> None:
    for name, (help, declarations, run) in table.items():
        command = parent.add_parser(name, help=help)
        for declare in declarations if only in ("", name) else ():
            declare(command)
        command.set_defaults(run=run)


def _serve(arguments: argparse.Namespace) -> int:
    configs, total = configs_from_arguments(arguments)
    config = configs[0]
    if config.log_level in ("debug", "info") and config.join is None:
        # before the imports and the processes, which take seconds
        where = local_url(config.host, config.port, is_https=config.tls_cert is not None)
        where = where if config.port else "a free port"
        print(f"Starting {config.model_path} on {where} …", file=sys.stderr, flush=True)
    from radixrt.supervisor.launch import serve

    return serve(configs, total)


def _completion(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise ConfigError("This command needs shtab: pip install 'radixrt[server]'.") from error
    print(shtab.complete(_parser(), arguments.shell))
    return 0


def _new_key(arguments: argparse.Namespace) -> int:
    from radixrt.base.api_keys import new_key

    key, entry = new_key(arguments.name, "admin" if arguments.admin else "user")
    print(f"The key, which is shown only now: {key}", file=sys.stderr)
    print(f'[[keys]]\nname = "{entry.name}"\nhash = "{entry.hash}"\nrole = "{entry.role}"')
    return 0


def _runs(module: str, *, extra: str = "server", takes_config: bool = False) -> Run:
    """Runs a function of a module, ``run`` by default; ``extra`` is the extra that installs its
    dependencies."""
    name, _, function = module.partition(":")

    def run(arguments: argparse.Namespace) -> int:
        given = (arguments, config_from_arguments(arguments)) if takes_config else (arguments,)
        try:
            found = getattr(importlib.import_module(f"radixrt.{name}"), function or "run")
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"This command needs {error.name}: pip install 'radixrt[{extra}]'."
            ) from error
        status: int = found(*given)
        return status

    return run


_COMMANDS: dict[str, tuple[str, tuple[Declare, ...], Run]] = {
    "serve": ("serve a model over an OpenAI-compatible HTTP API", (*flags.SERVE, add_arguments), _serve),
    "run": ("chat in the terminal, with the server on this machine or one that ends with the chat", (*flags.RUN, add_arguments), _runs("cli.chat.command:run_local", takes_config=True)),
    "chat": ("chat in the terminal, with any OpenAI-compatible server", flags.REMOTE, _runs("cli.chat.command:run_remote")),
    "launch": ("run a coding agent with a server, and report what the cache saved", (*flags.LAUNCH, add_arguments), _runs("cli.launch.command", takes_config=True)),
    "top": ("watch a server's KV cache", flags.TOP, _runs("cli.top")),
    "lint-prompts": ("find the causes of cache misses in recorded requests", flags.LINT_PROMPTS, _runs("cli.lint.report")),
    "doctor": ("check this machine, and say what to do", flags.DOCTOR, _runs("cli.doctor.command")),
    "models": ("list the checkpoints that are on this machine", flags.MODELS, _runs("cli.doctor.models")),
    "completion": ('print a script for the shell: eval "$(radixrt completion bash)"', flags.COMPLETION, _completion),
    "lint-schema": ("say what of JSON schemas is exact, checked after generation, and slow", flags.LINT_SCHEMA, _runs("cli.lint.schema")),
    "verify": ("compute an answer again by its receipt, and compare", flags.VERIFY, _runs("cli.verify")),
    "key": ("make API keys", (flags.new_key,), _new_key),
}  # fmt: skip
"""Help text, flags and function of each command but ``bench`` and ``cache``."""

_CACHE_ACTIONS: dict[str, tuple[str, tuple[Declare, ...], Run]] = {
    "info": ("show a folder of --cache-dir, or a bundle", flags.CACHE_INFO, _runs("cli.cache.command:info")),
    "export": ("compute the KV of texts and write it to a bundle", (*flags.CACHE_EXPORT, add_arguments), _runs("cli.cache.command:export", takes_config=True)),
    "import": ("add a bundle to a folder of --cache-dir", flags.CACHE_IMPORT, _runs("cli.cache.command:import_")),
}  # fmt: skip
"""Help text, flags and function of each action of ``radixrt cache``."""

_BENCHMARKS: dict[str, tuple[str, tuple[Declare, ...], Run]] = {
    "serve": ("load a server and measure its latencies", (bench_flags.add_arguments,), _runs("bench.serve", extra="bench")),
    "cache": ("replay recorded traffic through the scheduler and compare cache policies", (bench_flags.add_cache_arguments,), _runs("bench.cache.benchmark", extra="bench")),
}  # fmt: skip
"""Help text, flags and function of each benchmark."""

if __name__ == "__main__":
    main()
