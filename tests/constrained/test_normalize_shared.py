"""Real schemas and the official suite: each labelled instance is judged alike before and after."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.json_schema.keywords import without_origins
from radixrt.constrained.json_schema.normal.normalize import normalize

PLACES = [parent / "shared" / "data" / "jsonschema" for parent in Path(__file__).resolve().parents]
DATA = next((place for place in PLACES if place.exists()), PLACES[3])
"""Beside the checkout, or further up."""
DRAFTS = {
    "suite/draft7": "http://json-schema.org/draft-07/schema#",
    "suite/draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


def sample(name: str, count: int) -> list[dict[str, Any]]:
    path = DATA / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    with gzip.open(path) as lines:
        rows = [json.loads(line) for line in lines]
    return random.Random(7).sample(rows, min(count, len(rows)))


@pytest.mark.parametrize(("name", "count"), [("maskbench", 300), ("suite", 1000)])
def test_labels_hold_for_normalised_schemas(name: str, count: int) -> None:
    judged, wrong = 0, []
    for row in sample(name, count):
        schema = row["schema"]
        if isinstance(schema, dict) and (
            draft := DRAFTS.get(row["source"].removesuffix("/optional"))
        ):
            schema = {"$schema": draft, **schema}
        try:
            schema = normalize(schema)
        except CannotEnforce as error:
            if "No value satisfies" not in error.reason:
                continue
            schema = False
        validator = jsonschema.Draft202012Validator(without_origins(schema))
        for test in row["tests"]:
            if test.get("unverified") or test.get("fmt_only"):
                continue
            judged += 1
            if validator.is_valid(test["data"]) != test["valid"]:
                wrong.append(row["id"])
    assert judged > 500
    assert not wrong
