"""Makes a GGUF file of a checkpoint: ``gguf_conversion.py LLAMA_CPP_SOURCES CHECKPOINT TARGET [KIND
[PRE_TOKENIZER]]``

Runs in the environment of llama.cpp. Its converter recognizes pre-tokenizers by a hash of what a
known tokenizer makes of a text, so it refuses tokenizers that nobody has published. It is told the
name; those here split text as GPT-2 does, unless another is given. Of Qwen's models it expects
layers that predict further tokens, unless it is told that there are none.
"""

import json
import runpy
import sys
from pathlib import Path


def main(
    sources: str, checkpoint: str, target: str, kind: str = "bf16", pre: str = "gpt-2"
) -> None:
    sys.path[:0] = [sources, f"{sources}/gguf-py"]
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
    script = f"{sources}/convert_hf_to_gguf.py"
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    no_mtp = ["--no-mtp"] * config["model_type"].startswith(("qwen3_5", "qwen3_next"))
    sys.argv = [script, checkpoint, "--outtype", kind, "--outfile", target, *no_mtp]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
