"""Receipts of answers: what an answer was computed from, and its tokens, in a chain of digests."""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from radixrt.base.errors import RequestError
from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.constraint import Constraint

VERSION = 1
VERSION_WITH_IMAGES = 2
"""Of receipts of answers about images, so that a verifier that only knows those of text refuses
them."""

COMPUTING = (
    "attention_backend", "context_length", "dtype", "ep", "grammar_backend", "grammar_whitespace", "kv_cache_dtype",
    "load_format", "page_size", "quantization", "reasoning_parser", "tool_call_parser", "tp",
)  # fmt: skip
"""The settings that change what is computed, beside the checkpoint."""

TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
"""A number that can be a token: ids are packed in 32 bits, and negative ones stand for images."""


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
    """VERSION, or VERSION_WITH_IMAGES."""
    engine: dict[str, str]
    """Digests and names of what computed the answer: weights, config, kernels and their instruction
    set, code."""
    settings: dict[str, str | int]
    """The settings of the server that change what is computed."""
    prompt_ids: list[TokenId]
    """The model's ids, placeholders of images among them."""
    images: list[str] | msgspec.UnsetType = msgspec.UNSET
    """The digest of each image of the prompt in hex digits, in order (``ImageRun.image``). With
    the placeholders it decides the places of the image's features, and their positions, which
    follow from the shape of the tensor."""
    parameters: Parameters
    token_ids: list[TokenId]
    chain: list[str]
    """SHA-256 in hex digits of each field in turn, with the digest before it: of ``engine``,
    ``settings``, ``prompt_ids``, ``images`` if there are any, ``parameters`` and ``token_ids``. The
    last one is the receipt's."""

    @staticmethod
    def make(
        engine: dict[str, str],
        settings: dict[str, str | int],
        prompt_ids: list[int],
        parameters: Parameters,
        token_ids: list[int],
        images: Sequence[str] = (),
    ) -> "Receipt":
        receipt = Receipt(
            version=VERSION_WITH_IMAGES if images else VERSION,
            engine=engine,
            settings=settings,
            prompt_ids=prompt_ids,
            images=list(images) if images else msgspec.UNSET,
            parameters=parameters,
            token_ids=token_ids,
            chain=[],
        )
        return msgspec.structs.replace(receipt, chain=_chain(receipt))

    def check(self) -> None:
        """
        Raises:
            RequestError: the receipt is of another version, or a part was changed; names it.
        """
        if (names := _CHAINED.get(self.version)) is None:
            known = " and ".join(map(str, _CHAINED))
            raise RequestError(f"The receipt has version {self.version}; {known} are known.")
        has_images = self.images is not msgspec.UNSET
        if has_images is not ("images" in names) or self.images == []:
            raise _changed("images")
        expected = _chain(self)
        for name, ours, theirs in zip(names, expected, self.chain, strict=False):
            if ours != theirs:
                raise _changed(name)
        if len(self.chain) != len(names):
            raise RequestError(f"The receipt has {len(self.chain)} digests, not {len(names)}.")


_CHAINED = {
    VERSION: ("engine", "settings", "prompt_ids", "parameters", "token_ids"),
    VERSION_WITH_IMAGES: ("engine", "settings", "prompt_ids", "images", "parameters", "token_ids"),
}
"""The fields that each version's chain covers, in order."""


def _changed(name: str) -> RequestError:
    return RequestError(f"The receipt was changed: its {name} do not match its digests.")


def _chain(receipt: Receipt) -> list[str]:
    chain, before = [], f"radixrt receipt {receipt.version}"
    for name in _CHAINED[receipt.version]:
        part: Any = getattr(receipt, name)
        content = msgspec.json.encode(msgspec.to_builtins(part, str_keys=True), order="sorted")
        before = hashlib.sha256(before.encode() + b"\n" + content).hexdigest()
        chain.append(before)
    return chain
