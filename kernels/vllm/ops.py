"""LoRA of a layer as an operation that torch.compile does not look into, so that vLLM compiles models with LoRA too.

vLLM turns compiling off where LoRA is computed on a CPU, because it would trace its own kernels. These operations name a layer;
whatever the layer's wrapper does is done when the compiled model runs.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

_layers: WeakValueDictionary[str, torch.nn.Module] = WeakValueDictionary()
_library = torch.library.Library("motet_vllm", "FRAGMENT")


class LayerWrapper:
    """What a linear layer has as its `punica_wrapper`: vLLM's or Motet's wrapper, and the layer's name."""

    def __init__(self, wrapper: Any, layer: torch.nn.Module) -> None:
        self.wrapper, self.name = wrapper, named(layer)

    def add_lora_linear(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """y += LoRA of x; the other arguments are the layer's own."""
        if torch.compiler.is_compiling():
            torch.ops.motet_vllm.linear(y, x, self.name)
        else:
            self.wrapper.add_lora_linear(y, x, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["wrapper"], name)


def named(layer: torch.nn.Module) -> str:
    """A name for a layer that no other living one has. A model loaded again has the same names: compiled models are cached."""
    for name, other in _layers.items():
        if other is layer:
            return name
    base = str(getattr(layer.base_layer, "prefix", "") or type(layer).__name__)
    name, number = base, 1
    while name in _layers:
        name, number = f"{base}#{number}", number + 1
    _layers[name] = layer
    return name


def embedding(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The forward pass of an embedding with LoRA, as one operation: [rows] -> [rows, width]."""
    found: torch.Tensor = torch.ops.motet_vllm.embedding(x, layer.motet_name)
    return found


def _linear(y: torch.Tensor, x: torch.Tensor, name: str) -> None:
    layer: Any = _layers[name]
    layer.punica_wrapper.wrapper.add_lora_linear(y, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, layer.output_slices)


def _embedding(x: torch.Tensor, name: str) -> torch.Tensor:
    return _layers[name](x)


def _embedding_fake(x: torch.Tensor, name: str) -> torch.Tensor:
    base: Any = _layers[name].base_layer
    return torch.empty((*x.shape, base.embedding_dim), dtype=base.weight.dtype, device=x.device)


_library.define("linear(Tensor(a!) y, Tensor x, str name) -> ()")
_library.impl("linear", _linear, "CPU")
torch.library.register_fake("motet_vllm::linear", lambda y, x, name: None, lib=_library)
_library.define("embedding(Tensor x, str name) -> Tensor")
_library.impl("embedding", _embedding, "CPU")
torch.library.register_fake("motet_vllm::embedding", _embedding_fake, lib=_library)
