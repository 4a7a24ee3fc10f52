"""Measures the time of a routing decision: ``python -m bench.routing [--replicas 16] [--tokens 8192 100000]``.

A decision hashes the blocks of a prompt, looks for them in the index of each replica, compares the costs and notes the choice. Each
replica has a full pool of other prompts; half of each prompt is cached on one of the replicas. The promise: the 99th percentile is at most 0.5 ms
at 8k tokens and 16 replicas, and at most 6 ms at 100k.
"""

import argparse
import time

import msgspec
import numpy as np

from bench.markdown import markdown
from radixrt.kv.block_hash import block_hashes, namespace_hash
from radixrt.kv.events import BlockStored, EventBatch
from radixrt.messages.ids import pack_ids
from radixrt.messages.replicas import ReplicaLoad
from radixrt.router.router import RoutedPrompt, Router

PAGE_SIZE = 16
VOCABULARY = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 100_000])
    parser.add_argument("--pool", type=int, default=1 << 20, help="tokens cached by each replica")
    parser.add_argument("--decisions", type=int, default=1000)
    arguments = parser.parse_args()
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
    times, hashing = [], []
    for number in range(arguments.decisions):
        packed = pack_ids(random.integers(0, VOCABULARY, num_tokens))
        replica = int(random.integers(arguments.replicas))
        sequences[replica] += 1
        _store(router, replica, sequences[replica], packed[: 2 * num_tokens])
        router.report(
            replica, ReplicaLoad(received=1 << 30, queued_s=0.01 * number % 1, pool_tokens=1 << 20)
        )
        begin = time.perf_counter()
        prompt = RoutedPrompt.of(packed, "", PAGE_SIZE)
        hashed = time.perf_counter()
        router.send(prompt, router.choose(prompt), number + 1)
        times.append(time.perf_counter() - begin)
        hashing.append(hashed - begin)
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    return {
        "tokens": f"{num_tokens:,}",
        "replicas": str(arguments.replicas),
        "p50 ms": f"{p50:.3f}",
        "p99 ms": f"{p99:.3f}",
        "of it hashing, p50 ms": f"{np.median(hashing) * 1e3:.3f}",
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
