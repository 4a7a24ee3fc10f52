"""Encodes requests, and fills in what their prompts and the model decide."""

import dataclasses

from msgspec.structs import replace

from radixrt.base.errors import RequestError
from radixrt.messages.answers import EngineInfo
from radixrt.messages.ids import PackedIds, num_ids, pack_ids
from radixrt.messages.requests import (
    DEFAULT_POOLING,
    ChatPrompt,
    FimPrompt,
    GenerateRequest,
    TextPrompt,
    TokenPrompt,
)
from radixrt.tokenizer.answer.output_parser import OutputParser
from radixrt.tokenizer.limits import Limits
from radixrt.tokenizer.prompt.prompts import EncodedPrompt, PromptEncoder
from radixrt.tokenizer.receipts import ReceiptMaker
from radixrt.tokenizer.vocabulary import Vocabulary

MAX_CHARS_OF_A_TOKEN = 16
"""Most characters of a prediction that are encoded for each token that the answer may have."""


@dataclasses.dataclass(frozen=True)
class EncodedRequest:
    """A request whose prompt is encoded and fits the engine."""

    request: GenerateRequest
    """Its options have ``max_tokens`` and the retention of the prompt's cache breakpoints filled
    in."""
    prompt: EncodedPrompt
    prediction: PackedIds


@dataclasses.dataclass(frozen=True)
class RequestEncoder:
    """Encodes the requests of one engine. Safe to use from several threads."""

    info: EngineInfo
    vocabulary: Vocabulary
    prompts: PromptEncoder
    limits: Limits
    receipts: ReceiptMaker

    def encode(self, request: GenerateRequest) -> EncodedRequest:
        """Raises RequestError if the prompt is invalid, or does not fit."""
        options, sampling = request.options, request.sampling
        self._check_task(request)
        if isinstance(request.prompt, TokenPrompt):  # before looking at millions of ids
            self.limits.max_tokens(num_ids(request.prompt.token_ids), sampling.max_tokens)
        self.receipts.check(request)
        prompt = self._encode_prompt(request)
        token_ids, hints = prompt.token_ids, options.cache_hints
        if prompt.retain:
            hints = replace(hints, retain=[*hints.retain, *prompt.retain])
        max_tokens = self.limits.max_tokens(len(token_ids), sampling.max_tokens)
        if sampling.max_tokens is None and options.tenant.max_tokens is not None:
            max_tokens = min(max_tokens, options.tenant.max_tokens)
        sampling = replace(sampling, max_tokens=max_tokens)
        if sampling.bad_words:
            own = sampling.bad_words_token_ids
            found = self.vocabulary.encode_bad_words(sampling.bad_words)
            sampling = replace(sampling, bad_words=(), bad_words_token_ids=own + found)
        if isinstance(request.prompt, FimPrompt) and not sampling.ignore_eos:
            ends = {*sampling.stop_token_ids, *self.prompts.fill_in_middle.end_ids}
            ends.difference_update(self.info.eos_token_ids)
            sampling = replace(sampling, stop_token_ids=tuple(sorted(ends)))
        options = replace(options, cache_hints=hints, sampling=sampling)
        if request.says_how:
            options = replace(options, shares_answers=False)
        request = replace(request, options=options)
        sampling = OutputParser.bounded(request, self.vocabulary, token_ids)
        request = replace(request, options=replace(request.options, sampling=sampling))
        expected = request.prediction[: MAX_CHARS_OF_A_TOKEN * max_tokens]
        prediction = self.vocabulary.encode(expected, False) if expected else []
        return EncodedRequest(request, prompt, pack_ids(prediction))

    def _encode_prompt(self, request: GenerateRequest) -> EncodedPrompt:
        if not request.growth:
            return self.prompts.encode(request.prompt, self.limits, request.options.root)
        assert isinstance(request.prompt, TextPrompt | ChatPrompt)
        ids = self.prompts.settled.encode(
            request.prompt, request.growth, self.limits, request.options.root
        )
        if not ids:
            raise RequestError("No token of this prompt is settled yet.", code="nothing_settled")
        return EncodedPrompt(None, ids)

    def _check_task(self, request: GenerateRequest) -> None:
        """Raises RequestError if the request wants an answer of a model that gives numbers, or the
        other way round."""
        pool, pooling = request.options.pool, self.info.pooling
        warms = request.sampling.max_tokens == 0 and not (pooling and pooling.whole_prompts)
        if pool is None and pooling is not None and not warms:
            path = "/v1/embeddings" if pooling.task == "embed" else "/classify"
            raise RequestError(f"This server's model generates no text; use {path}.")
        if pool == DEFAULT_POOLING and pooling is None:
            raise RequestError(
                "This server's model generates text and gives no vectors or classes: its checkpoint has neither a modules.json "
                "of sentence-transformers nor a classifier's architecture. Serve an embedding model for this.",
            )
