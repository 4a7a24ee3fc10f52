"""The command ``radixrt top``: polls a server and draws its state."""

import argparse
import os
import sys
import time
from collections.abc import Iterator

import httpx
import msgspec
from msgspec.structs import asdict
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from radixrt.base.errors import RadixrtError
from radixrt.kv.reading import CacheStats, EngineReading, PoolParts, Rates, Reading
from radixrt.messages.cache_tree import CacheNamespace, CacheTree, CacheTreeNode

TIMEOUT_S = 5
LIVE_PATH = "/v1/live?depth=3&children=12"
_MIN_INTERVAL_S = 0.1
_POOL_COLOURS = {
    "owned": "red",
    "locked": "yellow",
    "pinned": "magenta",
    "evictable": "green",
    "free": "bright_black",
}
_POOL_LETTERS = {"owned": "█", "locked": "▓", "pinned": "◆", "evictable": "▒", "free": "·"}
"""For terminals without colours."""

_HEAD_LINES = 8
"""Lines of a frame above the prefixes."""
_MIN_PREFIXES = 5


class ServerAwayError(RadixrtError):
    """No radixrt server answers; the message names the next step."""


class ServerWatch:
    """Reads a server's state.

    Args:
        url: address of the server, with or without ``/v1`` at its end.
        api_key: key of the server.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def read(self) -> Reading:
        """Return the server's state.

        Raises:
            ServerAwayError: no radixrt server answers.
        """
        address = self.url + LIVE_PATH
        try:
            response = httpx.get(address, headers=self._headers, timeout=TIMEOUT_S)
            if response.is_error:
                raise ServerAwayError(self._refusal(response.status_code))
            reading = msgspec.json.decode(response.content, type=Reading)
        except httpx.UnsupportedProtocol as error:
            raise ServerAwayError(
                f"--url must begin with http:// or https://, not {self.url!r:.80}."
            ) from error
        except msgspec.MsgspecError as error:
            raise ServerAwayError(
                f"The answer of {address} does not fit this version of radixrt: {error}."
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerAwayError(
                f"No server answers at {self.url} ({error}). Start one with `radixrt serve`, or name another with --url."
            ) from error
        if reading.engine is None:
            raise ServerAwayError(self._refusal(403))
        return reading

    def _refusal(self, status: int) -> str:
        path = LIVE_PATH.partition("?")[0]
        if status == 401:
            return f"The server at {self.url} wants its key: give it with --api-key."
        if status == 403:
            return f"The server at {self.url} wants the key of an admin: give it with --api-key."
        if status == 404:
            return (
                f"The server at {self.url} has no {path}; is it a radixrt server of this version?"
            )
        return (
            f"The server at {self.url} answered {path} with status {status}; its log may say why."
        )


def run(arguments: argparse.Namespace) -> int:
    """Run until interrupted, or for one frame with ``--once``; returns the exit status."""
    watch = ServerWatch(arguments.url, arguments.api_key or os.environ.get("RADIXRT_API_KEY"))
    console = Console()
    if arguments.once:
        try:
            console.print(_frame(watch, console))
        except ServerAwayError as error:
            print(f"radixrt: {error}", file=sys.stderr)
            return 1
        return 0
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                live.update(_frame(watch, console), refresh=True)
            except ServerAwayError as error:
                away = Text(f"{error} Asking again; Ctrl-C ends this.", "yellow")
                live.update(away, refresh=True)
            time.sleep(max(_MIN_INTERVAL_S, arguments.interval))


def _frame(watch: ServerWatch, console: Console) -> RenderableType:
    return frame(watch.url, watch.read(), console.width, console.height)


def frame(url: str, reading: Reading, width: int, height: int) -> RenderableType:
    """Draw a reading.

    Args:
        width: columns of the terminal.
        height: its lines.
    """
    engine = reading.engine
    assert engine is not None  # else there is nothing to draw
    has_states = engine.stats.kept_states > 0
    cache = engine.cache
    has_disk = bool(cache.disk_pages or cache.disk_stopped)
    drafts = _drafts(engine)
    extra_lines = has_states + has_disk + (drafts is not None)
    most_prefixes = max(_MIN_PREFIXES, height - _HEAD_LINES - extra_lines - 3)
    return Group(
        _title(url, reading, cache),
        Text(),
        _requests(engine),
        _hits(cache, engine.rates),
        _leases(cache),
        *([] if drafts is None else [drafts]),
        *([_states(engine)] if has_states else []),
        *([_disk(cache)] if has_disk else []),
        _pool_bar(engine.pool, width),
        _pool_legend(engine.pool),
        Text(),
        _prefixes(reading.tree, most_prefixes),
    )


def _title(url: str, reading: Reading, cache: CacheStats) -> Text:
    tokens = cache.tokens.total
    mebibytes = tokens * reading.kv_bytes_per_token / 2**20
    return Text.assemble(
        ("radixrt top", "bold"),
        f"  {_shown(reading.model, 60)} on {reading.device}, KV of {_count(tokens)} tokens "
        f"({mebibytes:.0f} MiB), {url}",
    )


def _requests(engine: EngineReading) -> Text:
    rates = engine.rates
    return Text.assemble(
        _label("requests"),
        f"{engine.stats.running} running, {engine.stats.waiting} waiting",
        "   ",
        f"tokens/s: {_rate(rates.generated_tokens_per_s)} generated; prompts: "
        f"{_rate(rates.cached_tokens_per_s)} from the cache, {_rate(rates.computed_tokens_per_s)} computed",
    )


def _hits(cache: CacheStats, rates: Rates) -> Text:
    recent = "-" if rates.hit_rate is None else f"{rates.hit_rate:.1%}"
    return Text.assemble(
        _label("hit rate"),
        (recent, "bold"),
        f" in the last {rates.seconds:.0f} s, {cache.hit_rate:.1%} since start; "
        f"evicted {_rate(rates.evicted_pages_per_s)} pages/s",
    )


def _leases(cache: CacheStats) -> Text:
    broken = f" ({cache.leases_broken} broken)" if cache.leases_broken else ""
    return Text.assemble(
        _label("held"),
        f"{cache.leases} leases{broken}, {cache.sessions} sessions, {cache.retractions} retractions, "
        f"{_count(cache.tree_nodes)} nodes",
    )


def _drafts(engine: EngineReading) -> Text | None:
    """Draft tokens by drafter; None: there were none."""
    accepted = engine.stats.accepted_draft_tokens
    parts = [
        f"{name} {_count(accepted[name])} of {_count(drafted)}"
        for name, drafted in engine.stats.drafted_tokens.items()
        if drafted
    ]
    return Text.assemble(_label("drafts"), "accepted: ", ", ".join(parts)) if parts else None


def _states(engine: EngineReading) -> Text:
    """The states of recurrent layers."""
    stats = engine.stats
    again = stats.stateless_tokens / max(1, stats.prompt_tokens)
    mebibytes = stats.kept_state_bytes / 2**20
    return Text.assemble(
        _label("states"),
        f"{_count(stats.kept_states)} kept ({mebibytes:.0f} MiB); {again:.1%} of prompt tokens computed again for lack of one",
    )


def _disk(cache: CacheStats) -> Text:
    """The pages on disk."""
    share = cache.disk_tokens / max(1, cache.prompt_tokens)
    return Text.assemble(
        _label("disk"),
        f"{_count(cache.disk_pages * cache.page_size)} tokens, {share:.1%} of prompt tokens read from there; "
        f"{_count(cache.disk_pages_written)} pages written, {_count(cache.disk_pages_damaged)} damaged",
        (". Nothing is written any more: see the log" if cache.disk_stopped else "", "yellow"),
    )


def _pool_bar(pool: PoolParts, width: int) -> Text:
    room = max(10, width - 12)
    bar = Text.assemble(_label("pool"))
    parts = asdict(pool)
    total, shown, seen = max(1, sum(parts.values())), 0, 0
    for name, tokens in parts.items():
        seen += tokens
        columns = round(room * seen / total) - shown
        shown += columns
        bar.append(_POOL_LETTERS[name] * columns, _POOL_COLOURS[name])
    return bar


def _pool_legend(pool: PoolParts) -> Text:
    """The parts in tokens."""
    legend = Text.assemble(_label(""))
    for name, tokens in asdict(pool).items():
        legend.append(f"{_POOL_LETTERS[name]} ", _POOL_COLOURS[name])
        legend.append(f"{name} {_count(tokens)}  ")
    return legend


def _prefixes(tree: CacheTree, most: int) -> RenderableType:
    """The largest prefixes of the tree; children are indented."""
    table = Table(box=None, padding=(0, 1), expand=True)
    for heading in ("below", "tokens", "idle"):
        table.add_column(heading, justify="right", no_wrap=True, style="cyan")
    table.add_column("held", no_wrap=True)
    table.add_column("prefix", no_wrap=True, overflow="ellipsis", ratio=1)
    rows = list(_rows(tree))
    for level, node, salted in rows[:most]:
        text = "(with a salt)" if salted else "(hidden)" if node.text is None else node.text
        table.add_row(
            _count(node.total_tokens),
            _count(node.num_tokens),
            _duration(node.idle_s),
            _held(node),
            Text("  " * level + _shown(text, 200)),
        )
    if not rows and tree.total_nodes:
        return Text("No prefix leads to a thousandth of what is in the tree.", "dim")
    if not rows:
        return Text("The tree is empty.", "dim")
    return table


def _rows(tree: CacheTree) -> Iterator[tuple[int, CacheTreeNode, bool]]:
    for namespace in tree.namespaces:
        for node in namespace.children:
            yield from _rows_below(0, node, namespace)


def _rows_below(
    level: int, node: CacheTreeNode, namespace: CacheNamespace
) -> Iterator[tuple[int, CacheTreeNode, bool]]:
    yield level, node, namespace.salted
    for child in node.children:
        yield from _rows_below(level + 1, child, namespace)


def _held(node: CacheTreeNode) -> Text:
    if node.pinned:
        return Text("pinned", _POOL_COLOURS["pinned"])
    if node.locked:
        return Text("in use", _POOL_COLOURS["locked"])
    return Text("" if node.retention == "default" else node.retention)


def _shown(text: str, most: int) -> str:
    """A client's text on one line, without control characters."""
    line = text[:most].replace("\n", "⏎")
    return "".join(c if c.isprintable() else "·" for c in line)


def _label(name: str) -> tuple[str, str]:
    return f"{name:>9}  ", "dim"


def _rate(per_s: float | None) -> str:
    return "-" if per_s is None else _count(per_s)


def _count(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{value:.0f}"


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
