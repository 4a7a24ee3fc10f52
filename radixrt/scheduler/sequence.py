"""A sequence: a prompt and the answer generated from it so far; and the groups of sequences that
are accepted or refused as a whole, the answers of one HTTP request.

The sequences of a batch come one after the other, and of a long batch the next comes when one has
ended. The first decides for all of them, so that no batch fails in its middle because its last
prompts would wait too long. A group whose wait was forecast wrongly is refused as long as none of
its prompts has begun.
"""

from collections import OrderedDict
from dataclasses import dataclass

import msgspec
import numpy as np

from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.adapters import NO_ADAPTER
from radixrt.messages.answers import (
    AnswerReport,
    DraftCounts,
    FinishReason,
    PromptProgress,
    draft_totals,
)
from radixrt.messages.cache_explanation import CacheFacts, DiskRead
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.ids import TokenIds, unpack_ids
from radixrt.messages.sequences import SequenceRequest
from radixrt.scheduler.queue.accounts import Account
from radixrt.scheduler.radix.key_ids import key_ids, tokens_of
from radixrt.scheduler.radix.node import Node
from radixrt.scheduler.radix.return_hazards import Visit

MAX_IDLE = 512
"""Accepted groups of which no sequence is in the engine. A further one of them may still come."""


@dataclass(slots=True, eq=False)
class Group:
    """The sequences of one HTTP request."""

    most_output: int = 0
    """Tokens of one answer."""
    name: str = ""
    """By which its other sequences name it."""
    has_begun: bool = False
    """A prompt of it is planned, or was on another engine."""
    num_alive: int = 0
    """Sequences that wait or run."""
    num_to_come: int = 0
    """Sequences that were sent at once with the first, and have not arrived."""


class Groups:
    """The groups that were accepted."""

    def __init__(self) -> None:
        self._by_name: dict[str, Group] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self.num_to_come = 0
        """Sequences of all groups."""
        self.output_to_come = 0
        """Most tokens of their answers."""

    def knows(self, request: SequenceRequest) -> bool:
        """Whether a sequence of its group was accepted before."""
        return request.group in self._by_name

    def join(self, request: SequenceRequest) -> Group:
        """The group of a sequence that is accepted."""
        group = self._by_name.get(request.group)
        if group is None:
            group = Group(request.sampling.max_tokens or 0, request.group)
            if request.group_size > 1:
                self._by_name[request.group] = group
                self._expect(group, request.group_size - 1)
        else:
            self._idle.pop(request.group, None)
            self._expect(group, -min(group.num_to_come, 1))
        group.num_alive += 1
        group.has_begun |= request.has_begun
        return group

    def leave(self, group: Group) -> None:
        """A sequence has ended. If none is left, those to come may have been dropped before they
        were sent."""
        group.num_alive -= 1
        if group.num_alive:
            return
        self._expect(group, -group.num_to_come)
        if group.name in self._by_name:
            self._idle[group.name] = None
            if len(self._idle) > MAX_IDLE:
                oldest, _ = self._idle.popitem(last=False)
                del self._by_name[oldest]

    def _expect(self, group: Group, change: int) -> None:
        group.num_to_come += change
        self.num_to_come += change
        self.output_to_come += change * group.most_output


NO_SLOT = -1


class Sequence:
    """A prompt and the answer so far. The slot table knows the pages of its KV.

    Args:
        arrived: time of arrival, in seconds on the scheduler's clock, like the other times.
    """

    def __init__(
        self,
        request: SequenceRequest,
        arrived: float,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.options = request.options
        sampling = self.options.sampling
        assert sampling.max_tokens is not None, "the tokenizer process fills max_tokens in"
        self.seq_id = request.seq_id
        self.tokens = request.keys()
        """Buffer of ids, [at least num_tokens], int32; the first ``num_tokens`` are valid. Prefixes
        are compared by them: key ids stand in the places of images, and behind the invocation of an
        activated adapter."""
        self._replaced = unpack_ids(request.token_ids[: len(request.key_ids)])
        """The model's ids at the beginning, where others stand in ``tokens``."""
        self.images = request.images
        self.keeps_images_whole = False
        """A step computes all placeholders of an image or none."""
        self.num_tokens = len(self.tokens)
        """Known tokens: the prompt and the tokens that the worker has returned."""
        self.num_prompt = self.num_tokens - request.num_output
        self.max_output = sampling.max_tokens
        ends = () if sampling.ignore_eos else eos_token_ids
        self.stop_tokens = frozenset((*sampling.stop_token_ids, *ends))
        """Tokens that end the answer."""
        self.arrived = arrived
        self.forecast_wait_s = 0.0
        """Forecast of its wait when it arrived (:mod:`radixrt.scheduler.queue.wait_forecast`),
        without correction."""
        self.grammar = request.grammar
        self.second_segment_start = request.second_segment_start
        self.messages_end = request.messages_end
        self.prediction = request.prediction
        self.is_idle = bool(request.options.idle)
        """It is computed only while nothing else waits or runs."""
        self.speculates = False
        """Its tokens are drafted."""
        self.drafts: DraftCounts = {}
        self.account = Account()
        """The account of its tenant, once it is queued."""
        self.group = Group()
        """The group of its request, once it is accepted."""

        self.place = NO_ADAPTER
        """The place of its adapter, once it is accepted."""
        self.adapter_from = 0
        """The first position at which the adapter works; -1: nowhere."""
        self._is_activated = False
        self._namespace: int | None = None
        """Of the ids of the tokens from there on; None: they are the tokens."""
        self.slot = NO_SLOT
        """Slot in the worker's persistent batch while it runs."""
        self.node: Node | None = None
        """Tree node at whose end its pages in the tree end; locked while it runs."""

        self.visit: Visit | None = None
        """What a policy learns from it, once it is admitted."""
        self.kept_to = 0
        """Position of the last state that is kept of it, or from which it started."""
        self.branch = 0
        """Position up to which the tree had its prompt when it was admitted, if it had no state
        there."""
        self.answer_states: list[tuple[int, int]] = []
        """Positions and pages of its answer behind which states are kept, or may be by a step in
        flight."""
        self.disk_reads = 0
        """Times that it has waited for pages from disk."""
        self.disk_read: DiskRead | None = None
        """What was read while it waited."""
        self.cached_tokens = 0
        """Prompt tokens found in the tree before the first token was out."""
        self.cache_facts = CacheFacts(reusable_tokens=0)
        """Noted when it is first admitted."""
        self.replayed_tokens = 0
        """Output tokens that were computed for another request."""
        self.num_reached = 0
        """Leading tokens that were ever found or planned, even if a retraction has set it back
        since."""
        self.written_tokens = 0
        """Prompt tokens whose KV it inserted into the tree before the first token was out."""
        self.first_planned: float | None = None
        """Time at which its first chunk was planned."""
        self.first_token: float | None = None
        """Time at which its first token came back."""
        self.report = AnswerReport(prompt_tokens=self.num_prompt)
        self.prompt_logprobs_sent = 0
        self.prompt_logprobs_to_skip = 0
        """Rows that will come a second time, because the prompt is computed again after a
        retraction."""

    @property
    def sampling(self) -> SamplingParams:
        return self.options.sampling

    @property
    def root(self) -> CacheRoot:
        """Where its KV is in the tree: that before an invocation is the base model's."""
        root = self.options.root
        return root._replace(adapter="") if self._is_activated else root

    @property
    def adapter(self) -> int:
        """The place of the adapter that it computes with."""
        return self.place if self.adapter_from >= 0 else NO_ADAPTER

    def activate(self, start: int, namespace: int) -> None:
        """Let its adapter work from a position on, where its ids in the tree are those of a
        namespace; -1: nowhere."""
        self.adapter_from = start
        self._is_activated = True
        if start >= 0:
            self._namespace = namespace
            self.tokens = self.tokens.copy()
            self.tokens[start:] = key_ids(self.tokens[start:], namespace)

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def reports_progress(self) -> bool:
        """Whether its client wants to know how much of its prompt is computed."""
        return self.options.progress and self.num_tokens == self.num_prompt

    def progress(self, processed: int, now: float) -> PromptProgress:
        """The progress of its prompt at ``now``, with ``processed`` tokens computed or cached."""
        assert self.first_planned is not None
        return PromptProgress(
            self.num_prompt, self.cached_tokens, processed, now - self.first_planned
        )

    @property
    def reads_cache(self) -> bool:
        """Whether it may use cached KV. Log-probabilities of the whole prompt need the logits of
        every position."""
        return self.sampling.prompt_logprobs is None or self.sampling.prompt_logprobs_start > 1

    def num_scored(self, start: int, end: int) -> int:
        """Tokens of a chunk whose logits give log-probabilities of the prompt."""
        if self.sampling.prompt_logprobs is None:
            return 0
        return max(0, end - max(start, self.sampling.prompt_logprobs_start - 1))

    def cacheable_tokens(self) -> TokenIds:
        """The tokens that need not be computed if the tree has them: [n], int32.

        The last known token is always computed, because its logits give the next one. If
        log-probabilities of the prompt are asked for, so is the token before the first of them.
        """
        end = self.num_tokens - 1
        if self.sampling.prompt_logprobs is not None:
            end = min(end, max(self.sampling.prompt_logprobs_start - 1, 0))
        return self.tokens[:end]

    def split_image(self, position: int) -> tuple[int, int] | None:
        """Beginning and end of the image that a step would split if it ended before ``position``;
        None: it may end there."""
        if self.keeps_images_whole:
            for run in self.images:
                if run.start < position < run.start + run.num_tokens:
                    return run.start, run.start + run.num_tokens
        return None

    def before_image(self, num_tokens: int) -> int:
        """So many leading tokens, or those before the image that they would split."""
        split = self.split_image(num_tokens)
        return num_tokens if split is None else split[0]

    def known_tokens(self) -> TokenIds:
        return self.tokens[: self.num_tokens]

    def model_tokens(self) -> TokenIds:
        """The known tokens as the model reads them."""
        rest = tokens_of(self.tokens[len(self._replaced) : self.num_tokens])
        return np.concatenate((self._replaced, rest))

    def count_draft(self, drafter: str, num_drafted: int, num_accepted: int) -> None:
        """Note a draft that was verified."""
        drafted, accepted = self.drafts.get(drafter, (0, 0))
        self.drafts[drafter] = drafted + num_drafted, accepted + num_accepted

    def append(self, token: int) -> FinishReason | None:
        """Append a token; returns the reason if it is the last one.

        A grammar allows an end token only where the answer may end, and nothing after it, so
        min_tokens does not count.
        """
        if self.num_tokens == len(self.tokens):
            grown = np.empty(2 * self.num_tokens + 16, dtype=np.int32)
            grown[: self.num_tokens] = self.tokens
            self.tokens = grown
        self.tokens[self.num_tokens] = token
        if self._namespace is not None:
            new = slice(self.num_tokens, self.num_tokens + 1)
            self.tokens[new] = key_ids(self.tokens[new], self._namespace)
        self.num_tokens += 1
        num_output = self.num_tokens - self.num_prompt
        if token in self.stop_tokens and (
            self.grammar is not None or num_output > self.sampling.min_tokens
        ):
            return "stop"
        return "length" if num_output >= self.max_output else None

    def begin_prompt_again(self) -> None:
        """After a retraction: the worker will compute the prompt and send its log-probabilities
        from the beginning."""
        self.prompt_logprobs_to_skip = self.prompt_logprobs_sent

    def wants_prompt_logprob(self) -> bool:
        """Whether the next log-probability of the prompt is new to the client; counts it."""
        if self.prompt_logprobs_to_skip > 0:
            self.prompt_logprobs_to_skip -= 1
            return False
        self.prompt_logprobs_sent += 1
        return True

    def start(self, now: float) -> AnswerReport:
        """The first token is out at ``now``; returns the report to send with it."""
        assert self.first_planned is not None
        self.first_token = now
        self.cache_facts.cached_tokens = cached = min(self.cached_tokens, self.num_prompt)
        self.report = AnswerReport(
            prompt_tokens=self.num_prompt,
            cached_tokens=cached,
            disk_tokens=min(cached, 0 if self.disk_read is None else self.disk_read.tokens),
            cache_write_tokens=min(self.written_tokens, self.num_prompt - cached),
            replayed_tokens=self.replayed_tokens,
            queued_s=self.first_planned - self.arrived,
            prefill_s=now - self.first_planned,
        )
        return self.report

    def end(self, reason: FinishReason, now: float, last: int | None = None) -> AnswerReport:
        """The report to send at the end of the answer, with its ``last`` token where that has ended
        it."""
        stopped = reason == "stop" and last in self.sampling.stop_token_ids
        drafted, accepted = draft_totals(self.drafts)
        return msgspec.structs.replace(
            self.report,
            output_tokens=self.num_output,
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=drafted - accepted,
            drafts=self.drafts,
            finish_reason=reason,
            stop_reason=last if stopped else None,
            total_s=now - self.arrived,
        )
