"""The URL of a server for clients on its machine, and its certificate and key for TLS."""

import argparse
import os
import ssl

from radixrt.base.errors import ConfigError

URL_VARIABLE = "RADIXRT_URL"
DEFAULT_URL = "http://127.0.0.1:30000"


def add_url_flag(parser: argparse._ActionsContainer) -> None:
    """Declare ``--url``, which is ``--base-url``, too."""
    parser.add_argument(
        "--url",
        "--base-url",
        default=os.environ.get(URL_VARIABLE) or DEFAULT_URL,
        help=f"address of the server, with or without /v1 (default: environment variable RADIXRT_URL, or {DEFAULT_URL})",
    )


def local_url(host: str, port: int, *, is_https: bool = False) -> str:
    """The address at which a client on this machine reaches a server.

    >>> local_url("0.0.0.0", 30000)
    'http://127.0.0.1:30000'
    >>> local_url("::", 30000, is_https=True)
    'https://[::1]:30000'
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if is_https else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def server_context(cert: str, key: str | None) -> ssl.SSLContext:
    """The TLS context of a server: TLS 1.2 and later, HTTP/1.1.

    Args:
        cert: PEM file of the certificate, followed by those of its issuers.
        key: PEM file of the private key; None: it is in ``cert`` too.

    Raises:
        ConfigError: the files cannot be used; says why.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key, _no_password)
    except FileNotFoundError:
        raise ConfigError(f"--tls-cert {cert} or --tls-key {key}: there is no such file.") from None
    except OSError as error:  # SSLError is one
        files = f"--tls-cert {cert}" + (f" and --tls-key {key}" if key else "")
        raise ConfigError(
            f"{files} cannot be used ({error}). They must be PEM files of a certificate and its private key."
        ) from None
    return context


def _no_password() -> str:
    """Refuse an encrypted key; OpenSSL would ask the terminal."""
    raise ConfigError(
        "The key of --tls-key is encrypted; write it without a password: openssl pkey -in KEY -out PLAIN_KEY"
    )
