"""Computes the KV of a prompt ahead of its requests (warm), and keeps it from eviction for a time
(pin)."""

import msgspec

from radixrt.base.errors import RequestError
from radixrt.base.sampling_params import PREFILL_ONLY
from radixrt.client.engine_client import EngineClient, RunRequests
from radixrt.kv.cache_hint import check_pin_seconds
from radixrt.messages.calls import PinCall
from radixrt.messages.requests import GenerateRequest, Prompt, RequestOptions

DEFAULT_PIN_S = 300.0
"""Default duration of a lease, in seconds."""


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of warming a prompt, in tokens."""

    prompt_tokens: int
    cached_tokens: int
    """Found in the radix tree."""
    cache_write_tokens: int
    """Computed and put into the tree: the rest, but for a last page that is not full."""


class Pinned(Warmed, frozen=True, kw_only=True):
    """A lease on a warmed prompt."""

    lease: str
    """Its id, for release."""
    pinned_tokens: int
    """Leading tokens of the prompt that stay; all but a last page that is not full."""
    expires_in_s: float


async def warm(
    run: RunRequests, request_id: str, prompt: Prompt, options: RequestOptions
) -> Warmed:
    """Compute a prompt's KV without an answer.

    Args:
        run: runs a request and returns its one chunk.
        options: its sampling settings are not used.

    Raises:
        RequestError: the prompt is invalid, or the request was dropped.
    """
    options = msgspec.structs.replace(options, sampling=PREFILL_ONLY)
    (chunk,) = await run([GenerateRequest(request_id=request_id, prompt=prompt, options=options)])
    if chunk.finish_reason == "abort":
        raise RequestError("The request was dropped before the prompt was computed.", status=408)
    return msgspec.convert(chunk.report, Warmed, from_attributes=True)


async def pin(
    client: EngineClient,
    run: RunRequests,
    request_id: str,
    prompt: Prompt,
    options: RequestOptions,
    *,
    ttl_s: float,
) -> Pinned:
    """Warm a prompt, then take a lease on its KV.

    Args:
        ttl_s: seconds that the lease lasts; at most :data:`radixrt.kv.cache_hint.MAX_PIN_S`.

    Raises:
        RequestError: the prompt or ``ttl_s`` is invalid, or too much is pinned already.
    """
    check_pin_seconds(ttl_s)  # before anything is computed in vain
    while True:
        engine = client.engine
        warmed = await warm(run, request_id, prompt, options)
        try:
            lease = await client.call(
                PinCall(
                    prompt=prompt,
                    root=options.root,
                    ttl_s=ttl_s,
                    tenant=options.tenant,
                )
            )
        except RequestError:
            if client.engine == engine:
                raise
        else:
            return Pinned(**msgspec.structs.asdict(lease), **msgspec.structs.asdict(warmed))
