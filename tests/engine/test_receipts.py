"""Receipts: equal however an answer was computed, and verified by computing it again."""

import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError, RequestError
from radixrt.base.sampling_params import SamplingParams
from radixrt.cli.main import main
from radixrt.cli.verify import read_receipts
from radixrt.messages.receipts import Parameters, Receipt
from radixrt.tokenizer.receipts import ReceiptMaker
from tests.checkpoints import make_served
from tests.servers import Server, serving
from tests.servers.engine_in_threads import engines_in_threads
from tests.servers.fake_scheduler import engine_info

NUM_PROMPTS = int(os.environ.get("RADIXRT_RECEIPT_PROMPTS", "4"))
"""``make test-receipts`` takes 300."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "receipt.py"
SCHEMA = {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 3, "maxItems": 3}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "The cat sat on", "max_tokens": 24, "temperature": 0},
    "sampled": {"prompt": "The cat sat on", "max_tokens": 24, "n": 2, "logit_bias": {"7": 2.0}},
    "ends at a string": {"prompt": "abc", "max_tokens": 60, "seed": 4, "stop": ["e", "a"]},
    "forbidden": {"prompt": "abc", "max_tokens": 20, "seed": 5, "bad_words": ["a", "th"]},
    "checked": {"prompt": "abc", "max_tokens": 80, "seed": 6, "guided_json": SCHEMA},
    "chat": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "seed": 7},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served(tmp_path_factory.mktemp("receipts") / "llama")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    flags = ("--receipts", "--speculation", "auto", "--reasoning-parser", "deepseek-r1")
    with serving(model, *flags) as server:
        yield server


def receipts(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    path = "chat/completions" if "messages" in body else "completions"
    response = httpx.post(f"{server.url}/v1/{path}", json=body | {"receipt": True}, timeout=60)
    assert response.status_code == 200, response.text
    return [choice["receipt"] for choice in response.json()["choices"]]


@pytest.fixture(scope="module")
def given(server: Server) -> dict[str, list[dict[str, Any]]]:
    """Of each body, the receipts of its answers."""
    return {name: receipts(server, body) for name, body in BODIES.items()}


def verify(
    capsys: pytest.CaptureFixture, file: Path, model: Path, *, by_processes: bool = False
) -> tuple[int, str]:
    engine = contextlib.nullcontext() if by_processes else engines_in_threads()
    with engine, pytest.raises(SystemExit) as ended:
        main(["verify", str(file), "--model-path", str(model)])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out + printed.err


def written(tmp_path: Path, content: Any) -> Path:
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(content))
    return file


def test_receipts_are_equal_cold_cached_speculated_and_streamed(
    server: Server, given: dict[str, list[dict[str, Any]]]
) -> None:
    for name, body in BODIES.items():
        if "seed" in body or body.get("temperature") == 0:
            assert receipts(server, body) == given[name], name
    streamed = BODIES["greedy"] | {"receipt": True, "stream": True}
    text = httpx.post(f"{server.url}/v1/completions", json=streamed, timeout=60).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    found = [choice["receipt"] for e in events for choice in e["choices"] if "receipt" in choice]
    assert found == given["greedy"]
    for value, expected in (("true", given["greedy"]), ("false", [None])):
        by_header = httpx.post(
            f"{server.url}/v1/completions", json=BODIES["greedy"], headers={"X-Radixrt-Receipt": value}, timeout=60
        )  # fmt: skip
        assert [choice.get("receipt") for choice in by_header.json()["choices"]] == expected
    first, second = given["sampled"]
    assert first["chain"][:3] == second["chain"][:3] and first["chain"][-1] != second["chain"][-1]


def test_answers_are_verified_by_computing_them_again(
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
    model: Path,
    given: dict[str, list[dict[str, Any]]],
) -> None:
    every = [one for some in given.values() for one in some]
    status, output = verify(capsys, written(tmp_path, every), model)
    assert status == 0, output
    assert output.count("equal:") == len(every) == 7
    assert output.count("and the engine is the same") == len(every)


def test_a_flipped_bit_of_a_weight_is_named_with_the_first_token_that_differs(
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
    model: Path,
    given: dict[str, list[dict[str, Any]]],
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    file = other / "model.safetensors"
    content = bytearray(file.read_bytes())
    (header,) = struct.unpack("<Q", content[:8])
    receipt = given["greedy"][0]
    row = json.loads(content[8 : 8 + header])["lm_head.weight"]["data_offsets"][0]
    row += 8 + header + 4 * 64 * receipt["token_ids"][0]
    content[row + 3] ^= 0x40  # the highest bit of an exponent, in the row of the first token
    file.write_bytes(content)
    status, output = verify(capsys, written(tmp_path, receipt), other)
    assert status == 1 and "not the same: the weights" in output
    assert re.search(r"different: token \d+ of the answer is \d+ in the receipt, and \d+", output)
    changed = receipt | {"token_ids": [*receipt["token_ids"][:-1], 5]}
    status, output = verify(capsys, written(tmp_path, changed), model)
    assert status == 1 and "token_ids do not match" in output


def test_another_instruction_set_is_named(
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
    model: Path,
    given: dict[str, list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RADIXRT_KERNELS_ISA", "baseline")
    if given["greedy"][0]["engine"]["isa"] in ("baseline", "torch"):
        pytest.skip("the receipt is of the baseline")
    _, output = verify(capsys, written(tmp_path, given["greedy"]), model, by_processes=True)
    assert "not the same: the kernels' instruction set" in output and "baseline here" in output


def test_what_is_forged_is_told_by_the_first_token_that_differs(
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
    model: Path,
    given: dict[str, list[dict[str, Any]]],
) -> None:
    """A forger can make a chain of digests, but not an answer, nor one of another seed or template,
    which counts by the tokens of the prompt that it makes."""
    receipt = msgspec.convert(given["greedy"][0], Receipt)
    tokens = [*receipt.token_ids]
    tokens[11] = tokens[11] % 300 + 20
    chat = msgspec.convert(given["chat"][0], Receipt)
    sampling = msgspec.structs.replace(chat.parameters.sampling, seed=8)
    other = msgspec.structs.replace(chat.parameters, sampling=sampling)
    forged = [
        Receipt.make(receipt.engine, receipt.settings, receipt.prompt_ids, receipt.parameters, tokens),
        Receipt.make(chat.engine, chat.settings, chat.prompt_ids, other, chat.token_ids),
        Receipt.make(chat.engine, chat.settings, [*chat.prompt_ids, 9], chat.parameters, chat.token_ids),
    ]  # fmt: skip
    file = written(tmp_path, [msgspec.to_builtins(one, str_keys=True) for one in forged])
    status, output = verify(capsys, file, model)
    expected = f"token 11 of the answer is {tokens[11]} in the receipt, and {receipt.token_ids[11]}"
    assert status == 1 and expected in output
    assert len(re.findall(r"different: token \d+ of the answer", output)) == 3, output


def test_receipts_are_equal_cold_warm_speculated_batched_and_taken_over(server: Server) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": f"{number} The cat sat on the mat and {number * 7}", "max_tokens": 20, "seed": number, "speculation": False}
        for number in range(NUM_PROMPTS)
    ]  # fmt: skip

    def digests(some: list[dict[str, Any]], at_once: int) -> list[list[str]]:
        """All of a chain: the first that differs names the part that does."""
        with ThreadPoolExecutor(at_once) as pool:
            return [found[0]["chain"] for found in pool.map(lambda one: receipts(server, one), some)]  # fmt: skip

    cold: list[list[str]] = []
    for body in bodies:
        httpx.post(f"{server.url}/flush_cache")
        cold += digests([body], 1)
    assert digests(bodies, 1) == cold, "warm"
    assert digests([body | {"speculation": True} for body in bodies], 1) == cold, "speculated"
    assert digests(bodies, 16) == cold, "batched"
    long = [body | {"max_tokens": 200, "ignore_eos": True} for body in bodies]
    alone = digests(long, 1)
    with ThreadPoolExecutor(1) as pool:
        taken_over = pool.submit(digests, long, 16)
        (worker,) = [one for one in server.family() if "radixrt.worker" in one.cmdline()]
        os.kill(worker.pid, signal.SIGKILL)
        assert taken_over.result() == alone, "taken over"


def test_each_part_is_covered_by_the_chain() -> None:
    receipt = Receipt.make(
        {"weights": "a"},
        {"dtype": "auto"},
        [1, 2],
        Parameters(sampling=SamplingParams(seed=3, logit_bias={7: 1.0})),
        [4],
    )
    again = msgspec.json.decode(msgspec.json.encode(receipt), type=Receipt)
    again.check()
    assert again == receipt
    for name, value in {
        "engine": {"weights": "b"},
        "settings": {},
        "prompt_ids": [1],
        "parameters": Parameters(sampling=SamplingParams(seed=4)),
        "token_ids": [],
    }.items():
        with pytest.raises(RequestError, match=f"its {name} do not match"):
            msgspec.structs.replace(receipt, **{name: value}).check()
    with pytest.raises(RequestError, match="version 3; 1 and 2 are known"):
        msgspec.structs.replace(receipt, version=3).check()
    with pytest.raises(RequestError, match="has 4 digests"):
        msgspec.structs.replace(receipt, chain=receipt.chain[:4]).check()


def test_a_receipt_of_text_has_the_bytes_that_it_had_before_there_were_those_of_images() -> None:
    receipt = Receipt.make(
        {"weights": "ab"}, {"dtype": "auto"}, [1, 2], Parameters(sampling=SamplingParams(seed=3)), [4]
    )  # fmt: skip
    content = (
        '{"version":1,"engine":{"weights":"ab"},"settings":{"dtype":"auto"},"prompt_ids":[1,2],'
        '"parameters":{"sampling":{"seed":3}},"token_ids":[4],'
        '"chain":["70a4b9cd6d84620c944f2c19f9404f1431878ce7e504e7486b72419d7c0f65dd",'
        '"fb7c4ee69df8e5ce3fabaf5459d91fb27417064532b38cc7d9997b4bfc0e0902",'
        '"7cdbbdfc209a75263295a3b4ca68378b24e4e2da668a02332720b8d360d6801b",'
        '"5a14f036c73a50dbb84f1515daa4b81384168b5828e67de35a7a5a78cce75733",'
        '"f1fbb50601f307602a51018ab7dbe6220930cc56bc6b8952d5adfcca9fc15101"]}'
    )
    assert msgspec.json.encode(receipt).decode() == content


@pytest.mark.parametrize("token_id", [-5, 1 << 31, 1 << 70])
def test_numbers_that_are_no_token_are_refused(tmp_path: Path, token_id: int) -> None:
    forged = Receipt.make({}, {}, [token_id], Parameters(sampling=SamplingParams()), [4])
    with pytest.raises(
        ConfigError,
        match=r"cannot be read as a receipt: Expected `int` <="
        if token_id > 0
        else r"cannot be read as a receipt: Expected `int` >= 0",
    ):
        read_receipts(str(written(tmp_path, msgspec.to_builtins(forged, str_keys=True))))


def test_a_receipt_sets_nothing_of_the_verifier_but_what_is_computed(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """A folder of kept KV would be written and read."""
    settings = {"cache_dir": str(tmp_path / "kept"), "page_size": 16}
    forged = Receipt.make({}, settings, [1], Parameters(sampling=SamplingParams()), [4])
    content = msgspec.to_builtins(forged, str_keys=True)
    status, output = verify(capsys, written(tmp_path, content), tmp_path)
    assert status and "a setting that receipts do not have: cache_dir" in output


def test_the_chain_of_a_receipt_covers_each_image_and_its_place() -> None:
    parameters = Parameters(sampling=SamplingParams(seed=3))
    receipt = Receipt.make({"weights": "a"}, {}, [1, 2], parameters, [4], ["aa", "bb"])
    receipt.check()
    assert msgspec.json.decode(msgspec.json.encode(receipt), type=Receipt) == receipt
    for images in (["aa", "bc"], ["aa"], ["aa", "bb", "cc"], ["bb", "aa"], [], msgspec.UNSET):
        with pytest.raises(RequestError, match="its images do not match"):
            msgspec.structs.replace(receipt, images=images).check()
    text = Receipt.make({"weights": "a"}, {}, [1, 2], parameters, [4])
    assert text.version == 1, "it is known to those who do not know images"
    for forged in (
        msgspec.structs.replace(text, images=["aa"]),
        msgspec.structs.replace(text, images=[]),
        msgspec.structs.replace(text, version=2),
        msgspec.structs.replace(receipt, version=1),
    ):
        with pytest.raises(RequestError, match="its images do not match"):
            forged.check()
    cut = msgspec.structs.replace(receipt, version=1, images=msgspec.UNSET)
    with pytest.raises(RequestError, match="its engine do not match"):
        cut.check()


def test_a_draft_head_is_no_part_of_a_receipt() -> None:
    """Though its KV is in the pages that are kept on disk."""
    config = ServerConfig(model_path="demo", receipts=True)
    vocabulary: Any = SimpleNamespace(backend=SimpleNamespace(to_str=lambda: "{}"))
    request: Any = SimpleNamespace(
        receipt=True, constraint=None, parse_reasoning="", parse_tool_calls=""
    )
    prompt: Any = SimpleNamespace(token_ids=[5], pictures=())
    made = []
    for parts in ({"weights": "ab"}, {"weights": "ab", "head": "cd"}):
        maker = ReceiptMaker(config, engine_info(kv_parts=parts), vocabulary)
        make = maker.of(request, prompt, SamplingParams(temperature=0.0))
        assert make is not None
        made.append(make([7]))
    assert made[0] == made[1]
    assert made[0].engine["weights"] == "ab"


def test_the_example_checks_the_digests_by_itself(
    capsys: pytest.CaptureFixture, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "own.json"
    arguments = ["receipt.py", "--base-url", f"{server.url}/v1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "20 tokens, receipt" in capsys.readouterr().out
    msgspec.json.decode(out.read_bytes(), type=Receipt).check()


def test_files_without_a_receipt_are_refused(tmp_path: Path) -> None:
    from radixrt.cli.verify import read_receipts

    for content in ({}, {"choices": []}, {"chain": [], "prompt_ids": "a"}):
        with pytest.raises(ConfigError, match="receipt"):
            read_receipts(str(written(tmp_path, content)))
    with pytest.raises(ConfigError, match=r"nothing\.json"):
        read_receipts(str(tmp_path / "nothing.json"))
