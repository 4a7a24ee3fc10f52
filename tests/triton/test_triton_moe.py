"""The fused mixture of experts computes what each expert alone computes, and its sort loses no
pair."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from radixrt.layers.kernels.interface import LayerKernels
from radixrt_kernels.triton import moe
from radixrt_kernels.triton.moe import Tiling, experts_mlp, route
from tests.checkpoints.expert_stacks import dense_stack
from tests.triton.numbers import DEVICE, draw


def choose(tokens: int, top_k: int, num_experts: int, seed: int = 0) -> torch.Tensor:
    """Experts of each token, none twice, some of them popular."""
    generator = torch.Generator().manual_seed(seed)
    likelihood = torch.linspace(0.1, 4.0, num_experts).exp().expand(max(tokens, 1), -1)
    chosen = torch.multinomial(likelihood, top_k, generator=generator)
    return chosen[:tokens].to(DEVICE)


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts"), [(1, 1, 1), (1, 2, 8), (37, 2, 5), (200, 8, 60)]
)
def test_every_pair_stands_once_in_a_block_of_its_expert(
    tokens: int, top_k: int, num_experts: int, rows: int
) -> None:
    experts = choose(tokens, top_k, num_experts)
    routing = route(experts, num_experts, rows)
    pairs = tokens * top_k
    used = int(routing.num_blocks)
    assert used <= routing.max_blocks
    blocks = routing.sorted_pairs.view(-1, rows)[:used]
    flat = experts.flatten()
    for block, expert in zip(blocks.tolist(), routing.block_experts[:used].tolist(), strict=True):
        real = [pair for pair in block if pair < pairs]
        assert real and all(pair == pairs for pair in block[len(real) :])
        assert all(flat[pair] == expert for pair in real) and real == sorted(real)
    placed = sorted(pair for pair in blocks.flatten().tolist() if pair < pairs)
    assert placed == list(range(pairs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts", "hidden_size", "size"),
    [(1, 2, 4, 64, 32), (5, 1, 3, 100, 24), (70, 3, 6, 48, 80)],
)
def test_experts(
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    size: int,
    activation: str,
    dtype: torch.dtype,
) -> None:
    hidden = draw(tokens, hidden_size, dtype=dtype)
    gate_up = draw(num_experts, 2 * size, hidden_size, dtype=dtype) / hidden_size**0.5
    down = draw(num_experts, hidden_size, size, dtype=dtype) / size**0.5
    weights = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    experts = choose(tokens, top_k, num_experts)
    ours = experts_mlp(hidden, weights, experts, gate_up, down, activation)
    stacks = dense_stack(gate_up.float()), dense_stack(down.float())
    exact = LayerKernels().experts(hidden.float(), (weights, experts), stacks, activation)
    error = 2e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours.float(), exact, rtol=error, atol=error)


@pytest.mark.parametrize("pairs_an_expert", [4, 24, 100, 500])
def test_every_tiling_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, pairs_an_expert: int
) -> None:
    tiling = Tiling.of(pairs_an_expert * 4, 4)
    monkeypatch.setattr(moe.Tiling, "of", staticmethod(lambda pairs, num_experts: tiling))
    hidden, weights = draw(9, 96, dtype=torch.float32), torch.ones(9, 2, device=DEVICE)
    gate_up, down = (draw(4, *shape, dtype=torch.float32) / 8 for shape in ((80, 96), (96, 40)))
    choice, stacks = (weights, choose(9, 2, 4)), (dense_stack(gate_up), dense_stack(down))
    result = experts_mlp(hidden, *choice, gate_up, down, "silu")
    expected = LayerKernels().experts(hidden, choice, stacks, "silu")
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_no_tokens() -> None:
    empty = torch.zeros(0, 2, device=DEVICE)
    gate_up, down = draw(4, 8, 32, dtype=torch.float32), draw(4, 32, 4, dtype=torch.float32)
    hidden = torch.zeros(0, 32, device=DEVICE)
    assert experts_mlp(hidden, empty, empty.long(), gate_up, down, "silu").shape == (0, 32)


def test_experts_of_other_ranks_add_nothing() -> None:
    hidden, weights = draw(9, 64, dtype=torch.float32), torch.rand(9, 2).to(DEVICE)
    gate_up, down = (draw(6, *shape, dtype=torch.float32) / 8 for shape in ((48, 64), (64, 24)))
    experts = choose(9, 2, 6)
    experts[0], experts[1] = torch.tensor([0, 1]), torch.tensor([4, 5])  # all of one rank
    parts = [
        experts_mlp(hidden, weights, experts - first, gate_up[own], down[own], "silu", is_part=True)
        for first, own in ((0, slice(0, 2)), (2, slice(2, 6)))
    ]
    assert not parts[0][1].any() and not parts[1][0].any()
    whole = experts_mlp(hidden, weights, experts, gate_up, down, "silu")
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-5)
