"""The command ``radixrt top``: polls a server and draws its state."""

import argparse
import os
import sys
import time

import httpx
import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from radixrt.base.errors import RadixrtError
from radixrt.cli.top.frame import frame
from radixrt.kv.reading import Reading

TIMEOUT_S = 5
LIVE_PATH = "/v1/live?depth=3&children=12"
_MIN_INTERVAL_S = 0.1


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
