"""Serves the constraints of requests in the tokenizer process.

Constraints are compiled, and values that no grammar covers are validated, in the helper processes
of the compile pool. The manager also knows where in an answer the grammar begins.
"""

import logging
from pathlib import Path

import msgspec

from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError
from radixrt.constrained.advice import Advice, refused
from radixrt.constrained.compiler.jobs import CompileOptions, PoolConfig
from radixrt.constrained.compiler.pool import CompilePool
from radixrt.constrained.constraint import Constraint
from radixrt.constrained.grammar import Compiled, SpanError
from radixrt.messages.answers import EngineInfo
from radixrt.messages.grammars import GrammarUse
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import GenerateRequest
from radixrt.messages.sequences import SequenceRequest
from radixrt.messages.stats import StructuredStats
from radixrt.tokenizer.answer.output_parser import grammar_place
from radixrt.tokenizer.retry.checked_answer import DueCheck, RetriesExhausted
from radixrt.tokenizer.retry.checked_sequence import CheckedSequence
from radixrt.tokenizer.retry.exclusions import TokenTexts
from radixrt.tokenizer.vocabulary import Vocabulary

log = logging.getLogger(__name__)

COMPILE_MEMORY_BYTES = 1 << 30
"""Memory that compiling a grammar may take; then its request is refused."""


class ConstraintManager:
    """The compile pool of one engine, with the vocabulary of its model."""

    def __init__(
        self, config: ServerConfig, tokenizer_file: Path, vocabulary: Vocabulary, info: EngineInfo
    ) -> None:
        """Leaves the tokenizer in ``tokenizer_file``, for the pool and for the workers."""
        vocabulary.save(tokenizer_file)
        self.counters = StructuredStats()
        self._vocabulary = vocabulary
        self._token_texts: TokenTexts | None = None
        self._has_end = any(0 <= token < info.vocab_size for token in info.eos_token_ids)
        self._pool = CompilePool(
            PoolConfig(
                tokenizer_json=str(tokenizer_file),
                vocab_size=info.vocab_size,
                eos_token_ids=info.eos_token_ids,
                options=CompileOptions(
                    backend=config.grammar_backend,
                    whitespace=config.grammar_whitespace,
                    validates=config.debug_validate_structured_output,
                ),
                time_limit_s=config.grammar_compile_timeout,
                memory_limit_bytes=COMPILE_MEMORY_BYTES,
            )
        )

    def start(self) -> None:
        """Start the helper processes in the background."""
        if self._has_end:
            self._pool.start()

    async def close(self) -> None:
        await self._pool.close()

    async def compile(self, constraint: Constraint, tenant: str) -> Compiled:
        """Compile a constraint for a tenant. Raises RequestError if the constraint can't be
        enforced, or takes too long."""
        self._check_end()
        self.counters.requests += 1
        try:
            return await self._pool.compile(constraint, tenant)
        except RequestError:
            self.counters.refused += 1
            raise

    async def compile_ahead(self, constraint: Constraint, tenant: str) -> Advice:
        """Compile a constraint for later requests, and say what can be said of it. Raises
        RequestError if structured output is not available."""
        self._check_end()
        try:
            advice = await self._pool.advise(constraint, tenant)
            if advice.ok:
                await self.compile(constraint, tenant)
            return advice
        except RequestError as error:
            if error.code != "grammar":
                raise
            return refused(error)

    def _check_end(self) -> None:
        if not self._has_end:
            raise RequestError(
                "Structured output needs a model with an end-of-sequence token: set eos_token_id in the checkpoint's "
                "generation_config.json.",
            )

    async def validate(self, due: DueCheck, tenant: str) -> list[SpanError]:
        """Why the value is invalid; empty if it is valid. Raises RequestError if the validator
        takes too long."""
        self.counters.checks += 1
        return await self._pool.validate(due.check.schema, due.text, tenant)

    def grammar_use(
        self, compiled: Compiled, request: GenerateRequest, prompt_ids: list[int]
    ) -> GrammarUse:
        """How the answers of a request are held to its compiled constraint."""
        place = grammar_place(request, self._vocabulary, prompt_ids)
        return GrammarUse(
            compiled.grammar.key,
            begin_after=pack_ids(place.begin_after),
            opening=pack_ids(place.opening),
            then_after=pack_ids(place.then_after),
        )

    def checked(self, sequence: SequenceRequest, compiled: Compiled) -> CheckedSequence | None:
        """What holds an answer back until its values are validated; None if the grammar enforces
        all."""
        if not compiled.checks and compiled.validator is None:
            return None
        if self._token_texts is None:
            self._token_texts = token_texts(self._vocabulary)
        return CheckedSequence(
            sequence,
            compiled.checks,
            self._vocabulary,
            self._token_texts,
            final_schema=compiled.validator,
        )

    def validated(
        self, checked: CheckedSequence, due: DueCheck, errors: list[SpanError], seq_id: int
    ) -> SequenceRequest | None:
        """Take in the errors of a validator; returns a sequence ``seq_id`` to go on with, if a
        value was wrong. Raises RequestError if the model did not find a valid value in the retries
        that it has."""
        try:
            again = checked.validated(due, errors, seq_id)
        except RetriesExhausted as error:
            self.counters.exhausted += 1
            raise RequestError(str(error), status=422, code="structured_output_failed") from error
        self.counters.retries += again is not None
        return again

    def report_violation(
        self, constraint: Constraint | None, text: str, violation: str
    ) -> RequestError:
        """The error for an answer that violates an enforced schema; logs and counts it."""
        self.counters.violations += 1
        log.error(
            "An answer breaks its constraint, which is a bug in radixrt: %s. Constraint: %s. Answer: %s",
            violation, constraint, text,
        )  # fmt: skip
        return RequestError(
            f"The answer breaks its schema, which is a bug in radixrt: {violation}",
            status=500,
            code="structured_output_violated",
        )

    def stats(self) -> StructuredStats:
        return msgspec.structs.replace(
            self.counters,
            cache_hits=self._pool.compiled.hits,
            cache_misses=self._pool.compiled.misses,
            helpers_killed=self._pool.killed,
        )


def token_texts(vocabulary: Vocabulary) -> TokenTexts:
    """The text of every token that is no control token."""
    ids = range(vocabulary.backend.get_vocab_size())
    return TokenTexts(
        (i, vocabulary.token_bytes(i).decode("utf-8", "replace"))
        for i in ids
        if i not in vocabulary.special_ids
    )
