"""Keeps loaded tokenizers in the user's cache, with the facts about them that take long to find.

Of 262,144 tokens, transformers takes 2.4 s to load a tokenizer, the ``tokenizers`` library 0.7 s.
An entry of the cache holds what transformers has made of a checkpoint's files. Its name is a hash
of these files and of the versions of both libraries.
"""

import functools
import hashlib
import importlib.metadata
import inspect
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import orjson
import tokenizers
from tokenizers import Tokenizer
from tokenizers.models import BPE

from radixrt.base.token_bytes import load_tokenizer
from radixrt.base.user_cache import drop_oldest, sealed, unsealed, user_cache
from radixrt.tokenizer.prompt import template_sandbox
from radixrt.tokenizer.prompt.segments import SegmentRules

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
        """Raises:
        Exception: the file is damaged.
        """
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
