"""Chooses the kernels that compute the layers on a device: the fastest that are installed for
it."""

import logging

import torch

import radixrt_kernels
from radixrt.layers.kernels.gpu import gpu_kernels
from radixrt.layers.kernels.interface import LayerKernels

log = logging.getLogger(__name__)


def layer_kernels(device: torch.device) -> LayerKernels:
    """FlashInfer's and Triton's on a GPU, the package's own C++ on a CPU.

    Raises:
        ConfigError: it is a GPU, and Triton is not installed.
    """
    if device.type == "cuda":
        return gpu_kernels(device)
    if radixrt_kernels.available():
        from radixrt.layers.kernels.native import NativeKernels

        return NativeKernels()
    log.warning(
        "The native CPU kernels are not used and PyTorch computes, at a fraction of the speed: %s.",
        radixrt_kernels.missing_because,
    )
    return LayerKernels()
