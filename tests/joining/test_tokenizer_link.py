"""The link of a scheduler to the tokenizer process of its machine, when that is replaced."""

import shutil
import time
from collections.abc import Iterator

import pytest

from radixrt.base.channels import Channels
from radixrt.base.ipc import Inbox, Outbox, Poller
from radixrt.joining.tokenizer_link import TokenizerLink
from radixrt.messages.calls import StatsCall
from radixrt.messages.links import ToScheduler, ToTokenizerFromScheduler
from radixrt.messages.replicas import Attach, ReplicaDrained
from tests.servers.fake_scheduler import engine_info


@pytest.fixture
def channels() -> Iterator[Channels]:
    made = Channels(Channels.make_run_dir())
    made.of_replica(0, 3).folder.mkdir()
    yield made
    shutil.rmtree(made.run_dir)


class Tokenizer:
    """The other end."""

    def __init__(self, channels: Channels) -> None:
        replica = channels.of_replica(0, 3)
        self.inbox: Inbox[ToTokenizerFromScheduler] = Inbox(
            replica.address("scheduler", "tokenizer"), ToTokenizerFromScheduler
        )
        self.outbox = Outbox(replica.address("tokenizer", "scheduler"))
        self._attaching = Outbox(replica.attach_address)
        self._attaching.send(Attach(channels.engine))

    def ask(self, call_id: int) -> None:
        self.outbox.send(StatsCall(call_id=call_id))

    def close(self) -> None:
        for channel in (self.inbox, self.outbox, self._attaching):
            channel.close()


def test_nothing_of_one_tokenizer_process_reaches_the_next(channels: Channels) -> None:
    received: list[ToScheduler | str] = []
    poller = Poller()
    link = TokenizerLink(channels.of_replica(0, 3), poller, lambda: received.append("another one"))

    def receive(until_call: int) -> None:
        deadline = time.monotonic() + 10
        while StatsCall(call_id=until_call) not in received:
            assert time.monotonic() < deadline
            poller.wait(0.05)
            received.extend(link.receive_waiting())

    link.join(engine_info())
    first = Tokenizer(channels)
    first.ask(1)
    receive(1)
    assert first.inbox.receive() == engine_info()
    first.inbox.close()
    link.send(ReplicaDrained())  # waits for a process that is dead
    first.ask(2)

    for engine in (1, 2):
        channels.next_engine()
        following = Tokenizer(channels)
        following.ask(10 * engine)
        receive(10 * engine)
        assert following.inbox.receive() == engine_info()
        first._attaching.send(Attach(0))  # late
        first.ask(3)
        following.ask(10 * engine + 1)
        receive(10 * engine + 1)
        link.send(ReplicaDrained())
        assert following.inbox.receive() == ReplicaDrained()
        following.close()
    others = [(10, 11), (20, 21)]
    later = received[received.index("another one") :]
    assert later == [
        m for two in others for m in ("another one", *(StatsCall(call_id=n) for n in two))
    ]
    files = sorted(path.name for path in channels.of_replica(0, 3).folder.iterdir())
    assert files == ["attach", "tokenizer-scheduler.2"], "none of a dead process"
    first.outbox.close()
    first._attaching.close()
    link.close()
