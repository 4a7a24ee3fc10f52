"""Sends files as bodies of chat requests, all at a time, when its standard input ends; prints what is
not answered.

    python -m bench.senders URL FILE...
"""

import functools
import http.client
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

TIMEOUT_S = 120


def send(url: str, body: bytes) -> None:
    """Send a request, and read the answer.

    Raises:
        OSError, http.client.HTTPException: there is none.
    """
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=TIMEOUT_S)
    with closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        connection.getresponse().read()


def main() -> None:
    url, *files = sys.argv[1:]
    bodies = [Path(file).read_bytes() for file in files]
    sys.stdin.read()
    with ThreadPoolExecutor(len(bodies)) as threads:
        list(threads.map(functools.partial(send, url), bodies))


if __name__ == "__main__":
    main()
