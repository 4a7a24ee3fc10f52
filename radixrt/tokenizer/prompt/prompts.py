"""Encodes prompts of all forms into token ids."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from radixrt.base.errors import RequestError
from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.messages.ids import PackedIds, num_ids, pack_ids, unpack_ids
from radixrt.messages.images import ImageRun
from radixrt.messages.prompt_images import images_of, with_images
from radixrt.messages.requests import (
    ChatPrompt,
    FimPrompt,
    PairPrompt,
    Prompt,
    Retention,
    TextPrompt,
    TokenPrompt,
)
from radixrt.tokenizer.explain.records import ChatLayout
from radixrt.tokenizer.images.places import ImagePlacer, Tile
from radixrt.tokenizer.images.processed_image import ProcessedImage
from radixrt.tokenizer.images.spread import AS_THEY_ARE, Spread
from radixrt.tokenizer.limits import Limits
from radixrt.tokenizer.prompt.chat_template import (
    ChatTemplate,
    RenderedChat,
)
from radixrt.tokenizer.prompt.fill_in_middle import FillInMiddle
from radixrt.tokenizer.prompt.kept_turns import OpenTurn
from radixrt.tokenizer.prompt.settled import SettledEncoder
from radixrt.tokenizer.vocabulary import Vocabulary

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Qwen3-Reranker's default."""

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_ROLE = re.compile(r"""(["'])(query|document)\1""")
_MAX_CUTS = 4


KEPT_BYTES_PER_TOKEN = 64
"""Most memory of each kind of kept parts (turns, answers, encoded messages, prompts, texts of
nodes), for each token of the KV pool. That is 16 times the pool in token ids: of older parts the KV
is gone, and most of what they could save with it."""


class EncodedPrompt(NamedTuple):
    text: str | None
    """None if it came in tokens."""
    token_ids: list[int]
    second_segment_start: int = 0
    """Position of the first token of a pair's second text, for models that tell them apart; else
    0."""
    retain: Sequence[Retention] = ()
    """The retention for its cache breakpoints."""
    turn: OpenTurn | None = None
    """Keeps the answer to a chat whose later requests are to repeat it."""
    key_ids: PackedIds = b""
    """The ids by which prefixes are compared, in place of the first token_ids."""
    images: Sequence[ImageRun] = ()
    """The places of images."""
    pictures: Sequence[ProcessedImage] = ()
    """The images themselves."""
    layout: ChatLayout | None = None
    """The places of a chat's messages; None where special tokens in the messages hide them."""
    messages_end: int = 0
    """Tokens of a chat up to the end of its last message, before the generation prompt; 0: it is
    not known."""

    @property
    def keys(self) -> PackedIds:
        """The ids by which prefixes are compared, one for each of token_ids."""
        return self.key_ids + pack_ids(self.token_ids)[len(self.key_ids) :]


class PairEncoder:
    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate) -> None:
        self._vocabulary = vocabulary
        self._template = template
        named = _ROLE.findall(str(vocabulary.hf.chat_template))  # there may be several
        self._takes_roles = {role for _, role in named} == {"query", "document"}

    def encode(self, pair: PairPrompt, limits: Limits, root: CacheRoot) -> EncodedPrompt:
        """Raises RequestError if the texts are far too long, or the chat template refuses them."""
        document, limit = pair.document, pair.max_tokens
        self._vocabulary.check_text(pair.query, limits)
        if pair.max_document_tokens is not None:
            document = self._beginning(document, pair.max_document_tokens)
        if limit is None:
            self._vocabulary.check_text(document, limits)
            return self._join(pair, document, limits, root)
        document = document[: limit * self._vocabulary.longest_token]
        for _ in range(_MAX_CUTS):  # tokens may join differently where the text is cut
            encoded = self._join(pair, document, limits, root)
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

    def _join(
        self, pair: PairPrompt, document: str, limits: Limits, root: CacheRoot
    ) -> EncodedPrompt:
        if not self._vocabulary.hf.chat_template:
            return self._vocabulary_pair(pair.query, document)
        chat = self._template.render(self._chat(pair, document), root, limits.call_tokens)
        _, ids, _, _ = self._template.encode(chat, root, limits.check_num_tokens)
        return EncodedPrompt(None, ids)

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

    def _vocabulary_pair(self, query: str, document: str) -> EncodedPrompt:
        (encoding,) = self._vocabulary.backend.encode_batch_fast([(query, document)])
        types = encoding.type_ids
        return EncodedPrompt(None, encoding.ids, types.index(1) if 1 in types else 0)


class PromptEncoder:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._template = ChatTemplate(vocabulary)
        self._placer: ImagePlacer | None = None
        self._why_no_images = ""
        self.fill_in_middle = FillInMiddle(vocabulary)
        self._pairs = PairEncoder(vocabulary, self._template)
        self.settled = SettledEncoder(vocabulary, self._template)

    def serve_images(self, placer: ImagePlacer | None, why_not: str) -> None:
        """Take images in chats from now on; without a placer they are refused for a reason."""
        self._placer, self._why_no_images = placer, why_not

    def prepare_images(self) -> None:
        """Load what the first image needs, so that it need not wait."""
        if self._placer is not None:
            self._placer.prepare()

    def limit_memory(self, max_bytes: int) -> None:
        """Bound the memory of each kind of kept parts of prompts. Call it before the first
        prompt."""
        segments = self._vocabulary.segments
        for memory in (segments.memory, segments.answers.memory, self._template.turns.memory):
            memory.limit(max_bytes)

    def encode(self, prompt: Prompt, limits: Limits, root: CacheRoot = BASE_ROOT) -> EncodedPrompt:
        """The prompt as text and as token ids.

        Args:
            root: messages that were encoded before with the same root are not encoded again.

        Raises:
            RequestError: it is empty, far too long, not text, or refused by the chat template.
        """
        encoded = self._encode(prompt, limits, root)
        # a tokenizer may know tokens that its model does not
        limits.check_token_ids(np.array(encoded.token_ids))
        return encoded

    def _encode(self, prompt: Prompt, limits: Limits, root: CacheRoot) -> EncodedPrompt:
        vocabulary, check_length = self._vocabulary, limits.check_num_tokens
        match prompt:
            case TokenPrompt():
                return self._encode_tokens(prompt, limits)
            case TextPrompt(text=""):
                raise RequestError("The prompt is empty; give at least one token.", param="prompt")
            case TextPrompt(text, add, int(limit)):
                return EncodedPrompt(text, vocabulary.encode_cut(text, add, limit))
            case TextPrompt(text, add):
                vocabulary.check_text(text, limits)
                return EncodedPrompt(text, vocabulary.encode(text, add, check_length))
            case FimPrompt():
                files = (text for _, text in prompt.files)
                whole = "".join((prompt.prefix, prompt.suffix, prompt.middle, *files))
                vocabulary.check_text(whole, limits)
                return EncodedPrompt(None, self.fill_in_middle.encode(prompt, check_length))
            case PairPrompt():
                return self._pairs.encode(prompt, limits, root)
            case ChatPrompt():
                return self._encode_chat(prompt, limits, root)

    def _encode_chat(self, prompt: ChatPrompt, limits: Limits, root: CacheRoot) -> EncodedPrompt:
        if images := images_of(prompt):
            return self._encode_chat_with_images(prompt, images, limits, root)
        return self._encode_rendered(prompt, self._render(prompt, limits, root), limits, root)

    def _encode_chat_with_images(
        self, prompt: ChatPrompt, images: list[dict[str, Any]], limits: Limits, root: CacheRoot
    ) -> EncodedPrompt:
        placer = self._image_placer()
        pictures = placer.process(images, limits.context_length)
        digests = ({"type": "image", "digest": one.key.hex()} for one in pictures)
        prompt = with_images(prompt, digests)
        chat = placer.place(self._render(prompt, limits, root), pictures)
        tiles = placer.tiles(pictures)
        encoded = self._encode_rendered(prompt, chat, limits, root, placer.spread(tiles))
        placed = _with_pictures(encoded, placer, pictures, tiles)
        if placed is None:
            raise RequestError(
                "An earlier answer of this conversation holds the model's token for images; leave that answer out.",
                param="messages",
            )
        return placed

    def _encode_tokens(self, prompt: TokenPrompt, limits: Limits) -> EncodedPrompt:
        encoded = EncodedPrompt(None, unpack_ids(prompt.token_ids).tolist())
        if not prompt.images:
            return encoded
        placer = self._image_placer()
        pictures = placer.process(prompt.images, limits.context_length)
        placed = _with_pictures(encoded, placer, pictures, placer.tiles(pictures))
        if placed is None:
            raise _misplaced(prompt.images, pictures)
        return placed

    def _image_placer(self) -> ImagePlacer:
        if self._placer is None:
            raise RequestError(self._why_no_images, param="messages", code="no_images")
        return self._placer

    def _render(self, prompt: ChatPrompt, limits: Limits, root: CacheRoot) -> RenderedChat:
        chat = self._template.render(prompt, root, limits.call_tokens)
        self._vocabulary.check_text(chat.text, limits)
        return chat

    def _encode_rendered(
        self,
        prompt: ChatPrompt,
        chat: RenderedChat,
        limits: Limits,
        root: CacheRoot,
        spread: Spread = AS_THEY_ARE,
    ) -> EncodedPrompt:
        text, ids, lengths, segments = self._template.encode(
            chat, root, limits.check_num_tokens, spread
        )
        retain = [
            Retention("high", length, breakpoint.ttl_s)
            for breakpoint, length in zip(prompt.cache_breakpoints, lengths, strict=True)
            if length
        ]
        layout = ChatLayout.from_prompt(prompt, segments, chat.spans) if segments else None
        end = self._template.messages_end(chat, len(ids))
        return EncodedPrompt(text, ids, 0, retain, chat.turn, layout=layout, messages_end=end)


def size_in_chars(prompt: Prompt) -> int:
    """Estimated size of the text to encode, in characters."""
    match prompt:
        case TokenPrompt():
            return num_ids(prompt.token_ids) + sum(map(_json_size, prompt.images))
        case TextPrompt():
            return len(prompt.text)
        case PairPrompt():
            return len(prompt.query) + len(prompt.document)
        case FimPrompt():
            texts = (text for _, text in prompt.files)
            return sum(map(len, (prompt.prefix, prompt.suffix, prompt.middle, *texts)))
        case ChatPrompt():
            return sum(map(_json_size, (prompt.messages, prompt.tools, prompt.template_kwargs)))


def shows_images(*prompts: Prompt) -> bool:
    """Whether a prompt has images."""
    return any(map(images_of, prompts))


def _with_pictures(
    encoded: EncodedPrompt,
    placer: ImagePlacer,
    pictures: list[ProcessedImage],
    tiles: list[Tile],
) -> EncodedPrompt | None:
    """A prompt with images in the place of its placeholders; None: these are not theirs."""
    ids = np.array(encoded.token_ids, dtype=np.int32)
    runs = placer.runs(ids, tiles)
    if runs is None:
        return None
    keys = pack_ids(placer.key_ids(ids, runs, tiles))
    return encoded._replace(key_ids=keys, images=runs, pictures=pictures)


def _misplaced(images: list[dict[str, Any]], pictures: list[ProcessedImage]) -> RequestError:
    """The error of tokens without the placeholders of their images."""
    counts = ", ".join(str(one.num_tokens) for one in pictures)
    message = f"The prompt's placeholders are not those of its images, which have {counts}."
    for number, (part, one) in enumerate(zip(images, pictures, strict=True), 1):
        key = one.key.hex()
        if (expected := part.get("digest", key)) != key:
            message += f" Image {number} has the digest {key[:12]}, not {expected[:12]}: another file, processor or tower."
    return RequestError(message, param="prompt", code="invalid_image")


def _json_size(value: object) -> int:
    match value:
        case str():
            return len(value)
        case list():
            return sum(map(_json_size, value))
        case dict():
            return sum(map(_json_size, value.values()))
    return 0
