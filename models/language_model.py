"""The text encoder's decoder layers on CUDA: fewer kernels, captured per padded length.

Text is short, so an encoder of 36 layers is bound by launches, not by arithmetic. The layers are causal: padding behind
the text cannot reach it, and a graph captured for a length serves every shorter text. Prompts with images are long and
run without one. `models.qwen3_vl.LanguageModel.forward` is the plain counterpart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import kernels
from models.graphs import GraphPool
from models.quantization import Activation, takes_fp8
from models.qwen3_vl import LanguageModel, TextAttention, TextLayer, VisionFeatures, causal_attention

LENGTHS = (64, 128, 192, 256, 384, 512, 1024)  # captured when first needed; longer texts run without a graph


@dataclass(frozen=True, slots=True)
class _Graph:
    hidden: Tensor
    cos: Tensor
    sin: Tensor
    graph: torch.cuda.CUDAGraph
    output: Tensor


class FusedLanguageModel:
    """Runs the layers of a `LanguageModel`."""

    def __init__(self, model: LanguageModel, graphs: bool) -> None:
        self._model = model
        self._lengths = LENGTHS if graphs else ()
        self._graphs: dict[int, _Graph] = {}
        self._pool = GraphPool()

    def __call__(self, input_ids: Tensor, positions: Tensor, vision: VisionFeatures | None = None) -> Tensor:
        """The last layer's output before the final norm, (tokens, hidden size); valid until the next call.

        input_ids: (tokens,); positions: (3, tokens).
        """
        tokens = len(input_ids)
        if vision is not None:
            return self._model.run(_layer, self._model.embed(input_ids, vision), *self._model.rotary(positions), vision)
        length = next((length for length in self._lengths if length >= tokens), None)
        padding = 0 if length is None else length - tokens
        hidden = self._model.embed(F.pad(input_ids, (0, padding)))
        cos, sin = self._model.rotary(F.pad(positions, (0, padding)))
        if length is None:
            return self._model.run(_layer, hidden, cos, sin)
        graph = self._graphs.get(length) or self._capture(length, hidden, cos, sin)
        graph.hidden.copy_(hidden)
        graph.cos.copy_(cos)
        graph.sin.copy_(sin)
        graph.graph.replay()
        return graph.output[:tokens]

    def clear(self) -> None:
        """Give back the memory of all graphs."""
        self._graphs.clear()

    def _capture(self, length: int, hidden: Tensor, cos: Tensor, sin: Tensor) -> _Graph:
        graph, output = self._pool.capture(partial(self._model.run, _layer, hidden, cos, sin))
        captured = self._graphs[length] = _Graph(hidden, cos, sin, graph, output)
        return captured


def _layer(layer: TextLayer, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`TextLayer.forward`, in fewer kernels, and in FP8 where the layer is."""
    hidden = hidden + _attention(layer.self_attn, layer.input_layernorm(hidden), cos, sin)
    mlp, x = layer.mlp, _input_of(layer.mlp.gate_proj, layer.post_attention_layernorm(hidden))
    return hidden + mlp.down_proj(_input_of(mlp.down_proj, F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))


def _attention(attn: TextAttention, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    inputs = _input_of(attn.q_proj, x)
    q, k, v = (part(inputs).unflatten(-1, (-1, attn.head_dim)) for part in (attn.q_proj, attn.k_proj, attn.v_proj))
    q = kernels.norm_rotate_halves(q, attn.q_norm.weight, attn.q_norm.eps, cos, sin)
    k = kernels.norm_rotate_halves(k, attn.k_norm.weight, attn.k_norm.eps, cos, sin)
    projected: Tensor = attn.o_proj(_input_of(attn.o_proj, causal_attention(q, k, v)))
    return projected


def _input_of(linear: nn.Module, x: Tensor) -> Activation:
    """`x` in the form that a layer, and its neighbours with the same input, take."""
    return kernels.quantize(x) if takes_fp8(linear) else x
