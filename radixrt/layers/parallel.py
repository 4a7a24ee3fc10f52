"""The ranks that share a model: a rank's part of each layer, all-reduce and all-gather."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from radixrt.base.errors import ConfigError

Value = TypeVar("Value", bound=np.generic)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This rank's place among the ``size`` ranks that hold the shards of one model.

    Layers follow Megatron-LM (Shoeybi et al., 2019): column-parallel into row-parallel, so
    attention and MLP each cost one all-reduce. With ``size`` 1 no communication happens and
    torch.distributed need not be initialised.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """The ranks' process group; None: the default group."""
    host_group: dist.ProcessGroup | None = None
    """A group over gloo, for data on the host; None: the default group is one."""
    expert_groups: int = 1
    """Groups of ranks over which the experts of a mixture are spread (expert parallelism, Lepikhin
    et al., 2020). The ranks of a group split each of its experts."""

    def share(self, total: int, what: str) -> int:
        """This rank's part of ``total``, which must divide evenly.

        Raises:
            ConfigError: it does not; ``what`` names the quantity.
        """
        if total % self.size:
            raise ConfigError(
                f"The model's {what} ({total}) cannot be split over --tp {self.size} ranks; "
                f"choose a --tp that divides it."
            )
        return total // self.size

    def own_experts(self, count: int) -> range:
        """This rank's experts out of ``count``; groups differ by one where ``count`` does not
        divide evenly.

        >>> [TensorParallel(rank, 4, expert_groups=2).own_experts(5) for rank in range(4)]
        [range(0, 2), range(0, 2), range(2, 5), range(2, 5)]

        Raises:
            ConfigError: there are fewer experts than groups.
        """
        if count < self.expert_groups:
            raise ConfigError(
                f"The model's {count} experts cannot be spread over --ep {self.expert_groups} groups of ranks; "
                f"choose an --ep of at most {count}."
            )
        group = self.rank // self.ranks_per_expert
        return range(group * count // self.expert_groups, (group + 1) * count // self.expert_groups)

    @property
    def ranks_per_expert(self) -> int:
        """Ranks that split an expert."""
        return self.size // self.expert_groups

    def expert_share(self, total: int) -> slice:
        """This rank's part of the ``total`` features inside an expert.

        Raises:
            ConfigError: the ranks of a group cannot split them evenly.
        """
        ranks = self.ranks_per_expert
        if total % ranks:
            raise ConfigError(
                f"The model's expert size ({total}) cannot be split over {ranks} ranks (--tp {self.size}, "
                f"--ep {self.expert_groups}); choose --ep {self.size}, or a --tp that divides it."
            )
        share = total // ranks
        start = self.rank % ranks * share
        return slice(start, start + share)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks. May overwrite its input.

        Gloo adds more than two parts in an order that depends on their size, so that a token's sums
        would depend on the batch. On a CPU they are added in the order of the ranks.
        """
        if self.size > 2 and tensor.is_cpu:
            total, *others = self._parts(tensor)
            for part in others:
                total += part
            return total
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The ranks' tensors side by side: [rows, columns] -> [rows, size * columns]."""
        return tensor if self.size == 1 else torch.cat(self._parts(tensor), dim=-1)

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return parts

    def from_first(self, values: NDArray[Value]) -> NDArray[Value]:
        """The first rank's values [n], on every rank."""
        if self.size == 1:
            return values
        tensor = torch.from_numpy(values.view(np.uint8).copy())
        dist.broadcast(tensor, 0, group=self.host_group)
        return tensor.numpy().view(values.dtype)

    def agree(self, value: bytes) -> bool:
        """Whether every rank has the same bytes, of a length that all have."""
        if self.size == 1:
            return True
        first = self.from_first(np.frombuffer(value, dtype=np.uint8))
        same = torch.tensor(int(first.tobytes() == value))
        dist.all_reduce(same, dist.ReduceOp.MIN, group=self.host_group)
        return bool(same)
