"""Flow matching over encoded rows: the batch, the loss and the helpers that teach it faster.

`x = (1 − σ) · latents + σ · noise`, and the network predicts `noise − latents`, which is what the service integrates.
Two throw-away heads are trained along: one reads from the pooled prompt embeddings what the target holds, one from
the middle of the transformer which thing every target token belongs to. Tokens that a thing touches weigh more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layout import Grid
from models.preprocess import IMAGE_SLOT, PromptTokenizer
from models.text_encoder import TextEncoder
from models.transformer import Transformer
from training.encode import TOKEN_LABELS, Encoded
from training.examples import GRID, LABEL_SIZES
from training.forward import JointForward, RowLayout
from training.muon import Matrix, Muon
from training.rows import PAD_TAILS, pad_rows

EMPTY_PART = 0.08
TOUCHED_WEIGHT = 3.0  # on top of 1
TOKEN_LOSS, TEXT_LOSS = 0.1, 0.05
TAP = 4  # the block whose output names the tokens
SIGMA_SPREAD, SIGMA_SHIFT, UNIFORM_PART = 1.0, 1.6, 0.2


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one kind, drawn at random. `is_empty` rows lost their prompt."""

    input_ids: Tensor
    lengths: Tensor
    patches: tuple[Tensor, ...]
    conditions: tuple[Tensor, ...]
    latents: Tensor
    token_shape: Tensor
    token_colour: Tensor
    weight: Tensor
    labels: Tensor
    is_empty: Tensor


class Flow(nn.Module):
    """What is trained: text encoder, transformer and the throw-away heads."""

    def __init__(self, encoder: TextEncoder, transformer: Transformer) -> None:
        super().__init__()
        self.encoder, self.transformer = encoder, transformer
        self.token_head = nn.Linear(transformer.config.inner_dim, sum(TOKEN_LABELS))
        self.text_head = nn.Linear(encoder.hidden_size, sum(LABEL_SIZES))

    def optimisers(self, muon_decay: float = 0.95) -> tuple[Muon, torch.optim.Optimizer]:
        """Muon for the matrices inside the networks, Adam for what they meet the world with."""
        visual, language = self.encoder.model.visual, self.encoder.model.language_model
        parts = {"to_qkv": 3, "qkv": 3, "gate_up": 2}
        matrices = []
        for inner in (self.transformer.blocks, self.transformer.txt_in, language.layers, visual.blocks, visual.merger,
                      visual.deepstack_merger_list):  # fmt: skip
            for name, module in inner.named_modules():
                if isinstance(module, nn.Linear):
                    matrices.append(Matrix(module.weight, parts.get(name.rpartition(".")[2], 1)))
        chosen = {id(matrix.parameter) for matrix in matrices}
        rest = [parameter for parameter in self.parameters() if id(parameter) not in chosen]
        adam = torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01, fused=rest[0].is_cuda)
        return Muon(matrices, decay=muon_decay), adam


class Kind:
    """Encoded rows with one number of condition images, and the forward for their layout."""

    def __init__(self, flow: Flow, encoded: Encoded, processor: Path, device: torch.device) -> None:
        self.device = device
        self.use(encoded)
        tokenizer = PromptTokenizer(processor)
        empty = tokenizer("", [GRID] * self.num_images)
        self.empty_ids, self.empty_length = (part.to(device) for part in pad_rows([empty], PAD_TAILS[self.num_images]))
        layout = row_layout(processor, self.num_images)
        self.joint = JointForward(flow.encoder, flow.transformer, GRID, layout).to(device)

    def use(self, encoded: Encoded) -> None:
        """Draw from these rows from now on."""
        self.encoded, self.num_images = encoded, encoded.latents.shape[1] - 1
        examples = encoded.examples
        self.input_ids, self.lengths = examples.input_ids.to(self.device), examples.lengths.to(self.device)
        self.labels = examples.labels.to(self.device)

    def draw(self, rows: int, generator: torch.Generator) -> Batch:
        device, encoded = self.device, self.encoded
        chosen = torch.randint(len(encoded), (rows,), generator=generator, device=device)
        caption = torch.randint(self.input_ids.shape[1], (rows,), generator=generator, device=device)
        is_empty = torch.rand(rows, generator=generator, device=device) < EMPTY_PART
        input_ids = torch.where(is_empty[:, None], self.empty_ids, self.input_ids[chosen, caption].long())
        lengths = torch.where(is_empty, self.empty_length, self.lengths[chosen, caption].long())
        latents = encoded.latents[chosen].float()
        order = self.joint.patch_order if self.num_images else None
        patches = encoded.patches[chosen] if self.num_images else None
        return Batch(
            input_ids=input_ids,
            lengths=lengths,
            patches=tuple(patches[:, index][:, order].float() / 127.5 - 1 for index in range(self.num_images))
            if patches is not None
            else (),
            conditions=tuple(latents[:, index] for index in range(self.num_images)),
            latents=latents[:, -1],
            token_shape=encoded.token_shape[chosen].long(),
            token_colour=encoded.token_colour[chosen].long(),
            weight=1 + TOUCHED_WEIGHT * encoded.touched[chosen].float(),
            labels=self.labels[chosen].long(),
            is_empty=is_empty,
        )


def row_layout(processor: Path, num_images: int) -> RowLayout:
    """The padded layout of rows with this many condition images."""
    tokenizer = PromptTokenizer(processor)
    grids: list[Grid] = [GRID] * num_images
    empty = tokenizer("", grids)
    ids, _ = pad_rows([empty], PAD_TAILS[num_images])
    return RowLayout.of(ids[0].tolist(), tokenizer.special[IMAGE_SLOT], empty.num_system_tokens, grids)


def draw_sigmas(rows: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Stratified noise levels: logit-normal, shifted towards noise, a part of them uniform."""
    quantile = (torch.randperm(rows, generator=generator, device=device) + 0.5) / rows
    sigma = torch.sigmoid(torch.special.ndtri(quantile) * SIGMA_SPREAD)
    sigma = SIGMA_SHIFT * sigma / (1 + (SIGMA_SHIFT - 1) * sigma)
    uniform = torch.rand(rows, generator=generator, device=device)
    return torch.where(torch.rand(rows, generator=generator, device=device) < UNIFORM_PART, uniform, sigma)


def flow_loss(
    flow: Flow, joint: JointForward, batch: Batch, generator: torch.Generator, help_by: float
) -> dict[str, Tensor]:
    """Losses of one batch; `total` is to be minimised. `help_by` scales the throw-away heads."""
    rows = len(batch.latents)
    latents = batch.latents.float()
    sigma = draw_sigmas(rows, generator, latents.device)
    noise = torch.randn(latents.shape, generator=generator, device=latents.device)
    mixed = latents + sigma[:, None, None] * (noise - latents)
    embeds = joint.read(batch.input_ids, batch.patches)
    velocity, tapped = joint(embeds, batch.lengths, batch.conditions, mixed, sigma, TAP)
    error = (velocity.float() - (noise - latents)).square().mean(-1)
    flow_error = (error * batch.weight).sum() / batch.weight.sum()
    shape, colour = flow.token_head(tapped).float().split(TOKEN_LABELS, dim=-1)
    tokens = _tokens_loss(shape, batch.token_shape, batch.is_empty) + _tokens_loss(
        colour, batch.token_colour, batch.is_empty
    )
    losses = {"flow": flow_error, "tokens": tokens}
    losses["text"] = _text_loss(flow, embeds, batch, joint.layout.num_system_tokens)
    losses["total"] = flow_error + help_by * (TOKEN_LOSS * tokens + TEXT_LOSS * losses["text"])
    return losses


def _tokens_loss(logits: Tensor, target: Tensor, is_empty: Tensor) -> Tensor:
    loss = F.cross_entropy(logits.transpose(1, 2), target, reduction="none").mean(-1)
    return (loss * ~is_empty).mean()


def _text_loss(flow: Flow, embeds: Tensor, batch: Batch, num_system_tokens: int) -> Tensor:
    left_out = num_system_tokens + len(batch.conditions) * GRID.num_slots
    valid = torch.arange(embeds.shape[1], device=embeds.device) < (batch.lengths[:, None] - left_out)
    pooled = (embeds.float() * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
    logits = flow.text_head(pooled).float().split(LABEL_SIZES, dim=-1)
    losses = [F.cross_entropy(part, batch.labels[:, index], reduction="none") for index, part in enumerate(logits)]
    return (torch.stack(losses).mean(0) * ~batch.is_empty).mean()


def totals(losses: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value.detach()) for name, value in losses.items()}
