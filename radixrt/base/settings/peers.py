"""The table of flags, values and fields of vLLM, SGLang, llama.cpp and Ollama, and what stands for
each of them here: a setting, nothing, or an answer.

Names are written as on the command line. In settings files and in ``LLM`` they have no leading
dashes, and underscores may stand in place of the others.
"""

from collections.abc import Mapping
from typing import Any

ALIASES = {
    "model_path": "--model -m --hf-repo -hf -hfr",
    "tokenizer_path": "--tokenizer",
    "served_model_name": "--alias -a",
    "quantization": "-q",
    "context_length": "--max-model-len --ctx-size -c --n-ctx --num-ctx",
    "chat_template": "--chat-template-file",
    "lora": "--lora-modules --lora-paths",
    "mmproj": "-mm",
    "max_loras": "--max-loras-per-batch --max-loaded-loras --max-cpu-loras",
    "random_seed": "--seed -s",
    "cors_origins": "--allowed-origins",
    "tls_cert": "--ssl-certfile --ssl-cert-file",
    "tls_key": "--ssl-keyfile --ssl-key-file",
    "otlp_endpoint": "--otlp-traces-endpoint",
    "step_timeout": "--watchdog-timeout",
    "log_level": "--uvicorn-log-level --log-level-http",
    "tp": "--tensor-parallel-size --tp-size -tp",
    "ep": "--ep-size",
    "expert_metrics": "--enable-expert-distribution-metrics",
    "deterministic": "--enable-deterministic-inference",
    "kernel_threads": "--threads -t --n-threads",
    "cuda_graph_max_batch_size": "--cuda-graph-max-bs --max-cudagraph-capture-size",
    "dp": "--data-parallel-size --dp-size -dp",
    "mem_fraction_static": "--gpu-memory-utilization",
    "kv_cache_dtype": "--cache-type-k -ctk --cache-type-v -ctv",
    "page_size": "--block-size",
    "eviction_policy": "--radix-eviction-policy",
    "disable_radix_cache": "--no-enable-prefix-caching --no-cache-prompt",
    "max_running_requests": "--max-num-seqs --parallel -np --num-parallel",
    "max_prefill_tokens": "--max-num-batched-tokens --batch-size -b --n-batch",
    "schedule_policy": "--scheduling-policy",
    "grammar_backend": "--guided-decoding-backend --structured-outputs-config.backend",
    "debug_disable_cuda_graph": "--enforce-eager",
}
"""Our settings, and the names of the peers for the same thing."""

CONSTANTS: Mapping[str, tuple[str, Any]] = {
    "--constrained-json-disable-any-whitespace": ("grammar_whitespace", "compact"),
    "--verbose": ("log_level", "debug"),
    "-v": ("log_level", "debug"),
    "--log-disable": ("log_level", "error"),
    "--cpu": ("device", "cpu"),
    "--enable-expert-parallel": ("ep", 0),
    "--enable-ep-moe": ("ep", 0),
}
"""Switches that stand for one value of a setting."""

IGNORED = {
    "it is always so here": (
        "--enable-prefix-caching --enable-chunked-prefill --no-enable-chunked-prefill --cache-prompt --cont-batching -cb --jinja --enable-mixed-chunk --use-v2-block-manager "
        "--metrics --enable-metrics --enable-cache-report --enable-prompt-tokens-details --enable-force-include-usage --async-scheduling --no-context-shift "
        "--kv-unified -kvu --repack --slots --props --enable-server-load-tracking --sleep-on-idle --incremental-streaming-output",
        "--flash-attn= -fa=",
    ),
    "tool calls and reasoning are recognised by the chat template (--tool-call-parser and --reasoning-parser name another format)": (
        "--enable-auto-tool-choice --enable-reasoning --reasoning-preserve",
        "--reasoning-format --chat-format --chat-template-content-format --tool-server",
    ),
    "the checkpoint decides whether the server gives text, vectors or classes": (
        "--embedding --embeddings --rerank --reranking --is-embedding",
        "--task --runner --convert --pooling --pooler-config --override-pooler-config --embd-normalize",
    ),
    "requests are not logged; --log-level debug and --request-log FILE log them": (
        "--disable-log-requests --enable-log-requests --no-enable-log-requests --disable-log-stats --log-requests --disable-uvicorn-access-log --log-prefix --log-timestamps --log-stats --perf --no-perf",
        "--max-log-len --log-requests-level --log-requests-format --decode-log-interval --log-colors --verbosity --log-verbosity -lv",
    ),
    "the engine chooses it for the machine and the model": (
        "--mlock --no-mmap --mmap --use-mmap --use-mlock --enable-torch-compile --disable-custom-all-reduce --enable-p2p-check --worker-use-ray --enable-dp-attention "
        "--disable-flashinfer --warmup --no-warmup --skip-server-warmup --disable-cuda-graph-padding --offload-kqv --no-op-offload --no-repack --check-tensors --disable-hybrid-kv-cache-manager --disable-shared-experts-fusion",
        "--threads-batch -tb --ubatch-size -ub --n-ubatch --prio --poll --fit -fit --defrag-thold -dt --swap-space --max-seq-len-to-capture --compilation-config -O --num-scheduler-steps --scheduler-delay-factor "
        "--distributed-executor-backend --max-parallel-loading-workers --moe-runner-backend --moe-a2a-backend --sampling-backend --prefill-attention-backend --decode-attention-backend --mamba-ssm-dtype "
        "--stream-interval --num-continuous-decode-steps --schedule-conservativeness --max-num-partial-prefills --long-prefill-token-threshold --preemption-mode --prefill-max-requests --tokenizer-mode --tokenizer-worker-num "
        "--api-server-count --threads-http --config-format --model-impl --load-mode --ignore-patterns --model-loader-extra-config --nccl-port --load-balance-method --renderer-num-workers",
    ),
    "all layers run on one device (--device)": (
        "",
        "--gpu-layers --n-gpu-layers -ngl --split-mode -sm --tensor-split -ts --num-gpu",
    ),
    "draft tokens come from known text, and from an EAGLE-3 head by --draft-model; answers are the same with any drafter": (
        "",
        "--speculative-config --speculative-model --speculative-algorithm --speculative-algo --speculative-draft-model-path --speculative-num-steps --speculative-eagle-topk --speculative-num-draft-tokens "
        "--speculative-config.method --speculative-config.model --speculative-config.num_speculative_tokens "
        "--num-speculative-tokens --ngram-prompt-lookup-max --ngram-prompt-lookup-min --model-draft -md --hf-repo-draft -hfd --draft-max --draft-min --draft",
    ),
    "prefixes stay in memory until their room is needed, and there are no slots": (
        "--enable-hierarchical-cache --enable-lmcache --cache-idle-slots --swa-full --no-slots",
        "--cache-reuse --cache-ram -cram --slot-save-path --slot-prompt-similarity -sps --keep --hicache-ratio --hicache-size --ctx-checkpoints --swa-checkpoints -ctxcp --swa-full-tokens-ratio",
    ),
    "radixrt serves text": (
        "--no-mmproj --language-model-only --enable-multimodal",
        "--limit-mm-per-prompt --mm-processor-kwargs --mm-processor-cache-gb --mm-attention-backend",
    ),
    "adapters are served where --lora or --max-loras is given, and one may change any linear layer": (
        "--enable-lora --no-enable-lora",
        "--lora-target-modules --lora-backend --lora-dtype --lora-eviction-policy",
    ),
    "the web page is always served": ("--webui --ui --no-webui --no-ui", ""),
    "the server decides it for all clients": (
        "--allow-credentials --disable-fastapi-docs --disable-frontend-multiprocessing --enable-request-id-headers --return-tokens-as-token-ids --reuse-port --cors-credentials --enable-custom-logit-processor",
        "--allowed-methods --allowed-headers --cors-methods --cors-headers --response-role --max-logprobs --timeout -to --sse-ping-interval --file-storage-path --ssl-ca-certs --ssl-cert-reqs --weight-version --dist-timeout",
    ),
}  # fmt: skip
"""Names that are accepted without effect, by the reason: switches, and names with a value. A name
that ends in ``=`` may have one."""

REFUSED = {
    "an adapter has the scaling of its config; change lora_alpha in a copy of its folder": "--lora-scaled",
    "download the vision tower, and give --mmproj FILE": "--mmproj-url",
    "layers run on one machine and are split with --tp; there is no pipeline parallelism": "--pipeline-parallel-size --pp-size -pp",
    "engines on other machines join by --replica-listen and --join": "--nnodes --node-rank --dist-init-addr --nccl-init-addr --rpc --data-parallel-address --data-parallel-size-local",
    "weights and KV stay on one device; choose a smaller model, or --quantization int4": "--cpu-offload-gb --cpu-moe -cmoe --n-cpu-moe -ncmoe --kv-offloading-size --no-kv-offload -nkvo --override-tensor -ot",
    "prefill and decode run in one engine, and KV is not sent between servers": "--kv-transfer-config --disaggregation-mode --disaggregation-transfer-backend",
    "the size of the KV pool is --max-total-tokens, in tokens": "--num-gpu-blocks-override --kv-cache-memory-bytes",
    "the sampling of requests without settings is the checkpoint's; change generation_config.json in its folder, or send it with each request": "--override-generation-config --generation-config --sampling-defaults --preferred-sampling-params --temp --temperature --top-k --top-p --min-p --n-predict --predict -n --repeat-penalty --presence-penalty --frequency-penalty --samplers",
    "change config.json in a copy of the checkpoint's folder": "--rope-scaling --rope-theta --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --hf-overrides --json-model-override-args --override-kv --hf-config-path",
    "download that version with `hf download USER/NAME --revision REVISION`, and serve its folder": "--revision --tokenizer-revision --code-revision",
    "name the file in the model: hf:USER/REPO:FILE": "--hf-file -hff",
    "download the file, and give its path as the model": "--model-url -mu --docker-repo -dr",
    "models are kept in the hub's cache, whose folder is HF_HOME": "--download-dir",
    "set HF_TOKEN, or log in with `hf auth login`": "--hf-token -hft",
    "CUDA_VISIBLE_DEVICES chooses the GPU": "--main-gpu -mg --base-gpu-id",
    "--api-keys FILE declares keys; `radixrt key new NAME` makes one and prints its entry": "--api-key-file --admin-api-key",
    "send it with each request as chat_template_kwargs": "--chat-template-kwargs --default-chat-template-kwargs",
    "send max_reasoning_tokens with each request": "--reasoning-budget",
    "a proxy in front of the server can strip the path": "--root-path --fastapi-root-path --api-prefix --uds",
    "set --kv-events ADDRESS --kv-events-tokens --kv-events-format vllm": "--kv-events-config",
    "experts stay on their ranks (--ep); --expert-metrics counts the tokens of each": "--enable-eplb --eplb-config --ep-num-redundant-experts",
    "requests with token ids need no other mode: send them as the prompt": "--skip-tokenizer-init",
    "set --grammar-whitespace compact": "--constrained-json-whitespace-pattern",
    "set --cuda-graph-max-batch-size to the largest": "--cuda-graph-bs --cudagraph-capture-sizes",
    "set --schedule-policy priority, which takes the smallest priority first": "--enable-priority-scheduling",
}  # fmt: skip
"""Answers to names for which there is nothing here, or something of another form. Each takes a
value or none."""

NEUTRAL = {
    "0": "--cpu-offload-gb --n-cpu-moe -ncmoe --kv-offloading-size --node-rank --main-gpu -mg --base-gpu-id",
    "1": "--pipeline-parallel-size --pp-size -pp --nnodes --data-parallel-size-local",
    "-1": "--n-predict --predict -n --reasoning-budget",
    "main": "--revision --tokenizer-revision --code-revision",
    "auto": "--generation-config",
    "model": "--sampling-defaults",
}  # fmt: skip
"""Values that ask a name of ``REFUSED`` for what is so anyway, as do false and none."""

OFF: Mapping[str, tuple[str, Any]] = {
    "--enable-prefix-caching": ("disable_radix_cache", True),
    "--cache-prompt": ("disable_radix_cache", True),
    "--gpu-layers": ("device", "cpu"),
    "--n-gpu-layers": ("device", "cpu"),
    "-ngl": ("device", "cpu"),
    "--num-gpu": ("device", "cpu"),
}
"""Settings for which names of ``IGNORED`` stand if their value is false or 0."""

VALUES: Mapping[str, Mapping[str, Any]] = {
    "dtype": {
        "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16",
        "float": "float32", "fp32": "float32", "f32": "float32",
    },
    "device": {"gpu": "cuda", "cuda:0": "cuda", "CUDA0": "cuda", "none": "cpu"},
    "context_length": {"auto": None, "0": None, "-1": None},
    "kernel_threads": {"-1": None, "0": None},
    "max_running_requests": {"-1": None, "0": None},
    "random_seed": {"-1": 0},
    "kv_cache_dtype": {
        "fp8": "fp8_e4m3", "q8_0": "int8", "f16": "auto", "bf16": "auto", "bfloat16": "auto",
        "float16": "auto", "fp16": "auto", "f32": "auto",
    },
    "schedule_policy": {"dfs-weight": "lpm"},
    "grammar_backend": {"guidance": "llguidance", "outlines": "fsm"},
    "log_level": {"trace": "debug", "warn": "warning", "critical": "error"},
}  # fmt: skip
"""Values of the peers by our settings, and ours of the same meaning."""

DEFAULTED = {
    "quantization": (
        "the format of a quantized checkpoint is recognised",
        "none awq gptq awq_marlin gptq_marlin marlin compressed-tensors gguf mxfp4 moe_wna16 w8a8_fp8",
    ),
    "load_format": (
        "the format of the files is recognised",
        "gguf hf fastsafetensors runai_streamer mistral sharded_state",
    ),
    "attention_backend": (
        "the fastest kernels of the device are chosen",
        "triton fa3 fa4 flash_attn FLASH_ATTN FLASHINFER TRITON_ATTN FLEX_ATTENTION flex_attention torch_native torch_sdpa TORCH_SDPA XFORMERS CPU_ATTN intel_amx flashmla cutlass_mla trtllm_mha",
    ),
    "grammar_backend": (
        "the library is chosen for each grammar",
        "xgrammar lm-format-enforcer",
    ),
}  # fmt: skip
"""Values in place of which ``auto`` is taken, with the reason."""

ANSWERS = {
    "quantization": (
        "int8 and int4 round a plain checkpoint while it is loaded",
        "bitsandbytes w8a8_int8 torchao auto-round modelopt hqq experts_int8 tpu_int8 int8wo",
    ),
    "kv_cache_dtype": (
        "fp8_e4m3 is for GPUs, and int8 for CPUs",
        "fp8_e5m2 fp4_e2m1 q4_0 q4_1 q5_0 q5_1 iq4_nl",
    ),
    "load_format": (
        "convert the weights to safetensors; files of pickles can run code",
        "pt npcache bitsandbytes tensorizer",
    ),
    "schedule_policy": (
        "orders are lpm, suf, fcfs and priority (docs/queue_order.md)",
        "random lof routing-key",
    ),
    "eviction_policy": (
        "policies are value, lru, fifo and priority (docs/caching.md)",
        "lfu slru mru filo",
    ),
    "device": ("radixrt runs on CPUs and NVIDIA GPUs", "xpu hpu tpu rocm mps metal vulkan npu"),
}
"""Values that are refused, with the sentence that says what there is."""

FIELDS = {
    "n_predict": "max_tokens", "num_predict": "max_tokens", "max_new_tokens": "max_tokens",
    "max_length": "max_tokens", "repeat_penalty": "repetition_penalty", "n_probs": "logprobs",
    "min_new_tokens": "min_tokens", "sampling_seed": "seed", "json_schema": "response_format",
    "banned_tokens": "bad_words",
}  # fmt: skip
"""Fields of requests that other endpoints or engines have, and ours of the same meaning."""
