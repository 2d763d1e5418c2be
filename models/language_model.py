"""The text encoder's decoder layers on CUDA: fewer kernels than transformers launches, captured per padded length.

Text is short, so an encoder of 36 layers is bound by launches, not by arithmetic. The layers are causal: padding behind
the text cannot reach it, and a graph captured for a length serves every shorter text. Prompts with images are long and
run without one. transformers' own forward is the plain counterpart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import kernels
from models.quantization import Activation, takes_fp8

LENGTHS = (64, 128, 192, 256, 384, 512, 1024)  # captured when first needed; longer texts run without a graph


@dataclass(frozen=True, slots=True)
class _Graph:
    hidden: Tensor
    cos: Tensor
    sin: Tensor
    graph: torch.cuda.CUDAGraph
    output: Tensor


@dataclass(frozen=True, slots=True)
class VisionFeatures:
    """What the vision tower made of all images of a prompt: `embeds` (slots, hidden size) take the place of the tokens
    at `slots`, and entry i of `deepstack` is added to them behind layer i."""

    slots: Tensor
    embeds: Tensor
    deepstack: Sequence[Tensor]


class FusedLanguageModel:
    """Runs the layers of a transformers Qwen3-VL language model."""

    def __init__(self, model: Any, graphs: bool) -> None:
        self._model = model
        self._lengths = LENGTHS if graphs else ()
        self._graphs: dict[int, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    def __call__(self, input_ids: Tensor, positions: Tensor, vision: VisionFeatures | None = None) -> Tensor:
        """The last layer's output before the final norm, (tokens, hidden size); valid until the next call.

        input_ids: (tokens,); positions: (3, tokens).
        """
        tokens = len(input_ids)
        if vision is not None:
            hidden = self._model.embed_tokens(input_ids)
            hidden[vision.slots] = vision.embeds
            cos, sin = self._model.rotary_emb(hidden, positions[:, None])
            return self._layers(hidden, cos[0].float(), sin[0].float(), vision)
        length = next((length for length in self._lengths if length >= tokens), None)
        padding = 0 if length is None else length - tokens
        hidden = self._model.embed_tokens(F.pad(input_ids, (0, padding)))
        cos, sin = self._model.rotary_emb(hidden, F.pad(positions, (0, padding))[:, None])
        if length is None:
            return self._layers(hidden, cos[0].float(), sin[0].float())
        graph = self._graphs.get(length) or self._capture(length, hidden, cos[0].float(), sin[0].float())
        graph.hidden.copy_(hidden)
        graph.cos.copy_(cos[0])
        graph.sin.copy_(sin[0])
        graph.graph.replay()
        return graph.output[:tokens]

    def clear(self) -> None:
        """Give back the memory of all graphs."""
        self._graphs.clear()

    def _capture(self, length: int, hidden: Tensor, cos: Tensor, sin: Tensor) -> _Graph:
        self._layers(hidden, cos, sin)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._layers(hidden, cos, sin)
        captured = self._graphs[length] = _Graph(hidden, cos, sin, graph, output)
        return captured

    def _layers(self, hidden: Tensor, cos: Tensor, sin: Tensor, vision: VisionFeatures | None = None) -> Tensor:
        for number, layer in enumerate(self._model.layers):
            hidden = hidden + self._attention(layer.self_attn, _norm(layer.input_layernorm, hidden), cos, sin)
            mlp, x = layer.mlp, _input_of(layer.mlp.gate_proj, _norm(layer.post_attention_layernorm, hidden))
            hidden = hidden + mlp.down_proj(_input_of(mlp.down_proj, F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))
            if vision is not None and number < len(vision.deepstack):
                hidden[vision.slots] += vision.deepstack[number]
        return hidden

    def _attention(self, attn: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        inputs = _input_of(attn.q_proj, x)
        q, k, v = (part(inputs).unflatten(-1, (-1, attn.head_dim)) for part in (attn.q_proj, attn.k_proj, attn.v_proj))
        q = kernels.norm_rotate_halves(q, attn.q_norm.weight, attn.q_norm.variance_epsilon, cos, sin)
        k = kernels.norm_rotate_halves(k, attn.k_norm.weight, attn.k_norm.variance_epsilon, cos, sin)
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = attn.o_proj(_input_of(attn.o_proj, attended[0].transpose(0, 1).flatten(1)))
        return projected


def _input_of(linear: nn.Module, x: Tensor) -> Activation:
    """`x` in the form that a layer, and its neighbours with the same input, take."""
    return kernels.quantize(x) if takes_fp8(linear) else x


def _norm(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
