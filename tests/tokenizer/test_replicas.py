"""A tokenizer process with two replicas, whose schedulers answer from a script."""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError
from radixrt.base.liveness.link import SupervisorLink
from radixrt.base.sampling_params import SamplingParams
from radixrt.client.engine_client import EngineClient
from radixrt.messages.cache_root import BASE_ROOT
from radixrt.messages.calls import (
    CacheNodeCall,
    CacheTreeCall,
    FlushCacheCall,
    PinCall,
    StatsCall,
    merged_trees,
)
from radixrt.messages.ids import pack_ids, unpack_ids
from radixrt.messages.requests import GenerateRequest, RequestOptions, TokenPrompt
from radixrt.messages.sequences import SequenceRequest
from radixrt.tokenizer.process import TokenizerProcess
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.checkpoints.tiny_tokenizers import save_byte_level
from tests.servers.fake_scheduler import FakeScheduler, engine_info

NUM_REPLICAS = 2
STEP_S = 0.002


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = save_byte_level(tmp_path_factory.mktemp("model"))
    return Vocabulary.load(ServerConfig(model_path=str(folder)))


class Fleet:
    """A client, a tokenizer process, and replicas that can be killed."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.channels = Channels(Channels.make_run_dir())
        self.supervisor = SupervisorLink()
        self.replicas: dict[int, FakeScheduler] = {}
        for replica in range(NUM_REPLICAS):
            self.start_replica(replica, 0)
        self.config = ServerConfig(dp=NUM_REPLICAS)
        self.process = TokenizerProcess(self.config, self.channels, vocabulary, self.supervisor)
        self.client = EngineClient(Channels(self.channels.run_dir), supervisor=self.supervisor)
        self._vocabulary = vocabulary

    def run(self) -> None:
        self._running = asyncio.create_task(self.process.run())

    async def stop(self) -> None:
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running

    async def replace_tokenizer(self) -> None:
        """As the supervisor does when it has died."""
        await self.stop()
        self.process.close()
        self.channels.next_engine()
        self._tell(engine=self.channels.engine)
        self.process = TokenizerProcess(
            self.config, self.channels, self._vocabulary, self.supervisor
        )
        self.run()

    def start_replica(self, replica: int, start: int) -> None:
        channels = self.channels.of_replica(replica, start)
        channels.folder.mkdir()
        scheduler = FakeScheduler(channels, engine_info(), STEP_S)
        scheduler.script = next_numbers
        self.replicas[replica] = scheduler
        self._tell(starts={**self.supervisor.status.starts, replica: start})

    def kill_replica(self, replica: int, start: int = 0) -> None:
        self.replicas.pop(replica).close()
        shutil.rmtree(self.channels.of_replica(replica, start).folder)
        starts = self.supervisor.status.starts
        self._tell(starts={number: start for number, start in starts.items() if number != replica})

    def _tell(self, **changes: Any) -> None:
        """As the supervisor does."""
        self.supervisor.take(msgspec.structs.replace(self.supervisor.status, **changes))

    async def answer(
        self,
        name: str,
        tokens: list[int],
        length: int = 100,
        n: int = 1,
        *,
        seed: int | None = 1,
        shares: bool = False,
    ) -> list[list[int]]:
        """The tokens of each answer."""
        options = RequestOptions(
            sampling=SamplingParams(max_tokens=length, ignore_eos=True, n=n, seed=seed),
            shares_answers=shares,
        )
        request = GenerateRequest(
            request_id=name, prompt=TokenPrompt(pack_ids(tokens)), options=options, stream=True
        )
        told: list[list[int]] = [[] for _ in range(n)]
        async for chunk in self.client.generate(request):
            told[chunk.index] += unpack_ids(chunk.token_ids).tolist()
        return told

    def running(self) -> list[int]:
        return [scheduler.num_running for scheduler in self.replicas.values()]

    def close(self) -> None:
        self.client.close()
        self.process.close()
        for scheduler in self.replicas.values():
            scheduler.close()
        shutil.rmtree(self.channels.run_dir)


def next_numbers(request: SequenceRequest) -> list[int]:
    """The answer to any prompt: 2, 3, 4, …; a resumed one goes on after the tokens that it has."""
    return [2 + number for number in range(request.num_output, 400)]


def play(vocabulary: Vocabulary, scene: Callable[[Fleet], Awaitable[None]]) -> None:
    async def main() -> None:
        fleet = Fleet(vocabulary)
        fleet.run()
        try:
            info = await asyncio.wait_for(fleet.client.ready(), 10)
            assert info.replicas == NUM_REPLICAS
            await asyncio.wait_for(scene(fleet), 30)
        finally:
            await fleet.stop()
            fleet.close()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def test_answers_of_a_dead_replica_go_on_in_the_other_and_it_comes_back(
    vocabulary: Vocabulary,
) -> None:
    async def scene(fleet: Fleet) -> None:
        for scheduler in fleet.replicas.values():
            scheduler.step_s = 0.05  # no answer ends before the death
        asking = [
            asyncio.create_task(fleet.answer(str(n), list(range(n, n + 40)), n=1 + n % 2))
            for n in range(10)
        ]
        await until(lambda: sum(fleet.running()) == 15)
        assert min(fleet.running()) > 0, "both work"
        fleet.kill_replica(1)
        fleet.replicas[0].step_s = STEP_S
        answers = [answer for answers in await asyncio.gather(*asking) for answer in answers]
        assert answers == [list(range(2, 102))] * 15
        fleet.start_replica(1, 1)
        await until(lambda: len(fleet.process._schedulers.links) == 2)
        for n in range(10):
            await fleet.answer(f"later {n}", list(range(n, n + 40)), length=2)
        assert fleet.replicas[1].requests, "the replica that is back works again"

    play(vocabulary, scene)


def test_answers_go_on_in_the_same_replicas_behind_the_next_tokenizer_process(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has a large vocabulary: the replicas send results of steps before it is ready."""
    learn = vocabulary.learn_token_bytes
    monkeypatch.setattr(vocabulary, "learn_token_bytes", lambda: (time.sleep(0.3), learn()))

    async def scene(fleet: Fleet) -> None:
        for engine in (1, 2):
            for scheduler in fleet.replicas.values():
                scheduler.step_s = 0.05  # no answer ends before the death
            asking = [
                asyncio.create_task(fleet.answer(f"{engine} {n}", list(range(n, n + 40))))
                for n in range(10)
            ]
            await until(lambda: sum(fleet.running()) == 10)
            assert min(fleet.running()) > 0, "both work"
            await fleet.replace_tokenizer()
            for scheduler in fleet.replicas.values():
                scheduler.step_s = STEP_S
            assert await asyncio.gather(*asking) == [[list(range(2, 102))]] * 10
            assert fleet.client.engine == engine
            assert sum(fleet.running()) == 0, "nothing of the dead one runs on"

    play(vocabulary, scene)


def test_without_a_replica_requests_wait(vocabulary: Vocabulary) -> None:
    async def scene(fleet: Fleet) -> None:
        fleet.kill_replica(0)
        fleet.kill_replica(1)
        await until(lambda: not fleet.process._schedulers.links)
        asking = asyncio.create_task(fleet.answer("r", [5, 6, 7]))
        with pytest.raises(RequestError, match="restarted"):
            await fleet.client.call(FlushCacheCall())
        assert not asking.done()
        fleet.start_replica(0, 1)
        assert await asking == [list(range(2, 102))]

    play(vocabulary, scene)


def test_calls_reach_all_replicas_or_their_owner(vocabulary: Vocabulary) -> None:
    async def scene(fleet: Fleet) -> None:
        one = fleet.replicas[0]._stats()
        fleet.process._from_api.malformed_frames = 3
        stats = await fleet.client.call(StatsCall())
        assert stats.malformed_frames == 2 * one.malformed_frames + 3, "once, not of each replica"
        assert set(stats.replicas) == {"0", "1"}
        assert stats.pages_total == 2 * one.pages_total > 0
        assert stats.step_seconds.counts == [2 * count for count in one.step_seconds.counts]
        assert await fleet.client.call(FlushCacheCall()) == 6
        tree = await fleet.client.call(CacheTreeCall())
        assert sorted(space["replica"] for space in tree["namespaces"]) == [0, 0, 1, 1]
        nodes = {node["node"] for space in tree["namespaces"] for node in space["children"]}
        assert nodes == {2 * 7, 2 * 7 + 1}
        for node in nodes:
            await fleet.client.call(CacheNodeCall(node))
            asked = fleet.replicas[node % 2].cache_calls[-1]
            assert asked.node == node // 2

    play(vocabulary, scene)


def test_a_lease_is_taken_again_in_another_replica(vocabulary: Vocabulary) -> None:
    async def scene(fleet: Fleet) -> None:
        prompt = TokenPrompt(pack_ids(list(range(64))))
        granted = await fleet.client.call(PinCall(prompt=prompt, root=BASE_ROOT, ttl_s=60.0))
        [owner] = [r for r, scheduler in fleet.replicas.items() if scheduler.cache_calls]
        fleet.kill_replica(owner)
        other = fleet.replicas[1 - owner]
        await until(lambda: bool(other.cache_calls))
        assert other.cache_calls[-1].lease == granted.lease
        assert other.requests, "its prompt was computed first"

    play(vocabulary, scene)


def test_trees_are_merged_by_size_with_node_ids_of_their_own() -> None:
    def tree(tokens: int) -> dict:
        below = {"node": 3, "children": []}
        space = {"total_tokens": tokens, "children": [{"node": 7, "children": [below]}]}
        return {
            "page_size": 4, "total_tokens": tokens, "total_nodes": 2, "above": [], "namespaces": [space],
        }  # fmt: skip

    merged = merged_trees({0: tree(8), 1: tree(16)}, 2)
    assert merged["total_tokens"] == 24 and merged["total_nodes"] == 4
    first, second = merged["namespaces"]
    assert (first["replica"], second["replica"]) == (1, 0)
    assert first["children"][0]["node"] == 15 and first["children"][0]["children"][0]["node"] == 7
    assert second["children"][0]["node"] == 14


def test_requests_that_share_an_answer_go_to_one_replica_and_others_spread(
    vocabulary: Vocabulary,
) -> None:
    async def scene(fleet: Fleet) -> None:
        for scheduler in fleet.replicas.values():
            scheduler.step_s = 0.05  # none ends before the last is sent
        prompt = [3, 4, 5]  # less than a page, so the cache says nothing

        async def replicas_of(name: str, **options: Any) -> list[int]:
            """The answers of each replica while 16 requests run."""
            asking = [
                asyncio.create_task(fleet.answer(f"{name} {n}", prompt, 40 + n % 2, **options))
                for n in range(16)
            ]
            await until(lambda: sum(fleet.running()) == 16)
            found = sorted(fleet.running())
            await asyncio.gather(*asking)
            return found

        assert min(await replicas_of("computed")) > 0
        assert min(await replicas_of("drawn", shares=True, seed=None)) > 0
        before = {number: len(one.requests) for number, one in fleet.replicas.items()}
        assert await replicas_of("shared", shares=True) == [0, 16]
        (home,) = [n for n, one in fleet.replicas.items() if len(one.requests) > before[n]]
        fleet.kill_replica(home)
        assert await fleet.answer("afterwards", prompt, 4, shares=True) == [[2, 3, 4, 5]]

    play(vocabulary, scene)
