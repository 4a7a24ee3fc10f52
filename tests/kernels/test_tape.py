"""A tape repeats what it has heard, on new inputs, in memory that is shared by what does not live at the same time."""

from collections.abc import Callable

import pytest
import torch

from radixrt_kernels import tape

Compute = Callable[[torch.Tensor], torch.Tensor]


def kernel_that_doubles(source: torch.Tensor, target: torch.Tensor) -> None:
    target.numpy()[...] = 2 * source.numpy()  # torch does not see it


def by_kernel(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape)
    tape.call(kernel_that_doubles, x, out)
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


@pytest.mark.parametrize("compute", [by_kernel, chain, views, in_place, several_results])
def test_a_replay_is_what_the_computation_gives(compute: Compute) -> None:
    with torch.inference_mode():
        taped, _ = tape.record(compute, torch.randn(3, 8))
        for _ in range(3):
            x = torch.randn(3, 8)
            assert torch.equal(taped.replay(x), compute(x))


def test_memory_is_shared_by_what_lives_one_after_the_other() -> None:
    with torch.inference_mode():
        taped, _ = tape.record(chain, torch.randn(3, 1000))
    assert taped.num_bytes <= 3 * 4 * 3 * 1024


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
    with pytest.raises(tape.NotRecordable, match="depends on values"), torch.inference_mode():
        tape.record(compute, torch.randn(3, 8))
    assert torch.equal(by_kernel(torch.ones(2)), torch.full((2,), 2.0))  # nothing records any more
