"""Environment variables `MOTET_*` that are not service options, and the code that reads them.

Service options are in `services/<kind>/config.py`.

docs/configuration.md prints this table, and a test compares it with the sources. They are read where no
service's configuration is at hand: inside kernels, in clients, in the compose file, in tests and benches.
"""

from __future__ import annotations

VARIABLES: dict[str, dict[str, str]] = {
    "Kernels and caches": {
        "MOTET_KERNELS": "kernels of a worker: `auto` (the default: compiled ones on a CPU, if they can be compiled), `cpu`"
        " (compiled ones or an error) or `reference` (plain torch)",
        "MOTET_CPU_ISA": "instruction set of the compiled CPU kernels, instead of the best one that this machine has",
        "MOTET_CPU_CXXFLAGS": "more flags for the C++ compiler, such as those of a sanitizer",
        "MOTET_VLLM_LORA": "0: vLLM with LoRA uses its own kernels although Motet is installed beside it (docs/vllm-plugin.md)",
        "MOTET_CACHE_DIR": "directory for compiled kernels and the models of benches; default `$XDG_CACHE_HOME/motet`",
    },
    "Command line": {
        "MOTET_URL": "URL of the gateway that `motet chat`, `motet adapters` and so on talk to, as `--url`",
        "MOTET_API_KEY": "API key that they send",
        "MOTET_CA_FILE": "certificate authority of that gateway, if the system does not know it",
    },
    "Containers (`compose/`)": {
        "MOTET_MODEL_DIR": "directory of the base model on the host, mounted into the containers",
        "MOTET_SECRETS_DIR": "directory that `make compose-secrets` wrote",
        "MOTET_HTTP_PORT": "port of the gateway on the host",
        "MOTET_PROMETHEUS_PORT": "port of Prometheus on the host",
        "MOTET_GRAFANA_PORT": "port of Grafana on the host",
        "MOTET_BASE_IMAGE": "image that the containers are built on",
    },
    "Tests and benches": {
        "MOTET_TEST_FAULT": "set by a test: a file; while it exists, adapters reach the device without one of their modules",
        "MOTET_TEST_ISAS": "instruction sets on which the kernels' tests run; default: all that this machine has",
        "MOTET_TEST_VLLM": "set by `make test-vllm`: the engine suite runs on vLLM instead of the native engine",
        "MOTET_LLAMA_PYTHON": "Python of an environment with llama-cpp-python and gguf, for `bench engine`",
        "MOTET_VLLM_PYTHON": "Python of an environment with vLLM, for benches that compare with it",
        "MOTET_PEERS": "directory of the kernels that `make gpu-peers` unpacks, for `bench gpu`; default `build/peers`",
        "MOTET_BENCH_PACE": "how long the steps of a worker take that runs under `python -m bench.paced`, as JSON",
        "MOTET_BENCH_SEED_ENDS": "1: answers of such a worker have as many tokens as their request's seed says",
        "MOTET_DATA": "directory of traces for `python -m bench cluster` and `cluster_live`",
    },
}
