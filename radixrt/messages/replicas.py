"""The messages about replicas: their load and the changes of their caches, for the router; their
ends, for the api; the way in for engines on other machines."""

import msgspec

from radixrt.messages.answers import EngineInfo
from radixrt.messages.message import Message


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a scheduler after it has planned a step. Lengths are in tokens."""

    received: int = 0
    """Sequences received since the start; those that the router has sent later are not in the other
    fields."""
    step_s: float = 0.0
    """Seconds until the steps in flight end."""
    partial_s: list[float] = []
    """Seconds to compute the rest of each partly computed prompt."""
    waiting_s: float = 0.0
    """Seconds to compute the prompts that wait."""
    slowdown: float = 1.0
    """Time of a prompt beside the decoding sequences over its time alone."""
    seconds_per_token: float = 0.0
    """Fitted to the last steps: the cost of a prompt token. 0: not known yet."""
    seconds_per_pair: float = 0.0
    """Seconds for a pair of a prompt token and a token before it."""
    waiting: int = 0
    context_tokens: int = 0
    """Tokens of all running sequences; what several share counts for each."""
    held_tokens: int = 0
    """Tokens of the pool that running sequences and leases hold."""
    free_tokens: int = 0
    """Tokens of the pool without KV."""
    pool_tokens: int = 1

    @property
    def queued_s(self) -> float:
        """Seconds until all prompts are computed."""
        return self.step_s + sum(self.partial_s) + self.waiting_s


class ReplicaReport(Message, frozen=True, kw_only=True):
    """The news of a replica, after a step or several short ones, and at least once a second."""

    load: ReplicaLoad
    stream: str
    """The name of its stream of KV events."""
    sequence: int
    """Number of the last batch of KV events so far: a subscriber that has fewer has lost some."""
    events: bytes = b""
    """An encoded :class:`radixrt.kv.events.EventBatch`; empty: nothing has changed."""


class ReplayEvents(Message, frozen=True, kw_only=True):
    """The router has missed KV events; as :class:`radixrt.kv.events.ReplayRequest`."""

    stream: str
    sequence: int


class EventsReplayed(Message, frozen=True):
    """The batches that a router has missed, or a snapshot."""

    events: bytes
    """An encoded list of :class:`radixrt.kv.events.EventBatch`."""


class Attach(Message, frozen=True):
    """A tokenizer process tells a scheduler that it is the one to talk to. What others before it
    have sent is void."""

    engine: int
    """Number of its engine."""


class ReplicaDrained(Message, frozen=True):
    """A replica's last message before it ends, because it was asked to."""


class RequestsLost(Message, frozen=True, kw_only=True):
    """A replica has died or drained. The api sends its open requests again, with the tokens that
    their clients have."""

    request_ids: list[str]
    leases: list[str]
    """Ids of the leases of the replica."""
    has_drained: bool = False
    """No request can be the cause."""


class Join(Message, frozen=True, kw_only=True):
    """An engine on another machine asks to become a replica: the first message of its
    connection."""

    version: str
    """The version of radixrt: both ends must speak the same messages."""
    model: str
    """Fingerprint of the checkpoint and the types that it is computed in."""
    info: EngineInfo


class Joined(Message, frozen=True):
    """The engine is a replica of the ingress now."""

    replica: int
    tokenizer_json: bytes
    """The model's tokenizer.json, for the processes that load grammars."""


class JoinRefused(Message, frozen=True, kw_only=True):
    """The engine cannot be a replica of this ingress, or not yet."""

    reason: str
    retry_after_s: float


class JoinAgain(Message, frozen=True):
    """The ingress does not know the connection any more: what the engine has of it is void."""


class Ping(Message, frozen=True):
    """The ingress lives."""
