"""Attention of the two phases, over tensors of shape (rows, tokens, heads, head_dim).

Prefill runs the block-causal prefix one segment at a time: a segment sees every key up to its own end, text with a
causal triangle on top. No dense mask of the whole prefix is ever built. Decode lets each row's target tokens see that
row's whole prefix and the whole target block, so rows with prefixes of different lengths need no mask either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layout import Segment

AttentionFunction = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Plain softmax attention of every query over every key. With `causal`, queries and keys end at the same token,
    and a query sees no key behind it."""
    mask = None
    is_square = q.shape[1] == k.shape[1]
    if causal and not is_square:
        end = k.shape[1]
        queries = torch.arange(end - q.shape[1], end, device=q.device)
        mask = queries[:, None] >= torch.arange(end, device=q.device)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and is_square)
    return out.transpose(1, 2)


def block_causal_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Segment], attend: AttentionFunction = attention
) -> Tensor:
    """Attention of a prefix over itself; `segments` cover its tokens in order, `attend` serves one of them."""
    outputs = []
    for segment in segments:
        queries = q[:, segment.start : segment.end]
        outputs.append(attend(queries, k[:, : segment.end], v[:, : segment.end], segment.grid is None))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def target_attention(q: Tensor, k: Tensor, v: Tensor, prefix_kv: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of target tokens over their own block and, row by row, over that row's prefix.

    `prefix_kv` holds a row's keys and values of this layer, each (prefix tokens, heads, head_dim).
    """
    outputs = []
    for row, (prefix_k, prefix_v) in enumerate(prefix_kv):
        one = slice(row, row + 1)
        keys = torch.cat([k[one], prefix_k[None]], dim=1)
        values = torch.cat([v[one], prefix_v[None]], dim=1)
        outputs.append(attention(q[one], keys, values))
    return torch.cat(outputs)
