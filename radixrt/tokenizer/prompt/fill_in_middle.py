"""Writes prompts for filling in the middle (FIM): text before and behind a gap, in the order in
which the model was trained.

The model's family is recognised from the control tokens of its vocabulary.
"""

import dataclasses
import functools

from tokenizers import Tokenizer

from radixrt.base.errors import RequestError
from radixrt.messages.requests import FimPrompt
from radixrt.tokenizer.prompt.breakpoints import Literals
from radixrt.tokenizer.prompt.segments import CheckLength, any_length
from radixrt.tokenizer.vocabulary import Vocabulary, encode_aside


@dataclasses.dataclass(frozen=True)
class FimFormat:
    """The tokens of one family. The order is prefix, suffix, middle unless ``middle`` is empty:
    then suffix, prefix."""

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()
    """Tokens behind the middle, beside the model's own end tokens."""
    repository: str = ""
    file: str = ""
    """Begins a file of the repository; empty: there is no such token."""

    @property
    def tokens(self) -> set[str]:
        """All that it names."""
        named = {self.prefix, self.suffix, self.middle, *self.ends, self.repository, self.file}
        return named - {""}


FORMATS = (
    FimFormat(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
        "<|repo_name|>",
        "<|file_sep|>",
    ),  # Qwen Coder, CodeGemma
    FimFormat(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<fim_pad>", "<repo_name>", "<file_sep>", "<|endoftext|>"),
        "<repo_name>",
        "<file_sep>",
    ),  # StarCoder, Granite
    FimFormat(
        "<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"
    ),  # DeepSeek Coder
    FimFormat("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # Code Llama
    FimFormat("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)

_SNIPPET = "\n\n--- snippet ---\n\n"
_INNER = "☺"
"""Stands before a text that must not begin with the space that some tokenizers add (as in Code
Llama's own code)."""


class FillInMiddle:
    """Encodes FIM prompts for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        named = {string for form in FORMATS for string in form.tokens}
        found_ids = {string: vocabulary.backend.token_to_id(string) for string in named}
        known = {string: i for string, i in found_ids.items() if i is not None}
        found = (f for f in FORMATS if all(t in known for t in (f.prefix, f.suffix, f.middle) if t))
        self._format = next(found, None)
        self._ids = known
        self._adds_space = vocabulary.backend.encode("a", add_special_tokens=False).tokens[0] != "a"
        strings = [token.content for token in vocabulary.special_tokens.values()]
        self._special = Literals(strings) if strings else None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end the middle, beside the model's own end tokens."""
        ends = () if self._format is None else self._format.ends
        return tuple(self._ids[end] for end in ends if end in self._ids)

    def encode(self, prompt: FimPrompt, check_length: CheckLength = any_length) -> list[int]:
        """Token ids; special tokens in the texts count as text.

        Raises:
            RequestError: the model has no FIM tokens.
        """
        form = self._format
        if form is None:
            raise RequestError(
                "This model can't fill in the middle: its vocabulary has no FIM tokens. Leave suffix out, or serve a model "
                "that was trained for it, such as Qwen Coder, StarCoder, Code Llama, DeepSeek Coder or Codestral.",
                param="suffix",
            )
        begin = self._vocabulary.encode("", prompt.add_special_tokens)
        files = self._files(prompt, form, check_length)
        prefix = [self._ids[form.prefix], *self._text(prompt.prefix, check_length)]
        suffix = [self._ids[form.suffix], *self._inner(prompt.suffix, check_length)]
        if not form.middle:
            return [*begin, *files, *suffix, *prefix, *self._inner(prompt.middle, check_length)]
        middle = [self._ids[form.middle], *self._inner(prompt.middle, check_length)]
        return [*begin, *files, *prefix, *suffix, *middle]

    def _files(self, prompt: FimPrompt, form: FimFormat, check_length: CheckLength) -> list[int]:
        """Other files, before the one with the gap. Their form is llama.cpp's."""
        ids: list[int] = []
        if not prompt.files:
            return ids
        if form.file not in self._ids or form.repository not in self._ids:
            return [
                i for _, text in prompt.files for i in self._text(_SNIPPET + text, check_length)
            ]
        repository, file = self._ids[form.repository], self._ids[form.file]
        ids += [repository, *self._text("myproject\n")]
        for name, text in prompt.files:
            ids += [file, *self._text(f"{name}\n{text}", check_length)]
        return [*ids, file, *self._text("filename\n")]

    def _inner(self, text: str, check_length: CheckLength = any_length) -> list[int]:
        """A text that goes on from another one."""
        mark = self._text(_INNER)
        if not text or not self._adds_space:
            return self._text(text, check_length)
        ids = self._text(_INNER + text, check_length)
        return ids[len(mark) :] if ids[: len(mark)] == mark else self._text(text, check_length)

    def _text(self, text: str, check_length: CheckLength = any_length) -> list[int]:
        has_special = self._special is not None and next(self._special.finditer(text), None)
        tokenizer = self._inert if has_special else self._vocabulary.backend
        return encode_aside(tokenizer, text, False, check_length)

    @functools.cached_property
    def _inert(self) -> Tokenizer:
        """A copy of the tokenizer that reads special tokens as text."""
        tokenizer = Tokenizer.from_str(self._vocabulary.backend.to_str())
        tokenizer.encode_special_tokens = True
        return tokenizer
