"""Groups the misses of a log by cause and place, and says what each group costs."""

from collections import defaultdict
from collections.abc import Iterable

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from radixrt.cli.lint.replay import Linted
from radixrt.messages.cache_explanation import Cause

_ADVICE: dict[Cause, str] = {
    "volatile_text": "Move the text that changes behind the text that stays, or drop it.",
    "tools_changed": "Send the same tools in the same order.",
    "template_rewrote_history": "Send replay_reasoning: true, or use a template that leaves earlier messages as they were.",
    "other_salt": "Use one cache_salt where prefixes may be shared.",
    "evicted": "Use a larger KV pool (--max-total-tokens), or cache hints.",
}

_SHOWN_LINES = 8


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


def make_report(
    linted: Iterable[Linted], unreadable: dict[int, str], tokens_per_second: float | None
) -> Report:
    """Sum a log up."""
    every = list(linted)
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
    for group in report.groups:
        if group.lost_tokens:
            console.print(
                f"{group.cause}, line {group.lines[0]}: {group.example}",
                markup=False,
                highlight=False,
            )
            console.print(f"  {group.advice}", markup=False, highlight=False)
    for line, reason in report.unreadable.items():
        console.print(f"Line {line} was skipped: {reason}", markup=False, highlight=False)
