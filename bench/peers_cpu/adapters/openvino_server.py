"""Serves OpenVINO GenAI's continuous batching: a thread steps the pipeline and passes on what each request has got.

Runs in the environment of OpenVINO.
"""

import argparse
import queue
import threading
from collections.abc import Callable

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
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.enable_prefix_caching = True
    scheduling.max_num_batched_tokens = arguments.step_tokens
    scheduling.max_num_seqs = arguments.max_running
    scheduling.cache_size = arguments.cache_gb
    # Activations, products and keys and values in bfloat16 as the weights are.
    precision = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
    properties = {**precision, "PERFORMANCE_HINT": "LATENCY"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        arguments.model, scheduling, "CPU", properties
    )
    serve(SteppedPipeline(pipeline), arguments.checkpoint, arguments.port)


class SteppedPipeline:
    """Owns the pipeline: only its thread calls it."""

    def __init__(self, pipeline: openvino_genai.ContinuousBatchingPipeline) -> None:
        self._pipeline = pipeline
        self._arrived: queue.SimpleQueue[tuple[Generation, Callable[[Progress], None]]] = (
            queue.SimpleQueue()
        )
        self._running: dict[
            int, tuple[openvino_genai.GenerationHandle, Callable[[Progress], None]]
        ] = {}
        self._next_id = 0
        threading.Thread(target=self._run, daemon=True).start()

    def start(self, generation: Generation, tell: Callable[[Progress], None]) -> None:
        self._arrived.put((generation, tell))

    def _run(self) -> None:
        while True:
            self._admit()
            try:
                self._pipeline.step()
            except RuntimeError as error:
                for _, tell in self._running.values():
                    tell(Progress([], error=str(error)))
                self._running.clear()
                continue
            self._pass_on()

    def _admit(self) -> None:
        """Take what has arrived; wait for something to arrive if nothing runs."""
        while not self._running or not self._arrived.empty():
            generation, tell = self._arrived.get()
            prompt = openvino.Tensor(np.asarray([generation.prompt], dtype=np.int64))
            try:
                handle = self._pipeline.add_request(self._next_id, prompt, _settings(generation))
            except RuntimeError as error:
                tell(Progress([], error=str(error)))
                continue
            self._running[self._next_id] = handle, tell
            self._next_id += 1

    def _pass_on(self) -> None:
        for request_id, (handle, tell) in list(self._running.items()):
            while handle.can_read():
                (output,) = handle.read().values()
                tell(Progress(list(output.generated_ids), _finish_reason(output.finish_reason)))
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                del self._running[request_id]


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
