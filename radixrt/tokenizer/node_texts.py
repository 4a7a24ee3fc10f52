"""Keeps the texts of nodes of the radix tree: views of a server repeat each other."""

import sys

from radixrt.messages.ids import PackedIds, unpack_ids
from radixrt.tokenizer.prompt.kept_answers import TokenMemory
from radixrt.tokenizer.vocabulary import Vocabulary

CAPACITY_BYTES = 4 << 20
"""Most memory, as for some 5,000 nodes."""


class NodeTexts:
    """The texts of the first tokens of nodes. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, max_bytes: int) -> None:
        self._vocabulary = vocabulary
        self._memory: TokenMemory[str] = TokenMemory(min(CAPACITY_BYTES, max_bytes))

    def text_of(self, token_ids: PackedIds) -> str:
        """The text of a node's first tokens."""
        text = self._memory.find(token_ids)
        if text is None:
            text = self._vocabulary.decode(unpack_ids(token_ids).tolist())
            self._memory.keep(token_ids, text, len(token_ids) + sys.getsizeof(text))
        return text
