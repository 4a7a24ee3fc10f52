"""Fetches images by https from the hosts that ``--allow-image-hosts`` lists, and from no others.

A server that fetches what a client asks for is a way into its own network (SSRF). So the address of
each host, those of redirects too, is resolved here, checked and connected to: a name that resolves
to something else a moment later changes nothing. Environment variables for proxies and credentials
are ignored.
"""

import asyncio
import base64
import functools
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from msgspec.structs import replace

from radixrt.base.errors import RequestError, shown
from radixrt.messages.prompt_images import images_of, with_images
from radixrt.messages.requests import ChatPrompt, GenerateRequest

if TYPE_CHECKING:
    import httpx

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

SECONDS = 15.0
"""Time for one image, redirects included."""
SECONDS_OF_SILENCE = 5.0
MAX_REDIRECTS = 3
MAX_REQUEST_BYTES = 64 << 20
"""Of all files that are fetched for a request."""
THREADS = 4
"""Images that are fetched at a time."""
_HTTPS = 443
_REDIRECTS = (301, 302, 303, 307, 308)
_EMBEDS_IPV4 = ipaddress.ip_network("64:ff9b::/96")
"""Addresses of IPv4 hosts behind a translator (NAT64)."""


def is_public(address: Address) -> bool:
    """Whether an address is one of the internet at large: not private, loopback, link-local or
    reserved, nor such an IPv4 address in the form of an IPv6 one.

    >>> [is_public(ipaddress.ip_address(one)) for one in ("1.1.1.1", "169.254.169.254", "::ffff:10.0.0.1")]
    [True, False, False]
    """
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is not None:
            return is_public(inner)
        if address in _EMBEDS_IPV4:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


def resolve(host: str, port: int) -> list[Address]:
    """All addresses of a host.

    Raises:
        OSError: it has none.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(str(one[4][0]).partition("%")[0]) for one in found]


class ImageFetcher:
    """Fetches images for requests, in threads of its own.

    Args:
        hosts: ``HOST`` or ``HOST:PORT``.
        num_bytes: most of one image.
        resolve: see :func:`resolve`.
        is_public: see :func:`is_public`.
        tls: for servers whose certificates the system does not know.
    """

    def __init__(
        self,
        hosts: Iterable[str],
        num_bytes: int,
        *,
        resolve: Callable[[str, int], list[Address]] = resolve,
        is_public: Callable[[Address], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = frozenset(one.lower().removesuffix(f":{_HTTPS}") for one in hosts)
        self._num_bytes = num_bytes
        self._resolve, self._is_public, self._tls = resolve, is_public, tls
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="fetch-image")

    async def filled(self, request: GenerateRequest) -> GenerateRequest:
        """The request with files in the place of addresses, in base64.

        Raises:
            RequestError: an image can't be fetched.
        """
        images = images_of(request.prompt)
        if not isinstance(request.prompt, ChatPrompt) or not any("url" in part for part in images):
            return request
        left, filled = MAX_REQUEST_BYTES, []
        for number, part in enumerate(images, 1):
            if "url" in part:
                data = await self._in_thread(part["url"], f"Image {number}")
                left -= len(data) * 3 // 4
                if left < 0:
                    raise _refusal(f"Image {number}", _TOO_MUCH, status=413)
                part = {"type": "image", "data": data}
            filled.append(part)
        return replace(request, prompt=with_images(request.prompt, filled))

    async def _in_thread(self, url: str, where: str) -> str:
        loop = asyncio.get_running_loop()
        fetching = loop.run_in_executor(self._threads, self.fetch, url, where)
        try:
            return await asyncio.wait_for(fetching, SECONDS + SECONDS_OF_SILENCE)
        except TimeoutError:
            raise _refusal(where, f"did not come within {SECONDS:.0f} s") from None

    def fetch(self, url: str, where: str) -> str:
        """The file at an address, in base64.

        Args:
            where: names the image in errors.

        Raises:
            RequestError: the address is not allowed, or the file is too large or does not come.
        """
        import httpx

        end = time.monotonic() + SECONDS
        try:
            address = httpx.URL(url)
            for _ in range(1 + MAX_REDIRECTS):
                found = self._get(address, where, end)
                if isinstance(found, bytes):
                    return base64.b64encode(found).decode()
                address = address.join(found)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise _refusal(where, f"can't be fetched ({type(error).__name__})") from error
        raise _refusal(where, f"is behind more than {MAX_REDIRECTS} redirects")

    def close(self) -> None:
        """End the threads; what they fetch is lost."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @functools.cached_property
    def _client(self) -> "httpx.Client":
        """No connection is kept: one to an address must not serve another name."""
        import httpx

        return httpx.Client(
            verify=self._tls or ssl.create_default_context(),
            trust_env=False,
            timeout=SECONDS_OF_SILENCE,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def _get(self, url: "httpx.URL", where: str, end: float) -> bytes | str:
        """The file, or the address that the server names instead."""
        target, headers = self._checked(url, where)
        request = self._client.build_request(
            "GET", target, headers=headers, extensions={"sni_hostname": url.host}
        )
        response = self._client.send(request, stream=True, follow_redirects=False)
        try:
            if response.status_code in _REDIRECTS and "location" in response.headers:
                return str(response.headers["location"])
            if response.status_code != 200:
                raise _refusal(where, f"can't be fetched (status {response.status_code})")
            return self._body(response, where, end)
        finally:
            response.close()

    def _body(self, response: "httpx.Response", where: str, end: float) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise _refusal(where, "comes compressed, which was not asked for")
        too_large = f"has more than {self._num_bytes} bytes (--max-image-mib)"
        if int(response.headers.get("content-length", 0)) > self._num_bytes:
            raise _refusal(where, too_large, status=413)
        body = bytearray()
        for part in response.iter_raw(1 << 16):
            body += part
            if len(body) > self._num_bytes:
                raise _refusal(where, too_large, status=413)
            if time.monotonic() > end:
                raise _refusal(where, f"did not come within {SECONDS:.0f} s")
        return bytes(body)

    def _checked(self, url: "httpx.URL", where: str) -> tuple[str, Mapping[str, str]]:
        """The address to connect to, with a number for its host; and the headers.

        Raises:
            RequestError: it is not allowed.
        """
        port = url.port or _HTTPS
        name = url.host if port == _HTTPS else f"{url.host}:{port}"
        if url.scheme != "https" or url.userinfo:
            raise _refusal(where, "must have an https address without a name and a password")
        if name not in self._hosts:
            raise _refusal(
                where,
                f"is at {shown(name)}, from which this server fetches no images (--allow-image-hosts); send a data URL",
            )
        addresses = self._resolve(url.host, port)
        if not addresses or not all(map(self._is_public, addresses)):
            raise _refusal(where, f"is at {shown(name)}, which has no public address")
        number = addresses[0]
        host = f"[{number}]" if number.version == 6 else str(number)
        headers = {"host": name, "accept": "image/*", "accept-encoding": "identity"}
        return f"https://{host}:{port}{url.raw_path.decode('ascii')}", headers


_TOO_MUCH = f"has, with those before it, more than {MAX_REQUEST_BYTES} fetched bytes"


def _refusal(where: str, reason: str, status: int = 400) -> RequestError:
    return RequestError(f"{where} {reason}.", status=status, param="messages", code="invalid_image")
