"""Generates answers to random schemas on a live engine with the built-in model, and judges each
finished answer by ``jsonschema``.

``python -m tests.torture.live_schemas --schemas 3000 --seed 0`` prints a table, and exits with 1 if
an answer was invalid, a request failed otherwise than by a refusal, or more than 2 % of the
accepted requests were given up (status 422). Half of the schemas are those of
:mod:`tests.constrained.fuzz_schemas`, half those of :mod:`tests.server.test_random_schemas`, which
are more like real ones.
"""

import argparse
import asyncio
import json
import sys
from collections import Counter
from typing import Any

from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError
from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.constraint import JsonSchema
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import GenerateRequest, RequestOptions, TokenPrompt
from radixrt.offline.background_engine import BackgroundEngine
from radixrt.supervisor.launch import prepare
from tests.constrained import fuzz_schemas
from tests.server import test_random_schemas

AT_A_TIME = 16
TEMPERATURE = 1.3
MAX_TOKENS = 300
MAX_GIVEN_UP = 0.02
"""Of the requests that were not refused."""


def schema_of(seed: int) -> dict[str, Any]:
    makers = (fuzz_schemas.SchemaMaker, test_random_schemas.SchemaMaker)
    return makers[seed % 2](seed).make()


async def outcome_of(engine: BackgroundEngine, seed: int) -> str:
    """How the request with the schema of a seed ended."""
    schema = schema_of(seed)
    sampling = SamplingParams(temperature=TEMPERATURE, seed=seed, max_tokens=MAX_TOKENS)
    request = GenerateRequest(
        request_id=f"live-{seed}",
        prompt=TokenPrompt(pack_ids([5 + seed % 300, 7, seed % 11 + 3])),
        constraint=JsonSchema(schema=json.dumps(schema)),
        options=RequestOptions(sampling=sampling),
    )
    try:
        (answer,) = [chunk async for chunk in engine.client.generate(request)]
    except RequestError as error:
        outcome = {400: "refused", 422: "given up"}.get(error.status, "failed")
        if outcome != "refused":
            print(f"seed {seed}: {json.dumps(schema)}\n  {error.status} {error}", flush=True)
        return outcome
    if answer.finish_reason != "stop":
        return "cut off"
    if not fuzz_schemas.Judge(schema).is_valid(answer.text):
        print(f"seed {seed}: {json.dumps(schema)}\n  writes {answer.text}", flush=True)
        return "invalid"
    return "valid after retries" if answer.report.retries else "valid at once"


async def run_all(engine: BackgroundEngine, seeds: range) -> Counter[str]:
    """The number of requests that ended in each way."""
    limit = asyncio.Semaphore(AT_A_TIME)

    async def one(seed: int) -> str:
        async with limit:
            return await outcome_of(engine, seed)

    return Counter(await asyncio.gather(*map(one, seeds)))


def main() -> int:
    """Read the arguments, generate, and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="The first; each schema has the next.")
    arguments = parser.parse_args()
    config = ServerConfig(max_total_tokens=16384, log_level="warning")
    engine = BackgroundEngine(prepare(config))
    try:
        seeds = range(arguments.seed, arguments.seed + arguments.schemas)
        outcomes = engine.run(run_all(engine, seeds))
    finally:
        engine.close()
    accepted = outcomes.total() - outcomes["refused"]
    given_up = outcomes["given up"] / max(accepted, 1)
    for name, count in sorted(outcomes.items()):
        print(f"{name:24} {count:8}")
    print(f"{'given up of the accepted':24} {given_up:8.2%}")
    return int(outcomes["invalid"] + outcomes["failed"] > 0 or given_up > MAX_GIVEN_UP)


if __name__ == "__main__":
    sys.exit(main())
