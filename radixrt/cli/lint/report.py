"""The command ``radixrt lint-prompts``: groups the misses of a log by cause and place, and says
what each group costs."""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError, RequestError
from radixrt.cli.lint.recorded import Unreadable, read_log
from radixrt.cli.lint.replay import Linted, PromptLinter
from radixrt.messages.cache_explanation import Cause
from radixrt.models.checkpoint import resolve_model_path
from radixrt.tokenizer.vocabulary import Vocabulary

_ADVICE: dict[Cause, str] = {
    "volatile_text": "Move the text that changes behind the text that stays, or drop it.",
    "tools_changed": "Send the same tools in the same order.",
    "template_rewrote_history": "Send replay_reasoning: true, or use a template that leaves earlier messages as they were.",
    "other_salt": "Use one cache_salt where prefixes may be shared.",
    "evicted": "Use a larger KV pool (--max-total-tokens), or cache hints.",
}

_SHOWN_LINES = 8
_FILE_WIDTH = 160
"""Characters in a line of a report that no terminal shows."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The misses of one cause at one place."""

    cause: Cause
    message_index: int | None
    role: str | None
    lines: list[int]
    """Lines of the log, counted from 1."""
    missed_tokens: int
    lost_tokens: int
    """Missed tokens that would have come from the cache but for the cause."""
    lost_seconds: float | None
    """None: the prefill rate is unknown."""
    example: str
    """The explanation of the first of them."""
    advice: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The cache misses of a log."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    lost_tokens: int
    lost_seconds: float | None
    prefill_tokens_per_second: float | None
    groups: list[Group]
    """Those with the most lost tokens first."""
    unreadable: dict[int, str]
    """Lines that are no request, and why."""


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


def make_report(
    every: list[Linted], unreadable: dict[int, str], tokens_per_second: float | None
) -> Report:
    """Sum a log up."""
    groups: dict[tuple[Cause, int | None, str | None], list[Linted]] = defaultdict(list)
    for one in every:
        place, cause = one.explanation.divergence, one.explanation.cause
        if place is None or cause == "never_seen":
            groups[cause, None, None].append(one)
        else:
            groups[cause, place.message_index, place.role].append(one)
    lost = sum(one.lost_tokens for one in every)
    return Report(
        requests=len(every),
        prompt_tokens=sum(one.explanation.prompt_tokens for one in every),
        cached_tokens=sum(one.explanation.cached_tokens for one in every),
        lost_tokens=lost,
        lost_seconds=_seconds(lost, tokens_per_second),
        prefill_tokens_per_second=tokens_per_second,
        groups=sorted(
            (_group(key, members, tokens_per_second) for key, members in groups.items()),
            key=lambda group: (-group.lost_tokens, -group.missed_tokens),
        ),
        unreadable=unreadable,
    )


def _group(
    key: tuple[Cause, int | None, str | None],
    members: list[Linted],
    tokens_per_second: float | None,
) -> Group:
    cause, message_index, role = key
    lost = sum(one.lost_tokens for one in members)
    return Group(
        cause=cause,
        message_index=message_index,
        role=role,
        lines=[one.line for one in members],
        missed_tokens=sum(one.explanation.missed_tokens for one in members),
        lost_tokens=lost,
        lost_seconds=_seconds(lost, tokens_per_second),
        example=members[0].explanation.detail,
        advice=_ADVICE.get(cause, ""),
    )


def _seconds(tokens: int, tokens_per_second: float | None) -> float | None:
    return None if tokens_per_second is None else tokens / tokens_per_second


def print_report(console: Console, report: Report) -> None:
    """Print a report for people."""
    share = 100 * report.cached_tokens / max(1, report.prompt_tokens)
    seconds = "" if report.lost_seconds is None else f", {report.lost_seconds:,.1f} s of prefill"
    console.print(
        f"{report.requests:,} requests, {report.prompt_tokens:,} prompt tokens, {share:.1f} % from the cache; "
        f"{report.lost_tokens:,} tokens lost{seconds}.",
        highlight=False,
    )
    table = Table(box=box.MARKDOWN)
    for name in ("lost tokens", "missed tokens", "requests", "cause", "place", "lines"):
        table.add_column(name, justify="left" if name in ("cause", "place", "lines") else "right")
    for group in report.groups:
        place = (
            "" if group.message_index is None else f"message {group.message_index} ({group.role})"
        )
        more = "" if len(group.lines) <= _SHOWN_LINES else " …"
        lines = ", ".join(map(str, group.lines[:_SHOWN_LINES])) + more
        table.add_row(f"{group.lost_tokens:,}", f"{group.missed_tokens:,}", f"{len(group.lines):,}", group.cause, place, lines)  # fmt: skip
    console.print(table)
    notes: list[str] = []
    for group in report.groups:
        if group.lost_tokens:
            notes += [f"{group.cause}, line {group.lines[0]}: {group.example}", f"  {group.advice}"]
    notes += [f"Line {line} was skipped: {why}" for line, why in report.unreadable.items()]
    for note in notes:
        console.print(note, markup=False, highlight=False)
