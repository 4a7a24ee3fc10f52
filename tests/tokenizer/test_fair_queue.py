"""The fair queue of encoding keeps nothing of work that nobody waits for any more."""

import asyncio
import functools
import gc
import threading
import weakref

import pytest

from radixrt.tokenizer.fair_queue import FairQueue, NobodyWaits, goes_on


class Prompt:
    """Stands for megabytes of text."""


def test_cancelled_work_takes_no_memory_while_other_work_runs() -> None:
    done: list[int] = []

    def encode(prompt: Prompt, number: int) -> None:
        done.append(number)

    async def prompts_kept() -> int:
        queue, may_end = FairQueue(), threading.Event()
        serving = asyncio.create_task(queue.serve())
        running = asyncio.create_task(queue.run("a", "first", 1, may_end.wait))
        await asyncio.sleep(0)
        kept: list[weakref.ref[Prompt]] = []
        waiting = []
        for number in range(6):
            prompt = Prompt()
            kept.append(weakref.ref(prompt))
            key = "same" if number < 3 else f"key {number}"
            running_it = queue.run("a", key, 1, functools.partial(encode, prompt, number))
            waiting.append(asyncio.create_task(running_it))
            del prompt, running_it
        await asyncio.sleep(0)
        for number in (4, 3, 1, 0):
            task = waiting.pop(number)
            task.cancel()
            await asyncio.wait([task])
            del task
        gc.collect()
        alive = sum(one() is not None for one in kept)
        may_end.set()
        await asyncio.wait_for(asyncio.gather(running, *waiting), 20)
        serving.cancel()
        queue.close()
        return alive

    assert asyncio.run(prompts_kept()) == 2
    assert done == [2, 5]


def test_work_that_goes_on_does_not_count_as_hung() -> None:
    """As that of a request with many images does."""
    goes_on()  # outside of the queue it says nothing

    async def times() -> tuple[float, float]:
        queue, steps = FairQueue(), [threading.Event() for _ in range(3)]
        serving = asyncio.create_task(queue.serve())

        def work() -> None:
            steps[0].wait()
            goes_on()
            steps[1].set()
            steps[2].wait()

        running = asyncio.create_task(queue.run("a", "first", 1, work))
        await asyncio.sleep(0.05)
        before = queue.seconds_at_work()
        steps[0].set()
        steps[1].wait()
        after = queue.seconds_at_work()
        steps[2].set()
        await running
        assert queue.seconds_at_work() == 0
        serving.cancel()
        queue.close()
        return before, after

    before, after = asyncio.run(times())
    assert 0 < after < before


def test_work_that_nobody_waits_for_ends_where_it_goes_on() -> None:
    """As between two images of a request whose client has gone; the lane serves the others."""
    is_cancelled, ended = threading.Event(), list[str]()

    def work() -> None:
        goes_on()
        begun.set()
        is_cancelled.wait(20)
        try:
            goes_on()
        except NobodyWaits:
            ended.append("early")
            raise
        ended.append("late")

    async def serve() -> None:
        queue = FairQueue()
        serving = asyncio.create_task(queue.serve())
        running = asyncio.create_task(queue.run("a", "first", 1, work))
        await asyncio.to_thread(begun.wait, 20)
        running.cancel()
        await asyncio.wait([running])
        is_cancelled.set()
        await asyncio.wait_for(queue.run("a", "next", 1, goes_on), 20)
        serving.cancel()
        queue.close()

    begun = threading.Event()
    asyncio.run(serve())
    assert ended == ["early"]


def test_no_text_waits_for_an_image() -> None:
    """Neither a short one nor a long one."""

    async def serve() -> None:
        queue, prepared = FairQueue(), threading.Event()
        serving = asyncio.create_task(queue.serve())
        image = asyncio.create_task(queue.run("a", "image", 1, prepared.wait, has_images=True))
        texts = (queue.run("a", f"{size}", size, lambda: "text") for size in (1, 10**6))
        try:
            assert await asyncio.wait_for(asyncio.gather(*texts), 20) == ["text", "text"]
            assert queue.seconds_at_work() > 0
        finally:
            prepared.set()
        assert await asyncio.wait_for(image, 20)
        serving.cancel()
        queue.close()

    asyncio.run(serve())


class Panic(BaseException):
    """As the tokenizers library raises them."""


@pytest.mark.parametrize("error", [None, ValueError, Panic])
def test_work_that_is_done_keeps_nothing(error: type[BaseException] | None) -> None:
    """Neither its prompt, nor its result, nor the local variables of its error."""
    made: list[weakref.ref[Prompt]] = []

    def work(prompt: Prompt) -> Prompt:
        local = Prompt()
        made.append(weakref.ref(local))
        made.append(weakref.ref(prompt))
        if error is not None:
            raise error("It failed.")
        return local

    async def alive() -> int:
        queue = FairQueue()
        serving = asyncio.create_task(queue.serve())
        running = asyncio.create_task(queue.run("a", "k", 1, functools.partial(work, Prompt())))
        await asyncio.wait([running])
        failed = running.exception()
        assert isinstance(failed, {None: type(None), Panic: RuntimeError}.get(error, ValueError))
        del running, failed  # as their readers do
        await asyncio.sleep(0.01)
        left = sum(one() is not None for one in made)
        serving.cancel()
        queue.close()
        return left

    gc.disable()
    try:
        assert asyncio.run(alive()) == 0
        assert len(made) == 2
    finally:
        gc.enable()
