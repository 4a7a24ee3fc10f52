"""Serves the continuous batching of transformers: its manager's thread generates, results arrive by its callbacks.

Runs in the environment of transformers, whose own ``transformers serve`` can't go on behind the end token, so that answers of a
fixed length couldn't be compared.
"""

import argparse
from collections.abc import Callable

import torch
from openai_server import Generation, Progress, serve
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

PAGE_SIZE = 32
NEVER = -1
"""An end token that no model generates."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-running", type=int, required=True, help="sequences in a step")
    parser.add_argument("--step-tokens", type=int, required=True, help="tokens in a step, at most")
    parser.add_argument("--cache-tokens", type=int, required=True, help="size of the KV cache")
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        arguments.checkpoint, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    batching = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=arguments.cache_tokens // PAGE_SIZE,
        max_batch_tokens=arguments.step_tokens,
        max_requests_per_batch=arguments.max_running,
        allow_block_sharing=True,
    )
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=False,
            eos_token_id=model.config.eos_token_id,
            pad_token_id=model.config.eos_token_id,
        ),
        continuous_batching_config=batching,
    )
    manager.start()
    serve(BatchingManager(manager), arguments.checkpoint, arguments.port)


class BatchingManager:
    """Turns the manager's results, which repeat all tokens so far, into progress."""

    def __init__(self, manager: ContinuousBatchingManager) -> None:
        self._manager = manager
        self._next_id = 0

    def start(self, generation: Generation, tell: Callable[[Progress], object]) -> None:
        if generation.json_schema:
            raise ValueError("transformers has no structured output")
        request_id = str(self._next_id)
        self._next_id += 1
        told = 0

        def pass_on(result) -> None:
            nonlocal told
            new, told = result.generated_tokens[told:], len(result.generated_tokens)
            reason = None
            if result.is_finished():
                reason = "length" if told >= generation.max_tokens else "stop"
            tell(Progress(new, reason, result.error))

        self._manager.register_result_handler(request_id, pass_on)
        self._manager.add_request(
            generation.prompt,
            request_id,
            max_new_tokens=generation.max_tokens,
            streaming=True,
            eos_token_id=NEVER if generation.ignore_eos else None,
        )


if __name__ == "__main__":
    main()
