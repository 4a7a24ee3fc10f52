"""``radixrt top`` shows what the server says, and says so when there is none."""

import io
import itertools
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from radixrt.base.api_keys import new_key
from radixrt.cli.main import main
from radixrt.cli.top import ServerAwayError, ServerWatch, frame
from radixrt.kv.reading import PoolUse, Reading
from radixrt.messages.cache_tree import CacheNamespace, CacheTree, CacheTreeNode
from tests.api.conftest import RunningServer, StartServer


def top(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["top", "--once", *flags])
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


def changed(reading: Reading, **changes: Any) -> Reading:
    """A reading with other values, some of the engine."""
    of_engine = {name: changes.pop(name) for name in ("stats", "cache", "pool") if name in changes}
    engine = msgspec.structs.replace(reading.engine, **of_engine)
    return msgspec.structs.replace(reading, engine=engine, **changes)


def drawn(server: RunningServer, **changes: Any) -> str:
    reading = changed(ServerWatch(server.url).read(), **changes)
    console = Console(width=100, height=24, record=True, file=io.StringIO())
    console.print(frame(server.url, reading, 100, 24))
    return console.export_text()


def test_one_frame_tells_the_model_the_pool_and_the_prefixes(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text, _ = top(capsys, "--url", f"{server.url}/v1")
    assert status == 0
    assert "tiny" in text and "40.0% since start" in text and "KV of 2048 tokens" in text
    assert server.vocabulary.decode([300, 301]).strip() in text and "(with a salt)" in text


def test_a_frame_of_a_hybrid_model_tells_of_its_states(server: RunningServer) -> None:
    stats = ServerWatch(server.url).read().engine.stats
    none = msgspec.structs.replace(stats, kept_states=0)
    assert "computed again" not in drawn(server, stats=none)
    hybrid = msgspec.structs.replace(
        stats, kept_states=12, kept_state_bytes=3 << 20, prompt_tokens=200, stateless_tokens=50
    )
    text = drawn(server, stats=hybrid)
    assert re.search(r"states +12 kept \(3 MiB\); 25.0% of prompt tokens", text)


def test_a_frame_tells_what_is_on_disk(server: RunningServer) -> None:
    cache = ServerWatch(server.url).read().engine.cache
    none = msgspec.structs.replace(cache, disk_pages=0, disk_stopped=0)
    assert "pages written" not in drawn(server, cache=none)
    full = msgspec.structs.replace(
        cache, disk_pages=8, disk_tokens=50, prompt_tokens=200, disk_pages_written=9, disk_stopped=1
    )
    text = " ".join(drawn(server, cache=full).split())
    assert f"disk {8 * cache.page_size} tokens, 25.0% of prompt tokens read from there" in text
    assert "9 pages written" in text and "Nothing is written any more" in text


def test_a_frame_tells_the_drafts_of_each_drafter(server: RunningServer) -> None:
    stats = ServerWatch(server.url).read().engine.stats
    none = dict.fromkeys(stats.drafted_tokens, 0)
    silent = msgspec.structs.replace(stats, drafted_tokens=none, accepted_draft_tokens=none)
    assert "drafts" not in drawn(server, stats=silent)
    drafting = msgspec.structs.replace(
        stats,
        drafted_tokens=none | {"head": 50, "tree": 9},
        accepted_draft_tokens=none | {"head": 31, "tree": 9},
    )
    assert re.search(r"drafts +accepted: tree 9 of 9, head 31 of 50", drawn(server, stats=drafting))


def test_a_server_that_is_away_is_told_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, error = top(capsys, "--url", "http://127.0.0.1:9")
    assert status == 1 and not text
    assert "http://127.0.0.1:9" in error and "radixrt serve" in error


def test_a_key_is_asked_for_and_used(
    start_server: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server(api_key="secret")
    status, _, error = top(capsys, "--url", server.url)
    assert status == 1 and "--api-key" in error
    assert top(capsys, "--url", server.url, "--api-key", "secret")[0] == 0


def test_a_users_key_is_told_not_to_be_an_admins(
    start_server: StartServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, entry = new_key("alice", "user")
    file = tmp_path / "keys.json"
    file.write_bytes(msgspec.json.encode({"keys": [entry]}))
    status, _, error = top(capsys, "--url", start_server(api_keys=str(file)).url, "--api-key", key)
    assert status == 1 and "admin" in error


@pytest.mark.parametrize("url", ["nonsense", "http://[", "file:///etc/passwd", "ftp://x"])
def test_what_is_no_server_is_no_crash(url: str) -> None:
    with pytest.raises(ServerAwayError):
        ServerWatch(url).read()


def node(text: str | None, tokens: int, *children: CacheTreeNode) -> CacheTreeNode:
    return CacheTreeNode(
        node=1,
        text=text,
        num_tokens=tokens,
        total_tokens=tokens + sum(child.total_tokens for child in children),
        total_nodes=1,
        locked=False,
        pinned=False,
        idle_s=90,
        retention="high",
        children=list(children),
    )


def tree(*children: CacheTreeNode) -> CacheTree:
    namespace = CacheNamespace(salted=False, total_tokens=1, total_nodes=1, children=[*children])
    return CacheTree(page_size=16, total_tokens=1, total_nodes=1, namespaces=[namespace])


def test_children_stand_below_their_prefix_with_what_hangs_there(server: RunningServer) -> None:
    text = drawn(server, tree=tree(node("one", 16, node("two", 32)), node(None, 16)))
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()[-3:]]
    assert [row[0] for row in rows] == ["48", "32", "16"]
    assert [row[-1] for row in rows] == ["one", "two", "(hidden)"]
    assert all("high" in row and "2m" in row for row in rows)


def test_a_tree_of_many_small_prefixes_is_not_called_empty(server: RunningServer) -> None:
    assert "The tree is empty." in drawn(server, tree=CacheTree(page_size=16, total_tokens=0, total_nodes=0, namespaces=[]))  # fmt: skip
    namespace = CacheNamespace(salted=False, total_tokens=160_000, total_nodes=5_000, children=[])
    many = CacheTree(page_size=16, total_tokens=160_000, total_nodes=5_000, namespaces=[namespace])
    assert "No prefix leads to a thousandth" in drawn(server, tree=many)


def test_no_text_of_a_client_steers_the_terminal(server: RunningServer) -> None:
    text = drawn(server, tree=tree(node("a\x1b[2J\x07\nb[red]c\x9b", 16)))
    assert "a·[2J·⏎b[red]c·" in text
    assert "\x1b[2J" not in text and "\x07" not in text


def test_every_page_of_the_pool_is_in_one_part_of_the_bar(server: RunningServer) -> None:
    for owned, locked, pinned, free in itertools.product((0, 7), repeat=4):
        cached = locked + pinned + 20
        pages = PoolUse(
            total=owned + cached + free,
            owned=owned,
            cached=cached,
            evictable=20,
            pinned=pinned,
            free=free,
        )
        parts = msgspec.structs.astuple(pages.parts)
        assert parts == (owned, locked, pinned, 20, free)
        text = drawn(server, pool=pages.parts)
        bar = next(line for line in text.splitlines() if "pool" in line)
        assert len(bar.split()[-1]) == 100 - 12
