"""How is each of a request's n answers sampled? As the request says, with a length and a seed of its own."""

import hashlib
import random

import msgspec

from radixrt.base.sampling_params import SamplingParams


def per_answer_params(
    sampling: SamplingParams, max_tokens: int, seeds: random.Random
) -> list[SamplingParams]:
    """The sampling settings of each of a request's n answers: max_tokens and a seed filled in.

    Answer 0 has the request's own seed, so that n=1 and the first of n are the same answer.
    """
    seed = seeds.getrandbits(63) if sampling.seed is None else sampling.seed
    return [
        msgspec.structs.replace(sampling, n=1, max_tokens=max_tokens, seed=answer_seed(seed, index))
        for index in range(sampling.n)
    ]


def answer_seed(seed: int, index: int) -> int:
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
