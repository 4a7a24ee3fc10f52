"""An engine joins an ingress over TCP, with the ends of both in this process."""

import asyncio
import contextlib
import http.client
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from radixrt import __version__
from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.ipc import Poller
from radixrt.base.liveness.link import EnginesJoined, SupervisorLink, ToSupervisor
from radixrt.joining import engine_end, ingress_end
from radixrt.joining.engine_end import IngressLink
from radixrt.joining.fingerprint import SAMPLE_BYTES, model_fingerprint
from radixrt.joining.ingress_end import JoinedEngine, JoinPort
from radixrt.joining.sockets import JoinKeys, KeyPair, engine_socket
from radixrt.messages.ids import pack_ids
from radixrt.messages.replicas import Join
from radixrt.messages.sequences import ReleaseSequences, SequenceOutput, TokenBatch
from radixrt.supervisor.launch import bind
from radixrt.supervisor.probes import answering_probes
from tests.servers.fake_scheduler import engine_info

TOKEN, OTHER_TOKEN = "0123456789abcdef" * 2, "0123456789abcdeg" * 2
TOKENIZER = b'{"a tokenizer": "of the ingress"}'
SECRETS = [pack_ids([0x41424344, 0x45464748] * 50), pack_ids([0x51525354] * 100)]
"""Of a message to the engine and one to the ingress."""


@pytest.fixture
def folders() -> Iterator[Callable[[], Channels]]:
    made: list[Channels] = []

    def make() -> Channels:
        made.append(Channels(Channels.make_run_dir()))
        return made[-1]

    yield make
    for channels in made:
        shutil.rmtree(channels.run_dir)


class Told(SupervisorLink):
    """Keeps what the supervisor is told last: how many have joined."""

    joined = 0

    def tell(self, message: ToSupervisor) -> None:
        assert isinstance(message, EnginesJoined)
        self.joined = message.count


class Ingress:
    """A port, and the engines that have joined and are not lost."""

    def __init__(self, channels: Channels, address: str, num_local: int, model: str) -> None:
        self.channels = channels
        channels.tokenizer_file.write_bytes(TOKENIZER)
        self.supervisor = Told()
        self.port = JoinPort(
            address, JoinKeys.derive(TOKEN), channels, self.supervisor, num_local, model
        )
        self.address = self.port._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.engines: list[JoinedEngine] = []

    async def follow(self, engine: JoinedEngine) -> None:
        self.engines.append(engine)
        await engine.lost.wait()
        self.engines.remove(engine)


@contextlib.asynccontextmanager
async def ingress(
    channels: Channels,
    address: str = "tcp://127.0.0.1:*",
    num_local: int = 0,
    model: str = "",
    before: Callable[[str], Awaitable[None]] | None = None,
) -> AsyncIterator[Ingress]:
    made = Ingress(channels, address, num_local, model)
    if before is not None:
        await before(made.address)
    serving = asyncio.create_task(made.port.serve(made.follow))
    try:
        yield made
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        made.port.close()


class Engine:
    """A joining engine, whose loop turns while a test waits."""

    def __init__(
        self, channels: Channels, address: str, token: str = TOKEN, model: str = "m"
    ) -> None:
        file = channels.run_dir / "token"
        file.write_text(token + "\n")
        self.channels = channels.of_replica(0, 0)
        self.channels.folder.mkdir()
        self.poller = Poller()
        self.received: list[object] = []
        self.times_lost = 0
        config = ServerConfig(join=address, join_token_file=str(file))
        self.supervisor = Told()
        self.link = IngressLink(
            config, self.channels, model, self.poller, self._lose, self.supervisor
        )

    def _lose(self) -> None:
        self.times_lost += 1
        self.received.clear()

    @property
    def is_joined(self) -> bool:
        return self.supervisor.joined == 1

    async def turn(self) -> None:
        self.received += self.link.receive_waiting()
        await asyncio.sleep(0.005)

    async def until(self, condition: Callable[[], object], timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self.turn()

    async def for_seconds(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await self.until(lambda: False, seconds)

    def close(self) -> None:
        self.link.close()


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(scene(), 30)

    asyncio.run(main())


def test_messages_pass_in_both_directions_and_none_can_be_read_on_the_way(folders) -> None:
    async def scene() -> None:
        seen = bytearray()
        async with ingress(folders()) as host, recorded(host.address, seen) as address:
            engine = Engine(folders(), address)
            engine.link.join(engine_info())
            await engine.until(lambda: engine.is_joined and host.engines)
            joined = host.engines[0]
            assert await joined.receive() == engine_info()
            assert engine.channels.tokenizer_file.read_bytes() == TOKENIZER
            assert host.supervisor.joined == 1 and joined.channels.replica == 0
            joined.send(ReleaseSequences(SECRETS[0]))
            await engine.until(lambda: engine.received)
            assert engine.received == [ReleaseSequences(SECRETS[0])]
            batch = TokenBatch(outputs={1: SequenceOutput(vector=SECRETS[1])})
            engine.link.send(batch)
            assert await joined.receive() == batch
            assert len(seen) > sum(map(len, SECRETS))
            for text in (*SECRETS, TOKEN.encode(), TOKENIZER, b"ReleaseSequences", b"EngineInfo"):
                assert text[:16] not in seen
            engine.close()

    play(scene)


def test_only_holders_of_the_token_are_let_in(folders) -> None:
    """A wrong token, the ingress's key alone, also before the ingress checks keys, and a connection
    without keys."""
    keys = JoinKeys.derive(TOKEN)
    stranger = JoinKeys(keys.ingress, KeyPair.derive(OTHER_TOKEN, b"radixrt engine"))
    frame = msgspec.msgpack.encode(Join(version=__version__, model="m", info=engine_info()))
    strangers: list[zmq.Socket] = []

    async def come_early(address: str) -> None:
        strangers.append(engine_socket(address, stranger))
        await asyncio.sleep(0.3)

    async def scene() -> None:
        async with ingress(folders(), before=come_early) as host:
            plain: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
            plain.connect(host.address)
            strangers.extend([engine_socket(host.address, stranger), plain])
            wrong = Engine(folders(), host.address, OTHER_TOKEN)
            wrong.link.join(engine_info())
            for socket in strangers:
                socket.send(frame)
            await wrong.for_seconds(1.0)
            assert not wrong.is_joined and not host.engines
            for socket in strangers:
                with pytest.raises(zmq.Again):  # not even a refusal
                    socket.recv(zmq.NOBLOCK)
                socket.close(linger=0)
            wrong.close()
            known = engine_socket(host.address, keys)
            known.send(frame)
            right = Engine(folders(), host.address)
            right.link.join(engine_info())
            await right.until(lambda: right.is_joined and len(host.engines) == 2)
            assert known.poll(10_000), "one with the token is answered"
            known.close(linger=0)
            right.close()

    play(scene)


def test_an_engine_of_another_model_is_refused(folders, caplog) -> None:
    async def scene() -> None:
        async with ingress(folders(), num_local=1, model="m") as host:
            first = Engine(folders(), host.address)
            first.link.join(engine_info(kv_pool_tokens=1 << 20))
            await first.for_seconds(0.3)
            assert not first.is_joined, "before the ingress knows its own engine"
            host.port.compare_with(engine_info())
            await first.until(lambda: first.is_joined)
            assert host.engines[0].channels.replica == 1
            for changes, model, reason in (
                ({}, "another model", "its checkpoint"),
                ({"page_size": 32}, "m", "page_size"),
                ({"context_length": 99, "dtype": "int8"}, "m", "context_length, dtype"),
            ):
                other = Engine(folders(), host.address, model=model)
                other.link.join(engine_info(**changes))
                await other.until(lambda reason=reason: reason in caplog.text)
                assert not other.is_joined and len(host.engines) == 1
                other.close()
            first.close()

    play(scene)


def test_an_engine_whose_connection_ends_is_lost_at_once(folders) -> None:
    async def scene() -> None:
        async with ingress(folders()) as host:
            engine = Engine(folders(), host.address)
            engine.link.join(engine_info())
            await engine.until(lambda: engine.is_joined)
            engine.close()
            async with asyncio.timeout(ingress_end.SILENCE_S - 1):
                while host.engines:
                    await asyncio.sleep(0.01)
            assert host.supervisor.joined == 0

    play(scene)


def test_an_engine_that_is_silent_is_lost_and_joins_again(folders, monkeypatch) -> None:
    """As a machine that vanishes, and a process that was stopped: nobody closes the connection."""
    monkeypatch.setattr(ingress_end, "SILENCE_S", 0.5)

    async def scene() -> None:
        async with ingress(folders()) as host:
            engine = Engine(folders(), host.address)
            engine.link.join(engine_info())
            await engine.until(lambda: engine.is_joined)
            first = host.engines[0]
            async with asyncio.timeout(5.0):
                while host.engines:
                    await asyncio.sleep(0.01)
            engine.link.send(TokenBatch(outputs={1: SequenceOutput([2])}))
            await engine.until(lambda: engine.times_lost == 1 and engine.is_joined)
            assert await host.engines[0].receive() == engine_info(), "nothing late comes first"
            assert host.engines[0].channels.start > first.channels.start
            engine.close()

    play(scene)


def test_an_engine_joins_the_next_ingress(folders, monkeypatch) -> None:
    """An ingress that is started again knows nothing of the engines that had joined."""
    monkeypatch.setattr(engine_end, "SILENCE_S", 1.0)

    async def scene() -> None:
        async with ingress(folders()) as host:
            address = host.address
            engine = Engine(folders(), address)
            engine.link.join(engine_info())
            await engine.until(lambda: engine.is_joined)
        await engine.until(lambda: not engine.is_joined)
        assert engine.times_lost == 1
        async with ingress(folders(), address):
            await engine.until(lambda: engine.is_joined)
        engine.close()

    play(scene)


def test_the_fingerprint_changes_with_the_weights_and_the_types(tmp_path: Path) -> None:
    def fingerprint(weights: bytes, **settings: object) -> str:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(weights)
        return model_fingerprint(ServerConfig(model_path=str(tmp_path), **settings))  # type: ignore[arg-type]

    weights = os.urandom(3 * SAMPLE_BYTES)
    known = fingerprint(weights)
    assert fingerprint(weights, kernel_threads=1) == known
    assert fingerprint(weights[:-1] + b"\0\0") != known
    assert fingerprint(weights[:-9] + bytes(9)) != known
    assert fingerprint(weights, kv_cache_dtype="int8") != known


def test_a_token_has_to_be_long(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    with pytest.raises(ConfigError, match=r"6 characters .* openssl rand"):
        JoinKeys.read(str(tmp_path / "token"))
    with pytest.raises(ConfigError, match="cannot be read"):
        JoinKeys.read(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"dp": 0}, "set --replica-listen"),
        ({"join": "tcp://h:1"}, "--join-token-file"),
        ({"join_token_file": "f"}, "--join-token-file"),
        ({"join": "h:1", "join_token_file": "f"}, "write tcp://HOST:PORT"),
        ({"join": "tcp://h:1", "replica_listen": "tcp://h:1", "join_token_file": "f"}, "leave one out"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_each_other_are_refused(settings: dict, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        ServerConfig(**settings).validate()


def test_probes_tell_whether_an_engine_lives_and_belongs_to_an_ingress() -> None:
    """tests/server/test_supervisor.py: when it does."""
    is_ready = False
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]

        def status(path: str) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            with contextlib.closing(connection):
                connection.request("GET", path)
                return connection.getresponse().status

        def statuses() -> list[int]:
            return [status("/health"), status("/ready"), status("/metrics")]

        with answering_probes(listener, lambda: is_ready):
            assert statuses() == [200, 503, 404]
            is_ready = True
            assert statuses() == [200, 200, 404]


@contextlib.asynccontextmanager
async def recorded(address: str, seen: bytearray) -> AsyncIterator[str]:
    """The address of a proxy that notes each byte of both directions."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    tasks: list[asyncio.Task] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            seen.extend(data)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(host, int(port))
        tasks.extend(
            asyncio.ensure_future(copy(*ends)) for ends in ((reader, there[1]), (there[0], writer))
        )

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
