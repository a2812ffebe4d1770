"""The mesh bench's model, its client and its rival: the engine alone in a process of its own."""

from __future__ import annotations

import json
import os
import random
import select
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shared.clock import now_s

VOCABULARY = 4096
LAYERS, HIDDEN, HEADS, KV_HEADS, MLP = 8, 512, 8, 4, 1408
TAIL = len(b"data: ") - 1


def write_model(path: Path, *, seed: int = 0) -> None:
    """A random 30M-parameter Llama with a word-level tokenizer: Hugging Face format, made without transformers."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * 0.02

    head_dim = HIDDEN // HEADS
    tensors = {"model.embed_tokens.weight": weight(VOCABULARY, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    tensors["lm_head.weight"] = weight(VOCABULARY, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * head_dim, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * head_dim, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (MLP, HIDDEN),
            "mlp.up_proj": (MLP, HIDDEN),
            "mlp.down_proj": (HIDDEN, MLP),
        }
        tensors |= {f"{layer}.{name}.weight": weight(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = torch.ones(HIDDEN)
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    letters = "abcdefghijklmnop"
    words = [f"Ġ{letters[i // 256]}{letters[i // 16 % 16]}{letters[i % 16]}n" for i in range(VOCABULARY)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))


def prompts(streams: int, tokens: int, *, seed: int) -> list[list[int]]:
    """One random prompt per stream; another seed shares no prefix with this one."""
    draw = random.Random(seed)
    return [[draw.randrange(2, VOCABULARY) for _ in range(tokens)] for _ in range(streams)]


@dataclass(slots=True)
class Lap:
    """One round of concurrent streams: seconds from the start to each stream's first and last token."""

    first_s: list[float]
    last_s: list[float]
    tokens: int  # per stream

    @property
    def tokens_per_s(self) -> float:
        return len(self.last_s) * self.tokens / max(self.last_s)

    @property
    def tpot_s(self) -> list[float]:
        return [(last - first) / (self.tokens - 1) for first, last in zip(self.first_s, self.last_s, strict=True)]


def stream(port: int, prompts_: list[list[int]], max_tokens: int) -> Lap:
    """All prompts at once over HTTP, streamed; plain sockets, because the client shares the machine with the mesh.

    Raises RuntimeError when an answer is an error or is not `max_tokens` long.
    """
    poll = select.epoll()
    streams: dict[int, _Stream] = {}
    for i, prompt in enumerate(prompts_):
        body = {"model": "bench", "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "seed": i}
        body |= {"temperature": 0, "stream_options": {"include_usage": True}}
        text = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-type: application/json\r\n"
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        streams[connection.fileno()] = _Stream(connection, f"{head}content-length: {len(text)}\r\n\r\n".encode() + text)
    began = now_s()
    for number, one in streams.items():
        one.connection.sendall(one.request)
        poll.register(number, select.EPOLLIN)
    live = len(streams)
    while live:
        for number, _ in poll.poll():
            one = streams[number]
            data = one.connection.recv(1 << 18)
            now = now_s() - began
            if not data:
                poll.unregister(number)
                live -= 1
                one.connection.close()
                continue
            one.data += data
            if b'"text"' in data:
                one.first_s = one.first_s or now
                one.last_s = now
    poll.close()
    for one in streams.values():
        if f'"completion_tokens":{max_tokens}'.encode() not in one.data.replace(b": ", b":"):
            raise RuntimeError(f"not {max_tokens} tokens: {bytes(one.data[:600])!r} ... {bytes(one.data[-600:])!r}")
    every = list(streams.values())
    return Lap([one.first_s for one in every], [one.last_s for one in every], max_tokens)


class _Stream:
    __slots__ = ("connection", "data", "first_s", "last_s", "request")

    def __init__(self, connection: socket.socket, request: bytes) -> None:
        self.connection, self.request = connection, request
        self.data = bytearray()
        self.first_s = self.last_s = 0.0


def engine_alone(pipe: Connection, model: str, threads: int) -> None:
    """Serve laps of the engine over a pipe: (prompts, max_tokens) in, Lap out, None to end."""
    from services.worker.assemble import assemble
    from services.worker.config import WorkerConfig
    from services.worker.state import START_PERF, StepTimes

    config = WorkerConfig(model=model, threads=threads)
    engine = assemble(config, Path(model), StepTimes(START_PERF)).engine
    pipe.send("ready")
    while (lap := pipe.recv()) is not None:
        pipe.send(_engine_lap(engine, *lap))


def _engine_lap(engine: Any, prompts_: list[list[int]], max_tokens: int) -> Lap:
    from services.worker.engine.request import EngineRequest
    from shared.model import SamplingParams

    began = now_s()
    for i, prompt in enumerate(prompts_):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=i, ignore_eos=True)
        request = EngineRequest(request_id=f"{began}-{i}", gateway_id="g", prompt=prompt, sampling=sampling, arrival_s=now_s())
        engine.add(request, now_s())
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    while engine.has_work():
        output = engine.step(now_s())
        now = now_s() - began
        for item in output.items.get("g", []):
            first.setdefault(item.request_id, now)
            last[item.request_id] = now
    return Lap(list(first.values()), list(last.values()), max_tokens)


def cpu_s(pid: int) -> float:
    """CPU seconds a process has used, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
