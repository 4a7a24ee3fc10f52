"""A tape repeats what was traced, for any number of rows, in memory that is shared by what does not
live at the same time."""

import threading
from collections.abc import Callable

import pytest
import torch

from radixrt_kernels import tape, trace

Compute = Callable[[torch.Tensor], torch.Tensor]


def kernel_that_doubles(source: torch.Tensor, target: torch.Tensor) -> None:
    target.numpy()[...] = 2 * source.numpy()  # torch does not see it


def by_kernel(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape)
    trace.call(kernel_that_doubles, x, out)
    return out


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(30):
        x = by_kernel(x).mul(0.5).add(1)
    return x


def views(x: torch.Tensor) -> torch.Tensor:
    first, second = by_kernel(x).chunk(2, dim=-1)
    merged = torch.cat((second.unflatten(-1, (2, -1)).flatten(1), first.t().t()), dim=-1)
    return merged[:, 1:].contiguous()[:, :4].to(torch.float64).float()


def in_place(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x)
    total += x
    total[:, 0] = 3
    total[torch.tensor([1, 0])] *= 2
    return total.mul_(2).masked_fill_(total > 4, -1)


def several_results(x: torch.Tensor) -> torch.Tensor:
    values, indices = x.topk(2, dim=-1)
    mean = x.mean(-1, keepdim=True)
    return values + indices + mean + by_kernel(x)[:, :2]


def heads_apart(x: torch.Tensor) -> torch.Tensor:
    """Memory in which rows are not the outermost dimension."""
    heads = by_kernel(x).unflatten(-1, (2, -1)).transpose(0, 1).contiguous()
    return torch.cat((heads[1], by_kernel(heads)[0]), dim=-1)


def by_row_numbers(x: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(x.shape[0])
    return x.index_select(0, numbers) + numbers[:, None] + x.new_full((x.shape[0], 1), 2.0)


COMPUTATIONS = [by_kernel, chain, views, in_place, several_results, heads_apart, by_row_numbers]


@pytest.mark.parametrize("compute", COMPUTATIONS)
def test_a_replay_is_what_the_computation_gives(compute: Compute) -> None:
    with torch.inference_mode():
        tapes = tape.Tapes(compute, torch.randn(3, 8))
        memory = torch.empty(tapes.num_bytes(40), dtype=torch.uint8)
        for rows in (2, 3, 7, 40):
            taped = tapes.of(rows, memory)
            for _ in range(3):
                x = torch.randn(rows, 8)
                assert torch.equal(taped.replay(x), compute(x))


def test_memory_is_shared_by_what_lives_one_after_the_other() -> None:
    with torch.inference_mode():
        tapes = tape.Tapes(chain, torch.randn(3, 1000))
    assert tapes.num_bytes(3) <= 3 * 4 * 3 * 1024


def test_tapes_of_many_numbers_of_rows_share_memory() -> None:
    with torch.inference_mode():
        tapes = tape.Tapes(chain, torch.randn(1, 8))
        memory = torch.empty(tapes.num_bytes(20), dtype=torch.uint8)
        taped = [tapes.of(rows, memory) for rows in (20, 4)]
    (large, small) = (one.output.untyped_storage().data_ptr() for one in taped)
    assert large == small == memory.data_ptr()
    assert tapes.of(21, memory).output.untyped_storage().data_ptr() != large, "it would not fit"


def test_no_kernel_runs_in_a_trace() -> None:
    calls: list[int] = []

    def noting(source: torch.Tensor, target: torch.Tensor) -> None:
        calls.append(len(source))

    def compute(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape)
        trace.call(noting, x, out)
        return out

    with torch.inference_mode():
        tapes = tape.Tapes(compute, torch.randn(3, 8), checks=False)
        assert calls == []
        tapes.of(5).replay(torch.randn(5, 8))
    assert calls == [5]


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x[x > 0],
        lambda x: x * x.max().item(),
        lambda x: x[x[:, 0].nonzero().squeeze(-1)],
        lambda x: x if x.sum() > 0 else -x,
    ],
)
def test_what_looks_at_values_cannot_be_recorded(compute: Compute) -> None:
    with pytest.raises(trace.NotRecordable, match="depends on values"), torch.inference_mode():
        tape.Tapes(compute, torch.randn(3, 8))
    assert torch.equal(by_kernel(torch.ones(2)), torch.full((2,), 2.0))  # nothing traces any more


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x[: (len(x) + 1) // 2] * 2,
        lambda x: x.new_zeros(-(-len(x) // 4) * 4, 8)[: len(x)] + x,
        lambda x: by_kernel(x) if len(x) > 8 else x * 2,
        lambda x: x * (1 / len(x)),
    ],
)
def test_what_is_not_proportional_to_the_rows_cannot_be_recorded(compute: Compute) -> None:
    """A half of them, whole blocks, another way for many, other factors."""
    with pytest.raises(trace.NotRecordable, match="rows"), torch.inference_mode():
        tape.Tapes(compute, torch.randn(3, 8))


def test_a_branch_for_many_rows_is_found_by_the_first_replay() -> None:
    """No trace sees it, because traces have few rows."""

    def branching(x: torch.Tensor) -> torch.Tensor:
        return x + 2 if len(x) > 50 else x + 1

    tapes = tape.Tapes(branching, torch.zeros(1, 4), checks=True)
    few, many = torch.rand(3, 4), torch.rand(60, 4)
    assert torch.equal(tapes.of(3).replay(few), few + 1)
    with pytest.raises(tape.TapeDiffers, match="60 rows"):
        tapes.of(60).replay(many)


def test_a_replay_is_compared_once_and_nan_equals_itself() -> None:
    calls: list[int] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x.log()

    taped = tape.Tapes(counted, torch.ones(1, 4), checks=True).of(5)
    assert calls == list(trace.TRACED_ROWS)
    for _ in range(3):
        taped.replay(-torch.ones(5, 4))
    assert calls == [*trace.TRACED_ROWS, 5]


def test_kernels_of_another_thread_are_not_recorded() -> None:
    ran: list[torch.Tensor] = []

    def beside(x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=lambda: ran.append(by_kernel(torch.ones(2))))
        other.start()
        other.join()
        return by_kernel(x)

    tapes = tape.Tapes(beside, torch.zeros(1, 4))
    assert [one.tolist() for one in ran] == [[2.0, 2.0]] * len(trace.TRACED_ROWS)
    assert len(tapes.of(2).calls) == 1
