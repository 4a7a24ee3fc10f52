"""Receipts of answers: what an answer was computed from, and its tokens, in a chain of digests."""

import hashlib
from typing import Any

import msgspec

from radixrt.base.errors import RequestError
from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.constraint import Constraint

VERSION = 1


class Parameters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of one answer, as the engine used them: the seed, ``max_tokens`` and the tokens of
    ``bad_words`` are filled in, and ``n`` is 1."""

    sampling: SamplingParams
    constraint: Constraint | None = None
    parse_reasoning: str = ""
    parse_tool_calls: str = ""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """An answer and all that it depends on. Nothing in it depends on the time, the batch or the
    cache, so equal answers have equal receipts.

    >>> receipt = Receipt.make({"weights": "ab"}, {}, [5, 6], Parameters(sampling=SamplingParams(seed=1)), [7])
    >>> receipt.check()
    >>> msgspec.structs.replace(receipt, token_ids=[8]).check()
    Traceback (most recent call last):
    radixrt.base.errors.RequestError: The receipt was changed: its token_ids do not match its digests.
    """

    version: int = VERSION
    engine: dict[str, str]
    """Digests and names of what computed the answer: weights, config, kernels and their instruction
    set, code."""
    settings: dict[str, str | int]
    """The settings of the server that change what is computed."""
    prompt_ids: list[int]
    parameters: Parameters
    token_ids: list[int]
    chain: list[str]
    """SHA-256 in hex digits of each field in turn, with the digest before it: of ``engine``,
    ``settings``, ``prompt_ids``, ``parameters`` and ``token_ids``. The last one is the receipt's."""

    @staticmethod
    def make(
        engine: dict[str, str],
        settings: dict[str, str | int],
        prompt_ids: list[int],
        parameters: Parameters,
        token_ids: list[int],
    ) -> "Receipt":
        chain = _chain([engine, settings, prompt_ids, parameters, token_ids])
        return Receipt(
            engine=engine,
            settings=settings,
            prompt_ids=prompt_ids,
            parameters=parameters,
            token_ids=token_ids,
            chain=chain,
        )

    def check(self) -> None:
        """
        Raises:
            RequestError: the receipt is of another version, or a part was changed; names it.
        """
        if self.version != VERSION:
            raise RequestError(f"The receipt has version {self.version}; {VERSION} is known.")
        expected = _chain([getattr(self, name) for name in _CHAINED])
        for name, ours, theirs in zip(_CHAINED, expected, self.chain, strict=False):
            if ours != theirs:
                raise RequestError(f"The receipt was changed: its {name} do not match its digests.")
        if len(self.chain) != len(_CHAINED):
            raise RequestError(f"The receipt has {len(self.chain)} digests, not {len(_CHAINED)}.")


_CHAINED = ("engine", "settings", "prompt_ids", "parameters", "token_ids")


def _chain(parts: list[Any]) -> list[str]:
    chain, before = [], f"radixrt receipt {VERSION}"
    for part in parts:
        content = msgspec.json.encode(msgspec.to_builtins(part, str_keys=True), order="sorted")
        before = hashlib.sha256(before.encode() + b"\n" + content).hexdigest()
        chain.append(before)
    return chain
