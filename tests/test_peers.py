"""Flags, settings files and values of vLLM, SGLang, llama.cpp and Ollama, by their own usual
command lines."""

import logging
import shlex
from pathlib import Path
from typing import Any

import pytest

from radixrt import LLM
from radixrt.base.config import SETTINGS, ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.settings import peers
from radixrt.base.settings.translation import PEER_NAMES, key_of, translated
from radixrt.cli.config_flags import config_from_arguments
from radixrt.cli.main import _parsed
from tools import peer_flags_page

UNDERSTOOD: dict[str, dict[str, Any]] = {
    # vLLM
    "serve Qwen/Qwen3-4B": {"model_path": "Qwen/Qwen3-4B"},
    "serve demo --max-model-len 8192": {"context_length": 8192},
    "serve demo --max-model-len 32k": {"context_length": 32000},
    "serve demo --max-model-len 32K": {"context_length": 32768},
    "serve demo --max-model-len auto": {"context_length": None},
    "serve demo --gpu-memory-utilization 0.9": {"mem_fraction_static": 0.9},
    "serve demo --tensor-parallel-size 2": {"tp": 2},
    "serve demo -tp 2 -dp 2": {"tp": 2, "dp": 2},
    "serve demo --data-parallel-size 2": {"dp": 2},
    "serve demo --max-num-seqs 16": {"max_running_requests": 16},
    "serve demo --max-num-batched-tokens 4096": {"max_prefill_tokens": 4096},
    "serve demo --block-size 32": {"page_size": 32},
    "serve demo --dtype half": {"dtype": "float16"},
    "serve demo --quantization awq": {"quantization": "auto"},
    "serve demo --kv-cache-dtype fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "serve demo --enable-prefix-caching": {"disable_radix_cache": False},
    "serve demo --no-enable-prefix-caching": {"disable_radix_cache": True},
    "serve demo --enable-chunked-prefill": {},
    "serve demo --enforce-eager": {"debug_disable_cuda_graph": True},
    "serve demo --seed 7": {"random_seed": 7},
    "serve demo --enable-auto-tool-choice --tool-call-parser hermes": {"tool_call_parser": "hermes"},
    "serve demo --guided-decoding-backend xgrammar": {"grammar_backend": "auto"},
    "serve demo --swap-space 4 --disable-log-requests": {},
    "serve demo --ssl-certfile c.pem --ssl-keyfile k.pem": {"tls_cert": "c.pem", "tls_key": "k.pem"},
    """serve demo --allowed-origins '["http://a.example", "http://b.example"]'""": {"cors_origins": "http://a.example,http://b.example"},
    "serve demo --pipeline-parallel-size 1 --speculative-config '{}'": {"tp": 1},
    "serve demo --runner pooling": {},
    "serve deepseek-ai/DeepSeek-R1-0528 --tensor-parallel-size 8 --enable-expert-parallel --trust-remote-code": {"tp": 8},
    "serve zai-org/GLM-4.7-Flash --tensor-parallel-size 4 --speculative-config.method mtp --speculative-config.num_speculative_tokens 1 "
    "--tool-call-parser glm47 --reasoning-parser glm45 --enable-auto-tool-choice": {"tp": 4, "tool_call_parser": "glm47", "reasoning_parser": "qwen3"},
    # SGLang
    "serve --model-path deepseek-ai/DeepSeek-R1-0528 --tp 8 --reasoning-parser deepseek-r1": {"tp": 8, "reasoning_parser": "deepseek-r1"},
    "serve --model-path demo --tp-size 2": {"tp": 2},
    "serve --model demo --dp-size 2": {"dp": 2},
    "serve --model-path demo --enable-metrics --enable-cache-report": {},
    "serve --model-path demo --attention-backend triton": {"attention_backend": "auto"},
    "serve --model-path demo --cuda-graph-max-bs 64": {"cuda_graph_max_batch_size": 64},
    "serve --model-path demo --schedule-conservativeness 0.3": {},
    "serve --model-path demo --grammar-backend outlines": {"grammar_backend": "fsm"},
    "serve --model-path demo --speculative-algorithm NGRAM": {},
    "serve --model-path demo --enable-deterministic-inference": {"deterministic": True},
    "serve --model-path demo --constrained-json-disable-any-whitespace": {"grammar_whitespace": "compact"},
    "serve --model-path demo --load-format gguf --watchdog-timeout 300": {"step_timeout": 300.0},
    "serve demo --enable-lora --lora-modules a=b c=d --max-lora-rank 32": {"lora": "a=b c=d", "max_lora_rank": 32},
    'serve demo --lora-modules \'{"name": "a", "path": "b", "base_model_name": "demo"}\' c=d': {"num_adapter_places": 8},
    "serve demo --enable-lora --lora-paths a=b --max-loras-per-batch 4": {"lora": "a=b", "max_loras": 4},
    # llama.cpp
    "serve -m demo -c 4096": {"context_length": 4096, "model_path": "demo"},
    "serve -m demo --ctx-size 0": {"context_length": None},
    "serve -hf ggml-org/gemma-3-4b-it-GGUF:Q4_K_M": {"model_path": "hf:ggml-org/gemma-3-4b-it-GGUF:Q4_K_M"},
    "serve -m demo -ngl 99 -t 4": {"kernel_threads": 4, "device": "auto"},
    "serve -m demo -ngl 0": {"device": "cpu"},
    "serve -m demo -np 4 -b 512 -ub 512": {"max_running_requests": 4, "max_prefill_tokens": 512},
    "serve -m demo -fa on --jinja --metrics": {},
    "serve -m demo --jinja -fa": {},
    "serve -m demo -ctk q8_0 -ctv q8_0": {"kv_cache_dtype": "int8"},
    "serve -m demo -a chat --mlock --no-mmap": {"served_model_name": "chat"},
    "run demo --ctx-size 4096 --temperature 0.7": {"context_length": 4096},
}  # fmt: skip
"""Command lines as the engines' documentation has them, and what they set here."""

REFUSED = {
    "serve demo --lora-scaled a:0.5": "change lora_alpha",
    'serve demo --lora-modules \'{"name":"a","path":"b","scale":2}\'': "unknown field scale",
    "serve demo --lora-modules a=b a=c": "a twice",
    "serve demo --lora-modules demo=b": "is the name of the model",
    "serve demo --pipeline-parallel-size 2": "--tp",
    "serve demo --cpu-offload-gb 4": "smaller model",
    "serve demo --quantization bitsandbytes": "int8 and int4",
    'serve demo --rope-scaling \'{"rope_type":"yarn"}\'': "config.json",
    "serve demo --revision v2": "hf download",
    "serve demo --kv-cache-dtype q4_0": "int8 for CPUs",
    "serve demo --schedule-policy random": "lpm",
    "serve demo --temp 0.7": "generation_config.json",
    "serve demo --load-format pt": "safetensors",
    "serve demo --api-key-file keys.txt": "radixrt key new",
    "serve demo --dtype int3": "must be one of auto, float32",
    "serve demo --max-model-len long": "'long' is not a number",
    "serve demo --port 8000 other": "not an argument",
}


def config_of(line: str) -> ServerConfig:
    return config_from_arguments(_parsed(shlex.split(line)))


@pytest.mark.parametrize("line", UNDERSTOOD)
def test_a_usual_command_line_of_another_engine_starts(line: str) -> None:
    config = config_of(line)
    expected = UNDERSTOOD[line]
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("line", REFUSED)
def test_what_does_not_exist_gets_a_sentence(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        config_of(line)
    except ConfigError as error:
        assert REFUSED[line] in str(error)
    except SystemExit as exit:
        assert exit.code == 2
        assert REFUSED[line] in capsys.readouterr().err
    else:
        pytest.fail(f"{line} is accepted")


def test_every_name_of_the_table_is_understood_or_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On the command line, in files and in ``LLM`` the same function reads them."""
    for name in sorted(PEER_NAMES - SETTINGS.keys()):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            try:
                result = translated({name: "true"}, SETTINGS)
            except ConfigError as error:
                assert name.replace("_", "-") in str(error).replace("_", "-")
                continue
        assert name not in result
        assert result.keys() <= SETTINGS.keys()
        assert result or "has no effect" in caplog.text, name


def test_names_and_values_of_the_table_are_not_ours_and_stand_once() -> None:
    groups = [*peers.ALIASES.values(), *(" ".join(both) for both in peers.IGNORED.values())]
    flags = " ".join([*groups, *peers.CONSTANTS, *peers.REFUSED.values()]).replace("=", "").split()
    assert len(flags) > 250
    assert not [flag for flag in flags if flags.count(flag) > 1]
    assert {key_of(flag) for flag in flags} & SETTINGS.keys() == {"tp", "dp"}  # as -tp and -dp
    assert {*peers.ALIASES, *peers.VALUES, *peers.DEFAULTED, *peers.ANSWERS} <= SETTINGS.keys()
    for name, values in peers.VALUES.items():
        for theirs, ours in values.items():
            SETTINGS[name].check(ours)
            assert theirs not in SETTINGS[name].choices


def test_an_alias_is_silent_and_a_name_without_effect_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config_of("serve demo --max-model-len 512 --dtype half")
    assert not caplog.text
    config_of("serve demo --swap-space 4")
    assert "--swap-space has no effect: the engine chooses it" in caplog.text


def test_a_settings_file_of_another_engine_is_read_and_flags_win_over_it(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: demo\nmax-model-len: 4k\ntensor_parallel_size: 2\nenable-prefix-caching: false\n"
        "enforce-eager: false\nenable-lora: false\ndtype: half\nport: 8000\n"
    )
    config = config_of(f"serve --config {file} --max-model-len 512 --port 1")
    assert (config.context_length, config.tp, config.port, config.dtype) == (512, 2, 1, "float16")
    assert config.disable_radix_cache
    file.write_text("lora-scaled: a:2\n")
    with pytest.raises(ConfigError, match="change lora_alpha"):
        config_of(f"serve --config {file}")


def test_our_own_name_wins_over_an_alias() -> None:
    assert config_of("serve demo --max-model-len 512 --context-length 256").context_length == 256


def test_llm_names_the_argument_that_was_meant() -> None:
    """It takes those of vLLM's: tests/engine/test_llm.py."""
    with pytest.raises(ConfigError, match="Did you mean page_size"):
        LLM(pagesize=3)
    with pytest.raises(ConfigError, match="change lora_alpha"):
        LLM(lora_scaled="a:2")


def test_the_pages_have_the_table() -> None:
    assert peer_flags_page.PAGE.read_text() == peer_flags_page.page(), "run `make docs`"
