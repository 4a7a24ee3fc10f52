"""Derives the sampling settings of each of a request's ``n`` answers."""

import hashlib
import random

import msgspec

from radixrt.base.sampling_params import SamplingParams


def per_answer_params(sampling: SamplingParams, seeds: random.Random) -> list[SamplingParams]:
    """The settings of each answer: ``n`` is 1, and the seed is its own.

    Answer 0 has the request's own seed, so that n=1 and the first of n are the same answer.
    """
    seed = seeds.getrandbits(63) if sampling.seed is None else sampling.seed
    return [
        msgspec.structs.replace(sampling, n=1, seed=answer_seed(seed, index))
        for index in range(sampling.n)
    ]


def answer_seed(seed: int, index: int) -> int:
    """The seed of the answer number ``index``, or of its retry number ``index``."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
