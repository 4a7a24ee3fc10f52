"""Runs ``radixrt lint-prompts``."""

import argparse
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError, RequestError
from radixrt.cli.lint.recorded import Unreadable, read_log
from radixrt.cli.lint.replay import Linted, PromptLinter
from radixrt.cli.lint.report import make_report, print_report
from radixrt.models.checkpoint import resolve_model_path
from radixrt.tokenizer.vocabulary import Vocabulary

_FILE_WIDTH = 160
"""Characters in a line of a report that no terminal shows."""


def run(arguments: argparse.Namespace) -> int:
    """Lint the log; the status is 1 if no line could be read.

    Raises:
        ConfigError: the log or the tokenizer cannot be read.
    """
    model = str(resolve_model_path(arguments.model_path))
    config = ServerConfig(model_path=model, chat_template=arguments.chat_template)
    linter = PromptLinter(Vocabulary.load(config), arguments.page_size, arguments.cache_tokens)
    linted: list[Linted] = []
    unreadable: dict[int, str] = {}
    computed, seconds = 0, 0.0
    try:
        for one in read_log(Path(arguments.log)):
            if isinstance(one, Unreadable):
                unreadable[one.line] = one.reason
                continue
            try:
                linted.append(linter.lint(len(linted), one))
            except RequestError as error:
                unreadable[one.line] = error.message
            computed, seconds = computed + one.computed_tokens, seconds + one.prefill_s
    except OSError as error:
        raise ConfigError(f"Can't read {arguments.log}: {error}.") from error
    rate = arguments.prefill_tokens_per_second or (computed / seconds if seconds else None)
    report = make_report(linted, unreadable, rate)
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
    else:
        print_report(Console(width=None if sys.stdout.isatty() else _FILE_WIDTH), report)
    return 0 if linted else 1
