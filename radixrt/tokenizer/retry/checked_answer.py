"""Tracks which part of an answer is confirmed by validators, and where it goes on after a failed
value.

The tokenizer process keeps one :class:`CheckedAnswer` for each answer whose schema the grammar does
not fully cover. It uses no model, validator or socket. Its inputs are tokens and the results of
checks; its outputs are values to validate, confirmed text, and positions to go back to.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Sequence

from radixrt.constrained.grammar import CheckedTags, Checks, SpanCheck, SpanError
from radixrt.tokenizer.retry.backtracking import BacktrackPoint, FailedSpan, choose_backtrack_point
from radixrt.tokenizer.retry.exclusions import Exclusions, TokensAlong
from radixrt.tokenizer.retry.spans import Checkpoint, Scanner, SpanTracker
from radixrt.tokenizer.retry.tags import TagTracker

MAX_FAILURES = 16
"""Failures of one value without getting any further in it."""
MAX_RETRIES = 64
"""Failures in a whole answer."""


@dataclasses.dataclass(frozen=True)
class DueCheck:
    """A value to be validated against ``check.schema``."""

    id: int
    check: SpanCheck
    text: str


@dataclasses.dataclass(frozen=True)
class Rewind:
    """Go on from an earlier point."""

    num_output_kept: int
    """Tokens that stay, of those that were pushed."""
    excluded: list[list[int]]
    """Token sequences that must not follow them, for :class:`radixrt.messages.grammars.GrammarUse`.
    The worker ignores a set that would forbid every token that the grammar allows."""
    retries: int
    """Retries of the answer, this one included. Sampling should draw anew: a seed depends on it."""


class RetriesExhausted(Exception):
    """A value has failed too often, or has no alternative left."""

    def __init__(self, check: SpanCheck, errors: list[SpanError]) -> None:
        self.pointer = check.pointer
        self.keywords = check.keywords
        self.errors = errors
        place = f" in the tag {check.tag!r}" if check.tag else ""
        reason = f": {errors[0].message}" if errors else ""
        super().__init__(
            f"The model did not find a value that satisfies {', '.join(check.keywords)} at "
            f"{check.pointer or 'the root'} of the schema{place}{reason}. Say in the prompt what is wanted there, "
            "raise the temperature, or loosen the schema."
        )


@dataclasses.dataclass
class _Span:
    """A complete value."""

    check: SpanCheck
    start: int  # in characters of the answer
    end: int
    first_token: int
    """The token that holds its first character."""
    is_pinned: bool
    """The first token stays."""
    num_tokens: int
    """Length of the answer when the end was known: for a number, including the token after it."""

    @property
    def point_of_return(self) -> int:
        """Tokens of the answer that stay in any case."""
        return self.first_token + self.is_pinned


@dataclasses.dataclass
class RetryState:
    """The failures of the value that begins at one point."""

    num_failures: int = 0
    furthest: int = 0
    """Characters of the value that were right."""
    full: frozenset[object] = frozenset()
    """The :attr:`FailedSpan.fullness` of values that could not go on."""


class CheckedAnswer:
    """One answer, and its checked values: open, to be validated, and passed.

    Example::

        answer.push(token_ids, texts)
        for due in answer.due():
            errors = validate_text(json.dumps(due.check.schema), due.text)
            if not errors:
                answer.passed(due.id)
            elif (rewind := answer.failed(due.id, errors)) is not None:
                ...  # generate anew after rewind.num_output_kept tokens

    Results may come in any order and late; generation goes on meanwhile. Those of values that a
    rewind has dropped are ignored.
    """

    def __init__(
        self,
        checks: Checks,
        *,
        max_failures: int = MAX_FAILURES,
        max_retries: int = MAX_RETRIES,
        tokens_along: TokensAlong | None = None,
        choose_point: Callable[[FailedSpan], BacktrackPoint | None] = choose_backtrack_point,
    ) -> None:
        """``tokens_along``: see :class:`radixrt.tokenizer.retry.exclusions.TokenTexts`. Without it
        only the tokens that came are excluded, and the model may spell the same text in others."""
        self.retries = 0
        self._max_failures, self._max_retries = max_failures, max_retries
        self._choose_point = choose_point
        self._tracker: Scanner = (
            TagTracker(checks) if isinstance(checks, CheckedTags) else SpanTracker(checks)
        )
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._starts: list[int] = []
        """The position of each token's text, in characters."""
        self._checkpoints: list[Checkpoint] = []
        """The tracker before each token."""
        self._ends: list[bool] = []
        """Whether a checked value that began before it ends in each token."""
        self._new: list[DueCheck] = []
        self._unverified: dict[int, _Span] = {}
        self._passed: list[_Span] = []
        """Values that may be opened again by a rewind."""
        self._passed_from = 0
        """Lower bound of their ``first_token``."""
        self._ids = itertools.count()
        self._retry_states: dict[tuple[int, str], RetryState] = {}
        """States by the first token of the value, and the pointer of its check."""
        self._exclusions = Exclusions(tokens_along)
        self._finished = False

    # ------------------------------------------------------------ the answer grows

    def push(self, token_ids: Sequence[int], texts: Sequence[str]) -> None:
        """Take new tokens and the text that each added: "" while a character is incomplete.

        An end token is pushed like any other, with "".

        Raises:
            ValueError: the text is not JSON.
        """
        for token_id, text in zip(token_ids, texts, strict=True):
            self._checkpoints.append(self._tracker.checkpoint())
            self._starts.append(self._tracker.offset)
            self._tokens.append(token_id)
            self._texts.append(text)
            self._ends.append(False)
            for check, start, end in self._tracker.push(text):
                self._completed(check, start, end)

    def finish(self, *, cut_off: bool = False) -> None:
        """No more tokens come. Results are still awaited, and a failure makes the answer go on.

        Args:
            cut_off: the answer ended before it was complete: by its length, or an abort. Open
                values are confirmed unchecked: the finish_reason says that the answer is not
                complete.

        Raises:
            ValueError: the answer is not cut off, and yet incomplete.
        """
        if not cut_off:
            for check, start, end in self._tracker.finish():
                self._completed(check, start, end)
        self._finished = True

    def due(self) -> list[DueCheck]:
        """Values to be validated that no earlier call has returned."""
        new, self._new = self._new, []
        return [due for due in new if due.id in self._unverified]

    # ------------------------------------------------------------ results of checks

    def passed(self, span_id: int) -> None:
        """A value is valid."""
        span = self._unverified.pop(span_id, None)
        if span is not None:
            self._passed_from = min(
                span.first_token, self._passed_from if self._passed else span.first_token
            )
            self._passed.append(span)

    def failed(self, span_id: int, errors: list[SpanError]) -> Rewind | None:
        """A value is not valid: go back. Returns None if a rewind has dropped this value before.
        Raises RetriesExhausted if the request has to end, with this error."""
        span = self._unverified.get(span_id)
        if span is None:
            return None
        failed = self._failed_span(span, errors)
        point = self._choose_point(failed)
        is_exhausted = failed.num_failures > self._max_failures or self.retries >= self._max_retries
        if point is None or is_exhausted:
            raise RetriesExhausted(span.check, errors)
        self.retries += 1
        kept = span.first_token + point.depths[0]
        self._exclusions.add(self._tokens, span.first_token, failed, point)
        self._go_back(kept)
        return Rewind(kept, self._exclusions.after(self._tokens), self.retries)

    # ------------------------------------------------------------ confirmed tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self._tokens)

    @property
    def text(self) -> str:
        """The whole answer so far, confirmed or not."""
        return "".join(self._texts)

    @property
    def num_confirmed_tokens(self) -> int:
        """Number of tokens that no check can take back any more: they may be sent to the client."""
        bounds = [span.point_of_return for span in self._unverified.values()]
        if not self._finished:
            open_since = self._tracker.open_since
            if open_since is None:
                bounds.append(self._num_tokens_with_known_text())
            else:
                first = self._first_token(open_since)
                bounds.append(first + self._is_pinned(first, open_since))
        return self._before_what_may_open_again(min(bounds, default=len(self._tokens)))

    @property
    def num_confirmed_characters(self) -> int:
        """Characters of the text that those tokens added."""
        confirmed = self.num_confirmed_tokens
        return self._starts[confirmed] if confirmed < len(self._starts) else self._tracker.offset

    @property
    def is_settled(self) -> bool:
        """The answer is finished and every result is in."""
        return self._finished and not self._unverified

    # ------------------------------------------------------------ inside

    def _completed(self, check: SpanCheck, start: int, end: int) -> None:
        first = self._first_token(start)
        span = _Span(
            check, start, end, first, self._is_pinned(first, start), num_tokens=len(self._tokens)
        )
        self._ends[-1] |= first < len(self._tokens) - 1
        span_id = next(self._ids)
        self._unverified[span_id] = span
        begin = self._starts[first]
        text = "".join(self._texts[first:])[start - begin : end - begin]
        self._new.append(DueCheck(span_id, check, text))

    def _first_token(self, offset: int) -> int:
        """The token that holds a character of the text: the last token boundary at or before it.

        Tokens without text just before it may hold its first bytes, and belong to it.
        """
        token = bisect.bisect_right(self._starts, offset) - 1
        return bisect.bisect_left(self._starts, self._starts[token])

    def _before_what_may_open_again(self, bound: int) -> int:
        """``bound``, or less if a value that passed reaches beyond it: that value is checked again
        after a rewind to there. It ends in the token in which the next value begins, or contains a
        value that was not validated yet."""
        if not self._passed or bound <= self._passed_from:
            return bound
        for span in sorted(self._passed, key=lambda span: -span.first_token):
            if span.first_token < bound < span.num_tokens:
                bound = span.first_token
        self._passed = [span for span in self._passed if span.num_tokens > bound]
        self._passed_from = min((span.first_token for span in self._passed), default=0)
        return bound

    def _is_pinned(self, token: int, start: int) -> bool:
        """Whether a value has to keep the token in which it begins.

        Such a token also ends another checked value, as ``},{"`` does. Taking it back would open
        that value again, so none of these values could be confirmed before the last one. The token
        stays if it decides nothing of the later value.
        """
        begun = self._texts[token][start - self._starts[token] :]
        return self._ends[token] and not begun.strip('[{" \t\r\n')

    def _num_tokens_with_known_text(self) -> int:
        """Number of tokens without those at the end whose text is not complete yet."""
        count = len(self._texts)
        while count and not self._texts[count - 1]:
            count -= 1
        return count

    def _failed_span(self, span: _Span, errors: list[SpanError]) -> FailedSpan:
        first, last = span.first_token, span.num_tokens
        begin = self._starts[first]
        tokens = self._tokens[first:last]
        self._exclusions.forget_before(self.num_confirmed_tokens, self._tokens)
        dead_ends = self._exclusions.conclude(self._tokens[:last])
        failed = FailedSpan(
            text="".join(self._texts[first:last])[: span.end - begin],
            value_start=span.start - begin,
            token_ids=tokens,
            token_starts=[start - begin for start in self._starts[first:last]],
            spent=frozenset(at - first for at in dead_ends) | ({0} if span.is_pinned else set()),
            errors=errors,
        )
        key = (first, span.check.pointer)
        state = self._retry_states.setdefault(key, RetryState())
        progress = failed.sound_characters
        if progress is not None and progress > state.furthest:
            state.furthest, state.num_failures = progress, 0
        state.num_failures += 1
        if failed.is_full:
            state.full |= {failed.fullness}
        return dataclasses.replace(failed, num_failures=state.num_failures, full=state.full)

    def _go_back(self, kept: int) -> None:
        """Drop all tokens except the first ``kept``, and what is known of the dropped ones."""
        self._tracker.reset(self._checkpoints[kept])
        for known in (self._tokens, self._texts, self._starts, self._checkpoints, self._ends):
            del known[kept:]
        self._unverified = {k: v for k, v in self._unverified.items() if v.num_tokens <= kept}
        self._passed = [span for span in self._passed if span.num_tokens <= kept]
        self._retry_states = {k: v for k, v in self._retry_states.items() if k[0] <= kept}
        self._finished = False
