"""Fetching images: from listed hosts at public addresses, and from nowhere else."""

import asyncio
import base64
import ipaddress
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from radixrt.base.errors import RequestError
from radixrt.messages.requests import ChatPrompt, GenerateRequest
from radixrt.tokenizer.images import fetching
from radixrt.tokenizer.images.fetching import Address, ImageFetcher, is_public

LOOPBACK = ipaddress.ip_address("127.0.0.1")
FILE = bytes(range(256)) * 40
LIMIT = 20_000


class Site(ThreadingHTTPServer):
    """An https server for ``images.test`` and ``more.test`` at a port of this machine."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        key, cert = folder / "key.pem", folder / "cert.pem"
        names = "subjectAltName=DNS:images.test,DNS:more.test"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
             "-nodes", "-subj", "/CN=images.test", "-addext", names, "-days", "2", "-keyout", key, "-out", cert],
            check=True, capture_output=True,
        )  # fmt: skip
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.tls = ssl.create_default_context(cafile=str(cert))
        self.port = self.server_address[1]
        self.seen: list[tuple[str, str]] = []
        """Host and path of each request."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients go in the middle of an answer here."""


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.seen.append((str(self.headers["host"]), self.path))
        kind, _, rest = self.path.lstrip("/").partition("?")
        if kind == "to":
            self.send_response(302)
            self.send_header("location", rest)
            self.end_headers()
            return
        self.send_response(404 if kind == "missing" else 200)
        if kind == "gzip":
            self.send_header("content-encoding", "gzip")
        if kind == "large":
            self.send_header("content-length", str(LIMIT + 1))
        self.end_headers()
        if kind in ("endless", "slow"):
            for _ in range(200):
                self.wfile.write(b"x" * (1000 if kind == "endless" else 1))
                time.sleep(0.02 if kind == "slow" else 0)
        else:
            self.wfile.write(FILE)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("site")) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


Resolve = Callable[[str, int], list[Address]]


def at_loopback(host: str, port: int) -> list[Address]:
    return [LOOPBACK]


def public_or_loopback(address: Address) -> bool:
    return address == LOOPBACK or is_public(address)


def fetcher(site: Site, resolve: Resolve = at_loopback) -> ImageFetcher:
    """Allows two hosts, for which the loopback address counts as public."""
    hosts = [f"{name}.test:{site.port}" for name in ("images", "More")]
    return ImageFetcher(hosts, LIMIT, resolve=resolve, is_public=public_or_loopback, tls=site.tls)


def test_a_file_is_fetched_from_a_listed_host(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a proxy, and by way of redirects between listed hosts."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    more = f"https://more.test:{site.port}"
    resolved: list[str] = []

    def resolve(host: str, port: int) -> list[Address]:
        resolved.append(host)
        return [LOOPBACK]

    site.seen.clear()
    for path in ("/a.png?size=1", f"/to?{more}/b", "/to?/c"):
        data = fetcher(site, resolve).fetch(f"https://images.test:{site.port}{path}", "Image 1")
        assert base64.b64decode(data) == FILE
    images, more = (f"{name}.test:{site.port}" for name in ("images", "more"))
    assert [host for host, _ in site.seen] == [images, images, more, images, images]
    assert len(resolved) == 5, "each address is resolved once, and then connected to"


REFUSED = {
    "an unlisted host": ("https://other.test:{port}/", "fetches no images"),
    "another port": ("https://images.test/", "fetches no images"),
    "a number": ("https://127.0.0.1:{port}/", "fetches no images"),
    "plain http": ("http://images.test:{port}/", "https address"),
    "a password": ("https://a:b@images.test:{port}/", "https address"),
    "a listed host as a name": ("https://images.test:{port}@other.test/", "https address"),
    "a redirect to metadata": ("https://images.test:{port}/to?https://169.254.169.254/latest", "fetches no images"),
    "a redirect to plain http": ("https://images.test:{port}/to?http://images.test:{port}/", "https address"),
    "a redirect to a file": ("https://images.test:{port}/to?file:///etc/passwd", "https address"),
    "a circle": ("https://images.test:{port}/to?/to?/to?/to?/to?/to?/a", "more than 3 redirects"),
    "an error": ("https://images.test:{port}/missing", "status 404"),
    "too many bytes, announced": ("https://images.test:{port}/large", "more than 20000 bytes"),
    "too many bytes": ("https://images.test:{port}/endless", "more than 20000 bytes"),
    "compressed": ("https://images.test:{port}/gzip", "compressed"),
    "too slow": ("https://images.test:{port}/slow", "did not come within"),
    "no address": ("https://images.test:x/", "can't be fetched"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_addresses_are_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(fetching, "SECONDS", 0.4)
    url, words = (part.replace("{port}", str(site.port)) for part in REFUSED[name])
    with pytest.raises(RequestError, match=words) as refused:
        fetcher(site).fetch(url, "Image 2")
    assert refused.value.status == (413 if "bytes" in name else 400)
    assert str(refused.value).startswith("Image 2 ")


@pytest.mark.parametrize(
    "addresses",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254",
        "64:ff9b::7f00:1", "2002:7f00:1::", "1.1.1.1 127.0.0.1",
    ],
)  # fmt: skip
def test_a_listed_host_without_a_public_address_is_refused(site: Site, addresses: str) -> None:
    """Whatever the first of its addresses is."""
    found = [ipaddress.ip_address(one) for one in addresses.split()]
    checked = ImageFetcher(
        [f"images.test:{site.port}"], LIMIT, resolve=lambda *_: found, tls=site.tls
    )
    site.seen.clear()
    with pytest.raises(RequestError, match="has no public address"):
        checked.fetch(f"https://images.test:{site.port}/", "Image 1")
    assert not site.seen


def test_a_public_address_in_the_form_of_another_is_public() -> None:
    """As networks with IPv6 alone see hosts with IPv4; but not by the tunnels of Teredo."""
    for address in ("64:ff9b::101:101", "::ffff:1.1.1.1", "2002:101:101::", "2606:4700::1111"):
        assert is_public(ipaddress.ip_address(address)), address
    assert not is_public(ipaddress.ip_address("2001:0:4136:e378:8000:63bf:fefe:fefe"))


def test_a_name_of_this_machine_and_a_redirect_to_it_are_refused(site: Site) -> None:
    """By the system's own resolver, and behind a host that is allowed."""
    plain = ImageFetcher([f"localhost:{site.port}"], LIMIT, tls=site.tls)
    with pytest.raises(RequestError, match="has no public address"):
        plain.fetch(f"https://localhost:{site.port}/", "Image 1")
    inside = ipaddress.ip_address("10.0.0.1")
    turned = fetcher(site, lambda host, _: [inside if host == "more.test" else LOOPBACK])
    with pytest.raises(RequestError, match=r"more.test.* has no public address"):
        turned.fetch(
            f"https://images.test:{site.port}/to?https://more.test:{site.port}/", "Image 1"
        )


def test_a_certificate_of_another_name_is_refused(site: Site) -> None:
    other = ImageFetcher(
        [f"other.test:{site.port}"], LIMIT, resolve=at_loopback, is_public=public_or_loopback, tls=site.tls
    )  # fmt: skip
    with pytest.raises(RequestError, match=r"can't be fetched \(ConnectError\)"):
        other.fetch(f"https://other.test:{site.port}/", "Image 1")


def test_a_request_gets_the_files_in_the_place_of_addresses(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"https://images.test:{site.port}/a"
    content: list[dict[str, Any]] = [
        {"type": "image", "data": "AAAA"},
        {"type": "text", "text": "Which?"},
        {"type": "image", "url": url},
    ]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Brief."},
        {"role": "user", "content": content},
    ]
    request = GenerateRequest(request_id="a", prompt=ChatPrompt(messages))
    filled = asyncio.run(fetcher(site).filled(request)).prompt
    assert isinstance(filled, ChatPrompt)
    assert filled.messages[0] == messages[0]
    assert filled.messages[1]["content"][:2] == content[:2]
    data = base64.b64encode(FILE).decode()
    assert filled.messages[1]["content"][2] == {"type": "image", "data": data}
    assert content[2]["url"] == url, "the request is not changed"
    monkeypatch.setattr(fetching, "MAX_REQUEST_BYTES", len(FILE) + 9)
    assert asyncio.run(fetcher(site).filled(request)).prompt == filled
    content.append({"type": "image", "url": f"{url}/more"})
    with pytest.raises(RequestError, match=r"Image 3 has, with those before it, more than") as full:
        asyncio.run(fetcher(site).filled(request))
    assert full.value.status == 413
    no_hosts = ImageFetcher([], LIMIT)
    with pytest.raises(RequestError, match=r"Image 2 .* fetches no images"):
        asyncio.run(no_hosts.filled(request))
