"""Kimi K2: a config that transformers does not know and a tokenizer that is code in the checkpoint,
both read without running that code."""

import base64
import itertools
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import regex
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.token_bytes import TokenBytes
from radixrt.models.loader import load_model, transformers_config
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.checkpoints import make_checkpoint
from tests.checkpoints.tiny_tokenizers import TEXT, train_byte_level
from tests.models.harness import Harness
from tests.servers.servers_in_process import serving_in_process

SPLITS = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])  # fmt: skip
"""Of the published tokenization_kimi.py, as data."""
NAMED = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|im_end|>", True),
    3: ("<|im_user|>", True),
    4: ("<|im_assistant|>", True),
    6: ("<|im_middle|>", True),
    11: ("<|tool_calls_section_begin|>", False),
}
"""Special tokens by their place behind the others, and whether they are control tokens."""
TEMPLATE = (
    "{% for m in messages %}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
CODE = "raise RuntimeError('the code of the checkpoint runs')\n"


def make_ranks() -> dict[bytes, int]:
    """Tokens of a trained vocabulary, bytes first."""
    trained = train_byte_level(TEXT * 4, 600, [])
    known = TokenBytes(trained)
    tokens = [known.bytes_of(id_) for id_ in range(trained.get_vocab_size())]
    single = [bytes([byte]) for byte in range(256)]
    longer = dict.fromkeys(token for token in tokens if len(token) > 1)
    return {token: rank for rank, token in enumerate([*single, *longer])}


RANKS = make_ranks()


def tokens_of(text: str) -> list[int]:
    """Brute force: in each piece of a text, the pair whose bytes have the lowest rank merges first."""
    found = []
    for piece in regex.findall(SPLITS, text, regex.V1):
        parts = [bytes([byte]) for byte in piece.encode()]
        if piece.encode() in RANKS:
            parts = [piece.encode()]
        while True:
            pairs = [(RANKS.get(a + b), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
            known = [(rank, i) for rank, i in pairs if rank is not None]
            if not known:
                break
            _, i = min(known)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        found += [RANKS[part] for part in parts]
    return found


def write_tokenizer(folder: Path, **settings: Any) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {
        str(len(RANKS) + place): {"content": content, "special": special}
        for place, (content, special) in NAMED.items()
    }
    named = {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": {"content": "[EOS]"},
        "chat_template": TEMPLATE,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "tokenization_kimi.py").write_text(CODE)
    return folder


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("deepseek"), vocab_size=1024)


@pytest.fixture(scope="module")
def kimi(deepseek: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek V3's checkpoint under Kimi K2's names."""
    folder = tmp_path_factory.mktemp("kimi") / "checkpoint"
    shutil.copytree(deepseek, folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "rope_scaling": {**rope, "type": rope.pop("rope_type")},
        "rope_theta": rope["rope_theta"],
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_deepseek.py").write_text(CODE)
    return write_tokenizer(folder)


@pytest.fixture(scope="module")
def vocabulary(kimi: Path) -> Vocabulary:
    return Vocabulary.load(ServerConfig(model_path=str(kimi)))


@pytest.mark.parametrize("trusted", [False, True])
def test_the_code_of_a_checkpoint_is_not_run_where_it_is_not_needed(
    kimi: Path, deepseek: Path, tmp_path: Path, trusted: bool
) -> None:
    """As recipes of other engines ask for it."""
    assert transformers_config(kimi, trust_remote_code=trusted).model_type == "deepseek_v3"
    config = json.loads((deepseek / "config.json").read_text())
    own_code = {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **own_code}))
    (tmp_path / "configuration_deepseek.py").write_text(CODE)
    assert transformers_config(tmp_path, trust_remote_code=trusted).kv_lora_rank == 32
    Vocabulary.load(ServerConfig(model_path=str(kimi), trust_remote_code=trusted))


def test_the_model_is_that_of_deepseek_v3(kimi: Path, deepseek: Path) -> None:
    prompt = list(range(3, 60))
    ours, theirs = (
        Harness(load_model(folder), page_size=16).logits(prompt) for folder in (kimi, deepseek)
    )
    assert torch.equal(ours, theirs)


@given(
    st.lists(
        st.one_of(
            st.sampled_from([*TEXT, "I'LL we've", "HTTPServer", "12345", "  \n\n x", "\r\n", "语言world", "ǅ", "é", "ﷺ", "\u3000"]),
            st.text(max_size=6),
        ),
        max_size=5,
    )
)  # fmt: skip
def test_texts_have_the_tokens_of_the_published_rules(
    vocabulary: Vocabulary, parts: list[str]
) -> None:
    text = "".join(parts)
    ids = vocabulary.backend.encode(text, add_special_tokens=False).ids
    assert ids == tokens_of(text)
    assert vocabulary.decode(ids) == text


def test_texts_have_the_tokens_of_tiktoken(vocabulary: Vocabulary) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding("kimi", pat_str=SPLITS, mergeable_ranks=RANKS, special_tokens={})
    for text in [*TEXT, " ".join(TEXT), "I'LL we've HTTPServer  \n\n 12345 语言world"]:
        assert vocabulary.backend.encode(text, add_special_tokens=False).ids == encoding.encode(
            text
        )


def test_special_tokens_are_named_or_reserved(vocabulary: Vocabulary) -> None:
    first = len(RANKS)
    assert vocabulary.backend.get_vocab_size() == first + 256
    for place, (content, special) in NAMED.items():
        assert vocabulary.backend.encode(content).ids == [first + place]
        assert (first + place in vocabulary.special_ids) == special
    assert vocabulary.backend.token_to_id(f"<|reserved_token_{first + 5}|>") == first + 5


def test_it_answers_chats(kimi: Path) -> None:
    chat: Any = [{"role": "user", "content": "你好 world"}]
    with serving_in_process(kimi, max_total_tokens=2048) as server:
        ask = partial(server.openai.chat.completions.create, model="tiny", messages=chat, max_tokens=4)  # fmt: skip
        answer, number = ask(), ask(extra_body={"regex": "[0-9]{3}"})
    first = len(RANKS)
    prompt = [first + 3, *tokens_of("user"), first + 6, *tokens_of("你好 world"), first + 2]
    prompt += [first + 4, *tokens_of("assistant"), first + 6]
    assert answer.usage.prompt_tokens == len(prompt)
    text = number.choices[0].message.content
    assert len(text) == 3 and text.isdigit()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda folder: write_tokenizer(folder, tokenizer_class="QWenTokenizer"), "QWenTokenizer.*--tokenizer-path"),
        (lambda folder: (folder / "tiktoken.model").write_text("!! 0\n"), "damaged"),
        (lambda folder: (folder / "tiktoken.model").write_text("YQ== 0\n"), "lacks tokens"),
        (lambda folder: (folder / "tiktoken.model").write_text(_with_a_long_token()), "2000 bytes"),
    ],
)  # fmt: skip
def test_others_are_refused(tmp_path: Path, change: Callable[[Path], Any], match: str) -> None:
    change(write_tokenizer(tmp_path))
    with pytest.raises(ConfigError, match=match):
        Vocabulary.load(ServerConfig(model_path=str(tmp_path)))


def _with_a_long_token() -> str:
    tokens = [*RANKS, b"a" * 2000]
    return "\n".join(f"{base64.b64encode(t).decode()} {i}" for i, t in enumerate(tokens))
