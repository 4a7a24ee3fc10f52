"""What a program has so far is computed ahead, once the values in it are there."""

import time

import pytest

import radixrt.lang as rl
from tests.lang.scripted_backend import ScriptedBackend


def wait_for(backend: ScriptedBackend, count: int) -> None:
    deadline = time.monotonic() + 10
    while len(backend.ahead) < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_text_so_far_goes_to_the_backend_when_its_values_are_there() -> None:
    backend = ScriptedBackend(lambda prompt: "B")
    backend.hold()

    @rl.function
    def program(s: rl.State) -> None:
        s += "A" + rl.gen("b")
        s.compute_ahead()
        assert backend.ahead == []
        backend.release()
        assert s["b"] == "B"
        s += "C"

    program.run(backend=backend)
    wait_for(backend, 1)
    assert backend.ahead == ["AB"]


def test_a_call_that_fails_is_told_once_and_nothing_is_computed_ahead() -> None:
    def fail(prompt: str) -> str:
        raise rl.BadRequest("no")

    backend = ScriptedBackend(fail)

    @rl.function
    def program(s: rl.State) -> None:
        s += "A" + rl.gen("b")
        s.compute_ahead()

    with pytest.raises(rl.BadRequest):
        program.run(backend=backend)
    assert backend.ahead == []
