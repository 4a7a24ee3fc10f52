"""What does the tokenizer process do? Turns requests into sequences, and their tokens into answers.

api ──requests──▶ encode ──sequences──▶ scheduler
api ◀──chunks── detokenize ◀──tokens── scheduler
"""

import asyncio
import dataclasses
import logging
import random

import msgspec

from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError
from radixrt.base.ipc import AsyncInbox, Channels, Outbox
from radixrt.base.sampling_params import PREFILL_ONLY
from radixrt.constrained.grammar import Compiled
from radixrt.messages.answers import EngineInfo, PromptInfo
from radixrt.messages.calls import (
    StatsCall,
)
from radixrt.messages.ids import PackedIds, num_ids, pack_ids
from radixrt.messages.links import ToTokenizerFromApi, ToTokenizerFromScheduler
from radixrt.messages.replies import CallReply
from radixrt.messages.requests import (
    AbortRequest,
    CacheHints,
    ChatPrompt,
    GenerateRequest,
    TokenPrompt,
)
from radixrt.messages.sequences import SequenceRequest, TokenBatch
from radixrt.tokenizer.answer.answers import Answer
from radixrt.tokenizer.answer_sampling import per_answer_params
from radixrt.tokenizer.calls import Calls
from radixrt.tokenizer.constraints.structured import StructuredOutput
from radixrt.tokenizer.limits import Limits
from radixrt.tokenizer.prompt.prompts import PromptEncoder, size_in_chars
from radixrt.tokenizer.turns import Turns
from radixrt.tokenizer.under_way import AnswersUnderWay
from radixrt.tokenizer.vocabulary import Vocabulary

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Encoded:
    """A request whose prompt is encoded and found to fit."""

    request: GenerateRequest
    prompt: PromptInfo
    text: str | None
    """Of the prompt; None if it came in tokens."""
    token_ids: list[int]
    packed_ids: PackedIds
    max_tokens: int
    cache_hints: CacheHints


class TokenizerProcess:
    def __init__(self, config: ServerConfig, channels: Channels, vocabulary: Vocabulary) -> None:
        self._config = config
        self._tokenizer_file = channels.tokenizer_file
        self._vocabulary = vocabulary
        self._encoder = PromptEncoder(vocabulary)
        self._seeds = random.Random(config.random_seed)
        self._from_api: AsyncInbox[ToTokenizerFromApi] = AsyncInbox(
            channels.address("api", "tokenizer"), ToTokenizerFromApi
        )
        self._from_scheduler: AsyncInbox[ToTokenizerFromScheduler] = AsyncInbox(
            channels.address("scheduler", "tokenizer"), ToTokenizerFromScheduler
        )
        self._to_api = Outbox(channels.address("tokenizer", "api"))
        self._to_scheduler = Outbox(channels.address("tokenizer", "scheduler"))
        self._encoding: dict[str, asyncio.Task[None]] = {}
        """Requests whose prompts are being encoded, or wait for it."""
        self._turns = Turns()

    async def run(self) -> None:
        """Serve until cancelled. The engine's first message says what it can do."""
        while not isinstance(info := await self._from_scheduler.receive(), EngineInfo):
            log.warning("Ignored a %s before the engine was ready.", type(info).__name__)
        self._info = info
        self._limits = Limits.of(info)
        self._structured = StructuredOutput(
            self._config, self._tokenizer_file, self._vocabulary, info
        )
        self._structured.start()
        self._under_way = AnswersUnderWay(
            self._structured, self._to_api.send, self._to_scheduler.send
        )
        self._calls = Calls(
            vocabulary=self._vocabulary,
            encoder=self._encoder,
            limits=self._limits,
            structured=self._structured,
            turns=self._turns,
            shows_cache_texts=not self._config.hide_cache_texts,
            to_api=self._to_api.send,
            to_scheduler=self._to_scheduler.send,
        )
        self._to_api.send(info)
        try:
            await asyncio.gather(self._serve_scheduler(), self._serve_api(), self._turns.serve())
        finally:
            await self._structured.close()

    def close(self) -> None:
        self._turns.close()
        for channel in (self._from_api, self._from_scheduler, self._to_api, self._to_scheduler):
            channel.close()

    # ------------------------------------------------------------ from the api

    async def _serve_api(self) -> None:
        while True:
            self._handle_request(await self._from_api.receive())
            await asyncio.sleep(0)  # tokens of running answers go first

    def _handle_request(self, message: ToTokenizerFromApi) -> None:
        match message:
            case GenerateRequest():
                self._under_way.expect(message.request_id)
                generating = asyncio.get_running_loop().create_task(self._generate(message))
                self._encoding[message.request_id] = generating
            case AbortRequest():
                self._abort(message.request_id)
            case StatsCall():
                inboxes = (self._from_api, self._from_scheduler)
                malformed = sum(inbox.malformed_frames for inbox in inboxes)
                self._calls.take(msgspec.structs.replace(message, malformed_frames=malformed))
            case _:
                self._calls.take(message)

    async def _generate(self, request: GenerateRequest) -> None:
        owner = request.owner or request.request_id
        size = size_in_chars(request.prompt)
        try:
            encoding = self._turns.run(owner, size, lambda: self._encode(request))
            if request.structured is None:
                self._start(await encoding)
            else:
                compiling = self._structured.compile(request.structured)
                encoded, compiled = await asyncio.gather(encoding, compiling)
                self._start(encoded, compiled)
        except Exception as error:
            self._under_way.fail(request.request_id, error)
        finally:
            self._encoding.pop(request.request_id, None)

    def _encode(self, request: GenerateRequest) -> _Encoded:
        """Raises:
        RequestError: the request can't be served as it is.
        """
        if request.sampling != PREFILL_ONLY:
            request.sampling.validate(self._limits.vocab_size)
        if isinstance(request.prompt, TokenPrompt):  # before looking at millions of ids
            self._limits.max_tokens(num_ids(request.prompt.token_ids), request.sampling.max_tokens)
        text, token_ids, retain = self._encoder.encode_with_breakpoints(
            request.prompt, self._limits, request.cache_salt
        )
        hints = request.cache_hints
        if retain:
            hints = msgspec.structs.replace(hints, retain=[*hints.retain, *retain])
        max_tokens = self._limits.max_tokens(len(token_ids), request.sampling.max_tokens)
        packed = pack_ids(token_ids)
        prompt = self._prompt_info(request, text, token_ids, packed)
        return _Encoded(request, prompt, text, token_ids, packed, max_tokens, hints)

    def _start(self, encoded: _Encoded, compiled: Compiled | None = None) -> None:
        """Hand the n answers of a request to the scheduler."""
        constraint = None
        if compiled is not None:
            constraint = self._structured.constraint(compiled, encoded.request, encoded.text)
        request, token_ids = encoded.request, encoded.token_ids
        chat = request.prompt if isinstance(request.prompt, ChatPrompt) else None
        continues_prompt = chat is None or chat.continue_final_message
        conversation = encoded.text if chat and not self._config.debug_reencode_answers else None
        params = per_answer_params(request.sampling, encoded.max_tokens, self._seeds)
        for index, sampling in enumerate(params):
            sequence = SequenceRequest(
                seq_id=self._under_way.new_seq_id(),
                token_ids=encoded.packed_ids,
                sampling=sampling,
                cache_salt=request.cache_salt,
                priority=request.priority,
                cache_hints=encoded.cache_hints,
                deadline=request.deadline,
                constraint=constraint,
            )
            answer = Answer(
                request,
                index,
                self._vocabulary,
                encoded.prompt,
                token_ids,
                self._info.eos_token_ids,
                continues_prompt,
                conversation,
            )
            checked = None
            if compiled is not None:
                answer.unenforced = compiled.unenforced
                checked = self._structured.checked(sequence, compiled)
            self._under_way.begin(sequence, answer, checked)

    def _prompt_info(
        self, request: GenerateRequest, text: str | None, token_ids: list[int], packed: PackedIds
    ) -> PromptInfo:
        if not (request.return_prompt_token_ids or request.sampling.prompt_logprobs is not None):
            return PromptInfo(num_tokens=len(token_ids))
        if text is None:
            text = self._vocabulary.decode(token_ids, request.sampling.skip_special_tokens)
        return PromptInfo(num_tokens=len(token_ids), text=text, token_ids=packed)

    def _abort(self, request_id: str) -> None:
        if encoding := self._encoding.pop(request_id, None):
            encoding.cancel()
            self._under_way.fail(request_id, _ABORTED)
        else:
            self._under_way.abort(request_id)

    # ------------------------------------------------------------ from the scheduler

    async def _serve_scheduler(self) -> None:
        while True:
            message = await self._from_scheduler.receive()
            match message:
                case TokenBatch():
                    self._under_way.absorb(message)
                case CallReply():
                    self._calls.pass_on(message)
                case EngineInfo():
                    log.warning("Ignored a second EngineInfo.")


_ABORTED = RequestError("The request was aborted before it began.", code="request_aborted")


def run_tokenizer(config: ServerConfig, channels: Channels) -> None:
    """Run the tokenizer process until it is interrupted.

    Raises:
        ConfigError: the checkpoint has no tokenizer that can be used.
    """
    process = TokenizerProcess(config, channels, Vocabulary.load(config))

    async def serve() -> None:
        try:
            await process.run()
        finally:
            process.close()

    asyncio.run(serve())
