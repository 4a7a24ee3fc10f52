"""Chooses the threads and the processors that a worker computes with."""

import logging

import torch

import radixrt_kernels
from radixrt.base.config import ServerConfig
from radixrt.device.machine import bind, num_cores, numa_nodes, place_of, usable_cpus

log = logging.getLogger(__name__)

SMALL_MODEL_BYTES = 64 << 20


def use_fitting_threads(wanted: int | None, weight_bytes: int) -> None:
    """Set the number of threads of PyTorch and of the native kernels, which take turns on the same
    cores.

    Small models get one: waking more costs more than they save, and the other processes need cores
    too. The built-in model on two quiet cores, against two threads: one stream 1.4 times as fast,
    16 short streams 1.07, 16 streams of 550 tokens 0.83; on busy cores up to 3.6 times. (Measured
    with PyTorch's kernels.)
    """
    if wanted is not None:
        use_threads(wanted)
    elif weight_bytes < SMALL_MODEL_BYTES:
        use_threads(1)
    else:
        use_threads(torch.get_num_threads())


def take_share(config: ServerConfig, rank: int, replica: int) -> None:
    """Take this worker's share of the processors: of a NUMA node with ``--numa``, otherwise of all
    threads. Call before weights are loaded: memory is taken where it is first written."""
    index, count = replica * config.tp + rank, max(1, config.dp) * config.tp
    if not config.numa:
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
        return
    place = place_of(index, count, numa_nodes(usable_cpus()))
    bind(place)
    use_threads(num_cores(place.cpus))
    log.info("Bound to the NUMA nodes %s: %d processors.", list(place.nodes), len(place.cpus))


def use_threads(count: int) -> None:
    """Let PyTorch and the native kernels compute with ``count`` threads."""
    torch.set_num_threads(count)
    if radixrt_kernels.native is not None:
        radixrt_kernels.native.set_num_threads(count)
