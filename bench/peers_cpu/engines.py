"""The compared engines: commands of OpenAI-compatible servers with their best settings."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

ModelFormat = Literal["safetensors", "openvino", "gguf-bf16", "gguf-q8_0", "gguf-q4_k_m"]

ADAPTERS = Path(__file__).parent / "adapters"
KV_TOKENS = 32_768
"""What every peer's KV cache holds, more than any workload needs: 0.4 GB of this checkpoint's keys
and values in bfloat16."""
MAX_LENGTH = 4096
"""Tokens of a sequence; the longest one asked for has about 1,100 tokens."""
MAX_RUNNING = 16
"""Sequences at a time: the greatest concurrency of the workloads."""
STEP_TOKENS = 2048
NO_DRAFTS = ("--speculation", "off")
LLAMA_CPP_DRAFTS = "--spec-default"
"""Its n-gram drafter with its own settings; off unless asked for."""
VLLM_DRAFTS = (
    *("--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens", "5"),
    *("--speculative-config.prompt_lookup_min", "2", "--speculative-config.prompt_lookup_max", "4"),
)
"""The values of its documentation."""
AVX2 = {
    "RADIXRT_KERNELS_ISA": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
"""Variables that limit radixrt's kernels, PyTorch's and oneDNN's to AVX2."""


@dataclass(frozen=True)
class Engine:
    """A server and how it is started."""

    name: str
    command: tuple[str, ...]
    """The command, with the placeholders {environment}, {checkpoint}, {model} and {port}."""
    environment: str | None = None
    """The virtual environment in the folder of peers; None: the one that runs this."""
    variables: dict[str, str] = field(default_factory=dict)
    """Variables of the process's environment, with the same placeholders."""
    model_format: ModelFormat = "safetensors"
    workloads: str = "abcdefg"
    """Which it is measured on."""
    names_token_ids: bool = True
    """Whether ``return_token_ids`` makes it tell the ids of an answer's tokens."""
    reports_cached_tokens: bool = True
    keeps_connections: bool = True
    """Whether a connection serves one request after another."""
    template_flag: str | None = None
    """The flag for a file with the chat template; None: the template in the folder is used."""

    def python(self, peers: Path) -> str:
        """The interpreter of its environment."""
        return str(self.folder(peers) / "bin" / "python") if self.environment else sys.executable

    def folder(self, peers: Path) -> Path:
        return peers / (self.environment or "")

    def filled(self, text: str, *, peers: Path, checkpoint: Path, model: Path, port: int) -> str:
        """``text`` with the placeholders' values."""
        return text.format(
            python=self.python(peers),
            environment=self.folder(peers),
            checkpoint=checkpoint,
            model=model,
            port=port,
        )


def _radixrt(
    name: str, *flags: str, workloads: str = "abcdefg", model_format: ModelFormat = "safetensors"
) -> Engine:
    serve = "{python} -m radixrt.cli serve --model-path {model} --port {port}"
    names = ("--served-model-name", "model", "--log-level", "warning")
    patience = ("--max-queue-seconds", "0")  # no peer refuses requests that have to wait
    computes = ("--disable-shared-answers",)
    command = (*serve.split(), *names, *patience, *computes, *flags)
    return Engine(
        name,
        command,
        workloads=workloads,
        model_format=model_format,
        template_flag="--chat-template",
    )


def _vllm(name: str, *flags: str) -> Engine:
    # The wheel's own command looks for a package named vllm; the module doesn't.
    serve = (
        "{python} -m vllm.entrypoints.openai.api_server --model {model} --served-model-name model "
        f"--host 127.0.0.1 --port {{port}} --dtype bfloat16 --max-model-len {MAX_LENGTH} "
        f"--max-num-seqs {MAX_RUNNING} --max-num-batched-tokens {STEP_TOKENS} "
        "--enable-prefix-caching --enable-prompt-tokens-details --disable-uvicorn-access-log"
    )
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",  # else one core is left to the server
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "LD_PRELOAD": "{environment}/lib/libtcmalloc_minimal.so.4",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Engine(name, (*serve.split(), *flags), "vllm", variables)


def _openvino() -> Engine:
    serve = (
        f"{{python}} {ADAPTERS / 'openvino_server.py'} --checkpoint {{checkpoint}} --model {{model}} "
        f"--port {{port}} --max-running {MAX_RUNNING} --step-tokens {STEP_TOKENS} --cache-gb 2"
    )
    return Engine(
        "openvino",
        tuple(serve.split()),
        "openvino",
        model_format="openvino",
        reports_cached_tokens=False,
    )


def _llama_cpp(
    name: str, *flags: str, model_format: ModelFormat, workloads: str = "abcdefg"
) -> Engine:
    serve = (
        "{environment}/bin/llama-server --model {model} --host 127.0.0.1 --port {port} --alias model "
        f"--ctx-size {KV_TOKENS} --parallel {MAX_RUNNING} --kv-unified --threads 2 --threads-batch 2 "
        f"--batch-size {STEP_TOKENS} --ubatch-size 512 --flash-attn on --jinja --no-webui"
    )
    return Engine(
        name,
        (*serve.split(), *flags),
        "llama.cpp",
        model_format=model_format,
        workloads=workloads,
        names_token_ids=False,
        keeps_connections=False,
        template_flag="--chat-template-file",
    )


ENGINES = {
    engine.name: engine
    for engine in (
        _radixrt("radixrt"),
        _radixrt("radixrt-no-cache", "--disable-radix-cache"),
        _radixrt("radixrt-no-drafts", *NO_DRAFTS),
        _radixrt("radixrt-whole-prompts", "--max-step-ms", "0"),  # as the steps of the others are
        _vllm("vllm"),
        _vllm("vllm-block-32", "--block-size", "32"),
        _vllm("vllm-ngram", *VLLM_DRAFTS),
        _openvino(),
        _llama_cpp("llama.cpp", model_format="gguf-bf16"),
        _llama_cpp("llama.cpp-ngram", LLAMA_CPP_DRAFTS, model_format="gguf-bf16"),
        _radixrt("radixrt-q4_k_m", model_format="gguf-q4_k_m"),
        _radixrt("radixrt-q4_k_m-no-drafts", *NO_DRAFTS, model_format="gguf-q4_k_m"),
        _llama_cpp("llama.cpp-q4_k_m", model_format="gguf-q4_k_m"),
        _llama_cpp("llama.cpp-q4_k_m-ngram", LLAMA_CPP_DRAFTS, model_format="gguf-q4_k_m"),
        # how other quantized weights compare is asked of the one stream only
        _radixrt("radixrt-int8", "--quantization", "int8", workloads="d"),
        _radixrt("radixrt-int4", "--quantization", "int4", workloads="d"),
        _llama_cpp("llama.cpp-q8_0", model_format="gguf-q8_0", workloads="d"),
    )
}


def limited_to_avx2(engine: Engine) -> Engine:
    """The engine as on a processor with AVX2 alone. llama.cpp has to be compiled for that; vLLM's
    own kernels cannot be limited, only PyTorch's and oneDNN's in it."""
    environment = "llama.cpp-avx2" if engine.environment == "llama.cpp" else engine.environment
    return replace(engine, environment=environment, variables=engine.variables | AVX2)
