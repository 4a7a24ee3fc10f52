"""ZeroMQ sockets over TCP that are encrypted and authenticated by CURVE keys.

Both key pairs, that of the ingress and that of its engines, are computed from one join token. Only
a program that has the token can therefore address the ingress, and only such a program is let in.
Each connection has short-lived keys of its own beside them, so a recorded connection stays secret
if the token becomes known later (https://rfc.zeromq.org/spec/26/).
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import zmq
from zmq.utils import z85

from radixrt.base.errors import ConfigError
from radixrt.base.ipc import MAX_FRAME_BYTES

if TYPE_CHECKING:
    import zmq.asyncio  # with asyncio, which engines do not need

MIN_TOKEN_CHARS = 32
"""The token is the secret of the keys, so it must be as random as they are."""

ZAP_DOMAIN = b"radixrt"
"""Under which the handler of ZAP knows the keys that are let in."""

CONNECTION_SILENCE_MS = 5000
"""A connection on which the other machine acknowledges nothing for this time is closed."""


class KeyPair(NamedTuple):
    """A CURVE key pair, in Z85."""

    public: bytes
    secret: bytes

    @staticmethod
    def derive(token: str, role: bytes) -> "KeyPair":
        """The keys of a role."""
        digest = hashlib.blake2b(token.encode(), digest_size=32, person=role).digest()
        secret = z85.encode(digest)
        return KeyPair(zmq.curve_public(secret), secret)


class JoinKeys(NamedTuple):
    """The keys of both ends."""

    ingress: KeyPair
    engine: KeyPair

    @staticmethod
    def derive(token: str) -> "JoinKeys":
        """The keys of a token, which all machines of a server have.

        >>> keys = JoinKeys.derive("0123456789" * 4)
        >>> len(keys.ingress.public), keys.ingress == keys.engine, keys == JoinKeys.derive("0123456789" * 4)
        (40, False, True)
        """
        return JoinKeys(
            KeyPair.derive(token, b"radixrt ingress"), KeyPair.derive(token, b"radixrt engine")
        )

    @staticmethod
    def read(file: str) -> "JoinKeys":
        """The keys of the token in a file.

        Raises:
            ConfigError: the file cannot be read, or its token is too short.
        """
        try:
            token = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--join-token-file {file} cannot be read: {error}.") from None
        if len(token) < MIN_TOKEN_CHARS:
            raise ConfigError(
                f"--join-token-file {file}: the token has {len(token)} characters and needs at least {MIN_TOKEN_CHARS}; "
                "make one with: openssl rand -hex 32"
            )
        return JoinKeys.derive(token)


def ingress_socket(address: str, keys: JoinKeys) -> "zmq.asyncio.Socket":
    """A ROUTER socket that speaks with nobody but holders of the engine's key. The handler of ZAP
    in the same context (:mod:`zmq.auth`) checks the keys of its peers.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """
    from zmq.asyncio import Context

    socket = Context.instance().socket(zmq.ROUTER)
    _set_options(socket, address)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error for a message to a peer that is gone
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody is let in while no handler runs
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.ingress.secret)
    try:
        socket.bind(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def engine_socket(address: str, keys: JoinKeys) -> zmq.Socket:
    """A DEALER socket that is being connected to an ingress, and to no other program that listens
    at its address."""
    socket: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
    _set_options(socket, address)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)  # milliseconds
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.ingress.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.engine.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.engine.secret)
    socket.connect(address)
    return socket


def _set_options(socket: zmq.Socket, address: str) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.IPV6, "[" in address)
    socket.setsockopt(zmq.HEARTBEAT_IVL, CONNECTION_SILENCE_MS // 5)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, CONNECTION_SILENCE_MS)
