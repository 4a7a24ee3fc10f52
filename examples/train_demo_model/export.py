"""Exports a training checkpoint as a model directory that transformers can load."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from model import LlamaShape
from safetensors.torch import save_file


def export(checkpoint: Path, tokenizer: Path, out: Path) -> None:
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    shape = LlamaShape(**saved["shape"])
    out.mkdir(parents=True, exist_ok=True)
    # The head is tied to the embedding, so no lm_head is written.
    weights = {f"model.{k}": v.to(torch.bfloat16).contiguous() for k, v in saved["model"].items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = shape.hf_config()
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {k: config[k] for k in ("eos_token_id", "pad_token_id")}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (out / "model.safetensors").chmod(0o644)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tokenizer / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    export(args.checkpoint, args.tokenizer, args.out)


if __name__ == "__main__":
    main()
