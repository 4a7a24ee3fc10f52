"""The address at which a client on this machine reaches a server."""


def local_url(host: str, port: int, *, is_https: bool = False) -> str:
    """
    >>> local_url("0.0.0.0", 30000)
    'http://127.0.0.1:30000'
    >>> local_url("::", 30000, is_https=True)
    'https://[::1]:30000'
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if is_https else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
