"""Serves OpenVINO GenAI's continuous batching: a process steps the pipeline and tells what each
request has got.

Runs in the environment of OpenVINO.
"""

import argparse
import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import openvino
import openvino_genai
from openai_server import Generation, Progress, serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True, help="for the tokenizer")
    parser.add_argument("--model", required=True, help="the folder of the converted model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-running", type=int, required=True, help="sequences in a step")
    parser.add_argument("--step-tokens", type=int, required=True, help="tokens in a step, at most")
    parser.add_argument("--cache-gb", type=int, required=True, help="size of the KV cache")
    arguments = parser.parse_args()
    serve(SteppedPipeline(arguments), arguments.checkpoint, arguments.port)


def _pipeline(arguments: argparse.Namespace) -> openvino_genai.ContinuousBatchingPipeline:
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.enable_prefix_caching = True
    scheduling.max_num_batched_tokens = arguments.step_tokens
    scheduling.max_num_seqs = arguments.max_running
    scheduling.cache_size = arguments.cache_gb
    # Products, keys and values in bfloat16 as the weights are.
    precision = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
    properties = {**precision, "PERFORMANCE_HINT": "LATENCY"}
    return openvino_genai.ContinuousBatchingPipeline(arguments.model, scheduling, "CPU", properties)


class SteppedPipeline:
    """The pipeline in a process of its own: a step holds Python's lock, and would hold up the
    stream of the step before it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._connection, other_end = multiprocessing.Pipe()
        self._tell: dict[int, Callable[[Progress], object]] = {}
        process = multiprocessing.get_context("spawn").Process(
            target=_step_forever, args=(arguments, other_end), daemon=True
        )
        process.start()
        other_end.close()
        self._connection.recv()  # it says when the model is loaded
        threading.Thread(target=self._pass_on, daemon=True).start()

    def start(self, generation: Generation, tell: Callable[[Progress], object]) -> None:
        request_id = len(self._tell)
        self._tell[request_id] = tell
        self._connection.send((request_id, generation))

    def _pass_on(self) -> None:
        while True:
            for request_id, progress in self._connection.recv():
                self._tell[request_id](progress)


def _step_forever(arguments: argparse.Namespace, connection: Connection) -> None:
    """The process of the pipeline: admit, step, tell, until the other end closes."""
    pipeline = _pipeline(arguments)
    connection.send("loaded")
    running: dict[int, Any] = {}
    with contextlib.suppress(EOFError):
        while True:
            while not running or connection.poll():
                request_id, generation = connection.recv()
                prompt = openvino.Tensor(np.asarray([generation.prompt], dtype=np.int64))
                running[request_id] = pipeline.add_request(
                    request_id, prompt, _settings(generation)
                )
            pipeline.step()
            connection.send([*_new_progress(running)])


def _new_progress(
    running: dict[int, Any],
) -> Iterator[tuple[int, Progress]]:
    """What each request, by id with its handle, has got in a step; what has ended leaves
    ``running``."""
    for request_id, handle in list(running.items()):
        while handle.can_read():
            (output,) = handle.read().values()
            reason = _finish_reason(output.finish_reason)
            yield request_id, Progress(list(output.generated_ids), reason)
        if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
            del running[request_id]


def _settings(generation: Generation) -> openvino_genai.GenerationConfig:
    settings = openvino_genai.GenerationConfig()
    settings.max_new_tokens = generation.max_tokens
    settings.ignore_eos = generation.ignore_eos
    settings.do_sample = False
    if generation.json_schema:
        constraint = openvino_genai.StructuredOutputConfig()
        constraint.json_schema = generation.json_schema
        settings.structured_output_config = constraint
    return settings


def _finish_reason(reason: openvino_genai.GenerationFinishReason) -> str | None:
    reasons = openvino_genai.GenerationFinishReason
    return {reasons.STOP: "stop", reasons.LENGTH: "length"}.get(reason)


if __name__ == "__main__":
    main()
