"""``radixrt verify``: computes an answer again by its receipt, on an engine that has nothing cached,
and says whether it is the same."""

import argparse
import base64
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError, RadixrtError, RequestError
from radixrt.base.image_parts import image_base64
from radixrt.messages.ids import pack_ids
from radixrt.messages.receipts import COMPUTING, Receipt
from radixrt.messages.requests import GenerateRequest, RequestOptions, TokenPrompt
from radixrt.offline.background_engine import BackgroundEngine
from radixrt.supervisor.launch import prepare

_KNOWN = {
    "weights": "the weights",
    "config": "config.json",
    "tokenizer": "the tokenizer",
    "isa": "the kernels' instruction set",
    "kernels": "the build of the kernels",
    "code": "the code of radixrt",
}
"""What an engine's digests are of, for messages."""
_OF_IMAGES = ("mmproj", "max_image_pixels")
"""Settings of the server for images, which its receipts do not have."""


def run(arguments: argparse.Namespace) -> int:
    """Verify each receipt of a file; returns the exit status: 0 if all answers are the same."""
    receipts = read_receipts(arguments.receipt)
    settings: dict[str, Any] = {**receipts[0].settings, "model_path": arguments.model_path}
    if any(receipt.settings != receipts[0].settings for receipt in receipts):
        raise ConfigError("The receipts are of servers with different settings: verify each alone.")
    if others := receipts[0].settings.keys() - {*COMPUTING, "random_seed"}:
        raise ConfigError(f"The receipt has a setting that receipts do not have: {min(others)}.")
    try:
        for receipt in receipts:
            receipt.check()
        images = read_images(arguments.image, receipts)
        settings |= {"max_images": max(len(images), ServerConfig.max_images)}
        settings |= {name: value for name in _OF_IMAGES if (value := getattr(arguments, name))}
        config = prepare(ServerConfig(**settings, receipts=True, log_level="warning"))
        engine = BackgroundEngine(config)
        try:
            verdicts = [verdict_of(engine, receipt, images) for receipt in receipts]
        finally:
            engine.close()
    except RequestError as error:
        print(error)
        return 1
    for sentences, _ in verdicts:
        print(*sentences, sep="\n")
    return 0 if all(same for _, same in verdicts) else 1


def read_receipts(path: str) -> list[Receipt]:
    """The receipts in a file (``-``: standard input): one, or those in a response of the API.

    Raises:
        ConfigError: there is none.
    """
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        found = [
            msgspec.convert(one, Receipt, str_keys=True)
            for one in _receipts_in(msgspec.json.decode(content))
        ]
    except (OSError, ValueError, RadixrtError) as error:
        raise ConfigError(f"{path} cannot be read as a receipt: {error}") from error
    if not found:
        raise ConfigError(f"{path} holds no receipt: it is the field `receipt` of a choice.")
    return found


def _receipts_in(content: Any) -> Iterator[Any]:
    if isinstance(content, dict):
        if "chain" in content and "prompt_ids" in content:
            yield content
            return
        content = list(content.values())
    if isinstance(content, list):
        for part in content:
            yield from _receipts_in(part)


def read_images(files: list[str], receipts: list[Receipt]) -> list[dict[str, Any]]:
    """The content parts of the images of all receipts that have any.

    Raises:
        ConfigError: a file cannot be read, or there are not as many as images.
        RequestError: a file is empty or too large.
    """
    of_images = [receipt.images for receipt in receipts if receipt.images]
    if any(digests != of_images[0] for digests in of_images):
        raise ConfigError("The receipts are of different images: verify each alone.")
    count = len(of_images[0]) if of_images else 0
    if len(files) != count:
        raise ConfigError(
            f"Images of the receipt: {count}; given: {len(files)}. Give each with --image FILE, in the order of the prompt."
        )
    try:
        contents = [base64.b64encode(Path(file).read_bytes()).decode() for file in files]
    except OSError as error:
        raise ConfigError(f"An image cannot be read: {error}") from error
    return [
        {"type": "image", "data": image_base64(content, file)}
        for file, content in zip(files, contents, strict=True)
    ]


def verdict_of(
    engine: BackgroundEngine, receipt: Receipt, images: list[dict[str, Any]]
) -> tuple[list[str], bool]:
    """See :func:`verdict`; of a receipt whose request the engine refuses, the reason."""
    try:
        return verdict(receipt, recomputed(engine, receipt, images))
    except RequestError as error:
        return [str(error)], False


def recomputed(engine: BackgroundEngine, receipt: Receipt, images: list[dict[str, Any]]) -> Receipt:
    """The receipt of the same request here.

    Args:
        images: the content parts of the images, if the receipt has any.

    Raises:
        RadixrtError: the engine refuses the request.
    """
    parameters, digests = receipt.parameters, receipt.images or []
    shown = [part | {"digest": digest} for part, digest in zip(images, digests, strict=False)]
    request = GenerateRequest(
        request_id=f"verify-{receipt.chain[-1]}",
        prompt=TokenPrompt(pack_ids(receipt.prompt_ids), shown),
        options=RequestOptions(sampling=parameters.sampling),
        constraint=parameters.constraint,
        parse_reasoning=parameters.parse_reasoning,
        parse_tool_calls=parameters.parse_tool_calls,
        receipt=True,
    )

    async def answer() -> list[Any]:
        return [chunk async for chunk in engine.client.generate(request)]

    found: Receipt | None = engine.run(answer())[-1].receipt
    assert found is not None, "the last chunk of a complete answer has it"
    return found


def verdict(receipt: Receipt, here: Receipt) -> tuple[list[str], bool]:
    """Sentences on the differences, and whether the images and the tokens are the same."""
    names = sorted({*receipt.engine, *here.engine})
    sentences = [
        f"not the same: {_KNOWN.get(name, name)}, {_short(receipt.engine, name)} in the receipt and "
        f"{_short(here.engine, name)} here"
        for name in names
        if receipt.engine.get(name) != here.engine.get(name)
    ]
    pairs = list(zip(receipt.images or [], here.images or [], strict=True))
    others = [
        f"not the same: image {number}, {one[:12]} in the receipt and {other[:12]} here; the file, the processor or the tower is another"
        for number, (one, other) in enumerate(pairs, 1)
        if one != other
    ]
    sentences += others
    ours, theirs = here.token_ids, receipt.token_ids
    if ours == theirs:
        what = "by another engine" if sentences else "and the engine is the same"
        if others:
            what = "but about other images"
        return [*sentences, f"equal: {len(theirs)} tokens, {what}"], not others
    place = next(
        (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
        min(len(ours), len(theirs)),
    )
    token = [str(ids[place]) if place < len(ids) else "the end" for ids in (theirs, ours)]
    return [
        *sentences,
        f"different: token {place} of the answer is {token[0]} in the receipt, and {token[1]} here",
    ], False


def _short(engine: dict[str, str], name: str) -> str:
    value = engine.get(name, "nothing")
    return value[:12] if len(value) > 40 else value
