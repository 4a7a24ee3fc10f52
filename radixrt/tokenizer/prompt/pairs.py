"""Encodes a query and a document that a model judges together.

Decoders get them by their chat template: by one for judges, which takes the roles "query" and
"document", or by one for chats, in the form on which Qwen3-Reranker was trained. The query comes
first, so the documents of one query share a prefix. Encoders get the pair as their tokenizer joins
two texts.
"""

import re
from typing import NamedTuple

from radixrt.base.errors import RequestError
from radixrt.messages.requests import ChatPrompt, PairPrompt
from radixrt.tokenizer.limits import Limits
from radixrt.tokenizer.prompt.chat_template import ChatTemplate
from radixrt.tokenizer.vocabulary import Vocabulary

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Qwen3-Reranker's default."""

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_ROLE = re.compile(r"""(["'])(query|document)\1""")
_MAX_CUTS = 4


class EncodedPair(NamedTuple):
    token_ids: list[int]
    second_segment_start: int
    """Position of the second text's first token, for models that tell the texts apart; 0: none
    does."""


class PairEncoder:
    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate) -> None:
        self._vocabulary = vocabulary
        self._template = template
        named = _ROLE.findall(str(vocabulary.hf.chat_template))  # there may be several
        self._takes_roles = {role for _, role in named} == {"query", "document"}

    def encode(self, pair: PairPrompt, limits: Limits, salt: str) -> EncodedPair:
        """Raises:
        RequestError: the texts are far too long, or the chat template refuses them.
        """
        longest, limit = self._vocabulary.longest_token, pair.max_tokens
        limits.check_text(pair.query, longest, self._vocabulary.num_tokens)
        document = pair.document
        if pair.max_document_tokens is not None:
            document = self._beginning(document, pair.max_document_tokens)
        if limit is None:
            limits.check_text(document, longest, self._vocabulary.num_tokens)
            return self._join(pair, document, limits, salt)
        document = document[: limit * longest]
        for _ in range(_MAX_CUTS):  # tokens may join differently where the text is cut
            encoded = self._join(pair, document, limits, salt)
            surplus = len(encoded.token_ids) - limit
            if surplus <= 0:
                return encoded
            size = len(self._vocabulary.encode(document, add_special_tokens=False))
            document = self._beginning(document, size - surplus)
        raise RequestError(
            f"The query leaves no place for the document within {limit} tokens.",
            param="truncate_prompt_tokens",
        )

    def _beginning(self, text: str, num_tokens: int) -> str:
        """The characters of the first ``num_tokens`` tokens."""
        if num_tokens <= 0:
            return ""
        text = text[: num_tokens * self._vocabulary.longest_token]
        _, ends = self._vocabulary.encode_with_ends(text)
        return text if len(ends) <= num_tokens else text[: ends[num_tokens - 1]]

    def _join(self, pair: PairPrompt, document: str, limits: Limits, salt: str) -> EncodedPair:
        if not self._vocabulary.hf.chat_template:
            return self._vocabulary_pair(pair.query, document)
        chat = self._template.render(self._chat(pair, document), salt, limits.call_tokens)
        _, ids, _, _ = self._template.encode(chat, salt, limits.check_num_tokens)
        return EncodedPair(ids, 0)

    def _chat(self, pair: PairPrompt, document: str) -> ChatPrompt:
        if self._takes_roles:
            messages = [{"role": "system", "content": pair.instruction}] if pair.instruction else []
            messages += [
                {"role": "query", "content": pair.query},
                {"role": "document", "content": document},
            ]
            return ChatPrompt(messages)
        instruction = pair.instruction or INSTRUCTION
        task = f"<Instruct>: {instruction}\n<Query>: {pair.query}\n<Document>: {document}"
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": task}]
        return ChatPrompt(messages, template_kwargs={"enable_thinking": False})

    def _vocabulary_pair(self, query: str, document: str) -> EncodedPair:
        (encoding,) = self._vocabulary.backend.encode_batch_fast([(query, document)])
        types = encoding.type_ids
        return EncodedPair(encoding.ids, types.index(1) if 1 in types else 0)
