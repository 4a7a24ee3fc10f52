"""Encodes chats by segments, and keeps the token ids of segments that it has encoded.

A special token splits the text: the text between two of them is encoded independently of the rest.
So the ids of such a segment (usually a message) are kept, and the next request of a chat encodes
only its new messages. A tokenizer takes about a second for a megabyte of text, far longer than a
cached prefix takes in the model. Earlier answers of the model keep the tokens that it generated.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import chain, compress, pairwise, product
from typing import NamedTuple

import msgspec
import numpy as np
from tokenizers import AddedToken, Tokenizer

from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.messages.ids import TokenIds
from radixrt.tokenizer.prompt.breakpoints import Literals
from radixrt.tokenizer.prompt.kept_answers import KeptAnswer, KeptAnswers, TokenMemory, text_digest

SHORTEST_KEPT = 256
"""Characters; shorter segments are encoded about as quickly as they are found."""

CAPACITY_BYTES = 64 << 20

_PROBES = ("Hello world", " two  spaces ", "\n\nline\n", "ä€😀", "1234 {}", "▁x", "")


CheckLength = Callable[[int], None]
"""Raises a RequestError if a prompt of this number of tokens is too long. Copying the tokens of a
text that no context could hold would take tenths of a second, in which nothing else runs."""


def any_length(num_tokens: int) -> None:
    """No length is too long."""


class Segment(NamedTuple):
    """A piece of a text: a special token and the text after it, up to the next special token."""

    start: int
    """The place where it begins, in characters."""
    text: str
    ids: TokenIds
    is_answer: bool = False
    """Its ids are those that the model generated; the tokenizer might choose others."""


class SegmentRules(msgspec.Struct, frozen=True):
    """The places where a tokenizer's texts may be cut. Found by encoding examples: half a second
    for Gemma's 6,249 control tokens."""

    beginnings: list[str]
    """The special tokens at which segments begin."""
    joins_anywhere: bool
    """Whether a text that is cut anywhere and encoded in two parts decodes to the same text."""

    @staticmethod
    def from_tokenizer(
        tokenizer: Tokenizer, special_tokens: Sequence[AddedToken]
    ) -> "SegmentRules":
        return SegmentRules(_beginnings(tokenizer, special_tokens), _joins_anywhere(tokenizer))


class SegmentEncoder:
    """Encodes texts in which special tokens count as such, and adds none of its own. Safe to use
    from several threads.

    Attributes:
        answers: the model's own answers, which are not encoded anew; the caller adds them.
        rules: where texts are cut.
    """

    def __init__(self, tokenizer: Tokenizer, rules: SegmentRules) -> None:
        self.answers = KeptAnswers()
        self.rules = rules
        self._tokenizer = tokenizer
        self.memory: TokenMemory[TokenIds] = TokenMemory(CAPACITY_BYTES)
        self._begin = Literals(rules.beginnings) if rules.beginnings else None

    def encode(
        self,
        text: str,
        root: CacheRoot = BASE_ROOT,
        answer_ends: Sequence[int] = (),
        check_length: CheckLength = any_length,
    ) -> list[Segment]:
        """The segments of a text, in order; the first one, and one after an answer, may begin
        without a special token.

        Args:
            root: segments are shared only among texts with the same root, so that the time this
                takes reveals nothing about other clients' texts.
            answer_ends: where in the text, beside special tokens, an earlier answer may end.
            check_length: gets the number of tokens that are encoded anew before they are copied.
        """
        found = () if self._begin is None else self._begin.finditer(text)
        starts = {match.start() for match in found}
        ends = starts.union(answer_ends) if self.rules.joins_anywhere else starts
        answers = self.answers.find(text, sorted(ends), root)
        kept = {answer.start: answer.ids for answer in answers}
        bounds = _without_inner(sorted({0, len(text)} | starts), answers)
        pieces = [text[start:end] for start, end in pairwise(bounds)]
        # Only segments that begin with a special token: tokenizers may treat the beginning of a
        # text in their own way.
        keys = [
            text_digest(root, piece).digest()
            if start in starts and start not in kept and len(piece) >= SHORTEST_KEPT
            else None
            for start, piece in zip(bounds, pieces, strict=False)
        ]
        known = [
            kept.get(start) if key is None else self.memory.find(key)
            for start, key in zip(bounds, keys, strict=False)
        ]
        unknown = [piece for piece, ids in zip(pieces, known, strict=True) if ids is None]
        new = iter(self._encode_each(unknown, check_length))
        segments = []
        for start, piece, key, ids_known in zip(bounds, pieces, keys, known, strict=False):
            ids = next(new) if ids_known is None else ids_known
            if ids_known is None and key is not None:
                self.memory.keep(key, ids, ids.nbytes)
            segments.append(Segment(start, piece, ids, start in kept))
        return segments

    def _encode_each(self, pieces: list[str], check_length: CheckLength) -> list[TokenIds]:
        encodings = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        check_length(sum(map(len, encodings)))
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]


def joined(segments: Sequence[Segment]) -> list[int]:
    """The token ids of a whole text."""
    return list(chain.from_iterable(segment.ids.tolist() for segment in segments))


def _without_inner(bounds: list[int], answers: Sequence[KeptAnswer]) -> list[int]:
    """Bounds of segments, those of the answers among them and none inside of one; all ascending."""
    kept: list[int] = []
    position = 0
    for answer in answers:
        kept += bounds[position : bisect_left(bounds, answer.start)]
        kept += (answer.start, answer.end)
        position = bisect_right(bounds, answer.end)
    kept += bounds[position:]
    return sorted(set(kept))


def _beginnings(tokenizer: Tokenizer, special_tokens: Sequence[AddedToken]) -> list[str]:
    """The texts at which segments begin: special tokens that split a text cleanly.

    One that swallows the spaces beside it, or is looked for in the normalized text, does not. Nor
    is any trusted unseen: encoding by segments must give the same ids as encoding at once.
    """
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    hidden = _hidden(added, [token.content for token in special_tokens])
    clean = [
        token.content
        for token in special_tokens
        if not (token.lstrip or token.rstrip or token.normalized or token.single_word)
        and token.content not in hidden
    ]
    return list(compress(clean, _each_splits(tokenizer, clean)))


def _hidden(added: Sequence[str], specials: Sequence[str]) -> set[str]:
    """The special tokens that can begin inside an occurrence of an added one, where the search does
    not find them.

    Gemma has 6,000 of each, so pairs are not compared.
    """
    ordered, firsts = sorted(specials), {special[0] for special in specials}
    rests = {other[at:] for other in added for at in range(1, len(other)) if other[at] in firsts}
    hidden: set[str] = set()
    for rest in rests:
        hidden.update(rest[:end] for end in range(1, len(rest) + 1))
        for special in ordered[bisect_left(ordered, rest) :]:
            if not special.startswith(rest):
                break
            hidden.add(special)
    return hidden


def _each_splits(tokenizer: Tokenizer, specials: list[str]) -> list[bool]:
    """Whether the text before each special token is encoded as if the text ended there."""
    pairs = list(zip(_PROBES, _PROBES[1:] + _PROBES[:1], strict=True))
    texts = [
        text
        for special in specials
        for before, after in pairs
        for text in (before + special + after, before, special + after)
    ]
    encodings = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    verdicts = []
    for _ in specials:
        cases = [(next(encodings).ids, next(encodings).ids, next(encodings).ids) for _ in pairs]
        verdicts.append(all(whole == head + tail for whole, head, tail in cases))
    return verdicts


def _joins_anywhere(tokenizer: Tokenizer) -> bool:
    pairs = list(product(_PROBES, repeat=2))
    encodings = tokenizer.encode_batch_fast(list(_PROBES), add_special_tokens=False)
    ids = dict(zip(_PROBES, (encoding.ids for encoding in encodings), strict=True))
    texts = tokenizer.decode_batch([ids[a] + ids[b] for a, b in pairs], skip_special_tokens=False)
    return texts == [a + b for a, b in pairs]
