"""The tokenizer process: turns requests into sequences, and their tokens into answers.

api ──requests──▶ encode ──sequences──▶ scheduler
api ◀──chunks── detokenize ◀──tokens── scheduler
"""

import argparse
import asyncio
import dataclasses
import gc
import logging
import math
import os
import random
import time
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from msgspec.structs import replace

from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError
from radixrt.base.ipc import LONGEST_WAIT_S, AsyncInbox, Outbox
from radixrt.base.liveness.heartbeat import Heartbeat, work_limit_s
from radixrt.base.liveness.link import SupervisorLink
from radixrt.base.liveness.supervision import supervise
from radixrt.base.token_bytes import give_memory_back
from radixrt.constrained.grammar import Compiled
from radixrt.messages.answers import PromptInfo
from radixrt.messages.ids import PackedIds, pack_ids, unpack_ids
from radixrt.messages.links import ToTokenizerFromApi
from radixrt.messages.replicas import RequestsLost
from radixrt.messages.requests import (
    AbortRequest,
    GenerateRequest,
    PartialAnswer,
)
from radixrt.messages.sequences import SequenceRequest, TokenBatch
from radixrt.tokenizer.answer.answer_state import AnswerState
from radixrt.tokenizer.answer_sampling import answer_seed, per_answer_params
from radixrt.tokenizer.calls import Calls, NodeTexts
from radixrt.tokenizer.constraints.manager import ConstraintManager
from radixrt.tokenizer.explain.explainer import Explainer
from radixrt.tokenizer.explain.records import MAX_BYTES, PromptRecord
from radixrt.tokenizer.fair_queue import FairQueue
from radixrt.tokenizer.images.fetching import ImageFetcher
from radixrt.tokenizer.images.places import NO_PLACEHOLDER, ImagePlacer
from radixrt.tokenizer.in_flight import InFlightAnswers
from radixrt.tokenizer.limits import Limits
from radixrt.tokenizer.prompt.prompts import (
    KEPT_BYTES_PER_TOKEN,
    PromptEncoder,
    shows_images,
    size_in_chars,
)
from radixrt.tokenizer.receipts import ReceiptMaker
from radixrt.tokenizer.request_encoder import EncodedRequest, RequestEncoder
from radixrt.tokenizer.retry.checked_sequence import CheckedSequence
from radixrt.tokenizer.schedulers import SchedulerLink, Schedulers, shared_by
from radixrt.tokenizer.trial import try_tokenizer
from radixrt.tokenizer.vocabulary import MAX_THREADS, Vocabulary

Result = TypeVar("Result")
Other = TypeVar("Other")

log = logging.getLogger(__name__)

PREPARE_AFTER_S = 0.5
"""Seconds without a request until what later requests may need is loaded, which takes a second or
two."""


class TokenizerProcess:
    def __init__(
        self,
        config: ServerConfig,
        channels: Channels,
        vocabulary: Vocabulary,
        supervisor: SupervisorLink,
    ) -> None:
        self._config = config
        self._channels = channels
        self._vocabulary = vocabulary
        self._encoder = PromptEncoder(vocabulary)
        self._seeds = random.Random(config.random_seed)
        self._from_api: AsyncInbox[ToTokenizerFromApi] = AsyncInbox(
            channels.address("api", "tokenizer"), ToTokenizerFromApi
        )
        if config.replica_listen is not None:  # engines that join need it
            vocabulary.save(channels.tokenizer_file)
        self._schedulers = Schedulers(config, channels, supervisor)
        self._to_api = Outbox(channels.address("tokenizer", "api"))
        self._encoding: dict[str, asyncio.Task[None]] = {}
        """Requests whose prompts are being encoded, or wait in the queue."""
        self._queue = FairQueue()
        hosts = (config.allow_image_hosts or "").split()
        self._fetcher = ImageFetcher(hosts, config.max_image_mib << 20)
        self._is_ready = False
        self._heartbeat = Heartbeat(channels.heartbeat_file("tokenizer"))

    async def run(self) -> None:
        """Serve until cancelled. The engine's first message is its :class:`EngineInfo`."""
        beating = asyncio.create_task(self._beat())  # the first engine may join much later
        supervise(beating, "The heartbeat")
        learning = asyncio.create_task(asyncio.to_thread(self._vocabulary.learn_token_bytes))
        serving = asyncio.create_task(self._schedulers.serve(self._absorb, self._lose))
        getting_ready = asyncio.create_task(self._schedulers.info())
        await asyncio.wait([serving, getting_ready], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()  # raises
        info = getting_ready.result()
        await learning
        self._info = info
        self._limits = Limits.from_info(info)
        self._receipts = ReceiptMaker(self._config, info, self._vocabulary)
        self._requests = RequestEncoder(
            info, self._vocabulary, self._encoder, self._limits, self._receipts
        )
        pool_tokens = max(1, self._config.dp) * info.kv_pool_tokens
        kept_bytes = KEPT_BYTES_PER_TOKEN * pool_tokens
        self._encoder.limit_memory(kept_bytes)
        files = self._channels.folder
        placer = ImagePlacer.for_engine(info, self._config, self._vocabulary, files)
        self._encoder.serve_images(placer, info.why_no_images or NO_PLACEHOLDER)
        self._constraints = ConstraintManager(
            self._config, self._channels.tokenizer_file, self._vocabulary, info
        )
        self._constraints.start()
        self._in_flight = InFlightAnswers(
            self._constraints, self._to_api.send, self._prepare_next_turn
        )
        self._explainer = Explainer(
            self._vocabulary,
            info.page_size,
            max_bytes=min(MAX_BYTES, kept_bytes),
            shows_texts=not self._config.hide_cache_texts,
        )
        self._calls = Calls(
            vocabulary=self._vocabulary,
            encoder=self._encoder,
            limits=self._limits,
            constraints=self._constraints,
            queue=self._queue,
            shows_cache_texts=not self._config.hide_cache_texts,
            explainer=self._explainer,
            node_texts=NodeTexts(self._vocabulary, kept_bytes),
            to_api=self._to_api.send,
            ask=self._schedulers.calls.ask,
            malformed_frames=lambda: (
                self._from_api.malformed_frames + self._schedulers.malformed_frames
            ),
        )
        score_tokens = info.score_tokens or self._vocabulary.single_tokens("yes", "no")
        self._is_ready = True
        self._to_api.send(
            replace(
                info,
                engine=self._channels.engine,
                replicas=0 if self._config.replica_listen else self._config.dp,
                score_tokens=score_tokens,
                has_chat_template=bool(self._vocabulary.hf.chat_template),
            )
        )
        try:
            await asyncio.gather(
                serving,
                self._serve_api(),
                self._queue.serve(),
                beating,
                self._prepare_when_idle(),
                self._queue.run("", "", 0, self._encoder.prepare_images, has_images=True),
            )
        finally:
            await self._constraints.close()

    def close(self) -> None:
        self._queue.close()
        self._fetcher.close()
        for channel in (self._from_api, self._schedulers, self._to_api):
            channel.close()

    async def _beat(self) -> None:
        """Give signs of life as long as the event loop turns and no text keeps a thread for too
        long."""
        limit_s = work_limit_s(self._config.step_timeout)
        while True:
            self._heartbeat.promise(limit_s - self._queue.seconds_at_work())
            await asyncio.sleep(LONGEST_WAIT_S)

    async def _prepare_when_idle(self) -> None:
        """Load what chats need, at a time without other requests; the first chat loads it
        otherwise."""
        idle_since = time.monotonic()
        while time.monotonic() < idle_since + PREPARE_AFTER_S:
            await asyncio.sleep(PREPARE_AFTER_S / 5)
            if self._in_flight.any:
                idle_since = time.monotonic()
        await asyncio.to_thread(self._vocabulary.prepare_chats)
        gc.freeze()
        give_memory_back()

    # ------------------------------------------------------------ from the api

    async def _serve_api(self) -> None:
        while True:
            self._handle_request(await self._from_api.receive())
            await asyncio.sleep(0)  # tokens of running answers go first

    def _handle_request(self, message: ToTokenizerFromApi) -> None:
        match message:
            case GenerateRequest():
                self._in_flight.expect(message.request_id)
                generating = asyncio.get_running_loop().create_task(self._generate(message))
                self._encoding[message.request_id] = generating
            case AbortRequest():
                self._abort(message.request_id)
            case _:
                self._calls.take(message)

    def _prepare_next_turn(self, answer: AnswerState) -> None:
        """Nobody waits for it: the api drops what it does not know."""
        if (request := answer.next_turn()) is not None:
            self._handle_request(request)

    async def _generate(self, request: GenerateRequest) -> None:
        tenant, key = request.options.tenant, request.group_id or request.request_id
        if request.options.idle:
            key = ""  # all of a tenant share a turn: a request waits for one of them
        try:
            filled = await self._fetcher.filled(request)
            size = size_in_chars(filled.prompt) + len(request.prediction)
            encoding = self._queue.run(
                tenant.name,
                key,
                size,
                lambda: self._requests.encode(filled),
                has_images=shows_images(filled.prompt),
            )
            compiled: Compiled | None = None
            grammar_s = 0.0
            if request.constraint is None:
                encoded, encode_s = await _timed(encoding)
            else:
                compiling = self._constraints.compile(request.constraint, tenant.name)
                (encoded, encode_s), (compiled, grammar_s) = await _both(
                    _timed(encoding), _timed(compiling)
                )
            await self._schedulers.available()
            bare = replace(encoded.request, prompt=request.prompt)  # without what was fetched
            if request.resumed and filled is not request:
                bare = replace(bare, receipt=False)  # its first tokens may be of other files
            encoded = dataclasses.replace(encoded, request=bare)
            self._start(encoded, encode_s, compiled, grammar_s)
        except Exception as error:
            self._in_flight.fail(request.request_id, error)
        finally:
            self._encoding.pop(request.request_id, None)

    def _start(
        self,
        encoded: EncodedRequest,
        encode_s: float,
        compiled: Compiled | None,
        grammar_s: float,
    ) -> None:
        """Hand the n answers of a request to a scheduler."""
        request, token_ids = encoded.request, encoded.prompt.token_ids
        grammar = None
        if compiled is not None:
            grammar = self._constraints.grammar_use(compiled, request, token_ids)
        packed_ids, key_ids = pack_ids(token_ids), encoded.prompt.key_ids
        keys = encoded.prompt.keys
        alike = shared_by(request, grammar)
        scheduler = self._schedulers.choose(keys, request.options.root, alike)
        pictures = {one.key: one for one in encoded.prompt.pictures}
        scheduler.images.check_room(pictures.values())
        prompt_info = self._prompt_info(encoded, packed_ids)
        explains = request.options.cache_hints.explain
        record = PromptRecord(
            request_id=request.request_id.rpartition("#")[0] or request.request_id,
            tenant=request.options.tenant.name,
            token_ids=keys,
            images=encoded.prompt.images,
            layout=encoded.prompt.layout,
            session=request.options.cache_hints.session,
        )
        for index, sampling in enumerate(per_answer_params(request.sampling, self._seeds)):
            delivered = request.resumed[index] if request.resumed else PartialAnswer()
            if delivered.is_complete:
                continue
            sequence = SequenceRequest(
                seq_id=self._in_flight.new_seq_id(),
                token_ids=packed_ids,
                key_ids=key_ids,
                images=list(encoded.prompt.images),
                options=replace(request.options, sampling=sampling),
                grammar=grammar,
                second_segment_start=encoded.prompt.second_segment_start,
                messages_end=encoded.prompt.messages_end,
                prediction=encoded.prediction,
                group=request.group_id or request.request_id,
                group_size=max(request.group_size, request.sampling.n),
            )
            answer = AnswerState(
                request,
                index,
                self._vocabulary,
                encoded.prompt,
                prompt_info=prompt_info,
                keeps_answer=not self._config.debug_reencode_answers,
                record=record,
                explainer=self._explainer if explains and index == 0 else None,
                unenforced=() if compiled is None else compiled.unenforced,
                encode_s=encode_s,
                grammar_s=grammar_s,
                receipt_of=self._receipts.of(request, encoded.prompt, sampling),
            )
            checked = None if compiled is None else self._constraints.checked(sequence, compiled)
            if delivered.token_ids:
                sequence = self._resume(sequence, answer, checked, delivered)
            grammar_to_send = None if compiled is None else compiled.grammar
            self._in_flight.begin(
                sequence, answer, scheduler, checked, grammar_to_send, list(pictures.values())
            )
            record.seq_ids.append(sequence.seq_id)
        self._explainer.records.add(record)
        self._in_flight.forget_if_complete(request.request_id)

    def _resume(
        self,
        sequence: SequenceRequest,
        answer: AnswerState,
        checked: CheckedSequence | None,
        delivered: PartialAnswer,
    ) -> SequenceRequest:
        """Continue an answer after the tokens that its client has. Noise depends only on seed,
        position and token, so the next tokens are those of an undisturbed run."""
        token_ids = unpack_ids(delivered.token_ids).tolist()
        sampling, kept = sequence.sampling, token_ids
        ends = {*self._info.eos_token_ids, *sampling.stop_token_ids}
        if token_ids[-1] in ends or len(token_ids) >= (sampling.max_tokens or math.inf):
            kept = token_ids[:-1]  # the scheduler has to see the answer end
        answer.resume(token_ids, num_repeated=len(token_ids) - len(kept))
        if checked is not None:
            checked.resume(kept, delivered.retries)
        sampling = replace(sampling, seed=answer_seed(sampling.seed or 0, delivered.retries))
        return replace(
            sequence,
            token_ids=sequence.token_ids + pack_ids(kept),
            num_output=len(kept),
            has_begun=True,
            options=replace(sequence.options, sampling=sampling),
        )

    def _prompt_info(self, encoded: EncodedRequest, packed_ids: PackedIds) -> PromptInfo | None:
        """The prompt, if the request wants it back."""
        request, text, sampling = encoded.request, encoded.prompt.text, encoded.request.sampling
        if not request.return_prompt_token_ids and sampling.prompt_logprobs is None:
            return None
        if text is None:
            text = self._vocabulary.decode(encoded.prompt.token_ids, sampling.skip_special_tokens)
        return PromptInfo(text=text, token_ids=packed_ids)

    def _abort(self, request_id: str) -> None:
        if encoding := self._encoding.pop(request_id, None):
            encoding.cancel()
            self._in_flight.fail(request_id, _ABORTED)
        else:
            self._in_flight.abort(request_id)

    # ------------------------------------------------------------ to and from the schedulers

    def _absorb(self, batch: TokenBatch) -> None:
        if self._is_ready:  # else of a step in flight when the process before this one died
            self._heartbeat.count(batch.num_tokens)
            self._in_flight.absorb(batch)

    def _lose(self, scheduler: SchedulerLink, leases: list[str], has_drained: bool) -> None:
        """A replica has ended: the api sends its requests again, to others."""
        if not self._is_ready:
            return  # it had none
        lost = self._in_flight.lose(scheduler)
        how = "drained" if has_drained else "died"
        log.warning("Replica %d has %s with %d requests.", scheduler.replica, how, len(lost))
        self._to_api.send(RequestsLost(request_ids=lost, leases=leases, has_drained=has_drained))


_ABORTED = RequestError("The request was aborted before it began.", code="request_aborted")


async def _both(
    one: Coroutine[Any, Any, Result], other: Coroutine[Any, Any, Other]
) -> tuple[Result, Other]:
    """The results of both. The first that fails cancels the other."""
    tasks = asyncio.create_task(one), asyncio.create_task(other)
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _timed(work: Awaitable[Result]) -> tuple[Result, float]:
    """The result of ``work``, and the seconds until it came."""
    began = time.monotonic()
    return await work, time.monotonic() - began


def run_tokenizer(
    config: ServerConfig,
    channels: Channels,
    arguments: argparse.Namespace,
    supervisor: SupervisorLink,
) -> None:
    """Run the tokenizer process until it is interrupted.

    Raises:
        ConfigError: the checkpoint has no tokenizer that can be used.
    """
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))  # read at the first text
    try_tokenizer(config)
    process = TokenizerProcess(config, channels, Vocabulary.load(config), supervisor)

    async def serve() -> None:
        try:
            await process.run()
        finally:
            process.close()

    gc.freeze()  # the collector need not visit the libraries' objects: that takes some tenths of a second
    asyncio.run(serve())
