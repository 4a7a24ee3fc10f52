"""Adapters that come and go while sequences use them."""

from typing import Any

import pytest

from radixrt.messages.adapters import AdapterInfo, AdapterRead
from radixrt.messages.calls import LoadAdapterCall, UnloadAdapterCall
from tests.scheduler.engine_model import EngineModel, limits

PROMPT = list(range(8, 48))


@pytest.mark.parametrize("replaced", [False, True])
def test_a_request_on_its_way_has_the_adapter_that_it_was_sent_for_while_others_use_it(
    replaced: bool,
) -> None:
    info = AdapterInfo(name="a", digest="old", path="", place=0)
    given: dict[str, Any] = {"adapters": (info,), "num_adapter_places": 2}
    model = EngineModel(limits(num_pages=200, **given))
    registry = model.scheduler.adapters
    first = model.add(PROMPT, adapter="old")
    model.plan()
    if replaced:
        registry.load(LoadAdapterCall(name="a", path="", replaces=True), lambda _: None)
        registry.read(AdapterRead(place=1, digest="new"))
    else:
        registry.unload(UnloadAdapterCall(name="a"))
    late = model.add(PROMPT, adapter="old")
    assert registry.users[0] == 2
    model.run()
    assert model.finished[first] == model.finished[late] == "length"
    assert 0 not in registry.users, "its place is free behind its last sequence"
    options = model.requests[late].options
    assert "not loaded any more" in (registry.refusal(options) or "")
