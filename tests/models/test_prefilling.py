"""Which length a prompt is captured at, and what happens without memory; `tests/gpu` has the graphs themselves."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from models.config import TransformerConfig
from models.layout import Grid, prefix_layout
from models.prefilling import CapturedPrefiller, text_layout
from models.prefix_kv import KV_FORMATS, PrefixKV
from models.transformer import Transformer
from tests.closeness import relative_error

CONFIG = TransformerConfig(
    num_layers=2, num_attention_heads=2, attention_head_dim=16, axes_dims_rope=(4, 6, 6), in_channels=4,
    context_in_dim=12, mlp_ratio=2, causal_condition=True,
)  # fmt: skip


class Pool:
    """`GraphPool` where there is no CUDA: a replay does the work again. Runs out of memory when told to."""

    def __init__(self) -> None:
        self.captures = self.replays = 0
        self.is_full = False

    def capture(self, work: Callable[[], object]) -> tuple[SimpleNamespace, object]:
        if self.is_full:
            raise torch.OutOfMemoryError("nothing left")
        self.captures += 1
        return SimpleNamespace(replay=lambda: self._replay(work)), work()

    def _replay(self, work: Callable[[], object]) -> None:
        self.replays += 1
        work()


@pytest.fixture(scope="module")
def transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer(CONFIG).eval().requires_grad_(False)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    for needs_cuda in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, needs_cuda, lambda: None)
    return Pool()


def prefiller_of(transformer: Transformer, pool: Pool, kv: str = "auto") -> CapturedPrefiller:
    return CapturedPrefiller(transformer, KV_FORMATS[kv], pool)  # type: ignore[arg-type]


def prompt(tokens: int) -> Tensor:
    return torch.randn(tokens, CONFIG.context_in_dim, generator=torch.Generator().manual_seed(tokens))


def numbers(prefix: object) -> Tensor:
    assert isinstance(prefix, PrefixKV)
    return torch.stack([torch.stack(prefix.read(layer, torch.float32)) for layer in range(CONFIG.num_layers)])


def text(prefiller: CapturedPrefiller, tokens: int) -> Tensor:
    return numbers(prefiller.prefill(prompt(tokens), [], text_layout(tokens)))


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_a_graph_serves_every_shorter_prompt(transformer: Transformer, pool: Pool, kv: str) -> None:
    prefiller = prefiller_of(transformer, pool, kv)
    for tokens in (64, 1, 30, 500, 40, 65):
        exact = transformer.prefill(prompt(tokens), [], text_layout(tokens), KV_FORMATS[kv])
        assert relative_error(text(prefiller, tokens), numbers(exact)) < 1e-5
    assert (pool.captures, pool.replays) == (3, 6)


def test_long_prompts_and_images_run_plainly(transformer: Transformer, pool: Pool) -> None:
    prefiller = prefiller_of(transformer, pool)
    text(prefiller, 513)
    layout = prefix_layout([False, True, False], [Grid(2, 2)])
    prefiller.prefill(prompt(2), [torch.randn(4, CONFIG.in_channels)], layout)
    assert pool.captures == 0


def test_a_failed_capture_changes_no_number_and_stops_no_other_graph(transformer: Transformer, pool: Pool) -> None:
    unhurried = prefiller_of(transformer, Pool())
    prefiller = prefiller_of(transformer, pool)
    text(prefiller, 500), text(prefiller, 40)
    pool.is_full = True
    assert torch.equal(text(prefiller, 100), text(unhurried, 100))
    pool.is_full, before = False, pool.replays
    assert torch.equal(text(prefiller, 500), text(unhurried, 500))
    assert torch.equal(text(prefiller, 40), text(unhurried, 40))
    assert pool.replays == before + 2
    assert torch.equal(text(prefiller, 150), text(unhurried, 150))  # as long as the one that failed: not tried
    assert pool.captures == 2


def test_there_may_be_memory_again_after_a_clear(transformer: Transformer, pool: Pool) -> None:
    prefiller = prefiller_of(transformer, pool)
    pool.is_full = True
    text(prefiller, 40)
    pool.is_full = False
    text(prefiller, 40)
    assert pool.captures == 0
    prefiller.clear()
    text(prefiller, 40)
    assert pool.captures == 1


def test_without_the_room_of_all_graphs_none_is_tried(
    transformer: Transformer, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefiller = prefiller_of(transformer, pool)
    allocate, asked = PrefixKV.allocate, list[int]()

    def without_room(layout, *rest):  # type: ignore[no-untyped-def]
        asked.append(layout.prefix_len_tokens)
        if layout.prefix_len_tokens == 512:
            raise torch.OutOfMemoryError("nothing left")
        return allocate(layout, *rest)

    monkeypatch.setattr(PrefixKV, "allocate", without_room)
    for tokens in (300, 100, 20):
        text(prefiller, tokens)
    assert asked == [512, 384, 128, 64]
    assert pool.captures == 0
