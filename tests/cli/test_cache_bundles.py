"""Bundles: KV that is exported on one directory and imported into another."""

import errno
import hashlib
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

import radixrt_kernels
from radixrt import LLM, SamplingParams
from radixrt.base.errors import ConfigError
from radixrt.kv.store.directory import (
    FINGERPRINT_CHARS,
    CacheDirectory,
    fingerprint_of,
    replica_folders,
)
from radixrt.kv.store.journal import PagesSaved, framed
from radixrt.messages.ids import pack_ids
from radixrt.messages.moves import page_checksum
from radixrt.scheduler.disk.bundle import MAGIC, ROOT, Head, import_bundle, read_bundle, read_index
from radixrt.worker.fingerprint import machine_cpu, machine_parts
from tests.command_line import run_here
from tests.servers import Server, serving
from tests.servers.engine_in_threads import engines_in_threads

DOCUMENTS = [
    "The owner of Vidur is Noval. The port of Vidur is Teska. The fee of Vidur is 42. " * 2,
    "The owner of Vidur is Noval. The port of Vidur is Teska. Another harbor is Karas. " * 2,
]
SHORT = SamplingParams(temperature=0.0, max_tokens=4, logprobs=1)


def radixrt(*arguments: object) -> str:
    """What a command that succeeds prints."""
    done = run_here(*map(str, arguments))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def in_threads() -> Iterator[None]:
    with engines_in_threads():
        yield


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    files = []
    for number, text in enumerate(DOCUMENTS):
        files.append(folder / f"{number}.txt")
        files[-1].write_text(text)
    out = folder / "out.rdx"
    with engines_in_threads():
        said = radixrt("cache", "export", out, "--prefix", *files, "--log-level", "warning")
    assert "tokens of KV" in said
    return out


def test_imported_kv_has_the_bits_of_a_cold_engine(
    bundle: Path, tmp_path: Path, demo_llm: LLM
) -> None:
    cache = tmp_path / "cache"
    assert "pages of KV added" in radixrt("cache", "import", bundle, "--cache-dir", cache)
    assert "0.txt" in radixrt("cache", "info", bundle)
    assert "tokens" in radixrt("cache", "info", cache)
    expected = demo_llm.generate(DOCUMENTS, SHORT)  # which has no directory
    with engines_in_threads(), LLM(cache_dir=str(cache)) as llm:
        found = llm.generate(DOCUMENTS, SHORT)
        salted = llm.generate(DOCUMENTS[0], SHORT, cache_salt="other")
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert [x.logprob for x in one.answers[0].logprobs] == [
            x.logprob for x in other.answers[0].logprobs
        ]
        assert one.cached_tokens == 16 * ((one.num_prompt_tokens - 1) // 16)
    assert found[0].answers[0].disk_tokens > 0 and salted.cached_tokens == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.usefixtures("in_threads")
def test_a_program_names_a_bundle_and_has_its_kv(bundle: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    with LLM(cache_dir=cache, cache_bundle=str(bundle)) as llm:
        answer = llm.generate(DOCUMENTS[0], SHORT).answers[0]
        assert answer.disk_tokens == 16 * ((answer.prompt_tokens - 1) // 16)
    with pytest.raises(ConfigError, match="made with another quantization"):
        LLM(cache_dir=cache, cache_bundle=str(bundle), quantization="int8")
    with pytest.raises(ConfigError, match="made with another head"):
        LLM(cache_dir=cache, cache_bundle=str(bundle), speculation="off")
    with pytest.raises(ConfigError, match="give --cache-dir"):
        LLM(cache_bundle=str(bundle))


def test_a_bundle_is_added_once(bundle: Path, tmp_path: Path) -> None:
    here = machine_parts()
    added = import_bundle(bundle, tmp_path / "cache", 1.0, here)
    head, pages, file = read_bundle(bundle)
    file.close()
    assert added == len(pages) == head.num_pages and head.titles == ["0.txt", "1.txt"]
    assert import_bundle(bundle, tmp_path / "cache", 1.0, here) == 0


def test_other_kernels_are_refused_by_name(bundle: Path, tmp_path: Path) -> None:
    for name in machine_parts():
        with pytest.raises(ConfigError, match=f"made with another {name}"):
            import_bundle(bundle, tmp_path / "cache", 1.0, machine_parts() | {name: "other"})
    assert not (tmp_path / "cache").exists()


def test_damaged_bundles_are_refused(bundle: Path, tmp_path: Path) -> None:
    content, rng = bundle.read_bytes(), random.Random(5)
    copy = tmp_path / "copy.rdx"
    for number in range(60):
        damaged, at = bytearray(content), rng.randrange(len(content))
        if number % 3 == 0:
            del damaged[at:]
        elif number % 3 == 1:
            damaged[at] ^= 1 << rng.randrange(8)
        else:
            damaged[at:at] = b"\0"
        copy.write_bytes(damaged)
        with pytest.raises(ConfigError):
            import_bundle(copy, tmp_path / "cache", 1.0, {})
    assert not (tmp_path / "cache").exists()


def sealed(head: Head, records: bytes, body: bytes) -> bytes:
    """A bundle of these parts."""
    encoded = msgspec.msgpack.encode(head)
    content = MAGIC
    for part in (encoded, records):
        content += len(part).to_bytes(8, "little") + part
    content += body
    return content + hashlib.sha256(content).digest()


SAVED = PagesSaved(ROOT, 0, bytes(64), pack_ids([0]), page_checksum(hashlib.sha256(ROOT + bytes(64)).digest(), bytes(999)))  # fmt: skip


def small_bundle(path: Path, bundle: Path, *records: PagesSaved, **fields: Any) -> Path:
    """A bundle of the same model with one page of zeros, 999 bytes long."""
    head, _, file = read_bundle(bundle)
    file.close()
    header = replace(head.header, slot_bytes=999, **fields.pop("header", {}))
    head = replace(head, num_pages=1, header=header, **fields)
    path.write_bytes(sealed(head, b"".join(map(framed, records or (SAVED,))), bytes(999)))
    return path


def test_pages_of_another_form_leave_those_of_a_directory(bundle: Path, tmp_path: Path) -> None:
    cache, here = tmp_path / "cache", machine_parts()
    import_bundle(bundle, cache, 1.0, here)
    other = small_bundle(tmp_path / "other.rdx", bundle)
    (folder,) = replica_folders(cache)
    kept = (folder / "journal").read_bytes()
    with pytest.raises(ConfigError, match="16 tokens and 999 bytes, but those of this model"):
        import_bundle(other, cache, 1.0, here)
    with pytest.raises(ConfigError, match="16 tokens and 999 bytes, but those of this model"):
        LLM(cache_dir=str(cache), cache_bundle=str(other))
    assert (folder / "journal").read_bytes() == kept
    assert import_bundle(bundle, cache, 1.0, here) == 0
    assert import_bundle(other, tmp_path / "new", 1.0, here) == 1


@pytest.mark.parametrize(
    "lie",
    [
        {"slots": b"abc"},
        {"depth": -5},
        {"before": b""},
        {"tokens": b""},
        {"slots": b""},
        {"checksums": b""},
    ],
    ids=str,
)
def test_forged_records_are_refused(bundle: Path, tmp_path: Path, lie: dict[str, Any]) -> None:
    forged = small_bundle(tmp_path / "forged.rdx", bundle, replace(SAVED, **lie))
    with pytest.raises(ConfigError, match="its records name 0 pages of 1"):
        read_bundle(forged)


def test_forged_heads_are_refused(bundle: Path, tmp_path: Path) -> None:
    lies: list[dict[str, Any]] = [
        {"parts": {}},
        {"header": {"num_ranks": 2}},
        {"header": {"fingerprint": "0" * 64}},
    ]
    for lie in lies:
        with pytest.raises(ConfigError, match="contradict one another"):
            read_bundle(small_bundle(tmp_path / "forged.rdx", bundle, **lie))


def test_titles_of_others_do_not_control_the_terminal(bundle: Path, tmp_path: Path) -> None:
    named = small_bundle(tmp_path / "named.rdx", bundle, titles=["\x1b[31mred\x07", "rot-weiß"])
    said = radixrt("cache", "info", named)
    assert r"\x1b[31mred\x07" in said and "rot-weiß" in said and "\x1b" not in said


def test_a_folder_that_cannot_be_read_hides_no_other(bundle: Path, tmp_path: Path) -> None:
    import_bundle(bundle, tmp_path, 1.0, machine_parts())
    (whole,) = replica_folders(tmp_path)
    for name, content in (("torn", b'{"model": "Ll'), ("other", b"{}"), ("zzz", None)):
        CacheDirectory.own(tmp_path, {"weights": name}).close()
        (folder,) = [
            one
            for one in replica_folders(tmp_path)
            if one.parent.name == fingerprint_of({"weights": name})[:FINGERPRINT_CHARS]
        ]
        (folder.parent / "model.json").unlink()
        if content is not None:
            (folder.parent / "model.json").write_bytes(content)
    said = radixrt("cache", "info", tmp_path)
    assert said.count("cannot be read") == 3 and f"{whole}: model" in said


def test_a_small_quota_is_said(bundle: Path, tmp_path: Path) -> None:
    total = read_bundle(bundle)[0].num_pages
    head, _, file = read_bundle(bundle)
    file.close()
    room = total // 3
    quota_gb = (room + 0.5) * head.header.slot_bytes / 1e9
    with pytest.raises(ConfigError, match=f"room for {room} pages of {total}: raise --cache-dir"):
        import_bundle(bundle, tmp_path, quota_gb, machine_parts())
    (folder,) = replica_folders(tmp_path)
    assert len(read_index(folder)[1]) == room


def test_bundles_go_to_another_cpu_if_torch_multiplied_nothing(bundle: Path, tmp_path: Path) -> None:  # fmt: skip
    elsewhere = machine_parts() | {"cpu": "another"}
    parts = read_bundle(bundle)[0].parts
    if radixrt_kernels.available():
        assert parts["cpu"] == "" and import_bundle(bundle, tmp_path / "cache", 1.0, elsewhere) > 0
    parts |= {"cpu": machine_cpu()}
    header = {"fingerprint": fingerprint_of(parts)}
    by_torch = small_bundle(tmp_path / "torch.rdx", bundle, parts=parts, header=header)
    with pytest.raises(ConfigError, match="made with another cpu"):
        import_bundle(by_torch, tmp_path / "cache", 1.0, elsewhere)
    here = machine_parts() | {"cpu": machine_cpu()}
    assert import_bundle(by_torch, tmp_path / "cache", 1.0, here) == 1


def test_a_server_outlives_its_worker_without_bundle_and_without_directory(
    bundle: Path, tmp_path: Path
) -> None:
    copy, cache = tmp_path / "copy.rdx", tmp_path / "cache"
    copy.write_bytes(bundle.read_bytes())

    def ask(server: Server) -> dict[str, Any]:
        body = {"text": DOCUMENTS[0], "sampling_params": {"temperature": 0.0, "max_new_tokens": 4}}
        response = httpx.post(f"{server.url}/generate", json=body, timeout=120)
        assert response.status_code == 200, response.text
        return response.json()

    def kill_worker(server: Server) -> None:
        (worker,) = [one for one in server.family() if "radixrt.worker" in " ".join(one.cmdline())]
        worker.kill()

    def stats(server: Server) -> dict[str, Any]:
        return httpx.get(f"{server.url}/v1/cache/stats", timeout=30).json()

    flags = ("--cache-dir", str(cache), "--cache-bundle", str(copy), "--speculation", "auto")
    with serving("demo", *flags) as server:
        first = ask(server)
        assert first["meta_info"]["disk_tokens"] > 0
        copy.unlink()
        kill_worker(server)
        again = ask(server)
        assert again["output_ids"] == first["output_ids"] and stats(server)["disk_stopped"] == 0
        (folder,) = replica_folders(cache)
        parts = msgspec.json.decode((folder.parent / "model.json").read_bytes())
        with ThreadPoolExecutor() as pool:  # like a server that is started again and again
            other = pool.submit(CacheDirectory.own, cache, parts, patience_s=120.0)
            kill_worker(server)
            owned = other.result()
        third = ask(server)
        owned.close()
        assert third["output_ids"] == first["output_ids"]
        seen = stats(server)
        assert seen["disk_stopped"] == 1 and seen["disk_pages"] == 0
        assert sum("--cache-dir is not used until" in line for line in server.log) == 1


@pytest.mark.parametrize(
    "lie", [{"slot_bytes": 0}, {"slot_bytes": -1}, {"slot_bytes": 1 << 60}, {"page_size": 0}]
)
def test_a_bundle_that_lies_about_its_pages_is_refused(
    bundle: Path, tmp_path: Path, lie: dict[str, int]
) -> None:
    content, start = bundle.read_bytes()[: -hashlib.sha256().digest_size], len(MAGIC) + 8
    length = int.from_bytes(content[len(MAGIC) : start], "little")
    head = msgspec.msgpack.decode(content[start : start + length], type=Head)
    head = replace(head, header=replace(head.header, **lie))
    new = msgspec.msgpack.encode(head)
    lying = MAGIC + len(new).to_bytes(8, "little") + new + content[start + length :]
    (tmp_path / "lying.rdx").write_bytes(lying + hashlib.sha256(lying).digest())
    with pytest.raises(ConfigError, match="its pages are not as long"):
        import_bundle(tmp_path / "lying.rdx", tmp_path / "cache", 1.0, {})


def test_what_a_full_disk_has_room_for_is_imported(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, pwrite = [], os.pwrite

    def fill(fd: int, content: bytes, at: int) -> int:
        written.append(at)
        if len(content) > 64 and len(written) > 4:  # the first is not a page
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, content, at)

    here = machine_parts()
    monkeypatch.setattr("radixrt.scheduler.disk.bundle.os.pwrite", fill)
    with pytest.raises(ConfigError, match=r"room for 3 pages of \d+: No space left"):
        import_bundle(bundle, tmp_path / "cache", 1.0, here)
    monkeypatch.undo()
    total = read_bundle(bundle)[0].num_pages
    assert import_bundle(bundle, tmp_path / "cache", 1.0, here) == total - 3


def test_a_directory_in_use_is_refused(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("radixrt.kv.store.directory.LOCK_PATIENCE_S", 0.0)
    head, _, file = read_bundle(bundle)
    file.close()
    owned = CacheDirectory.own(tmp_path / "cache", head.parts)
    with pytest.raises(ConfigError, match="uses the cache of this model"):
        import_bundle(bundle, tmp_path / "cache", 1.0, {})
    owned.close()
