"""The example programs and their twins with the openai client answer most of their questions."""

import asyncio
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import radixrt.lang as rl
from tests.lang.code_lines import code_lines
from tests.servers import Server

FOLDER = Path(__file__).parents[2] / "examples" / "lang"
RIGHT = {
    "few_shot": 40,
    "json_extraction": 21,
    "llm_judge": 7,
    "multi_turn_chat": 30,
    "rag": 30,
    "react_agent": 7,
    "self_consistency": 5,
    "tree_of_thought": 5,
}
"""How many of its questions each gets right at least; the last line that it prints tells."""

Play = Callable[[str], str]


@pytest.fixture
def play(
    monkeypatch: pytest.MonkeyPatch,
    server: Server,
    backend: rl.Server,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Play]:
    """Runs a program of the folder and returns what it prints."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("RADIXRT_URL", server.url)
    rl.set_default_backend(backend)

    def play(name: str) -> str:
        result = importlib.import_module(name).main()
        if result is not None:
            asyncio.run(result)
        return capsys.readouterr().out

    yield play
    rl.set_default_backend(None)
    for name in {path.stem for path in FOLDER.glob("*.py")} - before:
        sys.modules.pop(name, None)


def test_there_are_eight_programs_each_with_its_twin() -> None:
    twins = {path.stem.removesuffix("_plain") for path in FOLDER.glob("*_plain.py")}
    assert twins == set(RIGHT) and len(twins) == 8
    assert all((FOLDER / f"{name}.py").exists() for name in twins)


@pytest.mark.parametrize("name", RIGHT)
def test_a_program_is_shorter_than_its_twin(name: str) -> None:
    assert code_lines(FOLDER / f"{name}.py") < code_lines(FOLDER / f"{name}_plain.py")


@pytest.mark.parametrize("name", RIGHT)
def test_a_program_and_its_twin_get_most_right(name: str, play: Play) -> None:
    for version in (name, f"{name}_plain"):
        output = play(version)
        (right, asked) = re.findall(r"(\d+) of (\d+)", output.splitlines()[-1])[-1]
        assert RIGHT[name] <= int(right) <= int(asked), output
