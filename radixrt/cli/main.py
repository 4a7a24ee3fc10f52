"""The ``radixrt`` command. Subcommands import their modules only when they run."""

import argparse
import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from radixrt import __version__
from radixrt.base.errors import ConfigError
from radixrt.base.server_url import add_url_flag, local_url
from radixrt.bench import arguments as bench_arguments
from radixrt.cli.arguments import (
    add_chat_arguments,
    add_doctor_arguments,
    add_key_arguments,
    add_launch_arguments,
    add_lint_prompts_arguments,
    add_lint_schema_arguments,
    add_models_arguments,
    add_remote_arguments,
    add_top_arguments,
)
from radixrt.cli.config_flags import add_arguments, config_from_arguments, configs_from_arguments


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Parse the command line and run one subcommand; exits with its status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        if argv[:1] == ["bench"] and argv[1:2] and argv[1] in _MOVED:
            status = _run_moved(argv[1], argv[2:])
        else:
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
    parser = _parser()
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


_BENCHMARKS = (
    ("serve", "serve", bench_arguments.add_arguments, "load a server and measure its latencies"),
    ("structured", "structured", bench_arguments.add_structured_arguments, "hold schemas' instances against the router and each grammar library"),
    ("cache", "cache.benchmark", bench_arguments.add_cache_arguments, "replay recorded traffic through the scheduler and compare cache policies"),
)  # fmt: skip
"""Name, module of :mod:`radixrt.bench`, function that declares the flags, and help text of each
benchmark."""

_MOVED = {
    "overhead": "bench.overhead",
    "constrained": "bench.constrained",
    "model": "bench.dummy_checkpoint",
}
"""Benchmarks that are no longer part of the package, and the modules of a checkout that took their
place."""


class _Command(_Parser):
    """The parser of a command."""

    is_launcher = False
    """The arguments after ``--`` are those of another program: ``of_agent``."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        own = args[: args.index("--")] if self.is_launcher and "--" in args else args
        namespace, unknown = super().parse_known_args(own, namespace)
        if self.is_launcher:
            namespace.of_agent = args[len(own) + 1 :]
        return namespace, unknown


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="radixrt", description="An LLM serving engine with a radix-tree KV cache."
    )
    parser.add_argument("--version", action="version", version=f"radixrt {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Command)
    serve = commands.add_parser("serve", help="serve a model over an OpenAI-compatible HTTP API")
    _add_model(
        serve,
        "model path, hub id or hf:USER/REPO:Q4_K_M, as --model-path (default: the built-in model)",
    )
    add_arguments(serve)
    serve.set_defaults(run=_serve)
    run = commands.add_parser(
        "run",
        help="chat in the terminal, with the server on this machine or one that ends with the chat",
    )
    _add_model(
        run,
        "model path, hub id or hf:USER/REPO:Q4_K_M (default: the running server's, or one that you choose)",
    )
    add_chat_arguments(run)
    add_url_flag(run)
    add_arguments(run)
    run.set_defaults(
        run=partial(_run_with_config, "radixrt.cli.chat.command", function="run_local"), url=None
    )
    chat = commands.add_parser(
        "chat", help="chat in the terminal, with any OpenAI-compatible server"
    )
    add_remote_arguments(chat)
    chat.set_defaults(
        run=partial(_run, "radixrt.cli.chat.command", "server", function="run_remote")
    )
    launch = commands.add_parser(
        "launch",
        usage="radixrt launch {claude,codex,opencode,aider} [FLAGS] [-- ARGUMENTS OF THE AGENT]",
        help="run a coding agent with a server, and report what the cache saved",
    )
    launch.is_launcher = True
    add_launch_arguments(launch)
    add_arguments(launch)
    launch.set_defaults(run=partial(_run_with_config, "radixrt.cli.launch.command"))
    top = commands.add_parser("top", help="watch a server's KV cache")
    add_top_arguments(top)
    top.set_defaults(run=partial(_run, "radixrt.cli.top.command", "server"))
    prompts = commands.add_parser(
        "lint-prompts", help="find the causes of cache misses in recorded requests"
    )
    add_lint_prompts_arguments(prompts)
    prompts.set_defaults(run=partial(_run, "radixrt.cli.lint.command", "server"))
    doctor = commands.add_parser("doctor", help="check this machine, and say what to do")
    add_doctor_arguments(doctor)
    doctor.set_defaults(run=partial(_run, "radixrt.cli.doctor.command", "server"))
    models = commands.add_parser("models", help="list the checkpoints that are on this machine")
    add_models_arguments(models)
    models.set_defaults(run=partial(_run, "radixrt.cli.doctor.models", "server"))
    completion = commands.add_parser(
        "completion", help='print a script for the shell: eval "$(radixrt completion bash)"'
    )
    completion.add_argument("shell", choices=["bash", "zsh", "fish", "tcsh"])
    completion.set_defaults(run=_completion)
    lint = commands.add_parser(
        "lint-schema", help="say what of JSON schemas is exact, checked after generation, and slow"
    )
    add_lint_schema_arguments(lint)
    lint.set_defaults(run=partial(_run, "radixrt.cli.lint.schema", "server"))
    key = commands.add_parser("key", help="make API keys")
    add_key_arguments(key)
    key.set_defaults(run=_new_key)
    bench = commands.add_parser("bench", help="measure")
    benchmarks = bench.add_subparsers(required=True, metavar="BENCHMARK")
    for name, module, declare_flags, help in _BENCHMARKS:
        benchmark = benchmarks.add_parser(name, help=help)
        declare_flags(benchmark)
        benchmark.set_defaults(run=partial(_run, f"radixrt.bench.{module}", "bench"))
    return parser


def _add_model(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=help)


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


def _run_with_config(module: str, arguments: argparse.Namespace, function: str = "run") -> int:
    return _run(module, "server", arguments, config_from_arguments(arguments), function=function)


def _new_key(arguments: argparse.Namespace) -> int:
    from radixrt.base.api_keys import new_key

    key, entry = new_key(arguments.name, "admin" if arguments.admin else "user")
    print(f"The key, which is shown only now: {key}", file=sys.stderr)
    print(f'[[keys]]\nname = "{entry.name}"\nhash = "{entry.hash}"\nrole = "{entry.role}"')
    return 0


def _run(module: str, extra: str, *arguments: object, function: str = "run") -> int:
    """Call a function of a module; ``extra`` is the extra that installs its dependencies."""
    try:
        run = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"This command needs {error.name}: pip install 'radixrt[{extra}]'."
        ) from error
    status: int = run(*arguments)
    return status


def _run_moved(name: str, argv: Sequence[str]) -> int:
    """Warn and run the successor of a benchmark, for one release.

    Raises:
        ConfigError: the successor is not there; the package was installed without its checkout.
    """
    command = f"python -m {_MOVED[name]}"
    try:
        main: Callable[[Sequence[str]], int] = importlib.import_module(_MOVED[name]).main
    except ModuleNotFoundError as error:
        if error.name not in ("bench", _MOVED[name]):
            raise
        raise ConfigError(
            f"'bench {name}' is no longer part of the package. Clone radixrt and run '{command}' there."
        ) from error
    print(
        f"radixrt: 'bench {name}' is now '{command}' in a clone of radixrt; this command goes with the next release.",
        file=sys.stderr,
    )
    return main(argv)


if __name__ == "__main__":
    main()
