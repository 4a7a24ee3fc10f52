"""Bundles: KV that is exported on one directory and imported into another."""

import errno
import hashlib
import os
import random
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from radixrt import LLM, SamplingParams
from radixrt.base.errors import ConfigError
from radixrt.kv.store.directory import CacheDirectory
from radixrt.scheduler.disk.bundle import MAGIC, Head, import_bundle, read_bundle
from radixrt.worker.fingerprint import machine_parts
from tests.command_line import run_here

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


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    files = []
    for number, text in enumerate(DOCUMENTS):
        files.append(folder / f"{number}.txt")
        files[-1].write_text(text)
    out = folder / "out.rdx"
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
    with LLM(cache_dir=str(cache)) as llm:
        found = llm.generate(DOCUMENTS, SHORT)
        salted = llm.generate(DOCUMENTS[0], SHORT, cache_salt="other")
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert [x.logprob for x in one.answers[0].logprobs] == [
            x.logprob for x in other.answers[0].logprobs
        ]
        assert one.cached_tokens == 16 * ((one.num_prompt_tokens - 1) // 16)
    assert found[0].answers[0].disk_tokens > 0 and salted.cached_tokens == 0


def test_a_program_names_a_bundle_and_has_its_kv(bundle: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    with LLM(cache_dir=cache, cache_bundle=str(bundle)) as llm:
        answer = llm.generate(DOCUMENTS[0], SHORT).answers[0]
        assert answer.disk_tokens == 16 * ((answer.prompt_tokens - 1) // 16)
    with pytest.raises(ConfigError, match="made with another quantization"):
        LLM(cache_dir=cache, cache_bundle=str(bundle), quantization="int8")
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
