"""Reads OpenAI's fields about the prompt cache: ``prompt_cache_key``, ``prompt_cache_retention`` and ``prompt_cache_options``."""

from typing import Any

from msgspec.structs import replace

from radixrt.api.requests.protocol import GenerationFields, QueueFields
from radixrt.base.errors import RequestError, shown
from radixrt.kv.cache_hint import LONGEST_SESSION
from radixrt.messages.requests import CacheHints, Retention

TTL_S = {"30m": 1800.0, "12h": 43200.0, "24h": 86400.0}
"""Seconds of each lifetime that OpenAI's fields have."""

DEFAULT_TTL = "30m"
"""Of a ``prompt_cache_breakpoint``."""

_RETENTIONS = ("in_memory", "24h")
_MODES = ("implicit", "explicit")


def with_prompt_cache(hints: CacheHints, fields: QueueFields | GenerationFields) -> CacheHints:
    """Cache hints with the meaning of OpenAI's fields added. Those of the field ``cache`` win.

    Raises:
        RequestError: a value is none that OpenAI's API has; names the field.
    """
    if not isinstance(fields, GenerationFields):
        return hints
    key = fields.prompt_cache_key
    if key and len(key) > LONGEST_SESSION:
        raise RequestError(
            f"prompt_cache_key may have at most {LONGEST_SESSION} characters.",
            param="prompt_cache_key",
        )
    if key and not hints.session:
        hints = replace(hints, session=key)
    ttl_s = _lifetime_s(fields)
    if ttl_s is not None and not hints.retain:
        hints = replace(hints, retain=[Retention("high", None, ttl_s)])
    return hints


def _lifetime_s(fields: GenerationFields) -> float | None:
    """Seconds for which all of the request's KV is to be retained before that of others."""
    retention = fields.prompt_cache_retention
    _check(retention, _RETENTIONS, "prompt_cache_retention")
    options = fields.prompt_cache_options
    if options is not None:
        _check(options.mode, _MODES, "prompt_cache_options.mode")
        _check(options.ttl, TTL_S, "prompt_cache_options.ttl")
        if options.ttl is not None and options.mode != "explicit":
            return TTL_S[options.ttl]
    return TTL_S["24h"] if retention == "24h" else None


def _check(value: str | None, known: Any, field: str) -> None:
    if value is not None and value not in known:
        raise RequestError(
            f"{field} must be one of {', '.join(known)}, not {shown(value)}.", param=field
        )
