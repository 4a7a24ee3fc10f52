"""A query and a document reach each kind of model in the form that it was trained on."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from radixrt.base.config import ServerConfig
from radixrt.messages.requests import PairPrompt
from radixrt.tokenizer.limits import Limits
from radixrt.tokenizer.prompt.prompts import EncodedPrompt, PromptEncoder
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.checkpoints.tiny_tokenizers import save_byte_level

LIMITS = Limits(context_length=512, kv_pool_tokens=1024, vocab_size=420)
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
RERANKER = (
    '{%- set instruction = messages | selectattr("role", "eq", "system") | map(attribute="content") | first'
    ' | default("the default") -%}'
    '{{ instruction }}|{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}|'
    '{{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}'
)


def encode(folder: Path, pair: PairPrompt) -> tuple[Vocabulary, EncodedPrompt]:
    vocabulary = Vocabulary.load(ServerConfig(model_path=str(folder)))
    return vocabulary, PromptEncoder(vocabulary).encode(pair, LIMITS)


@pytest.mark.parametrize("instruction", ["", "Find cats"])
def test_a_chat_template_gives_the_prompt_of_qwen3_reranker(
    tmp_path: Path, instruction: str
) -> None:
    pair = PairPrompt("a cat?", "dogs <|im_end|> bark", instruction=instruction)
    vocabulary, found = encode(save_byte_level(tmp_path, QWEN3), pair)
    task = (
        instruction or "Given a web search query, retrieve relevant passages that answer the query"
    )
    assert vocabulary.decode(found.token_ids) == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {task}\n<Query>: a cat?\n<Document>: dogs <|im_end|> bark<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    ends = vocabulary.encode("<|im_end|>", add_special_tokens=False)
    assert sum(ids == ends[0] for ids in found.token_ids) == 2, "the document's stays text"


@pytest.mark.parametrize(("instruction", "shown"), [("", "the default"), ("Find", "Find")])
def test_a_template_for_judges_gets_the_roles_query_and_document(
    tmp_path: Path, instruction: str, shown: str
) -> None:
    pair = PairPrompt("a cat?", "dogs bark", instruction=instruction)
    vocabulary, found = encode(save_byte_level(tmp_path, RERANKER), pair)
    assert vocabulary.decode(found.token_ids) == f"{shown}|a cat?|dogs bark"


def word_level(folder: Path) -> Path:
    """A tokenizer that joins pairs as BERT's does."""
    words = ["[UNK]", "[CLS]", "[SEP]", *"abcdefgh"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"
    )
    wrapped.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("limits", "ids"),
    [
        ({}, [1, 3, 4, 2, 5, 6, 7, 2]),
        ({"max_document_tokens": 2}, [1, 3, 4, 2, 5, 6, 2]),
        ({"max_tokens": 6}, [1, 3, 4, 2, 5, 2]),
        ({"max_tokens": 5}, [1, 3, 4, 2, 2]),
        ({"max_tokens": 8}, [1, 3, 4, 2, 5, 6, 7, 2]),
    ],
)
def test_without_a_template_the_tokenizer_joins_the_texts(
    tmp_path: Path, limits: dict[str, int], ids: list[int]
) -> None:
    _, found = encode(word_level(tmp_path), PairPrompt("a b", "c d e", **limits))
    assert (found.token_ids, found.second_segment_start) == (ids, 4)
