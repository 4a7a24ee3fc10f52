"""Getting numbers to the device without waiting for it."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray, device: torch.device) -> Tensor:
    """A copy of ``array`` on ``device``.

    Towards a GPU it goes by way of pinned memory, in the order of the stream's other work: a copy from
    ordinary memory would wait until all kernels launched so far are done. torch keeps the pinned memory
    until the copy has been made.
    """
    if device.type == "cuda":
        return (
            torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(device, non_blocking=True)
        )
    return torch.from_numpy(array.copy()).to(device)
