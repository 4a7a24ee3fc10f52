"""Sampling parameters of a request: the public class and its validation."""

from typing import Any

import msgspec

from radixrt.base.convert import converted
from radixrt.base.errors import RequestError, shown, wrong
from radixrt.base.settings.peers import FIELDS

MAX_LOGPROBS = 20
"""Most alternatives per token (OpenAI's limit)."""

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 4096
MAX_ALLOWED_TOKEN_IDS = 16384
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_N = 128


class _NamesFields(msgspec.StructMeta):
    """Lets the constructor say which field has the meaning of another engine's."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*args, **fields)
        except TypeError:
            for name in fields.keys() & FIELDS.keys() - {*cls.__struct_fields__}:
                raise TypeError(f"{name} is called {FIELDS[name]}.") from None
            raise


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, metaclass=_NamesFields
):
    """Sampling parameters of one request. By default tokens are sampled at temperature 1.

    >>> params = SamplingParams(max_tokens=16, temperature=0.0, stop=["\\n"]).validate()
    >>> params.is_greedy, params.stop
    (True, ('\\n',))
    >>> SamplingParams(top_p=1.5).validate()
    Traceback (most recent call last):
    radixrt.base.errors.RequestError: top_p must be a number from 0.0 to 1.0, not 1.5.
    >>> SamplingParams(max_new_tokens=16)
    Traceback (most recent call last):
    TypeError: max_new_tokens is called max_tokens.

    Call :meth:`validate` on values from outside.
    """

    n: int = 1
    """Number of answers to the same prompt."""
    max_tokens: int | None = None
    """Most tokens to generate; None: as many as the context length leaves."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are masked before this number of tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches top_p (Holtzman et al.
    2020)."""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0 or -1: no limit."""
    min_p: float = 0.0
    """Drop tokens below min_p times the likeliest token's probability (Nguyen et al. 2024)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or answer (CTRL)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens already in the answer (OpenAI)."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it is in the answer (OpenAI)."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of the given token ids."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens are sampled. The answer ends at an end token only if that is among them, or
    where a grammar allows the end (vLLM)."""
    bad_words: tuple[str, ...] = ()
    """Texts that the answer does not contain: the tokens of each, and of each behind a space, are
    not sampled in this order (vLLM). Other tokens of the same text are not forbidden."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the answer does not contain. The tokenizer process adds those of
    ``bad_words``."""
    max_reasoning_tokens: int | None = None
    """Most tokens of the reasoning with its tags, in chats whose reasoning is parsed. Before the
    last of them the end of the reasoning is forced."""
    reasoning_opening_ids: tuple[int, ...] = ()
    """The tokens with which the answer opens its reasoning; empty: it begins inside. Set by the
    tokenizer process."""
    reasoning_closing_ids: tuple[int, ...] = ()
    """The tokens that close it. Set by the tokenizer process."""
    seed: int | None = None
    """The same seed, prompt and settings give the same answer in any batch."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these strings."""
    stop_token_ids: tuple[int, ...] = ()
    """The answer ends at any of these tokens, as it does at the model's own end tokens."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """Log-probability of each token and of this number of likeliest alternatives; None: neither.

    They are the model's own, before temperature, penalties and filters.
    """
    kept_mass: bool = False
    """For each token, the probability of all tokens that the constraint allowed in its place, with
    ``allowed_token_ids`` and the like: 1 where nothing was forbidden.

    It is the model's own, before temperature, penalties and filters.
    """
    prompt_logprobs: int | None = None
    """The same as ``logprobs`` for the tokens of the prompt, which are computed even if cached."""
    prompt_logprobs_start: int = 0
    """First token of the prompt for ``prompt_logprobs``. Tokens before it may be cached."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def restricts_tokens(self) -> bool:
        """Some tokens are not sampled at all, or not at some points."""
        return self.allowed_token_ids is not None or bool(
            self.bad_words or self.bad_words_token_ids
        )

    def validate(self, vocab_size: int | None = None) -> "SamplingParams":
        """Return these settings with each value of its declared type (a single ``stop`` string, a
        list), and no stop token twice.

        Raises:
            RequestError: a value is of another type or out of its range; names the field.
        """
        checked = _with_declared_types(self)
        if checked.stop_token_ids:
            different = tuple(dict.fromkeys(checked.stop_token_ids))
            checked = msgspec.structs.replace(checked, stop_token_ids=different)
        checked._check_ranges(vocab_size)
        return checked

    def _check_ranges(self, vocab_size: int | None) -> None:
        for name, low, high in _RANGES:
            _require_in_range(name, getattr(self, name), low, high)
        if self.top_p == 0.0:
            raise wrong("top_p", "must be above 0; for greedy answers set temperature to 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise wrong(
                "min_tokens", f"({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )
        for name, (limit, unit) in _MAX_LENGTHS.items():
            if (length := len(getattr(self, name) or ())) > limit:
                raise wrong(name, f"takes at most {limit} {unit}, not {length}")
        if any(not s for s in self.stop):
            raise wrong("stop", "must not contain an empty string")
        for token in self.stop_token_ids:
            _require_token("stop_token_ids", token, vocab_size)
        for token, bias in (self.logit_bias or {}).items():
            _require_token("logit_bias", token, vocab_size)
            _require_in_range("logit_bias", bias, -100.0, 100.0)
        self._check_restrictions(vocab_size)

    def _check_restrictions(self, vocab_size: int | None) -> None:
        allowed = self.allowed_token_ids
        if allowed is not None:
            if not 0 < len(allowed) <= MAX_ALLOWED_TOKEN_IDS:
                raise wrong(
                    "allowed_token_ids",
                    f"takes 1 to {MAX_ALLOWED_TOKEN_IDS} tokens, not {len(allowed)}",
                )
            for token in (min(allowed), max(allowed)):
                _require_token("allowed_token_ids", token, vocab_size)
        if not all(0 < len(word) <= MAX_BAD_WORD_CHARS for word in self.bad_words):
            raise RequestError(
                f"A string of bad_words must have 1 to {MAX_BAD_WORD_CHARS} characters.",
                param="bad_words",
            )
        sequences = self.bad_words_token_ids
        limit = 2 * MAX_BAD_WORDS
        if len(sequences) > limit or not all(
            0 < len(one) <= MAX_BAD_WORD_CHARS for one in sequences
        ):
            raise wrong(
                "bad_words_token_ids",
                f"takes at most {limit} sequences of 1 to {MAX_BAD_WORD_CHARS} tokens",
            )
        for token in {token for one in sequences for token in one}:
            _require_token("bad_words_token_ids", token, vocab_size)


PREFILL_ONLY = SamplingParams(max_tokens=0, temperature=0.0)
"""Settings of a request that computes a prompt's KV and generates nothing. ``validate`` refuses it
from clients."""

_MAX_LENGTHS = {
    "stop": (MAX_STOP_STRINGS, "strings"),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, "different ids"),
    "logit_bias": (MAX_LOGIT_BIAS, "tokens"),
    "bad_words": (MAX_BAD_WORDS, "strings"),
}
"""The most entries of each setting, and what they are."""

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, MAX_N),
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("max_reasoning_tokens", 1, 2**31 - 1),
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("top_k", -1, 2**31 - 1),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),  # logits are divided by it, and must stay finite
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("seed", -(2**63), 2**63 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs_start", 0, 2**31 - 1),
)


def _with_declared_types(params: SamplingParams) -> SamplingParams:
    fields = msgspec.structs.asdict(params)
    if isinstance(params.stop, str):
        fields["stop"] = (params.stop,)
    for name in ("stop", "stop_token_ids", "bad_words", "bad_words_token_ids"):
        if fields[name] is None:
            fields[name] = ()
    return converted(fields, SamplingParams)


def _require_in_range(name: str, value: Any, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise wrong(name, f"must be a number from {low} to {high}, not {shown(value)}")


def _require_token(name: str, token: int, vocab_size: int | None) -> None:
    if token < 0 or (vocab_size is not None and token >= vocab_size):
        limit = "" if vocab_size is None else f" and below the vocabulary size {vocab_size}"
        raise wrong(name, f"holds token id {token}; ids must be at least 0{limit}")
