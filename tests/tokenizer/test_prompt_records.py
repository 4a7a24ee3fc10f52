"""The prompts that explanations of cache misses compare with."""

import random
import tracemalloc

import pytest

from radixrt.messages.ids import pack_ids
from radixrt.tokenizer.explain.records import ChatLayout, PromptRecord, PromptRecords


def record(number: int, num_tokens: int, num_messages: int) -> PromptRecord:
    """As a chat's, whose messages are three segments each."""
    start = 10_000 * number + 1000
    layout = ChatLayout(
        segments=[start + 10 * i for i in range(3 * num_messages)],
        tokens=[start + 3 * i for i in range(3 * num_messages)],
        spans=[(start + 30 * i, start + 30 * i + 20) for i in range(num_messages)],
        roles=["user" if i % 2 else "assistant" for i in range(num_messages)],
        messages=[hash((number, i)) for i in range(num_messages)],
        tools=[],
    )
    return PromptRecord(
        f"chatcmpl-{number:032}", "tenant", pack_ids(range(num_tokens)), layout, [10_000 + number]
    )


@pytest.mark.parametrize("num_messages", [1, 10, 40])
def test_memory_is_bounded_by_its_bytes(num_messages: int) -> None:
    max_bytes = 1 << 20
    records = PromptRecords(max_bytes)
    sizes = random.Random(1)
    tracemalloc.start()
    try:
        for number in range(1500):
            records.add(record(number, sizes.randrange(400), num_messages))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.6 * max_bytes < used < 1.15 * max_bytes
    assert records.find("tenant", f"chatcmpl-{1499:032}") is not None
    assert records.find("tenant", f"chatcmpl-{0:032}") is None
    assert records.of_sequence(10_000) is None


def test_a_repeated_id_replaces_its_record() -> None:
    records = PromptRecords(1 << 20)
    for _ in range(10_000):
        records.add(record(7, 100, 3))
    found = records.find("tenant", f"chatcmpl-{7:032}")
    assert found is not None
    assert records.of_sequence(10_007) is found
