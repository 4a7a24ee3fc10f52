"""A cache breakpoint keeps the tokens that its message and those before it settle: no fewer, no
more."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.base.common_prefix import common_prefix_length
from radixrt.base.config import ServerConfig
from radixrt.messages.requests import CacheBreakpoint, ChatPrompt, Retention
from radixrt.tokenizer.limits import Limits
from radixrt.tokenizer.prompt.breakpoints import substitute
from radixrt.tokenizer.prompt.prompts import PromptEncoder
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.checkpoints.tiny_tokenizers import TEXT, save_byte_fallback, save_byte_level

LIMITS = Limits(context_length=4096, kv_pool_tokens=4096, vocab_size=420)

BRACKETS = "{{ bos_token }}{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}"
TOOLS_AFTER_SYSTEM = (
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}"
    "{% if tools %}\nTools: {{ tools | tojson }}{% endif %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}"
)
THOUGHTS_OF_THE_LAST_TURN_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)
LAST_MUST_BE_THE_USER = (
    "{% if messages[-1].role != 'user' %}{{ raise_exception('no question') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = save_byte_level(tmp_path_factory.mktemp("chatml"))
    return Vocabulary.load(ServerConfig(model_path=str(folder)))


@pytest.fixture(scope="module")
def brackets(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = save_byte_fallback(tmp_path_factory.mktemp("brackets"), BRACKETS)
    return Vocabulary.load(ServerConfig(model_path=str(folder)))


@pytest.fixture(params=["chatml", "brackets"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return request.getfixturevalue(request.param)


def with_template(tmp_path: Path, template: str) -> Vocabulary:
    file = tmp_path / "template.jinja"
    file.write_text(template)
    folder = save_byte_level(tmp_path)
    return Vocabulary.load(ServerConfig(model_path=str(folder), chat_template=str(file)))


def conversation(*contents: str) -> list[dict[str, str]]:
    roles = ["system", *(["user", "assistant"] * len(contents))]
    return [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]


def kept(
    vocabulary: Vocabulary, messages: list[dict], *marked: int, **fields: object
) -> tuple[list[int], list[int]]:
    """Token ids of the prompt, and how many are kept for each marked message."""
    marks = [CacheBreakpoint(index, 300.0) for index in marked]
    prompt = ChatPrompt(messages=messages, cache_breakpoints=marks, **fields)  # type: ignore[arg-type]
    _, ids, _, retain, *_ = PromptEncoder(vocabulary).encode(prompt, LIMITS)
    assert all(r == Retention("high", r.num_tokens, 300.0) for r in retain)
    return ids, [r.num_tokens or 0 for r in retain]


def rendered_ids(vocabulary: Vocabulary, messages: list[dict], **settings: object) -> list[int]:
    return vocabulary.hf.apply_chat_template(messages, return_dict=True, **settings)["input_ids"]


def common_prefix(left: list[int], right: list[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def test_all_tokens_of_the_marked_messages_and_none_of_the_next_are_kept(
    vocabulary: Vocabulary,
) -> None:
    messages = conversation(*TEXT)
    ids, counts = kept(vocabulary, messages, *range(len(messages)))
    assert ids == rendered_ids(vocabulary, messages, add_generation_prompt=True)
    for index, count in enumerate(counts):
        assert ids[:count] == rendered_ids(vocabulary, messages[: index + 1])


words = st.lists(st.sampled_from(["the", " ", "fox", "\n", "[", "]", "é", "🦊", "<|im_", "x"]))


@given(contents=st.lists(words.map("".join), min_size=1, max_size=6), data=st.data())
@pytest.mark.parametrize("name", ["chatml", "brackets"])
def test_positions_are_those_of_the_longest_common_token_prefix(
    request: pytest.FixtureRequest, name: str, contents: list[str], data: st.DataObject
) -> None:
    vocabulary = request.getfixturevalue(name)
    messages = conversation(*contents)
    marked = data.draw(st.lists(st.integers(0, len(messages) - 1), max_size=4))
    ids, counts = kept(vocabulary, messages, *marked)
    for index, count in zip(marked, counts, strict=True):
        alone = rendered_ids(vocabulary, messages[: index + 1])
        assert count >= common_prefix(ids, alone)  # a token that spans the border is not kept ...
        text = vocabulary.decode(alone)
        assert text.startswith(vocabulary.decode(ids[:count]))  # ... and nothing beyond it


def test_special_tokens_in_the_text_of_users_move_no_position(chatml: Vocabulary) -> None:
    messages = conversation(
        "be <|im_start|>kind",
        "hi<|im_end|><|im_end|>\n<tool_call>",
        "<|im_start|>",
        "last <|im_end|>",
    )
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages[:2])
    ids, (count,) = kept(chatml, messages, 1)
    assert chatml.decode(ids[:count]) == text
    assert ids[:count] == kept(chatml, messages[:2], 1, add_generation_prompt=False)[0]


def test_the_tools_are_kept_with_the_system_message_before_them(tmp_path: Path) -> None:
    vocabulary = with_template(tmp_path, TOOLS_AFTER_SYSTEM)
    tools = [{"type": "function", "function": {"name": "look", "description": "fox"}}]
    ids, (count,) = kept(vocabulary, conversation("system", "question"), -1, tools=tools)
    text = vocabulary.decode(ids[:count])
    assert text.startswith("<|im_start|>system\nsystemTools: [") and "look" in text
    assert text.endswith("<|im_end|>\n<|im_start|>user\n")  # which every question begins with


def test_a_thought_that_the_template_drops_later_ends_what_is_kept(tmp_path: Path) -> None:
    vocabulary = with_template(tmp_path, THOUGHTS_OF_THE_LAST_TURN_ONLY)
    messages = conversation("s", "q", "<think>hmm</think>answer", "next")
    ids, (count,) = kept(vocabulary, messages, 2)
    assert vocabulary.decode(ids[:count]).endswith("q<|im_end|>\n<|im_start|>assistant\n")


def test_a_beginning_that_the_template_refuses_keeps_nothing_and_refuses_nothing(
    tmp_path: Path,
) -> None:
    vocabulary = with_template(tmp_path, LAST_MUST_BE_THE_USER)
    ids, counts = kept(vocabulary, conversation("s", "q", "a", "q2"), 2, 1, 77)
    assert len(counts) == 1 and vocabulary.decode(ids[: counts[0]]).endswith("q<|im_end|>")


def test_a_continued_message_is_kept_as_far_as_it_goes(chatml: Vocabulary) -> None:
    messages = conversation("s", "q", "the answer beg")
    ids, (count,) = kept(
        chatml, messages, 2, add_generation_prompt=False, continue_final_message=True
    )
    assert count == len(ids)


@given(st.text("ab", max_size=12), st.text("ab", max_size=12))
def test_common_length_is_that_of_a_walk(left: str, right: str) -> None:
    assert common_prefix_length(left, right) == common_prefix(list(left), list(right))  # type: ignore[arg-type]


@given(st.text("abx", max_size=14), st.lists(st.integers(0, 14), max_size=4))
def test_substitution_moves_lengths_with_the_text(text: str, lengths: list[int]) -> None:
    lengths = [min(length, len(text)) for length in lengths]
    pattern = re.compile("xx|a")
    result, moved = substitute(
        pattern, lambda match: "<long>" if match[0] == "a" else "", text, lengths
    )
    assert result == pattern.sub(lambda match: "<long>" if match[0] == "a" else "", text)
    for length, new in zip(lengths, moved, strict=True):
        inside = next((m for m in pattern.finditer(text) if m.start() < length < m.end()), None)
        before = text[: inside.start() if inside else length]
        assert result[:new] == pattern.sub(lambda m: "<long>" if m[0] == "a" else "", before)
