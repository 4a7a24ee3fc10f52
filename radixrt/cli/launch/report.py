"""Reports the cache's part in an agent's requests: tokens from the cache, tokens computed, and the
causes of the misses."""

import threading
from collections import defaultdict
from typing import Any
from urllib.parse import quote

from radixrt.base.liveness.supervision import start_thread
from radixrt.cli.chat.client import ChatClient, ChatError

POLL_S = 20.0
"""The server remembers the prompts of some hundred requests of an agent, which no model answers in
this time."""

_MEANING = {
    "none": "the last token of a prompt, which is always computed",
    "never_seen": "new text",
    "page_rounding": "tokens of incomplete pages",
    "evicted": "evicted",
    "missing_state": "tokens whose state was not kept",
    "other_salt": "cached under another salt",
    "template_rewrote_history": "earlier messages that the chat template wrote in another way",
    "tools_changed": "changed tools",
    "volatile_text": "a time, a number or an id in the prompt that differs",
}
_USUAL = frozenset({"none", "never_seen", "page_rounding", "missing_state"})
"""Causes that nobody can avoid."""


class SessionWatch:
    """Collects the explanations of a session's requests while the block runs."""

    def __init__(self, client: ChatClient, session: str) -> None:
        self._client = client
        self._path = f"/v1/cache/explain?session={quote(session)}"
        self._requests: dict[str, dict[str, Any]] = {}
        self._error: ChatError | None = None
        """The error of the last reading."""
        self._ended = threading.Event()

    def __enter__(self) -> "SessionWatch":
        start_thread(self._poll, name="watch-session")
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _poll(self) -> None:
        while not self._ended.wait(POLL_S):
            self._read()

    def _read(self) -> None:
        try:
            explained = self._client.get(self._path)["requests"]
        except ChatError as error:  # the next reading has the same requests
            self._error = error
            return
        self._error = None
        self._requests |= {request["request_id"]: request for request in explained}

    def summary(self, title: str, names_turns: bool) -> str:
        """The report, from all requests until now.

        Args:
            names_turns: with the address of the explanations of all turns.
        """
        self._read()
        if self._error is not None:
            return f"{title}: no report of the cache. {self._error}"
        report = summary(title, list(self._requests.values()))
        if names_turns and self._requests:
            report += f"\n  each turn: {self._client.url}{self._path}"
        return report


def summary(title: str, requests: list[dict[str, Any]]) -> str:
    """
    >>> turn = {"prompt_tokens": 90, "cached_tokens": 0, "missed_tokens": 90, "cause": "never_seen", "detail": "…"}
    >>> print(summary("Codex", [turn, turn | {"prompt_tokens": 110, "cached_tokens": 100, "missed_tokens": 10}]))
    Codex: 2 turns, 200 prompt tokens: 100 from the cache (50.0 %), 100 computed.
      computed      100  in 2 turns: new text
    """
    if not requests:
        return f"{title}: the server has answered none of its requests."
    prompt, cached = (sum(one[name] for one in requests) for name in ("prompt_tokens", "cached_tokens"))  # fmt: skip
    turns = "1 turn" if len(requests) == 1 else f"{len(requests)} turns"
    lines = [
        f"{title}: {turns}, {prompt:,} prompt tokens: {cached:,} from the cache "
        f"({100 * cached / max(1, prompt):.1f} %), {prompt - cached:,} computed."
    ]
    causes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in requests:
        causes[one["cause"]].append(one)
    for cause, missed in sorted(causes.items(), key=lambda item: -_tokens(item[1])):
        where = f"in {len(missed)} turn{'s' * (len(missed) != 1)}"
        line = f"  computed {_tokens(missed):>8,}  {where}: {_MEANING.get(cause, cause)}"
        if cause not in _USUAL:
            largest = max(missed, key=lambda one: int(one["missed_tokens"]))
            line += f". {largest['detail']}"
        lines.append(line)
    return "\n".join(lines)


def _tokens(requests: list[dict[str, Any]]) -> int:
    return sum(int(one["missed_tokens"]) for one in requests)
