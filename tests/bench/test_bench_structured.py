"""``python -m bench.structured`` counts the schemas that an engine accepts and the invalid instances
that it lets through."""

import json
from pathlib import Path

import pytest

from bench.structured import main

OBJECT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ROWS = [
    {
        "id": "object",
        "schema": OBJECT,
        "tests": [{"data": {"n": 1}, "valid": True}, {"data": {"n": "x"}, "valid": False}],
    },
    {"id": "no schema", "schema": {"type": "thing"}, "tests": []},
]


def test_what_is_taken_refused_and_let_through_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schemas = tmp_path / "schemas.jsonl"
    schemas.write_text("\n".join(map(json.dumps, ROWS)))
    assert main(["--schemas", str(schemas), "--backends", "router", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    counts = report["summary"]["router"]
    assert (counts["schemas"], counts["taken"], counts["covered"]) == (2, 1, 1)
    assert (counts["valid_accepted"], counts["invalid"], counts["invalid_accepted"]) == (1, 1, 0)
    taken, refused = report["schemas"]
    assert taken["tokens"] > 0 and taken["mask_s"] > 0 and not taken["wrong"]
    assert refused["refusal"] and not refused["backend"]
