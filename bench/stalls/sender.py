"""Sends one request of the catalogue, in a process of its own."""

import time
import urllib.error
import urllib.request

from bench.stalls.bodies import ATTACKS

REPLY_TIMEOUT_S = 60


def send(url: str, name: str) -> tuple[str, float, int]:
    """Status, seconds to the reply, and its bytes. In a process of its own, so that building the body delays nothing."""
    attack = ATTACKS[name]
    body = attack.body()
    begin = time.monotonic()
    try:
        with urllib.request.urlopen(
            post(url, attack.path, body), timeout=REPLY_TIMEOUT_S
        ) as response:
            status, reply = str(response.status), response.read()
    except urllib.error.HTTPError as error:
        status, reply = str(error.code), error.read()
    except OSError as error:
        status, reply = type(error).__name__, b""
    return status, time.monotonic() - begin, len(reply)


def post(url: str, path: str, body: bytes) -> urllib.request.Request:
    return urllib.request.Request(url + path, body, {"content-type": "application/json"})
