"""Drives a model with a paged KV cache by hand: what the worker does, with nothing clever in it."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from radixrt.attention.backend import AttentionBackend, AttentionSetup, ForwardContext
from radixrt.attention.metadata import AttentionMetadata
from radixrt.attention.registry import make_backend
from radixrt.attention.states import StateStep, StateTables
from radixrt.models.decoder import CausalLM


def _unused(dtype: torch.dtype) -> float:
    """NaN; in an int8 cache the bytes of a scale that is NaN."""
    return torch.nan if dtype.is_floating_point else -1


@dataclass
class Sequence:
    """The KV cache and the state of one sequence."""

    pages: list[int] = field(default_factory=list)
    length: int = 0
    row: int | None = None
    """Row of its state; None: it has no token yet."""
    keep: dict[int, int] = field(default_factory=dict)
    """Rows to which the state behind some positions is copied on the way, by position."""


def with_forward(model: CausalLM, forward: Callable[..., torch.Tensor]) -> CausalLM:
    """The same model, with another forward pass."""
    other = copy.copy(model)
    other.forward = forward  # type: ignore[method-assign]
    return other


class Harness:
    """Hands out pages in random order from a pool that begins as NaN, so a stray read shows."""

    def __init__(
        self,
        model: CausalLM,
        page_size: int,
        num_pages: int = 400,
        backend: AttentionBackend | None = None,
        kv_dtype: torch.dtype | None = None,
        num_rows: int = 40,
    ) -> None:
        """
        Args:
            kv_dtype: of the KV cache; default: the model's.
            num_rows: of the tables of states.
        """
        self.model = model
        self.page_size = page_size
        self.free_pages = random.Random(0).sample(range(num_pages), num_pages)
        setup = AttentionSetup(
            model.attention_specs(),
            model.dtype,
            kv_dtype=kv_dtype or model.dtype,
            kv_specs=model.kv_specs(kv_dtype or model.dtype),
        )
        self.states = StateTables(
            [
                tuple(
                    torch.full((num_rows, *t.shape), torch.nan, dtype=t.dtype) for t in spec.tensors
                )
                for spec in model.state_specs()
            ]
        )
        self.context = ForwardContext(
            backend or make_backend("auto", setup),
            [
                tuple(
                    torch.full((num_pages, page_size, *t.shape), _unused(t.dtype), dtype=t.dtype)
                    for t in spec.tensors
                )
                for spec in setup.kv_specs
            ],
            self.states,
        )
        self.free_rows = random.Random(1).sample(range(num_rows), num_rows)

    def step(self, work: list[tuple[Sequence, list[int]]]) -> list[torch.Tensor]:
        """Append tokens to sequences in one flat batch; each sequence's logits [new tokens,
        vocab_size]."""
        hidden = self.hidden(work)
        return list(self.model.logits(hidden).split([len(tokens) for _, tokens in work]))

    def hidden(
        self, work: list[tuple[Sequence, list[int]]], rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states after the same, of all new tokens or of these rows of the flat batch."""
        locations: list[int] = []
        positions: list[int] = []
        for sequence, tokens in work:
            for position in range(sequence.length, sequence.length + len(tokens)):
                if position % self.page_size == 0:
                    sequence.pages.append(self.free_pages.pop())
                page = sequence.pages[position // self.page_size]
                locations.append(page * self.page_size + position % self.page_size)
                positions.append(position)
        self._plan_states(work)
        self.context.backend.plan(self._metadata(work, locations))
        ids = torch.tensor([token for _, tokens in work for token in tokens])
        return self.model(ids, torch.tensor(positions), self.context, rows)

    def _plan_states(self, work: list[tuple[Sequence, list[int]]]) -> None:
        """Plan the step of the states, and count the tokens."""
        indptr, keep_indptr, keeps = [0], [0], []
        for sequence, tokens in work:
            if sequence.row is None:
                sequence.row = self.free_rows.pop()
                self.states.copy([(-1, sequence.row)])
            offset = indptr[-1] - sequence.length
            sequence.length += len(tokens)
            indptr.append(indptr[-1] + len(tokens))
            keeps += [
                (p + offset, row)
                for p, row in sorted(sequence.keep.items())
                if p <= sequence.length
            ]
            sequence.keep = {p: row for p, row in sequence.keep.items() if p > sequence.length}
            keep_indptr.append(len(keeps))
        columns = (
            indptr,
            [s.row for s, _ in work],
            keep_indptr,
            [k[0] for k in keeps],
            [k[1] for k in keeps],
        )
        self.states.plan(StateStep(*(torch.tensor(c, dtype=torch.int32) for c in columns)))

    def _metadata(
        self, work: list[tuple[Sequence, list[int]]], locations: list[int]
    ) -> AttentionMetadata:
        def indptr(lengths: list[int]) -> torch.Tensor:
            return torch.tensor([0, *lengths]).cumsum(0).int()

        return AttentionMetadata(
            qo_indptr_cpu=indptr([len(tokens) for _, tokens in work]),
            kv_indptr_cpu=indptr([len(s.pages) for s, _ in work]),
            last_page_len_cpu=torch.tensor(
                [(s.length - 1) % self.page_size + 1 for s, _ in work], dtype=torch.int32
            ),
            kv_indices=torch.tensor([p for s, _ in work for p in s.pages], dtype=torch.int32),
            kv_locations=torch.tensor(locations, dtype=torch.int64),
            page_size=self.page_size,
        )

    def logits(self, tokens: list[int], chunk: int | None = None) -> torch.Tensor:
        """Logits of a whole prompt [len(tokens), vocab_size], computed ``chunk`` tokens a step."""
        sequence, chunk = Sequence(), chunk or len(tokens)
        pieces = [
            self.step([(sequence, tokens[i : i + chunk])])[0] for i in range(0, len(tokens), chunk)
        ]
        return torch.cat(pieces)

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Greedy continuations of several prompts in one batch."""
        sequences = [Sequence() for _ in prompts]
        generated: list[list[int]] = [[] for _ in prompts]
        new = prompts
        for _ in range(count):
            logits = self.step(list(zip(sequences, new, strict=True)))
            new = [[int(rows[-1].argmax())] for rows in logits]
            for tokens, token in zip(generated, new, strict=True):
                tokens.extend(token)
        return generated


def check_chunks_and_batches(harness: Harness, prompt: list[int]) -> None:
    """Check that the logits of a prompt, of more than 40 tokens, have the same bits in chunks and
    beside others."""
    whole = harness.logits(prompt)
    assert whole.isfinite().all()
    for chunk in (1, 7, 64):
        assert torch.equal(harness.logits(prompt, chunk), whole)
    ours, first, second = Sequence(), Sequence(), Sequence()
    harness.step([(first, prompt[:9]), (ours, prompt[:30])])
    harness.step([(ours, prompt[30:31]), (first, [5])])
    _, found, _ = harness.step([(second, prompt[3:40]), (ours, prompt[31:]), (first, [7])])
    assert torch.equal(found, whole[31:])
