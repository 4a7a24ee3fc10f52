"""A checkpoint's tokenizer: encodes text, and knows the bytes of each token."""

import functools
import hashlib
import importlib.metadata
import inspect
import itertools
import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import orjson
import tokenizers
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.tags import Symbols, tag_symbols, token_symbols
from radixrt.base.token_bytes import SavedTokens, TokenBytes, TokenBytesTable, load_tokenizer
from radixrt.base.user_cache import drop_oldest, sealed, unsealed, user_cache
from radixrt.tokenizer import tiktoken_file
from radixrt.tokenizer.limits import Limits
from radixrt.tokenizer.prompt import template_sandbox
from radixrt.tokenizer.prompt.segments import (
    CheckLength,
    SegmentEncoder,
    SegmentRules,
    any_length,
)

log = logging.getLogger(__name__)

_FORM = 3
"""Raised whenever the content of the entries changes, or the code that finds it."""
_MAX_ENTRIES = 32
_FEWEST_TOKENS = 1 << 14
"""Fewest tokens of a tokenizer that is kept; smaller ones are loaded in a moment."""
_READ = {".json", ".jinja", ".model", ".txt"}
"""Endings of the files that transformers may read for a tokenizer."""
_TOKENIZER, _FACTS = "tokenizer.json", "facts.msgpack"


class Facts(msgspec.Struct, frozen=True):
    """What is known of a tokenizer beside its tokenizer.json."""

    chat_template: str | dict[str, str] | None
    special_names: dict[str, str]
    """The variables of chat templates for special tokens, such as ``bos_token``."""
    bos_id: int | None
    segment_rules: SegmentRules
    longest_token: int
    """Length in characters."""
    token_ends: bytes
    """The ends of ``TokenBytesTable``; with ``token_data`` the bytes of all tokens."""
    token_data: bytes


class CachedTokenizer:
    """Stands for the transformers tokenizer. Its first chat imports transformers, which other
    prompts need not wait for."""

    def __init__(self, file: Path, facts: Facts) -> None:
        """Raises Exception if the file is damaged."""
        self.file = file
        """tokenizer.json."""
        self.facts = facts
        self.backend_tokenizer = load_tokenizer(file)
        self.bos_token_id = facts.bos_id
        self.chat_template = facts.chat_template

    @functools.cached_property
    def renderer(self) -> Any:
        """A transformers tokenizer for chat templates only."""
        return _renderer(self.facts.special_names)

    def copy_to(self, file: Path) -> bool:
        """Copy tokenizer.json. Returns False if another start has removed it from the cache."""
        try:
            shutil.copyfile(self.file, file)
        except FileNotFoundError:
            return False
        return True

    def apply_chat_template(self, *args: Any, **settings: Any) -> Any:
        """Apply the template as transformers does."""
        self.renderer.chat_template = self.chat_template  # one of several depends on the tools
        return self.renderer.apply_chat_template(*args, **settings)


def entry_of(folder: Path) -> Path | None:
    """The cache's folder for the tokenizer of a checkpoint; it may not exist yet. None if there can
    be none."""
    try:
        return user_cache("tokenizers") / _digest_of(folder)
    except OSError as error:
        log.info("The tokenizer is not kept for the next start: %s", error)
        return None


def _digest_of(folder: Path) -> str:
    digest = hashlib.sha256(
        f"{_FORM} {tokenizers.__version__} {importlib.metadata.version('transformers')}".encode()
    )
    for file in sorted([*folder.glob("*"), *folder.glob("additional_chat_templates/*")]):
        if file.suffix in _READ and file.is_file():
            with file.open("rb") as content:
                content_digest = hashlib.file_digest(content, "sha256").hexdigest()
            digest.update(f" {file.relative_to(folder)} {content_digest}".encode())
    return digest.hexdigest()[:32]


def read_entry(entry: Path) -> CachedTokenizer | None:
    """The tokenizer of an entry; None if there is none that can be read."""
    try:
        facts = msgspec.msgpack.decode(unsealed((entry / _FACTS).read_bytes()), type=Facts)
        return CachedTokenizer(entry / _TOKENIZER, facts)
    except FileNotFoundError:
        return None
    except Exception as error:  # tokenizers raises bare Exception
        log.warning("Ignored %s, which cannot be read: %s", entry, error)
        return None


def write_entry(entry: Path, hf: Any, facts: Facts) -> None:
    """Keep a tokenizer of transformers, unless it is small, has a way of its own, or the cache
    cannot be written."""
    from transformers import PreTrainedTokenizerBase

    if (
        hf.backend_tokenizer.get_vocab_size() < _FEWEST_TOKENS
        or type(hf).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
        or _renderer(facts.special_names).special_tokens_map != facts.special_names
        or hf.backend_tokenizer.encode_special_tokens  # tokenizer.json does not tell
    ):
        return
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=entry.parent))
        try:
            (made / _TOKENIZER).write_bytes(_with_short_merges(hf.backend_tokenizer.to_str()))
            (made / _FACTS).write_bytes(sealed(msgspec.msgpack.encode(facts)))
            shutil.rmtree(entry, ignore_errors=True)  # a damaged one
            made.rename(entry)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        drop_oldest(entry.parent, _MAX_ENTRIES)
    except OSError as error:
        log.info("The tokenizer is not kept for the next start: %s", error)


def _with_short_merges(tokenizer_json: str) -> bytes:
    """Write each merge as one string, the older form, which is read in three quarters of the time,
    unless a token would be misread in it."""
    content = orjson.loads(tokenizer_json)
    merges = content["model"].get("merges") or []
    if not any(" " in part or part.startswith("#version") for merge in merges for part in merge):
        content["model"]["merges"] = [" ".join(merge) for merge in merges]
    return orjson.dumps(content)


@functools.cache
def template_parameters() -> frozenset[str]:
    """Names that a request's own variables of a chat template must not have."""
    from transformers import PreTrainedTokenizerBase

    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset(parameters) - {"kwargs"}


def _renderer(special_names: dict[str, str]) -> Any:
    import transformers

    template_sandbox.install()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), **special_names)


IMAGE_TEXT = "[image]"
"""Stands for an image where prompts are shown."""

KEPT_WORDS = 4000
"""Words whose tokens the tokenizers library keeps, in each thread that encodes; it never replaces
them. A word takes some 32 bytes for each of its letters, of which it has at most 256. The library's
default is 10,000: up to 84 MB for each thread, and hours until they have come together. Text whose
words are kept is encoded in half the time (measured with Gemma's vocabulary: 0.16 instead of 0.34
µs a character; 4,000 are enough for all pages of docs/, 3,000 are not)."""

CUT_CHARS_PER_TOKEN, CUT_MARGIN = 8, 64
"""A text that is cut off is encoded up to this number of characters a token first, and further if
that gives fewer tokens than are wanted and the margin. The last tokens depend on the text behind
them."""

MAX_THREADS = 4
"""Most threads in which the library encodes the parts of a text, so that a machine of many cores
does not keep the words for each."""


class Vocabulary:
    """A checkpoint's tokenizer: encoding, and the bytes behind each token.

    Attributes:
        hf: the transformers tokenizer, or one from the cache that stands for it: for its chat
            template.
        backend: the ``tokenizers`` tokenizer that does the work.
        special_tokens: the control tokens, by id.
        special_ids: their ids.
        segments: encodes chats, with a cache of encoded messages.
        longest_token: length in characters of the longest token, at most.
    """

    def __init__(self, hf: Any) -> None:
        """
        Args:
            hf: of transformers, or from the cache with its facts.
        """
        self.hf = hf
        facts: Facts | None = getattr(hf, "facts", None)
        self.backend: Tokenizer = hf.backend_tokenizer
        if isinstance(self.backend.model, BPE | Unigram):  # others keep no words
            self.backend.model._resize_cache(KEPT_WORDS)  # ahead of the first text
        self.backend.no_truncation()
        self.backend.no_padding()
        added = self.backend.get_added_tokens_decoder()
        self.special_tokens = {i: token for i, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_tokens)
        self._bos_id: int | None = hf.bos_token_id
        self._token_bytes = TokenBytes(self.backend)
        self._known_bytes: TokenBytesTable | None = None
        if facts is None:
            rules = SegmentRules.from_tokenizer(self.backend, list(self.special_tokens.values()))
            self.longest_token = max(map(len, self.backend.get_vocab()), default=1)
        else:
            rules, self.longest_token = facts.segment_rules, facts.longest_token
            self._known_bytes = TokenBytesTable(facts.token_ends, facts.token_data)
        self.segments = SegmentEncoder(self.backend, rules)

    @staticmethod
    def load(config: ServerConfig) -> "Vocabulary":
        """Load the tokenizer of a checkpoint; both paths of the config are folders by now.

        Raises:
            ConfigError: there is none, or it is of a kind that can't be used.
        """
        path = config.tokenizer_path or config.model_path
        if not Path(path).is_dir():
            raise ConfigError(f"There is no folder {path} to load a tokenizer from.")
        entry = None if config.trust_remote_code else entry_of(Path(path))  # code may read any file
        hf = None if entry is None else read_entry(entry)
        try:
            if hf is None:
                hf = _load(Path(path), config.trust_remote_code)
        except ConfigError:
            raise
        except Exception as error:  # transformers raises many kinds
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"Can't load a tokenizer from {path} (is there a tokenizer.json? --tokenizer-path can name another "
                f"folder): {reason}"
            ) from error
        if not isinstance(getattr(hf, "backend_tokenizer", None), Tokenizer):
            raise ConfigError(
                f"The tokenizer in {path} ({type(hf).__name__}) has no tokenizer.json form, which radixrt needs; "
                "convert it with transformers' convert_slow_tokenizer or name another with --tokenizer-path."
            )
        vocabulary = Vocabulary(hf)
        if not isinstance(hf, CachedTokenizer):
            template_sandbox.install()
            if entry is not None:
                write_entry(entry, hf, vocabulary._facts())
        if config.chat_template is not None:
            hf.chat_template = _read_template(Path(config.chat_template))
            _check_syntax(hf, config.chat_template)
        return vocabulary

    def _facts(self) -> Facts:
        self.learn_token_bytes()
        assert self._known_bytes is not None
        return Facts(
            chat_template=self.hf.chat_template,
            special_names=self.hf.special_tokens_map,
            bos_id=self._bos_id,
            segment_rules=self.segments.rules,
            longest_token=self.longest_token,
            token_ends=self._known_bytes.ends.tobytes(),
            token_data=self._known_bytes.data,
        )

    def save(self, file: Path) -> None:
        """Write the tokenizer.json, and the tokens beside it if they are known. Other processes may
        read the files meanwhile."""
        if (known := self._known_bytes) is not None:
            SavedTokens(tuple(self.special_ids), known.ends.tobytes(), known.data).save(file)
        written = file.with_suffix(".new")
        if not (isinstance(self.hf, CachedTokenizer) and self.hf.copy_to(written)):
            written.write_text(self.backend.to_str(), encoding="utf-8")
        written.replace(file)

    def prepare_chats(self) -> None:
        """Import what the first chat needs, so that it need not wait."""
        if isinstance(self.hf, CachedTokenizer) and self.hf.chat_template:
            self.hf.renderer  # noqa: B018 (made on first use)

    def encode(
        self, text: str, add_special_tokens: bool, check_length: CheckLength = any_length
    ) -> list[int]:
        """Token ids of a text in which special tokens count as such. A text that already begins
        with the beginning-of-sequence token does not get a second one.

        Args:
            check_length: gets the number of tokens before they are copied.
        """
        ids = encode_aside(self.backend, text, add_special_tokens, check_length)
        return ids[self.surplus_at_start(ids) :] if add_special_tokens else ids

    def surplus_at_start(self, ids: Sequence[int]) -> int:
        """1 where a text begins with a beginning-of-sequence token, and the tokenizer has added
        another; else 0."""
        return int(len(ids) > 1 and ids[0] == ids[1] == self._bos_id)

    def encode_cut(self, text: str, add_special_tokens: bool, max_tokens: int) -> list[int]:
        """The same as :meth:`encode`, with the end of the text cut off beyond ``max_tokens``;
        special tokens behind it stay."""
        end = CUT_CHARS_PER_TOKEN * (max_tokens + CUT_MARGIN)
        longest = max_tokens * self.longest_token
        while True:
            part = text[: min(end, longest)]
            (encoding,) = self.backend.encode_batch_fast([part], add_special_tokens=False)
            if len(encoding) > max_tokens + CUT_MARGIN or end >= min(len(text), longest):
                break
            end *= 4
        added = self.backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        encoding.truncate(max(0, max_tokens - added))
        ids: list[int] = self.backend.post_process(encoding, None, add_special_tokens).ids
        return ids

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of a text, and where in it, in characters, each of them ends."""
        return encode_aside_with_ends(self.backend, text)

    def check_text(self, text: str, limits: Limits) -> None:
        """:meth:`Limits.check_text` with the tokens of this vocabulary, whose ids are not copied."""

        def num_tokens(piece: str) -> int:
            (encoding,) = self.backend.encode_batch_fast([piece], add_special_tokens=False)
            return len(encoding)

        limits.check_text(text, self.longest_token, num_tokens)

    def single_tokens(self, *words: str) -> tuple[int, ...]:
        """The ids of words that are one token each; nothing if one of them is not."""
        ids = [encode_aside(self.backend, word, False) for word in words]
        return tuple(one for (one,) in ids) if all(len(one) == 1 for one in ids) else ()

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of texts that an answer must not contain: of each text without spaces
        at its beginning, and of the same behind one space, unless that ends with the first."""
        texts = [word.lstrip(" ") or word for word in words]
        both = [text for word in texts for text in (word, f" {word}")]
        found = self.backend.encode_batch_fast(both, add_special_tokens=False)
        ids = [tuple(one.ids) for one in found]
        sequences = [
            one
            for bare, spaced in zip(ids[::2], ids[1::2], strict=True)
            for one in ((bare,) if spaced[-len(bare) :] == bare else (bare, spaced))
            if one
        ]
        return tuple(dict.fromkeys(sequences))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids; of ids that stand for an image, ``IMAGE_TEXT``."""
        if min(ids, default=0) < 0:
            runs = itertools.groupby(ids, lambda one: one < 0)
            return "".join(
                IMAGE_TEXT if is_image else self.decode(list(run), skip_special_tokens)
                for is_image, run in runs
            )
        texts: list[str] = self.backend.decode_batch(
            [list(ids)], skip_special_tokens=skip_special_tokens
        )  # unlike decode, it releases the GIL
        return texts[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; b"" for an id without a token."""
        found = None if self._known_bytes is None else self._known_bytes.bytes_of(token_id)
        return self._token_bytes.bytes_of(token_id) if found is None else found

    def symbols_of(self, token_id: int) -> Symbols:
        """What a token adds to the text, as tags are compared."""
        text = self.token_bytes(token_id)
        return token_symbols(token_id, text, is_control=token_id in self.special_ids)

    def tag_symbols(self, token_ids: Sequence[int]) -> Symbols:
        """The symbols of a tag that is encoded so."""
        return tag_symbols(token_ids, self.symbols_of)

    def learn_token_bytes(self) -> None:
        """Find the bytes of all tokens, in some tenths of a second, so that :meth:`token_bytes` is
        quick for many of them."""
        if self._known_bytes is None:
            ids = range(1 + max(self.backend.get_vocab().values(), default=-1))
            self._known_bytes = TokenBytesTable.from_tokens(map(self._token_bytes.bytes_of, ids))


def encode_aside(
    tokenizer: Tokenizer,
    text: str,
    add_special_tokens: bool,
    check_length: CheckLength = any_length,
) -> list[int]:
    """Token ids of a text. Other threads run meanwhile: ``Tokenizer.encode`` would hold the GIL
    (0.7 s for a megabyte), the batch methods release it. Offsets are not used and not computed."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    check_length(len(encoding))
    ids: list[int] = encoding.ids
    return ids


def encode_aside_with_ends(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """The same as :func:`encode_aside`, no special tokens added; with the character at which each
    token ends."""
    (encoding,) = tokenizer.encode_batch([text], add_special_tokens=False)
    return encoding.ids, [end for _, end in encoding.offsets]


_NO_PARTICULAR_CLASS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names of the same class: transformers 4 and transformers 5 write them."""


def _load(folder: Path, trust_remote_code: bool) -> Any:
    """The tokenizer as transformers has it. A checkpoint whose tokenizer is of no particular class
    is spared AutoTokenizer, which imports torch and reads the model's config to find out: two
    seconds.
    """
    import transformers

    settings = folder / "tokenizer_config.json"
    named = orjson.loads(settings.read_bytes()) if settings.is_file() else {}
    if named.get("tokenizer_class") in _NO_PARTICULAR_CLASS and "auto_map" not in named:
        return transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    if (folder / tiktoken_file.FILE).is_file() and not (folder / _TOKENIZER).is_file():
        return tiktoken_file.read_tiktoken(folder, named)
    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Can't read the chat template {path}: {error}") from error


def _check_syntax(hf: Any, path: str) -> None:
    """Raises ConfigError if the template is not valid Jinja. Its other errors depend on the
    messages."""
    try:
        template_sandbox.check_syntax(hf.chat_template)
        return
    except jinja2.TemplateError:
        pass  # it may use a tag of transformers
    try:
        with template_sandbox.bounded():
            hf.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"--chat-template {path}, line {error.lineno}: {error.message}"
        ) from error
    except Exception:
        return
