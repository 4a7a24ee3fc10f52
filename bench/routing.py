"""Measures the CPU time of a routing decision, and the memory of the index.

``python -m bench.routing [--replicas 16] [--tokens 8192 100000]``: a decision hashes the blocks of a prompt, looks for them in the index of each
replica, compares the costs and notes the choice. Each replica has a full pool of other prompts; half of each prompt is cached on one of the replicas.
The promise: the 99th percentile is at most 0.5 ms at 8k tokens and 16 replicas, and at most 6 ms at 100k. The next turn of a conversation is a
prompt that begins with the prompt before it.

``python -m bench.routing --events 10000000``: the resident memory of a process with the KV events of one replica, their stream and their mirror.
"""

import argparse
import time
from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np
import psutil

from bench.markdown import markdown
from radixrt.kv.block_hash import block_hashes, namespace_hash
from radixrt.kv.events import BlockStored, EventBatch
from radixrt.messages.ids import pack_ids
from radixrt.messages.replicas import ReplicaLoad
from radixrt.router.router import RoutedPrompt, Router
from radixrt.scheduler.radix.kv_events.recorder import EventRecorder
from radixrt.scheduler.radix.kv_events.stream import EventStream

PAGE_SIZE = 16
VOCABULARY = 100_000
TURN_TOKENS = 500
"""Of an answer and the next question."""

EVENT_PAGES = 4
"""Of each stored prompt, and of each removal."""

EVENTS_PER_STEP = 8
PRINTED_ROWS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 100_000])
    parser.add_argument("--pool", type=int, default=1 << 20, help="tokens cached by each replica")
    parser.add_argument("--decisions", type=int, default=1000)
    parser.add_argument(
        "--events", type=int, help="measure the memory over this number of KV events"
    )
    arguments = parser.parse_args()
    if arguments.events:
        rows = list(_memory(arguments.events, arguments.pool // PAGE_SIZE))
    else:
        rows = [_row(arguments, num_tokens) for num_tokens in arguments.tokens]
    print("\n".join(markdown(rows)))


def _row(arguments: argparse.Namespace, num_tokens: int) -> dict[str, str]:
    random = np.random.default_rng(1)
    router = Router(PAGE_SIZE)
    for replica in range(arguments.replicas):
        router.join(replica)
        filler = random.integers(0, VOCABULARY, arguments.pool)
        _store(router, replica, 1, pack_ids(filler))
    sequences = [1] * arguments.replicas
    answers = dict.fromkeys(range(arguments.replicas), 0)
    first: list[float] = []
    hashing: list[float] = []
    next_turn: list[float] = []
    for number in range(arguments.decisions):
        packed = pack_ids(random.integers(0, VOCABULARY, num_tokens))
        replica = int(random.integers(arguments.replicas))
        sequences[replica] += 1
        _store(router, replica, sequences[replica], packed[: 2 * num_tokens])
        router.report(
            replica, ReplicaLoad(received=1 << 30, waiting_s=0.01 * number % 1, pool_tokens=1 << 20)
        )
        for times, turn in ((first, packed), (next_turn, packed + _turn(random))):
            begin = time.thread_time()
            prompt = RoutedPrompt.of(turn, "", PAGE_SIZE)
            hashed = time.thread_time()
            router.send(prompt, router.choose(prompt, answers), number + 1)
            times.append(time.thread_time() - begin)
            if turn is packed:
                hashing.append(hashed - begin)
    p50, p99 = np.percentile(first, [50, 99]) * 1e3
    return {
        "tokens": f"{num_tokens:,}",
        "replicas": str(arguments.replicas),
        "p50 ms": f"{p50:.3f}",
        "p99 ms": f"{p99:.3f}",
        "of it hashing, p50 ms": f"{np.median(hashing) * 1e3:.3f}",
        "next turn, p99 ms": f"{np.percentile(next_turn, 99) * 1e3:.3f}",
    }


def _turn(random: np.random.Generator) -> bytes:
    return pack_ids(random.integers(0, VOCABULARY, TURN_TOKENS))


def _memory(num_events: int, num_pages: int) -> Iterator[dict[str, str]]:
    """A pool that is full most of the time: prompts of a few pages come, and the oldest leave."""
    random, process = np.random.default_rng(1), psutil.Process()
    recorder = EventRecorder(num_pages, PAGE_SIZE, with_token_ids=False)
    stream, router = EventStream(recorder), Router(PAGE_SIZE)
    router.join(0)
    free = deque(np.arange(num_pages, dtype=np.int32).reshape(-1, EVENT_PAGES))
    cached: deque[np.ndarray] = deque()
    print_at, begin = 0, time.process_time()
    while stream.num_events < num_events:
        tokens = random.integers(
            0, VOCABULARY, (EVENTS_PER_STEP, EVENT_PAGES * PAGE_SIZE), dtype=np.int32
        )
        for prompt in tokens:
            if not free:
                free.append(cached.popleft())
                recorder.removed(free[0])
            cached.append(free.popleft())
            recorder.stored("", None, prompt, cached[-1])
        frame = stream.next_batch()
        assert frame is not None
        router.take_events(0, [frame])
        if stream.num_events >= print_at:
            print_at += num_events // PRINTED_ROWS
            yield {
                "events": f"{stream.num_events:,}",
                "RSS MB": f"{process.memory_info().rss / 1e6:.1f}",
                "blocks in the index": f"{len(router._replicas[0].mirror.hashes):,}",
                "CPU s": f"{time.process_time() - begin:.0f}",
            }


def _store(router: Router, replica: int, sequence: int, packed: bytes) -> None:
    event = BlockStored(
        block_hashes=block_hashes(namespace_hash(), packed, PAGE_SIZE),
        parent_hash=None,
        token_ids=None,
        page_size=PAGE_SIZE,
        salted=False,
    )
    batch = EventBatch(stream=str(replica), sequence=sequence, timestamp=0.0, events=[event])
    router.take_events(replica, [msgspec.msgpack.encode(batch)])


if __name__ == "__main__":
    main()
