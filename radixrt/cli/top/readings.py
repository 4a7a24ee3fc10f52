"""Reads a server's state over HTTP."""

import http.client
import urllib.error
import urllib.request
from typing import Any

import msgspec

from radixrt.base.errors import RadixrtError
from radixrt.kv.reading import Reading

TIMEOUT_S = 5
LIVE_PATH = "/v1/live?depth=3&children=12"


class ServerAwayError(RadixrtError):
    """No radixrt server answers; the message names the next step."""


class ServerWatch:
    """Reads a server's state."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """
        Args:
            url: address of the server, with or without ``/v1`` at its end.
            api_key: key of the server.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def read(self) -> Reading:
        """Return the server's state.

        Raises:
            ServerAwayError: no radixrt server answers.
        """
        reading: Reading = self._get(LIVE_PATH, Reading)
        if reading.engine is None:
            raise ServerAwayError(self._refusal(LIVE_PATH, 403))
        return reading

    def _get(self, path: str, kind: type[Any]) -> Any:
        if not self.url.startswith(("http://", "https://")):
            raise ServerAwayError(
                f"--url must begin with http:// or https://, not {self.url!r:.80}."
            )
        try:
            request = urllib.request.Request(self.url + path, headers=self._headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return msgspec.json.decode(response.read(), type=kind)
        except urllib.error.HTTPError as error:
            raise ServerAwayError(self._refusal(path, error.code)) from error
        except msgspec.MsgspecError as error:
            raise ServerAwayError(
                f"The answer of {self.url}{path} does not fit this version of radixrt: {error}."
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:  # the last: no such URL
            reason = getattr(error, "reason", error)
            raise ServerAwayError(
                f"No server answers at {self.url} ({reason}). Start one with `radixrt serve`, or name another with "
                "--url."
            ) from error

    def _refusal(self, path: str, status: int) -> str:
        if status == 401:
            return f"The server at {self.url} wants its key: give it with --api-key."
        if status == 403:
            return f"The server at {self.url} wants the key of an admin: give it with --api-key."
        if status == 404:
            return f"The server at {self.url} has no {path.partition('?')[0]}; is it a radixrt server of this version?"
        return (
            f"The server at {self.url} answered {path} with status {status}; its log may say why."
        )
