"""FIM prompts of each family: the tokens of the documented forms, in their order."""

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from radixrt.base.errors import RequestError
from radixrt.messages.requests import FimPrompt
from radixrt.tokenizer.prompt.fill_in_middle import FillInMiddle
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.checkpoints.tiny_tokenizers import byte_fallback, byte_level

PROMPT = FimPrompt("def f(x):\n    ", "\n    return y", "y = ", [("a.py", "import b")])
TEXTS = ("def f(x):\n    ", "\n    return y", "y = ")

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]  # fmt: skip
STARCODER = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
DEEPSEEK = ["<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"]
FAMILIES = {
    "Qwen": (
        QWEN,
        "<|repo_name|>myproject\n<|file_sep|>a.py\nimport b<|file_sep|>filename\n"
        "<|fim_prefix|>{0}<|fim_suffix|>{1}<|fim_middle|>{2}",
    ),
    "StarCoder": (
        STARCODER,
        "\n\n--- snippet ---\n\nimport b<fim_prefix>{0}<fim_suffix>{1}<fim_middle>{2}",
    ),
    "DeepSeek": (
        DEEPSEEK,
        "\n\n--- snippet ---\n\nimport b" + DEEPSEEK[0] + "{0}" + DEEPSEEK[1] + "{1}" + DEEPSEEK[2] + "{2}",
    ),
    "Codestral": (
        ["[PREFIX]", "[SUFFIX]", "[MIDDLE]"],
        "\n\n--- snippet ---\n\nimport b[SUFFIX]{1}[PREFIX]{0}{2}",
    ),
}  # fmt: skip


def vocabulary_with(names: list[str]) -> Vocabulary:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return Vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_stand_in_the_order_of_the_family(family: str) -> None:
    names, written = FAMILIES[family]
    vocabulary = vocabulary_with(names)
    ids = FillInMiddle(vocabulary).encode(PROMPT)
    assert vocabulary.decode(ids) == written.format(*TEXTS)
    marks = [vocabulary.special_tokens[i].content for i in ids if i in vocabulary.special_ids]
    assert "".join(marks) == "".join(part for part in _marks_of(written, names))


def _marks_of(written: str, names: list[str]) -> list[str]:
    found = sorted((written.find(name, at), name) for name in names for at in range(len(written)) if written.startswith(name, at))  # fmt: skip
    return [name for _, name in found]


def test_control_tokens_in_the_texts_are_text() -> None:
    vocabulary = vocabulary_with(QWEN)
    ids = FillInMiddle(vocabulary).encode(FimPrompt("a<|fim_middle|>", "<|im_end|>b"))
    assert vocabulary.decode(ids) == "<|fim_prefix|>a<|fim_middle|><|fim_suffix|><|im_end|>b<|fim_middle|>"  # fmt: skip
    marks = [vocabulary.special_tokens[i].content for i in ids if i in vocabulary.special_ids]
    assert marks == ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]


def test_the_middle_ends_at_the_tokens_of_the_family() -> None:
    vocabulary = vocabulary_with(QWEN)
    ends = {vocabulary.special_tokens[i].content for i in FillInMiddle(vocabulary).end_ids}
    assert ends == {"<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}
    assert FillInMiddle(vocabulary_with([])).end_ids == ()


def test_code_llama_gets_its_first_token_and_no_space_before_the_suffix() -> None:
    tokenizer = byte_fallback()
    tokenizer.add_special_tokens(["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"])
    vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>"))
    ids = FillInMiddle(vocabulary).encode(FimPrompt("the", "the"))
    tokens = [tokenizer.id_to_token(i) for i in ids]
    assert tokens[0] == "<s>" and tokens[1] == "▁<PRE>" and tokens[-1] == "▁<MID>"
    assert tokens[2].startswith("▁")
    behind = tokens[tokens.index("▁<SUF>") + 1]
    assert not behind.startswith("▁")
    plain = FimPrompt("the", "the", add_special_tokens=False)
    assert FillInMiddle(vocabulary).encode(plain) == ids[1:]


def test_a_vocabulary_without_fim_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="can't fill in the middle") as caught:
        FillInMiddle(vocabulary_with([])).encode(PROMPT)
    assert (caught.value.status, caught.value.param) == (400, "suffix")
