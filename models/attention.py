"""Attention of the two phases, over tensors of shape (rows, tokens, heads, head_dim).

Prefill runs the block-causal prefix one segment at a time: a segment sees every key up to its own end, text with a
causal triangle on top. No dense mask of the whole prefix is ever built. Decode lets each row's target tokens see that
row's whole prefix and the whole target block, so rows with prefixes of different lengths need no mask either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layout import Segment


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Plain softmax attention of every query over every key that `mask` (queries, keys) allows."""
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return out.transpose(1, 2)


def _causal_mask(segment: Segment, device: torch.device) -> Tensor:
    queries = torch.arange(segment.start, segment.end, device=device)
    return queries[:, None] >= torch.arange(segment.end, device=device)


def block_causal_attention(q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Attention of a prefix over itself; `segments` cover its tokens in order."""
    outputs = []
    for segment in segments:
        mask = None if segment.grid is not None else _causal_mask(segment, q.device)
        queries = q[:, segment.start : segment.end]
        outputs.append(attention(queries, k[:, : segment.end], v[:, : segment.end], mask))
    return torch.cat(outputs, dim=1)


def target_attention(q: Tensor, k: Tensor, v: Tensor, prefix_kv: Sequence[Tensor]) -> Tensor:
    """Attention of target tokens over their own block and, row by row, over that row's prefix.

    `prefix_kv` holds one (2, prefix tokens, heads, head_dim) per row: keys, then values, of this layer.
    """
    outputs = []
    for row, prefix in enumerate(prefix_kv):
        one = slice(row, row + 1)
        keys = torch.cat([k[one], prefix[0:1]], dim=1)
        values = torch.cat([v[one], prefix[1:2]], dim=1)
        outputs.append(attention(q[one], keys, values))
    return torch.cat(outputs)
