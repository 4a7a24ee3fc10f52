"""The compile pool: compiles constraints and validates values in helper processes that may be
killed.

A schema can be written so that compiling it, or matching its patterns, takes unlimited time or
memory. So each job runs in a helper with limits of both; a helper over a limit is killed, without
effect on the server.
"""

import asyncio
import collections
import contextlib
import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from radixrt.base.errors import RequestError
from radixrt.base.liveness.supervision import supervise
from radixrt.base.round_robin import RoundRobin
from radixrt.constrained.advice import Advice
from radixrt.constrained.backends.tag_schemas import KeptSchemas, content_key
from radixrt.constrained.compiler import jobs
from radixrt.constrained.compiler.cache import ByteLru
from radixrt.constrained.compiler.helper import Helper, HelperCannotStart, HelperDied, Zygote
from radixrt.constrained.constraint import Constraint, JsonSchema, Parameters, StructuralTag
from radixrt.constrained.grammar import Compiled, SpanError

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.05
_TRIES_BEFORE_REFUSING = 3

SCHEMAS_BYTES, SCHEMAS_ENTRIES = 64 << 20, 8192
"""Limits of what is kept of the schemas in tags. That of a tool of an agent has 1 kB."""


class _Waiting:
    """A job in the queue, and the future of its reply."""

    def __init__(self, job: jobs.Job, tenant: str, left_s: float) -> None:
        self.job = job
        self.tenant = tenant
        """The key that asks for it."""
        self.left_s = left_s
        """Seconds that it may still run, on this helper or on others after its death."""
        self.reply: asyncio.Future[jobs.Reply] = asyncio.get_running_loop().create_future()
        self.advice = ""
        """What to change in its constraint, if it went over a limit or killed its helper."""


class CompilePool:
    """Used from one event loop. Helpers start when :meth:`start` is called, in the background.

    Attributes:
        compiled: the cache; its ``hits`` and ``misses`` count.
        killed: how many helpers went over a limit or crashed.
    """

    def __init__(self, config: jobs.PoolConfig) -> None:
        if config.num_helpers < 2:
            raise ValueError("a pool needs 2 helpers, so that a slow job does not hold up the rest")
        self.config = config
        self.compiled: ByteLru[bytes, Compiled] = ByteLru(config.cache_bytes, config.cache_entries)
        self.killed = 0
        self.schemas: ByteLru[bytes, bytes] = ByteLru(SCHEMAS_BYTES, SCHEMAS_ENTRIES)
        """What is known of the schemas in tags, so that only new ones are normalised."""
        self._under_way: dict[tuple[str, bytes], asyncio.Task[Compiled]] = {}
        self._num_waiting_for: dict[asyncio.Task[Compiled], int] = {}
        self._quick = RoundRobin[_Waiting]()
        self._slow = RoundRobin[_Waiting]()
        """Jobs that were stopped once, so that quick ones could go on."""
        self._work = asyncio.Condition()
        self._keepers: list[asyncio.Task[None]] = []
        self._zygote: Zygote | None = None
        self._starting_zygote = asyncio.Lock()
        self._cannot_start: str | None = None

    def start(self) -> None:
        """Start the helpers; the first job waits until one has loaded the tokens."""
        self._keepers = [
            asyncio.create_task(self._keep(for_quick_ones=index == 0))
            for index in range(self.config.num_helpers)
        ]
        for keeper in self._keepers:
            supervise(keeper, "The keeper of a compiler helper", may_return=True)

    async def close(self) -> None:
        """Kill the helpers; jobs that wait fail."""
        for keeper in self._keepers:
            keeper.cancel()
        if self._zygote is not None:
            await self._zygote.kill()  # first: while it loads the tokenizer, it ends no helper
        await asyncio.gather(*self._keepers, return_exceptions=True)
        if self._zygote is not None:
            await self._zygote.kill()  # one that a keeper has just started
        await asyncio.sleep(
            0
        )  # pipes of helpers that were just starting close in the loop's next round
        for waiting in self._drop(lambda _: True):
            waiting.reply.cancel()

    async def compile(self, constraint: Constraint, tenant: str = "") -> Compiled:
        """Compile a constraint. Equal ones are compiled once, also those that a tenant asks for at
        the same time.

        Args:
            tenant: the key that asks; the jobs of different ones take turns.

        Raises:
            RequestError: it can't be enforced, or takes more time or memory than it may (400); too
                many jobs wait (503).
        """
        digest = hashlib.sha256(msgspec.msgpack.encode(constraint)).digest()
        if (compiled := self.compiled.get(digest)) is not None:
            return compiled
        key = (tenant, digest)
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.create_task(self._compile(key, constraint))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._under_way[key] = task
        self._num_waiting_for[task] = self._num_waiting_for.get(task, 0) + 1
        try:
            return await asyncio.shield(task)  # one that gives up leaves the others waiting
        finally:
            self._num_waiting_for[task] -= 1
            if not self._num_waiting_for[task]:
                del self._num_waiting_for[task]
                self._abandon(key, task)

    def _abandon(self, key: tuple[str, bytes], task: asyncio.Task[Compiled]) -> None:
        """No request waits for this grammar any more: drop its job, or stop it if it is slow."""
        if not task.done():
            self._under_way.pop(key, None)
            task.cancel()
            asyncio.get_running_loop().call_soon(self._drop, lambda each: each.reply.done())

    async def _compile(self, key: tuple[str, bytes], constraint: Constraint) -> Compiled:
        tenant, digest = key
        try:
            job = jobs.CompileJob(constraint, self._known_schemas(constraint))
            reply = await self._do(job, tenant, "The constraint takes")
            if not isinstance(reply, jobs.CompileDone):
                raise _error_of(reply)
            self.compiled.put(digest, reply.compiled, reply.num_bytes)
            for content, found in reply.schemas.items():
                self.schemas.put(content, found, len(found))
            return reply.compiled
        finally:
            if self._under_way.get(key) is asyncio.current_task():
                del self._under_way[key]

    def _known_schemas(self, constraint: Constraint) -> KeptSchemas:
        """What is known of the schemas in the tags of a constraint."""
        tags = constraint.tags if isinstance(constraint, StructuralTag) else ()
        keys = (
            content_key(tag.content)
            for tag in tags
            if isinstance(tag.content, JsonSchema | Parameters)
        )
        return {key: found for key in keys if (found := self.schemas.get(key)) is not None}

    async def advise(self, constraint: Constraint, tenant: str = "") -> Advice:
        """The advice on a constraint, which is not kept. Raises RequestError if compiling it takes
        more time or memory than it may (400); too many jobs wait (503)."""
        reply = await self._do(jobs.AdviseJob(constraint), tenant, "The constraint takes")
        if not isinstance(reply, jobs.AdviseDone):
            raise _error_of(reply)
        return reply.advice

    async def validate(self, schema: Any, text: str, tenant: str = "") -> list[SpanError]:
        """Why ``text`` is no JSON that is valid under ``schema``; empty if it is.

        Formats are checked as far as ``jsonschema`` can.

        Raises:
            RequestError: it takes more time or memory than it may (400); too many jobs wait (503).
        """
        job = jobs.ValidateJob(json.dumps(schema, ensure_ascii=False), text)
        reply = await self._do(job, tenant, "Validating the answer takes")
        if not isinstance(reply, jobs.ValidateDone):
            raise _error_of(reply)
        return reply.errors

    # ------------------------------------------------------------ queue

    async def _do(
        self,
        job: jobs.Job,
        tenant: str,
        what: str,
        *,
        deaths: int = 0,
        left_s: float | None = None,
    ) -> jobs.Reply:
        """Queue a job and wait for its reply.

        Args:
            deaths: number of helpers that have died at it.
            left_s: seconds that it may run; None: the limit.

        Raises:
            RequestError: it went over a limit, or the queue is full.
        """
        if self._cannot_start is not None:
            raise self._unavailable()
        self._make_room(tenant)
        waiting = _Waiting(job, tenant, self.config.time_limit_s if left_s is None else left_s)
        async with self._work:
            self._quick.push(tenant, "", waiting)
            self._work.notify()
        try:
            reply = await waiting.reply
        except TimeoutError:
            reason = f"{what} more than {self.config.time_limit_s:g} seconds"
        except HelperDied as error:
            # They may have died of something else.
            if deaths < self.config.num_helpers and waiting.left_s > 0:
                return await self._do(job, tenant, what, deaths=deaths + 1, left_s=waiting.left_s)
            reason = f"A helper process did not survive it ({error})"
        else:
            if not isinstance(reply, jobs.OutOfMemory):
                return reply
            reason = f"{what} more memory than it may"
        raise RequestError(f"{reason}; {waiting.advice}.", param="structured", code="grammar")

    def _make_room(self, tenant: str) -> None:
        """Let one more job of a tenant wait. Where the queue is full, the tenant with the most jobs
        loses its last one. Raises RequestError if no other tenant has more jobs than this one."""
        counts = collections.Counter(self._quick.counts())
        counts.update(self._slow.counts())
        if counts.total() < self.config.max_waiting:
            return
        (longest, count), *_ = counts.most_common(1)
        if longest == tenant or count <= counts[tenant] + 1:
            raise _too_many(counts[tenant])
        queue = self._quick if longest in self._quick.counts() else self._slow
        last = queue.pop_last(longest)
        if not last.reply.done():
            last.reply.set_exception(_too_many(count))

    async def _next(self, for_quick_ones: bool) -> _Waiting:
        """The next job: a slow one first, where taken, as quick ones have their own helper."""
        async with self._work:
            while True:
                await self._work.wait_for(
                    lambda: self._quick or (self._slow and not for_quick_ones)
                )
                take_slow = self._slow and not for_quick_ones
                waiting = (self._slow if take_slow else self._quick).pop()
                if not waiting.reply.done():  # else no request waits for it any more
                    return waiting

    def _drop(self, is_unwanted: Callable[[_Waiting], bool]) -> list[_Waiting]:
        """Remove jobs from the queue; returns them."""
        return self._quick.drop(is_unwanted) + self._slow.drop(is_unwanted)

    # ------------------------------------------------------------ helpers

    async def _keep(self, for_quick_ones: bool) -> None:
        """Keep one helper alive and busy; ``for_quick_ones`` stops slow jobs if others wait."""
        helper: Helper | None = None
        waiting: _Waiting | None = None
        needs_tokenizer = False
        try:
            while True:
                if helper is None or not helper.is_alive:
                    try:
                        helper = await self._start_helper(needs_tokenizer)
                    except RequestError as error:
                        if waiting is not None and not waiting.reply.done():
                            waiting.reply.set_exception(error)
                        waiting, needs_tokenizer = None, False
                        continue
                    if helper is None:
                        return
                waiting = waiting or await self._next(for_quick_ones)
                if helper.is_alive:  # it may have died while it had nothing to do
                    needs_tokenizer = await self._run(helper, waiting, for_quick_ones)
                    if not needs_tokenizer:
                        waiting = None
        finally:
            if helper is not None:
                await helper.kill()
            if waiting is not None:
                waiting.reply.cancel()

    async def _start_helper(self, needs_tokenizer: bool) -> Helper | None:
        """A new helper, after as many tries as it takes; None if there is no use in trying. Raises
        RequestError if several zygotes could not load the tokenizer."""
        for tries in itertools.count(1):
            try:
                async with self._starting_zygote:
                    if self._zygote is None or not self._zygote.is_alive:
                        self._zygote = await Zygote.start(self.config)
                if needs_tokenizer:
                    self._zygote.load_tokenizer()
                helper = await self._zygote.fork()
            except HelperCannotStart as error:
                self._refuse_all(str(error))
                return None
            except (HelperDied, TimeoutError, OSError) as error:
                logger.warning("A compiler helper did not start: %s", error or "it took too long")
                if tries >= _TRIES_BEFORE_REFUSING and needs_tokenizer:
                    raise RequestError(
                        "Its kind of structured output is not available: its helper processes cannot load the tokenizer; see the log.",
                        status=503,
                    ) from error
                if tries >= _TRIES_BEFORE_REFUSING:
                    self._refuse_all("its helper processes do not start; see the log")
                await asyncio.sleep(min(0.1 * 2**tries, 30.0))
            else:
                self._cannot_start = None
                return helper
        raise AssertionError("unreachable")

    def _refuse_all(self, reason: str) -> None:
        """Fail all waiting jobs: no helper starts."""
        logger.error("Structured output is not available: %s", reason)
        self._cannot_start = reason
        for waiting in self._drop(lambda _: True):
            if not waiting.reply.done():
                waiting.reply.set_exception(self._unavailable())

    def _unavailable(self) -> RequestError:
        return RequestError(f"Structured output is not available: {self._cannot_start}", status=503)

    async def _run(self, helper: Helper, waiting: _Waiting, for_quick_ones: bool) -> bool:
        """Run one job to its end, its limit, or until it has to make room for quick ones. True: it
        has to run once more, in a helper with the tokenizer; this one is gone then."""
        running = asyncio.create_task(helper.do(waiting.job))
        begin = time.monotonic()
        ends = begin + waiting.left_s
        try:
            # Also if no request waits any more: a new helper costs more than the rest of a quick
            # job.
            if not await _one_is_done({running}, self.config.patience_s):
                job = {running, waiting.reply}
                if for_quick_ones and await self._has_to_make_room(job, ends):
                    await helper.kill()
                    async with self._work:
                        self._slow.push(waiting.tenant, "", waiting)
                        self._work.notify_all()
                    return False
                await _one_is_done(job, ends - time.monotonic())
            if isinstance(_reply_of(running), jobs.NeedsTokenizer):
                await helper.kill()
                return True
            if not waiting.reply.done():
                error = running.exception() if running.done() else TimeoutError()
                waiting.advice = helper.advice()
                if isinstance(error, HelperDied):
                    waiting.left_s -= time.monotonic() - begin
                if error is None:
                    waiting.reply.set_result(running.result())
                else:
                    waiting.reply.set_exception(error)
            if isinstance(_reply_of(running), jobs.OutOfMemory | None):
                self.killed += 1
                await helper.kill()
            return False
        finally:
            running.cancel()
            with contextlib.suppress(BaseException):
                await running

    async def _has_to_make_room(self, job: set[asyncio.Future[jobs.Reply]], ends: float) -> bool:
        """Whether others come to wait for the helper of a slow job."""
        is_done = any(future.done() for future in job)
        while not is_done and not self._quick and time.monotonic() < ends:
            is_done = await _one_is_done(job, _LOOK_AGAIN_S)
        return not is_done and bool(self._quick)


async def _one_is_done(job: set[asyncio.Future[jobs.Reply]], within_s: float) -> bool:
    """Wait for the end of a job: it is done, or its reply is no longer awaited."""
    timeout = max(within_s, 0.0)
    done, _ = await asyncio.wait(job, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


def _reply_of(running: asyncio.Task[jobs.Reply]) -> jobs.Reply | None:
    return running.result() if running.done() and not running.exception() else None


def _error_of(reply: jobs.Reply) -> RequestError:
    match reply:
        case jobs.Refused():
            return RequestError(
                reply.message, status=reply.status, param=reply.param, code=reply.code
            )
        case _:
            reason = getattr(reply, "reason", "")
            logger.error("A helper process failed at a job: %s", reason)
            return RequestError(
                f"The constraint could not be handled: {reason}", param="structured"
            )


def _too_many(num_waiting: int) -> RequestError:
    return RequestError(
        f"{num_waiting} of your constraints wait to be compiled; try again later.",
        status=503,
        retry_after_s=1,
    )
