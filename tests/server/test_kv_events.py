"""A router beside a server, with the subscriber of the examples."""

import runpy
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tests.api.conftest import RunningServer
from tests.servers import samples
from tests.servers.servers_in_process import serving_in_process

PAGE_SIZE = 4
EXAMPLE = Path(__file__).parents[2] / "examples" / "kv_event_mirror.py"


def generate(
    server: RunningServer, docs: dict[str, Any], prompt: list[int], salt: str | None = None
) -> set[bytes]:
    """Ask for an answer; returns the hashes of the blocks that are cached for it."""
    answer = httpx.post(
        f"{server.url}/generate",
        json={
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 9, "temperature": 0, "ignore_eos": True},
            "cache_salt": salt,
        },
        timeout=30,
    )
    tokens = prompt + answer.raise_for_status().json()["output_ids"]
    return set(docs["block_hashes"](tokens[:-1], PAGE_SIZE, salt=salt or ""))


def listen(mirror: Any, expected: set[bytes]) -> None:
    """Updates come when they come."""
    deadline = time.monotonic() + 20
    while mirror.hashes != expected and time.monotonic() < deadline:
        mirror.update(100)
    assert mirror.hashes == expected


def test_a_subscriber_knows_what_the_server_has_cached(served_checkpoint: Path) -> None:
    docs = runpy.run_path(str(EXAMPLE))
    folder = Path(tempfile.mkdtemp(prefix="rx"))  # pytest's own paths are too long for sockets
    events, replays = f"ipc://{folder}/events", f"ipc://{folder}/replays"
    settings = {"page_size": PAGE_SIZE, "max_total_tokens": 1024}
    settings |= {"kv_events": events, "kv_events_replay": replays}
    with serving_in_process(served_checkpoint, **settings) as server:
        mirror, cached = docs["subscribe"](events, replays), set[bytes]()
        for prompt in ([5, 6, 7, 8] * 6, [5, 6, 7, 8] * 3 + [9, 10, 11], list(range(3, 90))):
            cached |= generate(server, docs, prompt)
            listen(mirror, cached)
        assert server.http.get("/get_server_info").json()["stats"]["pages_cached"] == len(cached)

        httpx.post(f"{server.url}/flush_cache").raise_for_status()
        listen(mirror, set())

        salted = generate(server, docs, [5, 6, 7, 8] * 6, salt="tenant")
        assert not salted & cached
        late = docs["subscribe"](events, replays)
        for subscriber in (mirror, late):
            listen(subscriber, salted)
        metrics = samples(httpx.get(f"{server.url}/metrics").text)
        assert metrics["radixrt_kv_event_snapshots_total", ()] == 2
    for subscriber in (mirror, late):
        subscriber.events.close(linger=0)
        subscriber.replays.close(linger=0)
    shutil.rmtree(folder)
