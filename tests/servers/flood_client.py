"""Opens many connections at once, sends one request on each, and prints its answers' statuses and
times as JSON.

A program of its own, so that it holds no lock of the test that measures.
"""

import argparse
import collections
import json
import resource
import selectors
import socket
import time

BODY = json.dumps({"prompt": "Once upon", "max_tokens": 4}).encode()
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
) + BODY


def flood(port: int, count: int, seconds: float) -> dict[str, object]:
    """Returns the number of answers by status, and of those the slowest one's time in seconds."""
    selector = selectors.DefaultSelector()
    begin = time.monotonic()
    for _ in range(count):
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", port))
        selector.register(client, selectors.EVENT_WRITE)
    statuses: collections.Counter[str] = collections.Counter()
    slowest: dict[str, float] = {}
    while selector.get_map() and time.monotonic() < begin + seconds:
        for key, events in selector.select(1.0):
            client = key.fileobj  # type: ignore[assignment]
            try:
                if events & selectors.EVENT_WRITE:
                    client.send(REQUEST)
                    selector.modify(client, selectors.EVENT_READ)
                    continue
                status = client.recv(65536)[9:12].decode() or "cut"
            except OSError:
                status = "cut"
            statuses[status] += 1
            slowest[status] = round(time.monotonic() - begin, 2)
            selector.unregister(client)
            client.close()
    return {
        "statuses": statuses,
        "slowest_s": slowest,
        "unanswered": count - sum(statuses.values()),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(json.dumps(flood(arguments.port, arguments.count, arguments.seconds)))
