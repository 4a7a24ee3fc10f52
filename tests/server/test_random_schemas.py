"""Random schemas, random sampling, random weights: whatever comes to its end satisfies its schema.

An untrained model is the hardest client: it prefers nothing, so it finds every hole that a grammar
has.
"""

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError
from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.constraint import JsonSchema
from radixrt.messages.calls import StatsCall
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import GenerateRequest, RequestOptions, TokenPrompt
from radixrt.offline.background_engine import BackgroundEngine
from radixrt.supervisor.launch import prepare
from tests.checkpoints import make_served
from tests.servers.engine_in_threads import engines_in_threads

NUM_SCHEMAS = 100
"""``make live-schemas`` has 3,000."""
AT_A_TIME = 16
NAMES = ["id", "name", "value", "kind", "a b", 'q"', "é"]


class SchemaMaker:
    """Small schemas over all kinds of keywords, also those that no grammar covers."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self, depth: int = 0) -> dict[str, Any]:
        kinds = [self._integer, self._number, self._string, self._enum, self._boolean]
        if depth < 3:
            kinds += [self._object, self._array, self._any_of, self._one_of, self._conditional] * 2
        schema = self._random.choice(kinds)(depth)
        if self._random.random() < 0.1:
            schema["not"] = {"enum": [0, "", [], {}, True, "a"]}
        return schema

    def _integer(self, depth: int) -> dict[str, Any]:
        low = self._random.randint(-20, 20)
        schema: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": low + 50}
        if self._random.random() < 0.3:
            schema["multipleOf"] = self._random.choice([2, 3, 7])
        return schema

    def _number(self, depth: int) -> dict[str, Any]:
        return {
            "type": "number",
            "exclusiveMinimum": -1.5,
            "maximum": self._random.choice([0, 2.25]),
        }

    def _string(self, depth: int) -> dict[str, Any]:
        return self._random.choice(
            [
                {"type": "string", "maxLength": 6},
                {"type": "string", "minLength": 1, "maxLength": 4, "pattern": "^[a-e]*$"},
                {"type": "string", "pattern": "^(ab+)?$", "maxLength": 5},
                {"type": "string", "format": "date"},
                {"type": "string", "format": "ipv4"},
            ]
        )

    def _enum(self, depth: int) -> dict[str, Any]:
        values = [1, 1.5, "x", "longer text", None, True, [1, "a"], {"k": "v"}, "é\n"]
        return {"enum": self._random.sample(values, self._random.randint(1, 4))}

    def _boolean(self, depth: int) -> dict[str, Any]:
        return {"type": ["boolean", "null"]}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(NAMES, self._random.randint(1, 4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.make(depth + 1) for name in names},
            "required": self._random.sample(names, self._random.randint(0, len(names))),
            "additionalProperties": False,
        }
        if self._random.random() < 0.2:
            schema["dependentRequired"] = {names[0]: names[-1:]}
        if self._random.random() < 0.1:
            schema["minProperties"] = 1
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": self.make(depth + 1), "maxItems": 3}
        if self._random.random() < 0.4:
            schema["uniqueItems"] = True
        if self._random.random() < 0.2:
            schema["contains"] = self.make(3)
        if self._random.random() < 0.2:
            schema["prefixItems"] = [self.make(3)]
        return schema

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.make(depth + 1), self.make(depth + 1)]}

    def _one_of(self, depth: int) -> dict[str, Any]:
        return {"oneOf": [self.make(depth + 1), self.make(depth + 1)]}

    def _conditional(self, depth: int) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"kind": {"enum": ["n", "s"]}, "value": {"type": ["integer", "string"], "maxLength": 4, "maximum": 99, "minimum": 0}},
            "required": ["kind", "value"],
            "additionalProperties": False,
            "if": {"properties": {"kind": {"const": "n"}}},
            "then": {"properties": {"value": {"type": "integer"}}},
            "else": {"properties": {"value": {"type": "string"}}},
        }  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundEngine]:
    folder = make_served(tmp_path_factory.mktemp("llama"))
    config = ServerConfig(
        model_path=str(folder),
        max_total_tokens=16384,
        debug_validate_structured_output=True,
        log_level="warning",
    )
    with engines_in_threads():
        engine = BackgroundEngine(prepare(config))
    yield engine
    engine.close()


@pytest.mark.timeout(600)
def test_every_finished_answer_validates(engine: BackgroundEngine) -> None:
    outcomes: Counter[str] = Counter()
    limit = asyncio.Semaphore(AT_A_TIME)

    async def one(number: int) -> None:
        schema = SchemaMaker(number).make()
        request = GenerateRequest(
            request_id=f"random-{number}",
            prompt=TokenPrompt(pack_ids([5 + number % 300, 7, number % 11 + 3])),
            constraint=JsonSchema(schema=json.dumps(schema)),
            options=RequestOptions(
                sampling=SamplingParams(temperature=1.5, seed=number, max_tokens=300)
            ),
        )
        async with limit:
            try:
                (answer,) = [chunk async for chunk in engine.client.generate(request)]
            except RequestError as error:
                assert error.status in (400, 422), error
                outcomes[f"refused {error.status}"] += 1
                return
        if answer.finish_reason == "stop":
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            value = json.loads(answer.text)
            jsonschema.validate(
                value, schema, jsonschema.Draft202012Validator, format_checker=checker
            )
            outcomes["taken back" if answer.report.retries else "valid at once"] += 1
        else:
            outcomes["cut off"] += 1

    async def all_of_them() -> None:
        await asyncio.gather(*(one(number) for number in range(NUM_SCHEMAS)))

    engine.run(all_of_them())
    assert outcomes["valid at once"] + outcomes["taken back"] >= 0.75 * NUM_SCHEMAS, outcomes
    assert outcomes["taken back"] > 0, outcomes
    stats = engine.run(engine.client.call(StatsCall(check_invariants=True)))
    assert stats.structured.violations == 0 and stats.structured.checks > NUM_SCHEMAS
    assert stats.running == stats.pages_owned == 0


@pytest.mark.timeout(600)
def test_streams_never_take_back_what_they_told(
    checkpoint: Callable[[str], Path], engine: BackgroundEngine
) -> None:
    """Arrays without repeats, of which an untrained model writes few at once; each value is told as
    it passes."""
    schema = {
        "type": "object",
        "properties": {
            name: {"type": "array", "items": {"enum": ["x", "yy", 3]}, "uniqueItems": True, "contains": {"const": 3}, "minItems": 2, "maxItems": 9}
            for name in ("first", "second")
        },
        "required": ["first", "second"],
        "additionalProperties": False,
    }  # fmt: skip

    async def one(number: int) -> tuple[list[str], int]:
        request = GenerateRequest(
            request_id=f"stream-{number}",
            prompt=TokenPrompt(pack_ids([5 + number, 7])),
            constraint=JsonSchema(schema=json.dumps(schema)),
            stream=True,
            options=RequestOptions(
                sampling=SamplingParams(temperature=1.5, seed=number, max_tokens=200, n=2)
            ),
        )
        texts, retries = {0: "", 1: ""}, 0
        try:
            async for chunk in engine.client.generate(request):
                texts[chunk.index] += chunk.text
                if chunk.finish_reason == "length":
                    texts.pop(chunk.index)
                retries += chunk.report.retries
        except RequestError as error:
            assert error.code == "structured_output_failed"
            return [], retries
        return list(texts.values()), retries

    async def all_of_them() -> list[tuple[list[str], int]]:
        return await asyncio.gather(*(one(number) for number in range(16)))

    results = engine.run(all_of_them())
    texts = [text for answers, _ in results for text in answers]
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    assert len(texts) >= 16 and sum(retries for _, retries in results) > 0


# ---------------------------------------------------------------- values as they are complete

NUM_TOLD = 500 if "RADIXRT_TORTURE" in os.environ else 30


def ends_of(text: str) -> dict[str, int]:
    """Where each value of a JSON text ends, by its pointer; white space is skipped, names are
    decoded by ``json``."""
    ends: dict[str, int] = {}
    decoder = json.JSONDecoder()

    def skip(at: int) -> int:
        while text[at] in " \n\t\r,:":
            at += 1
        return at

    def walk(at: int, pointer: str) -> int:
        at = skip(at)
        if text[at] not in "{[":
            ends[pointer] = decoder.raw_decode(text, at)[1]
            return ends[pointer]
        is_object, count, at = text[at] == "{", 0, skip(at + 1)
        while text[at] not in "]}":
            step: Any = count
            if is_object:
                step, at = decoder.raw_decode(text, at)
            step = str(step).replace("~", "~0").replace("/", "~1")
            at, count = skip(walk(at, f"{pointer}/{step}")), count + 1
        ends[pointer] = at + 1
        return at + 1

    walk(0, "")
    return ends


def subschemas(schema: Any, path: list[str]) -> list[Any]:
    """The subschemas that may apply at a path; those of different branches stand side by side.

    None applies inside a value of an enum.
    """
    if not isinstance(schema, dict):
        return [schema]
    branches = [branch for key in ("anyOf", "oneOf") for branch in schema.get(key, ())]
    if not path:
        return [schema]
    found = [one for branch in branches for one in subschemas(branch, path)]
    step, rest = path[0], path[1:]
    if step in schema.get("properties", {}):
        found += subschemas(schema["properties"][step], rest)
    elif step.isdigit() and int(step) < len(schema.get("prefixItems", ())):
        found += subschemas(schema["prefixItems"][int(step)], rest)
    elif step.isdigit() and "items" in schema:
        found += subschemas(schema["items"], rest)
    return found


@pytest.mark.timeout(600)
def test_told_values_hold_their_schemas_and_are_those_of_the_whole(
    engine: BackgroundEngine,
) -> None:
    """Each comes in the chunk that brings its last character; a number in the next one, or with the
    end."""
    limit = asyncio.Semaphore(AT_A_TIME)
    counted: Counter[str] = Counter()

    async def one(number: int) -> None:
        schema = SchemaMaker(number).make()
        request = GenerateRequest(
            request_id=f"told-{number}",
            prompt=TokenPrompt(pack_ids([5 + number % 300, 7, number % 11 + 3])),
            constraint=JsonSchema(schema=json.dumps(schema)),
            stream=True,
            stream_values=True,
            options=RequestOptions(
                sampling=SamplingParams(temperature=1.5, seed=number, max_tokens=200)
            ),
        )
        text, lengths, told, finish = "", [], [], None
        async with limit:
            try:
                async for chunk in engine.client.generate(request):
                    text += chunk.text
                    lengths.append(len(text))
                    told += [(len(lengths) - 1, event) for event in chunk.values]
                    finish = chunk.finish_reason
            except RequestError:
                finish = None
        for _, event in told:  # also those of an answer that failed later
            if event.text is None:
                continue
            value, path = json.loads(event.text), pointer_path(event.pointer)
            assert any(
                jsonschema.Draft202012Validator(each).is_valid(value)
                for each in subschemas(schema, path) or [True]
            ), (event, schema)
            assert event.validated
            counted["values"] += 1
            counted["with a subschema"] += bool(path and subschemas(schema, path))
        if finish != "stop":
            return
        counted["answers"] += 1
        ends, whole = ends_of(text), json.loads(text)
        completed = [(when, event) for when, event in told if event.event == "completed"]
        assert sorted(ends) == sorted(event.pointer for _, event in completed)
        for when, event in completed:
            assert event.text is not None
            part = whole
            for step in pointer_path(event.pointer):
                part = part[int(step)] if isinstance(part, list) else part[step]
            assert json.loads(event.text) == part
            due = next(i for i, length in enumerate(lengths) if length >= ends[event.pointer])
            scalar = event.type in ("number", "boolean", "null")
            last = due + 1 if event.pointer else len(lengths) - 1
            assert when == due or (scalar and due < when <= last), (event, text)

    async def all_of_them() -> None:
        await asyncio.gather(*(one(number) for number in range(NUM_TOLD)))

    engine.run(all_of_them())
    assert counted["answers"] > NUM_TOLD / 2 and counted["values"] > 1.5 * NUM_TOLD
    assert counted["with a subschema"] > NUM_TOLD / 3, counted


def pointer_path(pointer: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
