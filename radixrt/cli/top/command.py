"""The command ``radixrt top``: polls a server and draws its state."""

import argparse
import os
import sys
import time

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from radixrt.cli.top.frame import frame
from radixrt.cli.top.readings import ServerAwayError, ServerWatch

_MIN_INTERVAL_S = 0.1


def run(arguments: argparse.Namespace) -> int:
    """Run until interrupted, or for one frame with ``--once``; returns the exit status."""
    watch = ServerWatch(arguments.url, arguments.api_key or os.environ.get("RADIXRT_API_KEY"))
    console = Console()
    if arguments.once:
        return _once(watch, console)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_current(watch, console), refresh=True)
            time.sleep(max(_MIN_INTERVAL_S, arguments.interval))


def _once(watch: ServerWatch, console: Console) -> int:
    try:
        console.print(_frame(watch, console))
    except ServerAwayError as error:
        print(f"radixrt: {error}", file=sys.stderr)
        return 1
    return 0


def _current(watch: ServerWatch, console: Console) -> RenderableType:
    """The server's state, or the reason why it does not answer."""
    try:
        return _frame(watch, console)
    except ServerAwayError as error:
        return Text(f"{error} Asking again; Ctrl-C ends this.", "yellow")


def _frame(watch: ServerWatch, console: Console) -> RenderableType:
    return frame(watch.url, watch.read(), console.width, console.height)
