"""``radixrt lint-schema``: says what of JSON schemas a grammar enforces, what is checked
afterwards, and what is slow."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec

from radixrt.base.errors import RequestError
from radixrt.constrained import requests
from radixrt.constrained.advice import Advice, Finding, SlowStep, refused
from radixrt.constrained.compiler.compilation import advise, compile_constraint
from radixrt.constrained.compiler.jobs import CompileOptions
from radixrt.constrained.constraint import JsonSchema
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.models.checkpoint import resolve_model_path


def run(arguments: argparse.Namespace) -> int:
    """Print the advice on each schema.

    The exit status is 0 if all are enforced exactly and fast, 2 if one is refused, 1 otherwise.
    """
    facts = TokenizerFacts.from_folder(resolve_model_path(arguments.tokenizer, "--tokenizer"))
    compile_constraint(JsonSchema(schema="{}"), facts, CompileOptions())  # loads the libraries
    advices = {file: _advice_on(file, facts) for file in arguments.files}
    if arguments.json:
        rows = [{"file": file, **msgspec.to_builtins(each)} for file, each in advices.items()]
        print(json.dumps(rows, indent=1, ensure_ascii=False))
    else:
        for file, advice in advices.items():
            print("\n".join([file, *_lines(advice)]))
    every = advices.values()
    if not all(advice.ok for advice in every):
        return 2
    return int(any(advice.slow or not advice.exact for advice in every))


def _advice_on(file: str, facts: TokenizerFacts) -> Advice:
    try:
        text = Path(file).read_text(encoding="utf-8")
        return advise(requests.json_schema(text, file), facts, CompileOptions())
    except (OSError, UnicodeDecodeError) as error:
        return refused(RequestError(f"The file can't be read: {error}"))
    except RequestError as error:
        return refused(error)


def _lines(advice: Advice) -> Iterator[str]:
    if advice.error is not None:
        yield "  refused"
        yield from _paragraph(advice.error)
        return
    held = "enforced exactly" if advice.exact else "checked in part after generation"
    yield f"  {held}; compiled in {advice.compile_ms:.1f} ms, masks up to {advice.mask_ms:.2f} ms"
    for found in advice.checked:
        yield from _paragraph(found)
    for slow in advice.slow:
        yield from _paragraph(slow)


def _paragraph(found: Finding | SlowStep) -> Iterator[str]:
    yield f"  {found.pointer or 'the root'}: {found.message}"
    if found.advice not in found.message:
        yield f"    {found.advice}"
