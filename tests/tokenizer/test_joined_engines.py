"""A tokenizer process whose engines have joined it over TCP; their schedulers answer from a
script."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable

import zmq

from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.base.liveness.link import (
    EnginesJoined,
    ServerStatus,
    SupervisorLink,
    ToSupervisor,
)
from radixrt.base.settings.replicas import MAX_REPLICAS
from radixrt.client.engine_client import EngineClient
from radixrt.messages.cache_root import BASE_ROOT
from radixrt.messages.calls import CacheTreeCall, FlushCacheCall, PinCall, StatsCall
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import TokenPrompt
from radixrt.tokenizer.process import TokenizerProcess
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.servers.fake_scheduler import FakeScheduler, engine_info
from tests.tokenizer.test_replicas import STEP_S, Fleet, next_numbers, until, vocabulary  # noqa: F401


class JoinSupervisor(SupervisorLink):
    """An ingress is well while an engine has joined."""

    def tell(self, message: ToSupervisor) -> None:
        assert isinstance(message, EnginesJoined)
        self.take(ServerStatus(is_well=message.count > 0))


class JoinedFleet(Fleet):
    """A client, a tokenizer process, and engines that join and die."""

    def __init__(self, vocabulary: Vocabulary) -> None:  # noqa: F811
        self.channels = Channels(Channels.make_run_dir())
        token = self.channels.run_dir / "token"
        token.write_text("0123456789abcdef" * 2)
        self._common = {"join_token_file": str(token)}
        self.replicas: dict[int, FakeScheduler] = {}
        self._folders: list[Channels] = []
        config = ServerConfig(dp=0, replica_listen="tcp://127.0.0.1:*", **self._common)
        self.supervisor = JoinSupervisor()
        self.process = TokenizerProcess(config, self.channels, vocabulary, self.supervisor)
        port = self.process._schedulers._port
        assert port is not None
        self.address = port._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.client = EngineClient(self.channels, supervisor=self.supervisor)

    def start_engine(self) -> None:
        """As a further replica."""
        self._folders.append(Channels(Channels.make_run_dir()))
        config = ServerConfig(join=self.address, **self._common)
        engine = FakeScheduler(self._folders[-1], engine_info(), STEP_S, config)
        engine.script = next_numbers
        self.replicas[len(self._folders) - 1] = engine

    async def joined(self, number: int) -> None:
        await until(lambda: len(self.process._schedulers.links) == number)

    def close(self) -> None:
        super().close()
        for channels in self._folders:
            shutil.rmtree(channels.run_dir)


def play(vocabulary: Vocabulary, scene: Callable[[JoinedFleet], Awaitable[None]]) -> None:  # noqa: F811
    async def main() -> None:
        fleet = JoinedFleet(vocabulary)
        fleet.run()
        try:
            await asyncio.wait_for(scene(fleet), 30)
        finally:
            await fleet.stop()
            fleet.close()

    asyncio.run(main())


def test_answers_of_an_engine_that_is_gone_go_on_in_another(vocabulary: Vocabulary) -> None:  # noqa: F811
    async def scene(fleet: JoinedFleet) -> None:
        assert not fleet.client.is_ready
        for _ in range(2):
            fleet.start_engine()
        info = await asyncio.wait_for(fleet.client.ready(), 10)
        assert info.replicas == 0 and info.page_size == engine_info().page_size
        await fleet.joined(2)
        assert fleet.client.is_ready
        for engine in fleet.replicas.values():
            engine.step_s = 0.05  # no answer ends before the engine does
        asking = [
            asyncio.create_task(fleet.answer(str(n), list(range(n, n + 40)), n=1 + n % 2))
            for n in range(10)
        ]
        await until(lambda: sum(fleet.running()) == 15)
        assert min(fleet.running()) > 0, "both work"
        fleet.replicas.pop(1).close()
        fleet.replicas[0].step_s = STEP_S
        answers = [answer for answers in await asyncio.gather(*asking) for answer in answers]
        assert answers == [list(range(2, 102))] * 15
        fleet.start_engine()
        await fleet.joined(2)
        for n in range(10):
            await fleet.answer(f"later {n}", list(range(n, n + 40)), length=2)
        assert fleet.replicas[2].requests, "the new engine works"

    play(vocabulary, scene)


def test_without_an_engine_requests_wait_and_the_server_is_not_ready(
    vocabulary: Vocabulary,  # noqa: F811
) -> None:
    async def scene(fleet: JoinedFleet) -> None:
        fleet.start_engine()
        await asyncio.wait_for(fleet.client.ready(), 10)
        fleet.replicas.pop(0).close()
        await fleet.joined(0)
        asking = asyncio.create_task(fleet.answer("r", [5, 6, 7]))
        await until(lambda: not fleet.client.is_ready)
        fleet.start_engine()
        assert await asking == [list(range(2, 102))]
        assert fleet.client.is_ready

    play(vocabulary, scene)


def test_calls_reach_all_engines_or_their_owner(vocabulary: Vocabulary) -> None:  # noqa: F811
    async def scene(fleet: JoinedFleet) -> None:
        for _ in range(2):
            fleet.start_engine()
        await asyncio.wait_for(fleet.client.ready(), 10)
        await fleet.joined(2)
        assert set((await fleet.client.call(StatsCall())).replicas) == {"0", "1"}
        assert await fleet.client.call(FlushCacheCall()) == 6
        tree = await fleet.client.call(CacheTreeCall())
        nodes = {node["node"] for space in tree["namespaces"] for node in space["children"]}
        assert nodes == {MAX_REPLICAS * 7, MAX_REPLICAS * 7 + 1}
        granted = await fleet.client.call(
            PinCall(prompt=TokenPrompt(pack_ids(list(range(64)))), root=BASE_ROOT, ttl_s=60.0)
        )
        [owner] = [r for r, engine in fleet.replicas.items() if len(engine.cache_calls) == 2]
        fleet.replicas.pop(owner).close()
        other = fleet.replicas[1 - owner]
        await until(lambda: len(other.cache_calls) == 2)
        assert other.cache_calls[-1].lease == granted.lease

    play(vocabulary, scene)
