"""Mirrors the KV cache of an engine by its event stream (docs/internals/kv_events.md): which blocks of a
prompt are cached there.

radixrt serve --kv-events tcp://127.0.0.1:5557 --kv-events-replay tcp://127.0.0.1:5558
python examples/kv_event_mirror.py tcp://127.0.0.1:5557 tcp://127.0.0.1:5558
"""

import struct
import sys
from hashlib import blake2b

import msgspec
import zmq


def block_hashes(token_ids, page_size, tenant="", salt="", adapter=""):
    """The hash of each full block of a prompt."""
    fields = [field.encode() for field in (tenant, salt, adapter)]
    root = b"".join(struct.pack("<I", len(field)) + field for field in fields)
    last = blake2b(root, digest_size=8).digest()
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        block = struct.pack(f"<{page_size}i", *token_ids[start : start + page_size])
        last = blake2b(last + block, digest_size=8).digest()
        yield last


class Mirror:
    """The set of block hashes in the cache of one engine."""

    def __init__(self, events, replays):
        self.events, self.replays = events, replays  # a SUB and a REQ socket
        self.stream, self.next, self.hashes = "", 0, set()

    def update(self, patience_ms=1000):
        """Take the next batch. After a gap or a silence, ask for what is missing."""
        if self.events.poll(patience_ms):
            batch = msgspec.msgpack.decode(self.events.recv())
            if batch["stream"] == self.stream and batch["sequence"] <= self.next:
                return self.apply(batch)
        self.replays.send(msgspec.msgpack.encode({"stream": self.stream, "sequence": self.next}))
        for batch in msgspec.msgpack.decode(self.replays.recv()):
            self.apply(batch)

    def apply(self, batch):
        if batch["stream"] == self.stream and batch["sequence"] < self.next:
            return  # a replay has brought it before
        self.stream, self.next = batch["stream"], batch["sequence"] + 1
        for event in batch["events"]:
            packed = event.get("block_hashes", b"")
            hashes = {packed[at : at + 8] for at in range(0, len(packed), 8)}
            match event["type"]:
                case "BlockStored":
                    self.hashes |= hashes
                case "BlockRemoved":
                    self.hashes -= hashes
                case "AllBlocksCleared" | "AllBlocks":
                    self.hashes = hashes


def subscribe(events, replays):
    """Mirror the engine that listens on these two addresses."""
    subscriber, request = (
        zmq.Context.instance().socket(zmq.SUB),
        zmq.Context.instance().socket(zmq.REQ),
    )
    for option in (zmq.REQ_RELAXED, zmq.REQ_CORRELATE):
        request.setsockopt(option, 1)  # after a timeout, ask again
    request.setsockopt(zmq.RCVTIMEO, 5000)  # then recv raises zmq.Again: the engine is gone
    subscriber.subscribe(b"")
    subscriber.connect(events)
    request.connect(replays)
    return Mirror(subscriber, request)


if __name__ == "__main__":
    mirror = subscribe(*sys.argv[1:])
    while True:
        mirror.update()
        print(len(mirror.hashes), "blocks are cached")
