"""A conversation that goes on after a restart: the cache directory, llama.cpp's saved slots, and
llama.cpp's cache in memory, which a restart empties.

Each engine answers two turns, is started again, and answers the third. llama.cpp's slot is saved and
restored by its endpoints; the time of the restoration counts. That the cache directory needs no such
call, and knows which of its pages a prompt needs, is its own difference.
"""

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx

from bench.markdown import markdown
from bench.peers_cpu.agent_session import ask, tool_result
from bench.peers_cpu.checkpoints import Checkpoint, make_checkpoint
from bench.peers_cpu.converting import converted
from bench.peers_cpu.engines import ENGINES, Engine
from bench.peers_cpu.serving import serving
from radixrt.base.user_cache import user_cache

CHECKPOINTS = Path(tempfile.gettempdir()) / "radixrt-peers-checkpoints"
"""As of ``python -m bench.peers_cpu``."""
ANSWER_TOKENS = 16
SLOT_FILE = "slot.bin"
Messages = list[dict[str, str]]


def measure_peers(length: int) -> None:
    """Print the table.

    Args:
        length: tokens of the first turn's prompt, roughly.
    """
    peers = user_cache("peers")
    with tempfile.TemporaryDirectory(prefix="radixrt-restart-") as scratch:
        checkpoint = make_checkpoint("padded", CHECKPOINTS / "padded")
        cache, slots = Path(scratch, "cache"), Path(scratch, "slots")
        slots.mkdir()
        radixrt, llama = ENGINES["radixrt-no-drafts"], _one_slot(ENGINES["llama.cpp"])
        rows = [
            _row("radixrt --cache-dir", _with(radixrt, "--cache-dir", str(cache)), checkpoint, peers, length, cache),
            _row("llama.cpp --slot-save-path", _with(llama, "--slot-save-path", str(slots)), checkpoint, peers, length, slots, _save, _restore),
            _row("llama.cpp --cache-ram 8192", _with(llama, "--cache-ram", "8192"), checkpoint, peers, length, slots / "none"),
        ]  # fmt: skip
    print("\n".join(markdown(rows)))


def _with(engine: Engine, *flags: str) -> Engine:
    return replace(engine, command=(*engine.command, *flags))


def _one_slot(engine: Engine) -> Engine:
    """With a slot for the whole conversation, so that its number is known."""
    command = list(engine.command)
    command[command.index("--parallel") + 1] = "1"
    return replace(engine, command=tuple(command))


def _nothing(root: str) -> None:
    return


def _save(root: str) -> None:
    _slot_action(root, "save")


def _restore(root: str) -> None:
    _slot_action(root, "restore")


def _slot_action(root: str, action: str) -> None:
    body = {"filename": SLOT_FILE}
    url = f"{root.removesuffix('/v1')}/slots/0?action={action}"
    httpx.post(url, json=body, timeout=600).raise_for_status()


def _row(
    name: str,
    engine: Engine,
    checkpoint: Checkpoint,
    peers: Path,
    length: int,
    folder: Path,
    save: Callable[[str], None] = _nothing,
    restore: Callable[[str], None] = _nothing,
) -> dict[str, str]:
    log = Path(tempfile.gettempdir()) / "radixrt-restart.log"
    model = converted(engine, checkpoint, peers)
    texts = random.Random(1)
    messages: Messages = [{"role": "user", "content": _text_of(length, texts)}]
    with serving(engine, checkpoint.folder, model, peers, log) as root:
        turns = []
        with _client() as client:
            for _ in range(2):
                turn, answer = ask(client, root, "model", messages, ANSWER_TOKENS)
                turns.append(turn)
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]  # fmt: skip
            ask(client, root, "model", messages, 1)  # the second use of the second turn
        save(root)
        time.sleep(2.0)  # pages are written beside the steps
    num_bytes = sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
    with serving(engine, checkpoint.folder, model, peers, log) as root, _client() as client:
        ask(client, root, "model", [{"role": "user", "content": "Hello."}], 1)
        begin = time.perf_counter()
        restore(root)
        restored_s = time.perf_counter() - begin
        last, _ = ask(client, root, "model", messages, ANSWER_TOKENS)
    print(f"{name}: done", flush=True)
    return {
        "engine": name,
        "first turn, s": f"{turns[0].first_token_s:.2f}",
        "second turn, s": f"{turns[1].first_token_s:.2f}",
        "after the restart, s": f"{restored_s + last.first_token_s:.3f}",
        "of the first turn": f"{(restored_s + last.first_token_s) / turns[0].first_token_s:.3f}",
        "prompt tokens": f"{last.prompt}",
        "from the cache": f"{last.cached}",
        "MB on disk": f"{num_bytes / 1e6:.1f}",
    }


def _client() -> httpx.Client:
    """A client that connects anew for each request: llama.cpp may close a connection behind a
    stream, which a request at once would meet."""
    return httpx.Client(timeout=1800, limits=httpx.Limits(max_keepalive_connections=0))


def _text_of(length: int, texts: random.Random) -> str:
    """A text of roughly so many tokens."""
    parts: list[str] = []
    while sum(map(len, parts)) < 3 * length:
        parts.append(tool_result(len(parts), texts))
    return "\n".join(parts)[: 3 * length]
