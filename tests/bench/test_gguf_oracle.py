"""The comparison with llama.cpp: texts for tokenizers, the log-probabilities that it writes, and,
where it is installed, its own files."""

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

import radixrt_kernels
from bench.gguf_oracle.checks import (
    Divergence,
    Greedy,
    Page,
    _cut_off,
    _divergence,
    compare_kv_cache,
    divide,
    served,
)
from bench.gguf_oracle.families import FAMILIES, compare_families
from bench.gguf_oracle.llama_cpp import MAX_DROP, LlamaCpp, Pages
from bench.gguf_oracle.texts import SENTENCES, make_texts
from radixrt.base.errors import ConfigError

PEERS = Path(os.environ.get("RADIXRT_PEERS", "~/.cache/radixrt/peers")).expanduser()
needs_llama_cpp = pytest.mark.skipif(
    not (PEERS / "llama.cpp" / "bin" / "llama-perplexity").exists(),
    reason="llama.cpp is not installed in RADIXRT_PEERS",
)


def test_texts_differ_and_have_many_scripts_and_control_tokens() -> None:
    texts = make_texts(2000, ["<|im_end|>"])
    assert texts == make_texts(2000, ["<|im_end|>"])
    assert len(set(texts)) == 2000
    assert sum("<|im_end|>" in text for text in texts) > 400
    assert len({ord(letter) >> 7 for text in texts for letter in text}) > 50
    assert all(text.encode("utf-8").decode("utf-8") == text for text in texts)


def test_log_probabilities_of_a_file_are_those_that_were_written(tmp_path: Path) -> None:
    """In the form of tools/perplexity/perplexity.cpp."""
    length, vocabulary, pages = 8, 11, 2
    logits = torch.randn(pages, length - 1 - length // 2, vocabulary) * 9
    expected = _cut_off(logits)
    tokens = np.arange(pages * length, dtype=np.int32)
    with (file := tmp_path / "logits").open("wb") as out:
        out.write(b"_logits_" + struct.pack("<3i", length, vocabulary, pages) + tokens.tobytes())
        for row, exact in zip(logits.flatten(0, 1), logits.log_softmax(-1).flatten(0, 1), strict=True):  # fmt: skip
            span = min(float(row.max() - row.min()), MAX_DROP)
            least = float(exact.max()) - span
            codes = ((exact - least) / span * 65535).round().clamp(0).to(torch.int32).tolist()
            out.write(struct.pack(f"<2f{vocabulary + 1}H", span / 65535, least, *codes, 0))
    read = Pages.read(file)
    assert read.tokens.tolist() == tokens.reshape(pages, length).tolist()
    for page in range(pages):
        found = _cut_off(torch.from_numpy(read.log_probabilities(page, vocabulary)))
        torch.testing.assert_close(found, expected[page], atol=3e-4, rtol=0)


def test_divergence_is_zero_of_itself_and_that_of_the_textbook() -> None:
    base = torch.tensor([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]).log()
    other = torch.tensor([[0.25, 0.25, 0.5], [0.8, 0.1, 0.1]]).log()
    expected = torch.nn.functional.kl_div(other, base, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(_divergence(_cut_off(base), _cut_off(other)), expected)
    assert _divergence(base, base).abs().max() == 0


def test_pages_are_those_of_llama_perplexity_also_where_a_text_begins_with_one() -> None:
    words = [f"w{i}" for i in range(9)]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(["<s>", *words])}, "<s>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    text = "  ".join(random.Random(0).choices(words, k=44))
    for template, bos in (("$A", []), ("<s> $A", [0])):
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", 0)])
        ids = tokenizer.encode(text).ids
        pages = divide(tokenizer, text, 9, length=8)
        assert [page.tokens for page in pages] == [bos + ids[i + len(bos) : i + 8] for i in (0, 8, 16, 24)]  # fmt: skip
        for page in pages:
            assert tokenizer.encode(text[page.start :]).ids[:8] == page.tokens
    assert len(divide(tokenizer, text, 3, length=8)) == 3
    with pytest.raises(ConfigError, match="fewer than 64 tokens"):
        divide(tokenizer, text, 9, length=32)


def test_the_mean_of_pages_has_the_error_of_its_pages() -> None:
    base = torch.randn(3, 8, 50).log_softmax(-1)
    other = (base + torch.randn(3, 8, 50) / 10).log_softmax(-1)
    divergence = Divergence()
    for page in zip(base, other, strict=True):
        divergence.add(*page)
    means = _divergence(base, other).mean(-1)
    assert divergence.mean == pytest.approx(float(means.mean()))
    assert divergence.standard_error == pytest.approx(np.std(means.tolist(), ddof=1) / 3**0.5)
    agreed = int((base.argmax(-1) == other.argmax(-1)).sum())
    assert str(divergence).endswith(f"over 24 tokens of 3 pages, same likeliest token {agreed / 24:.4f}")  # fmt: skip


def test_greedy_tokens_are_counted_for_each_pair() -> None:
    theirs, ours_are, exact_are = range(7), [0, 1, 2, 3, 1, 1, 1], [0, 0, 3, 0, 1, 1, 6]
    ours, exact = torch.eye(7)[ours_are], torch.eye(7)[exact_are]
    for row in (4, 5, 6):
        ours[row, row] = 1 - row / 10  # llama.cpp's token has the second greatest logit
    greedy = Greedy()
    for rows in (slice(3), slice(3, 7)):
        greedy.add(torch.tensor(theirs)[rows], ours[rows], exact[rows])
    assert greedy.worst_margin == pytest.approx(0.6)
    greedy.worst_margin = 0
    assert greedy == Greedy(7, agreed=4, theirs_exact=2, ours_exact=3, all_agreed=1)
    assert str(greedy).startswith("4 of 7 (0.5714); ")


@pytest.mark.skipif(radixrt_kernels.native is None, reason="only the kernels read int8")
def test_keys_and_values_in_int8_move_distributions_a_little(
    checkpoint: Callable[[str], Path],
) -> None:
    pages = [Page(0, random.Random(i).choices(range(100), k=16)) for i in range(2)]
    with torch.inference_mode():
        model = served(checkpoint("llama"))
        *_, found = compare_kv_cache(model, model, pages)
    assert 0 < found.exact_int8.mean < 0.002
    assert found.served.mean == 0
    assert found.served_int8.mean == found.exact_int8.mean


@needs_llama_cpp
@pytest.mark.parametrize("family", ["gemma3", "llama 3"])
def test_files_of_llama_cpps_own_tools_answer_like_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SentencePiece and byte-level BPE; ``make gguf-oracle`` has all families."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for other in set(FAMILIES) - {family}:
        monkeypatch.delitem(FAMILIES, other)
    training = [*SENTENCES, *filter(str.isascii, make_texts(3000, []))]  # characters < vocabulary
    (corpus := tmp_path / "corpus").write_text("\n".join(training))
    with torch.inference_mode():
        (outcome,) = compare_families(LlamaCpp(PEERS), tmp_path, make_texts(300, ["[INST]"]), corpus)  # fmt: skip
    assert outcome.largest_error < 1e-3
    assert outcome.divergence < 0.01
    assert not outcome.tokens.others
