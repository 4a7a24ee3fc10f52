"""The messages between scheduler and workers: plans and results of steps."""

import msgspec

from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.adapters import NO_ADAPTER
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.grammars import GrammarUse
from radixrt.messages.ids import PackedIds
from radixrt.messages.images import ImageRun
from radixrt.messages.message import Message
from radixrt.messages.requests import PoolingRequest

NO_TOKEN = -1
"""Stands for a sampled token: the model's logits were not finite, so no token could be sampled."""

GRAMMAR_FAILED = -2
"""Stands for a sampled token: the grammar allows no token of the vocabulary, or its matcher
failed."""


MAX_DRAFTED = 31
"""Draft tokens of one sequence in a step. With the token before them they are 32 rows, two tiles of
the CPU's kernels."""


FULL_SAVING = 1.0
"""Each accepted draft token saves a step: no prompts are to come. This very object is not sent."""


EMPTY_STATE = -1
"""Stands for a kept state: that of an empty sequence."""

SAME_STATE = -2
"""Stands for a kept state: the slot goes on from its own."""


class DraftSources(msgspec.Struct, frozen=True, array_like=True):
    """Texts from which draft tokens of a sequence may come, beside its own."""

    continuation: PackedIds = b""
    """Tokens that followed the known ones the last time, under the same cache root."""
    prediction: PackedIds = b""
    """The answer as the client expects it."""
    root: CacheRoot | None = None
    """Cache root, whose sequences share a pool of continuations; None: no pool."""


class Admit(msgspec.Struct, frozen=True, array_like=True):
    """Put a sequence into a slot."""

    slot: int
    token_ids: PackedIds
    """Prompt, and the tokens generated before a retraction."""
    num_cached: int
    """Leading tokens whose KV the given pages already hold."""
    pages: PackedIds
    """Block table so far: position p lies in ``pages[p // page_size]``."""
    sampling: SamplingParams
    num_output: int
    """Number of generated tokens in token_ids: penalties, min_tokens and the grammar count them."""
    grammar: GrammarUse | None = None
    pool: PoolingRequest | None = None
    """The end of the prompt gives these numbers, and no token is sampled."""
    second_segment_start: int = 0
    """Position of the first token of a pair's second text, for models that tell them apart."""
    drafts: DraftSources | None = None
    """None: no tokens of this sequence are drafted."""
    state: int = EMPTY_STATE
    """The kept state of recurrent layers behind the first ``num_cached`` tokens."""
    adapter: int = NO_ADAPTER
    """The place of the sequence's LoRA adapter."""
    adapter_from: int = 0
    """The first position at which the adapter works."""
    images: list[ImageRun] = []
    """The images of the prompt, whose features the worker has."""


class BlockTable(msgspec.Struct, frozen=True, array_like=True):
    """The whole block table of a slot, in place of the one it had."""

    slot: int
    pages: PackedIds
    state: int = SAME_STATE
    """The kept state of recurrent layers from which the slot goes on."""


class KeepState(msgspec.Struct, frozen=True, array_like=True):
    """Keep the state of a slot's recurrent layers when it has computed ``position`` tokens.

    The order stands until the slot gets there, in this step or a later one, or is released. If the
    slot is beyond the position already, nothing is kept.
    """

    slot: int
    position: int
    state: int
    """The kept state that is overwritten."""


class Prefill(msgspec.Struct, frozen=True, array_like=True):
    """Compute the next ``num_tokens`` prompt tokens of a slot, from position ``start``.

    ``start`` moves past the tokens that the worker computed for this slot when another sequence's
    pages were adopted. The chunk that reaches the end of the prompt samples a token.
    """

    slot: int
    start: int
    num_tokens: int


class StepPlan(Message, frozen=True, kw_only=True):
    """The changes before a step, and the step itself.

    Applied in this order: ``release``, ``admit``, ``block_tables``, ``extend_*``. Then one forward
    pass computes the ``prefill`` chunks and one token for every slot whose prompt was complete
    before. These slots have no entry, so a step without changes has a few bytes for any batch size.
    A slot that is released while its token is held (``StepResult.deferred_slots``) gives that token
    first: its sequence may have ended by this very token.
    """

    step_id: int
    release: list[int] = []
    admit: list[Admit] = []
    block_tables: list[BlockTable] = []
    """Block tables of slots that adopted pages which another sequence computes."""
    extend_slots: PackedIds = b""
    extend_pages: PackedIds = b""
    """Page ``extend_pages[i]`` is appended to the block table of slot ``extend_slots[i]``. The
    entries of a slot are adjacent."""
    prefill: list[Prefill] = []
    keep: list[KeepState] = []
    """In the order of the positions of each slot. All kept states that the plan names elsewhere are
    read before."""
    draft_saving: float = FULL_SAVING
    """Part of the tokens to come that will be sampled when all prompts are computed. Only these
    take a step less for each draft token that is accepted: there are as many steps with prompts as
    these need."""


class SlotLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position of a slot: the chosen token first, then the likeliest,
    descending; no tokens, if only the kept mass is asked for."""

    slot: int
    token_ids: PackedIds
    logprobs: list[float]
    log_kept_mass: float | None = None
    """Logarithm of the probability of all tokens that the mask allowed, if it is asked for."""


class SlotVector(msgspec.Struct, frozen=True, array_like=True):
    """The numbers that a slot's prompt gives in place of a token."""

    slot: int
    values: bytes
    """Numbers as 32-bit floats; empty: they were not finite."""


class VerifiedDraft(msgspec.Struct, frozen=True, array_like=True):
    """Draft tokens of a slot whose rows were computed in a step."""

    slot: int
    drafter: int
    """Index into ``DRAFTERS``."""
    num_drafted: int
    num_accepted: int
    """Leading draft tokens that the sampler drew too."""


DRAFTERS = ("grammar", "tree", "ngram", "pool", "prediction", "head", "mtp")
"""Names of the drafters, as metrics show them. Of drafts that promise as much, the one of the first
is taken."""


class ExpertTokens(Message, frozen=True, kw_only=True):
    """The tokens that the experts of a mixture have got since the worker started."""

    layers: int
    """Layers with experts."""
    counts: bytes
    """int64 [layers, experts]"""


class StepResult(Message, frozen=True, kw_only=True):
    """The sampled tokens of one step, in columns; a slot with several tokens has several
    entries."""

    step_id: int
    slots: PackedIds
    token_ids: PackedIds
    """Sampled tokens, those of accepted drafts included, each followed by those that the grammar
    forces after it; or NO_TOKEN, GRAMMAR_FAILED."""
    jump_slots: PackedIds = b""
    jump_tokens: PackedIds = b""
    """Slot ``jump_slots[i]`` was advanced by ``jump_tokens[i]`` tokens beyond the one of a decode
    step: forced ones, and drafts that were accepted."""
    drafts: list[VerifiedDraft] = []
    deferred_slots: PackedIds = b""
    """Slots that were to sample a token and did not, because their grammar's mask was not ready.
    The next step does not compute them: it samples their tokens from the same logits."""
    logprobs: list[SlotLogprobs] = []
    prompt_logprobs: list[SlotLogprobs] = []
    kept_states: PackedIds = b""
    """The kept states that this step has written."""
    vectors: list[SlotVector] = []
    """Vectors of the slots whose prompts end in this step and that sample no token."""
    forward_s: float = 0.0
    """The model's forward pass, logits included."""
    wait_s: float = 0.0
    """Time that the worker waited for this plan after the previous step."""
    step_s: float = 0.0
    """Whole step on the worker: apply the plan, forward, sample."""
