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
