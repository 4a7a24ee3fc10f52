"""Names of the last release, of settings and of their values, that are other ones now, or none."""

import logging
from typing import Any

from radixrt.base.settings.setting import flag_of

log = logging.getLogger(__name__)

RENAMED = {
    "disable_cascade": "debug_disable_cascade",
    "disable_cuda_graph": "debug_disable_cuda_graph",
    "disable_jump_forward": "debug_disable_jump_forward",
    "disable_overlap_schedule": "debug_disable_overlap_schedule",
    "reencode_answers": "debug_reencode_answers",
    "validate_structured_output": "debug_validate_structured_output",
}
"""Switches and their successors."""

REMOVED = {
    "grammar_compile_memory": "the limit is 1 GiB",
    "kept_conversations_ttl": "a conversation is kept for an hour after its last use; --kept-conversations-mb is the limit",
    "kv_events_buffer": "10,000 batches are kept, of at most 32 MiB",
    "max_body_bytes": "the limit is 32 MiB",
    "max_pin_seconds": "a pin lasts at most an hour; --max-pinned-fraction is the limit",
    "structured_retries": "a value is tried again 16 times",
}
"""Settings whose value is ignored, with the rule that replaces each."""

RENAMED_VALUES = {"eviction_policy": {"duel": "lru"}}


def upgraded(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the names of this release in place of those of the last; warns of each.

    >>> upgraded({"disable_cascade": True, "page_size": 1})
    {'debug_disable_cascade': True, 'page_size': 1}
    """
    result = {}
    for name, value in settings.items():
        if name in REMOVED:
            _warn(f"{flag_of(name)} is ignored: {REMOVED[name]}")
            continue
        if name in RENAMED:
            _warn(f"{flag_of(name)} is {flag_of(RENAMED[name])} now")
            name = RENAMED[name]
        new_value = RENAMED_VALUES.get(name, {}).get(str(value))
        if new_value is not None:
            _warn(f"{flag_of(name)} {value} is {flag_of(name)} {new_value} now")
            value = new_value
        result[name] = value
    return result


def _warn(change: str) -> None:
    log.warning("%s. The next release will refuse it.", change)
