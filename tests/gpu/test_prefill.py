"""Captured prefill: as close to the plain path as an eager one, whatever was in the graph's memory before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.config import TransformerConfig
from models.graphs import GraphPool
from models.layout import Grid, prefix_layout
from models.prefilling import LENGTHS, CapturedPrefiller, text_layout
from models.prefix_kv import KV_FORMATS, PrefixKV
from models.transformer import Transformer
from tests.closeness import relative_error

if torch.cuda.is_available():
    from models.fused import FusedOps

CONFIG = TransformerConfig(
    num_layers=3, num_attention_heads=4, attention_head_dim=64, axes_dims_rope=(16, 24, 24), in_channels=16,
    context_in_dim=48, mlp_ratio=2, causal_condition=True,
)  # fmt: skip
PLAIN_KV, EXACT = KV_FORMATS["auto"], torch.float32


@pytest.fixture(scope="module")
def transformer() -> Transformer:
    torch.manual_seed(0)
    with torch.device("cuda"):
        network = Transformer(CONFIG, FusedOps.of(torch.device("cuda"), CONFIG.attention_head_dim))
    return network.bfloat16().eval().requires_grad_(False)


@pytest.fixture(autouse=True)
def inference() -> object:
    with torch.inference_mode():
        yield


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each capture."""
    seen: list[int] = []
    capture = GraphPool.capture

    def counted(pool, work):  # type: ignore[no-untyped-def]
        seen.append(len(seen))
        return capture(pool, work)

    monkeypatch.setattr(GraphPool, "capture", counted)
    return seen


def prompt(tokens: int, seed: int = 0) -> Tensor:
    draw = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(tokens, CONFIG.context_in_dim, device="cuda", generator=draw).bfloat16()


def text(prefiller: CapturedPrefiller, embeds: Tensor) -> PrefixKV:
    prefix = prefiller.prefill(embeds, [], text_layout(len(embeds)))
    assert isinstance(prefix, PrefixKV)
    return prefix


def numbers(prefix: object) -> Tensor:
    """All keys and values."""
    assert isinstance(prefix, PrefixKV)
    return torch.stack([torch.stack(prefix.read(layer, EXACT)).float() for layer in range(CONFIG.num_layers)])


@pytest.mark.parametrize("fp8", list(KV_FORMATS.values()))
def test_is_as_close_to_the_plain_path_as_an_eager_one(
    transformer: Transformer, captures: list[int], fp8: tuple[bool, bool]
) -> None:
    with torch.device("cuda"):
        plain = Transformer(CONFIG)
    plain.load_state_dict({name: tensor.float() for name, tensor in transformer.state_dict().items()})
    prefiller = CapturedPrefiller(transformer, fp8)
    for turn, tokens in enumerate((1, 40, 64, 65, 3, 300, 512, 700, 100)):  # back and forth, and beyond the longest
        embeds, layout = prompt(tokens, turn), text_layout(tokens)
        exact = numbers(plain.prefill(embeds.float(), [], layout))
        eager = numbers(transformer.prefill(embeds, [], layout, fp8))
        ours = text(prefiller, embeds)
        assert ours.layout == layout
        assert ours.fp8 == fp8
        assert relative_error(numbers(ours), exact) <= 1.5 * relative_error(eager, exact)
    assert len(captures) == 4  # 64, 128, 384 and 512


def test_what_an_earlier_prompt_left_does_not_matter(transformer: Transformer) -> None:
    used = CapturedPrefiller(transformer, PLAIN_KV)
    text(used, torch.full_like(prompt(64), float("nan")))
    assert torch.equal(
        numbers(text(used, prompt(33))), numbers(text(CapturedPrefiller(transformer, PLAIN_KV), prompt(33)))
    )


def test_a_prefix_is_its_requests_own(transformer: Transformer) -> None:
    prefiller = CapturedPrefiller(transformer, PLAIN_KV)
    for tokens in (50, LENGTHS[-1]):
        first = text(prefiller, prompt(tokens, seed=1))
        kept = numbers(first).clone()
        text(prefiller, prompt(tokens, seed=2))
        assert torch.equal(numbers(first), kept)
        assert all(part.is_contiguous() for part in (first.keys, first.values) if isinstance(part, Tensor))


def test_condition_images_go_without_a_graph(transformer: Transformer, captures: list[int]) -> None:
    layout = prefix_layout([False] * 5 + [True] * 4 + [False], [Grid(4, 4)])
    arguments = prompt(6), [prompt(16)[:, : CONFIG.in_channels].contiguous()], layout
    ours = CapturedPrefiller(transformer, PLAIN_KV).prefill(*arguments)
    assert torch.equal(numbers(ours), numbers(transformer.prefill(*arguments)))
    assert not captures


def test_captures_anew_after_its_memory_was_given_back(transformer: Transformer, captures: list[int]) -> None:
    prefiller = CapturedPrefiller(transformer, PLAIN_KV)
    before = numbers(text(prefiller, prompt(20)))
    for _ in range(2):
        prefiller.clear()
        assert torch.equal(numbers(text(prefiller, prompt(20))), before)
    assert len(captures) == 3


def test_without_memory_it_runs_without_a_graph(transformer: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    prefiller = CapturedPrefiller(transformer, PLAIN_KV)
    capture, tried = GraphPool.capture, list[object]()

    def short_of_memory(pool, work):  # type: ignore[no-untyped-def]
        tried.append(work)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("nothing left")
        return capture(pool, work)

    monkeypatch.setattr(GraphPool, "capture", short_of_memory)
    for tokens in (150, 190, 400):  # none as long as the one that failed is tried again
        expected = transformer.prefill(prompt(tokens), [], text_layout(tokens))
        assert torch.equal(numbers(text(prefiller, prompt(tokens))), numbers(expected))
    assert len(tried) == 1
    text(prefiller, prompt(100))
    assert len(tried) == 2
