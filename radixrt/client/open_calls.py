"""The calls of a client that have no reply yet, and their repetition in the next engine when an
engine dies."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from radixrt.base.errors import EngineDiedError, RequestError
from radixrt.messages.calls import AnyCall, Call, CallReply, PinCall, Reply

RETRY_AFTER_S = 2

MAX_DEATHS_OF_A_CALL = 2
"""A call is asked again once: should it kill engines, it ends before the server does."""


@dataclass(eq=False)
class _OpenCall:
    """A call without a reply."""

    message: AnyCall
    reply: asyncio.Future[Any]
    was_sent: bool = False
    """Whether it was sent to the engine that lives, or lived last."""
    deaths: int = 0
    """Engines that died while they had it."""

    @property
    def may_be_repeated(self) -> bool:
        """A new engine would give the reply that the old one would have given; a pinned prompt is
        not in its tree."""
        return not isinstance(self.message, PinCall) and self.deaths < MAX_DEATHS_OF_A_CALL


class OpenCalls:
    """All open calls of a client.

    Args:
        send: to the engine; raises a RequestError if the call cannot be sent, an EngineDiedError if
            no engine will follow.
        engine_is_alive: calls that come while it is not wait for :meth:`take_over`.
    """

    def __init__(
        self, send: Callable[[AnyCall], None], engine_is_alive: Callable[[], bool]
    ) -> None:
        self._send = send
        self._engine_is_alive = engine_is_alive
        self._by_id: dict[int, _OpenCall] = {}
        self._new_id = itertools.count()

    async def ask(self, call: Call[Reply]) -> Reply:
        """Send a call and wait for its reply.

        Raises:
            RequestError: the reply is an error.
            EngineDiedError: the engine ended.
        """
        call_id = next(self._new_id)
        reply = asyncio.get_running_loop().create_future()
        opened = self._by_id[call_id] = _OpenCall(replace(call, call_id=call_id), reply)
        try:
            self._dispatch(opened)
            return msgspec.convert(await reply, call.reply_type())
        finally:
            del self._by_id[call_id]

    def send(self, call: AnyCall) -> None:
        """Send a call whose reply nobody needs."""
        self._send(replace(call, call_id=next(self._new_id)))

    def take(self, reply: CallReply) -> None:
        """Hand a reply to the call that waits for it, if one does."""
        call = self._by_id.get(reply.call_id)
        if call is None or call.reply.done():
            return
        if reply.error is not None:
            call.reply.set_exception(reply.error.as_error())
        else:
            call.reply.set_result(reply.value)

    def take_over(self) -> None:
        """Ask a new engine what the dead one has not answered."""
        for call in self._by_id.values():
            call.deaths += call.was_sent
            if call.reply.done():
                continue
            try:
                if not call.may_be_repeated:
                    raise RequestError(
                        "The engine was restarted before it answered; ask again.",
                        status=503,
                        retry_after_s=RETRY_AFTER_S,
                    )
                self._dispatch(call)
            except Exception as error:  # it may hold what can't be sent
                call.reply.set_exception(error)

    def fail(self, error: RequestError | EngineDiedError) -> None:
        """End all of them with an error."""
        for call in self._by_id.values():
            if not call.reply.done():
                call.reply.set_exception(error)

    def _dispatch(self, call: _OpenCall) -> None:
        call.was_sent = self._engine_is_alive()
        if call.was_sent:
            self._send(call.message)
