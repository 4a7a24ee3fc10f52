"""Compares the engines' greedy tokens with those of ``transformers`` in float32.

    python -m bench.peers_cpu.agreement CHECKPOINT PROMPT ...

prints the reference as JSON. It is a process of its own so that its gigabytes are gone before
anything is measured.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench import children
from bench.peers_cpu.engines import Engine
from bench.peers_cpu.serving import EngineFailedError

TOKENS = 32
"""Compared for each prompt."""
TIMEOUT_S = 300


@dataclass(frozen=True)
class Greedy:
    """A prompt and its continuation, as token ids."""

    prompt: list[int]
    tokens: list[int]


def reference(checkpoint: Path, prompts: Sequence[str]) -> list[Greedy]:
    """The tokens of ``transformers`` in float32, also after an end; kept by the checkpoint."""
    kept = checkpoint / "greedy_float32.json"
    if not kept.exists():
        command = [sys.executable, "-m", "bench.peers_cpu.agreement", str(checkpoint)]
        done = children.run([*command, *prompts], stdout=subprocess.PIPE, check=True)
        kept.write_bytes(done.stdout)
    return [Greedy(**each) for each in json.loads(kept.read_text())]


def leading_agreement(base_url: str, engine: Engine, expected: Sequence[Greedy]) -> list[int]:
    """How many tokens each answer of a server has in common with the reference before they part.

    Raises:
        EngineFailedError: the server refused, or doesn't tell its tokens.
    """
    ask = _ask_for_token_ids if engine.names_token_ids else _ask_llama_cpp
    try:
        return [common_length(ask(base_url, each.prompt), each.tokens) for each in expected]
    except (httpx.HTTPError, KeyError, TypeError) as error:
        raise EngineFailedError(f"its tokens could not be compared: {error!r}") from error


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    for length, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return length
    return min(len(left), len(right))


def _ask_for_token_ids(base_url: str, prompt: list[int]) -> list[int]:
    request = {"max_tokens": TOKENS, "return_token_ids": True, "model": "model"}
    return _post(f"{base_url}/completions", prompt, request)["choices"][0]["token_ids"]


def _ask_llama_cpp(base_url: str, prompt: list[int]) -> list[int]:
    """Tokens are told by its own API only."""
    request = {"n_predict": TOKENS, "return_tokens": True}
    return _post(f"{base_url.removesuffix('/v1')}/completion", prompt, request)["tokens"]


def _post(url: str, prompt: list[int], request: dict[str, Any]) -> Any:
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **request}
    response = httpx.post(url, json=body, timeout=TIMEOUT_S)
    response.raise_for_status()
    return response.json()


def main() -> None:
    checkpoint, *prompts = sys.argv[1:]
    print(json.dumps([vars(each) for each in _generate(checkpoint, prompts)]))


def _generate(checkpoint: str, prompts: list[str]) -> list[Greedy]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    answers = []
    for text in prompts:
        prompt = tokenizer.encode(text)
        tokens: list[int] = []
        new, cache = prompt, None
        with torch.inference_mode():
            while len(tokens) < TOKENS:
                out = model(torch.tensor([new]), past_key_values=cache, use_cache=True)
                new, cache = [int(out.logits[0, -1].argmax())], out.past_key_values
                tokens += new
        answers.append(Greedy(prompt, tokens))
    return answers


if __name__ == "__main__":
    main()
