"""Recurrences compute what the reference does, and the same bits whatever the chunks, the batch and
the threads; the copies of a state are the state at their token."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import radixrt_kernels
from radixrt_kernels import recurrence
from radixrt_kernels.reference import recurrence as reference

pytestmark = pytest.mark.skipif(
    not radixrt_kernels.available(), reason=f"no native kernels: {radixrt_kernels.missing_because}"
)

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
Step = tuple[torch.Tensor, ...]


def step_of(
    lengths: list[int], rows: list[int], keeps: list[tuple[int, int, int]] | None = None
) -> Step:
    """A step of sequences; keeps are (sequence, tokens behind which, row)."""
    indptr = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    keeps = sorted(keeps or [])
    counts = [sum(k[0] < i for k in keeps) for i in range(len(lengths) + 1)]
    ends = [indptr[i] + tokens for i, tokens, _ in keeps]
    columns = (indptr, rows, counts, ends, [k[2] for k in keeps])
    return tuple(torch.tensor(column, dtype=torch.int32) for column in columns)


class Convolution:
    """A short convolution with everything that it can have."""

    def __init__(
        self, tokens: int, dtype: torch.dtype, channels: int, taps: int, full: bool
    ) -> None:
        projection = torch.randn(tokens, 3 * channels).to(dtype)
        self.tensors = [projection[:, i * channels : (i + 1) * channels] for i in range(3)]
        if not full:
            self.tensors[1:] = [None, None]
        bias = torch.randn(channels).to(dtype) if full else None
        self.weights = (torch.randn(taps, channels).to(dtype), bias, full)
        self.states = torch.randn(9, taps - 1, channels).to(dtype)
        self.outputs = torch.full((tokens, channels), torch.nan, dtype=dtype)

    def run(self, functions: Any, states: torch.Tensor, step: Step, part: slice) -> torch.Tensor:
        tensors = [None if t is None else t[part] for t in self.tensors]
        outputs = self.outputs[part].clone()
        functions.short_convolution(*tensors, *self.weights, outputs, states, step)
        return outputs


class Scan:
    """A gated delta rule, or the scan of a state space."""

    def __init__(
        self, tokens: int, dtype: torch.dtype, heads: int, keys: int, columns: int, delta: bool
    ) -> None:
        key_heads = max(1, heads // 2)
        sizes = [key_heads * keys, key_heads * keys, heads * columns]
        merged = torch.randn(tokens, sum(sizes)).to(dtype).split(sizes, dim=1)
        counts = (key_heads, key_heads, heads)
        self.tensors = [t.unflatten(1, (n, -1)) for t, n in zip(merged, counts, strict=True)]
        self.tensors += [torch.randn(tokens, heads).to(dtype) for _ in range(2 if delta else 1)]
        rate, dt_bias = -0.05 * torch.rand(heads), torch.randn(heads)
        self.weights: Any = (
            (rate, dt_bias, keys < 100)
            if delta
            else (rate, dt_bias, torch.randn(heads), (0.1, 0.9))
        )
        self.states = torch.randn(9, heads, keys, columns)
        self.delta = delta
        self.outputs = torch.full((tokens, heads, columns), torch.nan, dtype=dtype)

    def run(self, functions: Any, states: torch.Tensor, step: Step, part: slice) -> torch.Tensor:
        function = functions.gated_delta_rule if self.delta else functions.state_space_scan
        outputs = self.outputs[part].clone()
        function(*(t[part] for t in self.tensors), *self.weights, outputs, states, step)
        return outputs


MAKERS: dict[str, Callable[[int, torch.dtype], Convolution | Scan]] = {
    "convolution": lambda tokens, dtype: Convolution(tokens, dtype, 131, 4, full=True),
    "plain convolution": lambda tokens, dtype: Convolution(tokens, dtype, 64, 3, full=False),
    "two taps": lambda tokens, dtype: Convolution(tokens, dtype, 5, 2, full=False),
    "delta rule": lambda tokens, dtype: Scan(tokens, dtype, 4, 128, 64, delta=True),
    "small delta rule": lambda tokens, dtype: Scan(tokens, dtype, 6, 18, 35, delta=True),
    "state space": lambda tokens, dtype: Scan(tokens, dtype, 4, 64, 32, delta=False),
    "small state space": lambda tokens, dtype: Scan(tokens, dtype, 1, 16, 10, delta=False),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[int, torch.dtype], Convolution | Scan]:
    return MAKERS[request.param]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = radixrt_kernels.native.num_threads()
    radixrt_kernels.native.set_num_threads(2)
    yield
    radixrt_kernels.native.set_num_threads(before)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_step_of_ragged_sequences_is_what_torch_computes(
    isa: str, make: Callable[..., Any], dtype: torch.dtype
) -> None:
    step = step_of([1, 12, 2, 3], [4, 0, 7, 2], [(1, 1, 5), (1, 12, 8), (3, 2, 1)])
    case = make(18, dtype)
    ours, theirs = case.states.clone(), case.states.clone()
    outputs = case.run(recurrence, ours, step, slice(None))
    expected = case.run(reference, theirs, step, slice(None))
    scale = float(expected.float().abs().max())
    atol = TOLERANCES[dtype] * scale
    torch.testing.assert_close(outputs, expected, rtol=TOLERANCES[dtype], atol=atol)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4 if ours.dim() == 4 else 0)
    assert torch.equal(ours[[3, 6]], case.states[[3, 6]]), "rows of nobody are as they were"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_batches_and_threads_change_no_bit(
    isa: str, make: Callable[..., Any], dtype: torch.dtype, two_threads: None
) -> None:
    case, length = make(40, dtype), 40
    whole = case.states.clone()
    keeps = [(0, end, row) for end, row in ((1, 1), (7, 2), (39, 3))]
    expected = case.run(recurrence, whole, step_of([length], [0], keeps), slice(None))
    radixrt_kernels.native.set_num_threads(1)
    for chunk in (1, 7, 39):
        states, outputs = case.states.clone(), []
        for first in range(0, length, chunk):
            part = slice(first, min(first + chunk, length))
            kept = [(0, e - first, row) for _, e, row in keeps if first < e <= part.stop]
            step = step_of([part.stop - first], [0], kept)
            outputs.append(case.run(recurrence, states, step, part))
        assert torch.equal(torch.cat(outputs), expected)
        assert torch.equal(states, whole)
    # the end of the sequence beside others, whose states are elsewhere
    batch = case.states.clone()
    batch[4] = whole[2]
    rest = case.run(recurrence, batch, step_of([3, 4, 33], [5, 6, 4]), slice(None))
    assert torch.equal(rest[7:], expected[7:])
    assert torch.equal(batch[4], whole[0])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("weights", [None, 1, 3])
def test_the_gated_norm_is_what_torch_computes(
    isa: str, dtype: torch.dtype, gate_first: bool, weights: int | None
) -> None:
    projection = torch.randn(5, 2 * 3 * 37).to(dtype)
    rows, gate = projection.unflatten(1, (2, 3, 37)).unbind(1)
    weight = None if weights is None else torch.randn(weights, 37).to(dtype)
    expected = reference.gated_norm(rows, gate, weight, 1e-5, gate_first)
    result = recurrence.gated_norm(rows, gate, weight, 1e-5, gate_first)
    torch.testing.assert_close(result, expected, rtol=2 * TOLERANCES[dtype], atol=1e-5)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (step_of([18], [9]), "rows must be those of the states"),
        (step_of([17], [0]), "end at the number of tokens"),
        (step_of([18, 0], [0, 1]), "each sequence must have tokens"),
        (step_of([18], [0], [(0, 19, 1)]), "keep_ends must ascend"),
        (step_of([18], [0], [(0, 2, 1), (0, 2, 3)]), "keep_ends must ascend"),
        (step_of([18], [0], [(0, 2, -1)]), "keep_rows must be"),
        (tuple(t.long() for t in step_of([18], [0])), "int32"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(step: Step, message: str) -> None:
    for maker in MAKERS.values():
        case = maker(18, torch.float32)
        with pytest.raises(ValueError, match=message):
            case.run(recurrence, case.states, step, slice(None))


def test_tensors_that_do_not_fit_are_refused() -> None:
    step, case = step_of([3], [0]), Scan(3, torch.float32, 2, 8, 4, delta=True)
    query, key, value, *gates = case.tensors
    for tensors, states, message in (
        ((query, key[..., :4], value), case.states, "heads without gaps"),
        ((query, key, value), case.states[..., :2], "states must be"),
        ((query, key, value), case.states.half(), "states must be"),
        ((query, key, value.half()), case.states, "one dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            recurrence.gated_delta_rule(*tensors, *gates, *case.weights, case.outputs, states, step)
    conv = Convolution(3, torch.float32, 8, 3, full=False)
    with pytest.raises(ValueError, match="2 to 4 taps"):
        recurrence.short_convolution(
            *conv.tensors, torch.randn(5, 8), None, False, conv.outputs, conv.states, step
        )
