"""Clients that send requests endlessly, slowly, or never to the end."""

import ast
import contextlib
import inspect
import json
import re
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from radixrt.api.http import connection
from radixrt.api.http.connection import Connection
from radixrt.api.server import _Server
from tests.api.conftest import RunningServer

CHAT = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}).encode()


def connect(server: RunningServer) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=20)


def send_all(client: socket.socket, data: bytes) -> None:
    """Send, unless the server has closed the connection."""
    with contextlib.suppress(ConnectionError):
        client.sendall(data)


def answer(client: socket.socket) -> bytes:
    """Everything that comes until the server closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(65536):
            received += piece
    return received


def post(length: int) -> bytes:
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode()


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.3)


def test_headers_up_to_the_limit_pass(server: RunningServer) -> None:
    value = "a" * (connection.MAX_HEADER_BYTES - 2000)
    assert server.http.get("/health", headers={"X-Long": value}).status_code == 200


def test_headers_above_the_limit_get_431(server: RunningServer) -> None:
    value = "a" * connection.MAX_HEADER_BYTES
    response = server.http.get("/health", headers={"X-Long": value})
    assert response.status_code == 431
    assert "headers are larger than 65536 bytes" in response.json()["error"]["message"]


def test_many_small_headers_count_together(server: RunningServer) -> None:
    headers = b"".join(b"X-%d: a\r\n" % i for i in range(12_000))
    with connect(server) as client:
        send_all(client, b"GET /health HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
        assert b" 431 " in answer(client)


def test_an_endless_header_ends_at_the_limit(server: RunningServer) -> None:
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX-Endless: ")
        for _ in range(16):
            send_all(client, b"a" * 65536)  # a megabyte
        assert b"431 Request Header Fields Too Large" in answer(client)


def test_an_endless_address_ends_at_the_limit(server: RunningServer) -> None:
    with connect(server) as client:
        send_all(client, b"GET /" + b"a" * 1_000_000)
        assert b" 431 " in answer(client)


@pytest.mark.usefixtures("short_limits")
def test_headers_that_do_not_end_get_408(server: RunningServer) -> None:
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        assert b"408 Request Timeout" in answer(client)


@pytest.mark.usefixtures("short_limits")
def test_a_trickle_of_header_bytes_buys_no_time(server: RunningServer) -> None:
    sent = 0
    with connect(server) as client:
        for byte in b"GET /health HTTP/1.1\r\nX-Slow: " + b"a" * 100:
            try:
                client.sendall(bytes([byte]))
            except ConnectionError:
                break
            sent += 1
            time.sleep(0.05)
    assert sent < 80  # in 4 seconds at most; all would take 6


@pytest.mark.usefixtures("short_limits")
def test_a_body_that_does_not_end_gets_408(server: RunningServer) -> None:
    with connect(server) as client:
        client.sendall(post(len(CHAT)) + CHAT[:10])
        assert b"408 Request Timeout" in answer(client)


@pytest.mark.usefixtures("short_limits")
def test_a_body_at_the_speed_of_a_slow_link_is_served(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes three times the limit, but never pauses."""
    monkeypatch.setattr(connection, "BODY_BYTES_PER_S", 10)
    with connect(server) as client:
        client.sendall(post(len(CHAT)))
        for index in range(0, len(CHAT), 8):
            client.sendall(CHAT[index : index + 8])
            time.sleep(0.1)
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.usefixtures("short_limits")
def test_a_long_answer_is_not_cut_by_the_limits_of_requests(server: RunningServer) -> None:
    server.scheduler.step_s = 0.1
    server.answer_with("the " * 12)
    body = {**json.loads(CHAT), "max_tokens": 12}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.json()["usage"]["completion_tokens"] == 12


@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize("rest", [
    " HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n{",
    " HTTP/1.1\r\nHost: localhost\r\n",
    " HTTP/1.1\r\nHost: localhost\r\nX-Long: " + 70_000 * "a" + "\r\n\r\n",
    " HTTP/1.1\r\nX-Endless: " + 200_000 * "a",
    "?" + 200_000 * "a",
], ids=("slow body", "slow headers", "long header", "endless header", "endless address"))  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/%6dessages"])  # fmt: skip
def test_refusals_have_the_form_of_the_path(server: RunningServer, path: str, rest: str) -> None:
    with connect(server) as client:
        send_all(client, f"POST {path}{rest}".encode())
        head, _, body = answer(client).partition(b"\r\n\r\n")
    assert head.split()[1] in (b"408", b"431") and b"connection: close" in head
    told = json.loads(body)
    if path.startswith("/api/"):
        assert [*told] == ["error"] and isinstance(told["error"], str)
    else:
        assert told.get("type") == (None if "chat" in path else "error")
        assert told["error"]["type"] == "invalid_request_error"


def test_requests_on_one_connection_are_limited_one_by_one(server: RunningServer) -> None:
    value = "a" * (connection.MAX_HEADER_BYTES // 2)
    with httpx.Client(base_url=server.url) as client:
        for _ in range(4):
            assert client.get("/health", headers={"X-Long": value}).status_code == 200


def test_pipelined_requests_are_limited_one_by_one(server: RunningServer) -> None:
    value = b"a" * (connection.MAX_HEADER_BYTES // 2)
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + value + b"\r\n"
    with connect(server) as client:
        client.sendall((request + b"\r\n") * 3 + request + b"Connection: close\r\n\r\n")
        assert answer(client).count(b"HTTP/1.1 200") == 4


def test_blank_lines_keep_no_connection_open(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "IDLE_TIMEOUT_S", 0.3)
    with connect(server) as client:
        client.sendall(b"\r\n\r\n")
        assert answer(client) == b""


def test_slow_connections_cost_others_nothing(server: RunningServer) -> None:
    slow = [connect(server) for _ in range(200)]
    try:
        for client in slow:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
        assert server.http.post("/v1/chat/completions", content=CHAT).status_code == 200
    finally:
        for client in slow:
            client.close()


@pytest.mark.parametrize(
    ("derived", "base"), [(Connection, HttpToolsProtocol), (_Server, uvicorn.Server)]
)
def test_no_private_member_of_uvicorn_is_used_or_overridden(derived: type, base: type) -> None:
    """They change without notice, and any release of uvicorn from the oldest one in pyproject.toml
    on may be installed."""
    tree = ast.parse(inspect.getsource(derived))
    ours = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    ours |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    theirs = set(re.findall(r"\b(?:self\.|def )(_[a-z]\w*)", inspect.getsource(base)))
    assert theirs and not ours & theirs
