"""Captured prefill: as close to the plain path as an eager one, whatever was in the graph's memory before."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from models.config import TransformerConfig
from models.decoding import PackedDecoder
from models.graphs import GraphPool
from models.layout import Grid, prefix_layout
from models.packed import Row
from models.prefilling import LENGTHS, CapturedPrefiller, text_layout
from models.prefix_kv import KV_FORMATS, PrefixKV
from models.rope import target_table
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
    prefiller = CapturedPrefiller(transformer, fp8, GraphPool())
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
    used = CapturedPrefiller(transformer, PLAIN_KV, GraphPool())
    text(used, torch.full_like(prompt(64), float("nan")))
    assert torch.equal(
        numbers(text(used, prompt(33))),
        numbers(text(CapturedPrefiller(transformer, PLAIN_KV, GraphPool()), prompt(33))),
    )


def test_a_prefix_is_its_requests_own(transformer: Transformer) -> None:
    prefiller = CapturedPrefiller(transformer, PLAIN_KV, GraphPool())
    for tokens in (50, LENGTHS[-1]):
        first = text(prefiller, prompt(tokens, seed=1))
        kept = numbers(first).clone()
        text(prefiller, prompt(tokens, seed=2))
        assert torch.equal(numbers(first), kept)
        assert all(part.is_contiguous() for part in (first.keys, first.values) if isinstance(part, Tensor))


def test_condition_images_go_without_a_graph(transformer: Transformer, captures: list[int]) -> None:
    layout = prefix_layout([False] * 5 + [True] * 4 + [False], [Grid(4, 4)])
    arguments = prompt(6), [prompt(16)[:, : CONFIG.in_channels].contiguous()], layout
    ours = CapturedPrefiller(transformer, PLAIN_KV, GraphPool()).prefill(*arguments)
    assert torch.equal(numbers(ours), numbers(transformer.prefill(*arguments)))
    assert not captures


def test_captures_anew_after_its_memory_was_given_back(transformer: Transformer, captures: list[int]) -> None:
    prefiller = CapturedPrefiller(transformer, PLAIN_KV, GraphPool())
    before = numbers(text(prefiller, prompt(20)))
    for _ in range(2):
        prefiller.clear()
        assert torch.equal(numbers(text(prefiller, prompt(20))), before)
    assert len(captures) == 3


@pytest.mark.parametrize("phase", ["room", "warm-up", "capture"])
def test_without_memory_for_a_capture_it_runs_without_and_gives_the_same(
    transformer: Transformer, captures: list[int], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    short, long = prompt(100), prompt(400)
    expected = [numbers(text(CapturedPrefiller(transformer, PLAIN_KV, GraphPool()), one)) for one in (short, long)]
    capturing, failed = torch.cuda.is_current_stream_capturing, list[str]()

    def failing(work: Callable[..., object], when: Callable[[], bool]) -> Callable[..., object]:
        def run(*args: object) -> object:
            done = work(*args)
            if when() and not failed:
                failed.append(phase)
                raise torch.OutOfMemoryError("injected")
            return done

        return run

    prefiller = CapturedPrefiller(transformer, PLAIN_KV, GraphPool())
    if phase == "room":
        monkeypatch.setattr(PrefixKV, "allocate", failing(PrefixKV.allocate, lambda: True))
    else:
        monkeypatch.setattr(transformer, "fill", failing(transformer.fill, lambda: capturing() == (phase == "capture")))
    torch.cuda.synchronize()
    gc.collect()
    before, count = torch.cuda.memory_allocated(), len(captures)
    for _ in range(2):
        assert torch.equal(numbers(text(prefiller, short)), expected[0])
        assert failed == [phase]
        gc.collect()
        assert torch.cuda.memory_allocated() == before
    assert torch.equal(numbers(text(prefiller, long)), expected[1])
    assert len(captures) == count + (phase != "room")  # neither it nor anything longer was tried again
    prefiller.clear()
    assert torch.equal(numbers(text(prefiller, long)), expected[1])
    assert len(captures) == count + (phase != "room") + 1


def test_steps_and_prefills_share_memory_and_stay_right(transformer: Transformer) -> None:
    """Graphs of one pool overwrite what others left there: each is to leave nothing that another one needs."""
    pool, grid = GraphPool(), Grid(8, 8)
    table = target_table(grid, 64, CONFIG.axes_dims_rope).cuda()
    latents = torch.randn(grid.num_tokens, CONFIG.in_channels, device="cuda").bfloat16()

    def pair(pool: GraphPool | None) -> tuple[CapturedPrefiller, PackedDecoder]:
        attention = FusedOps.of(torch.device("cuda"), CONFIG.attention_head_dim).decode_attention
        return CapturedPrefiller(transformer, PLAIN_KV, pool or GraphPool()), PackedDecoder(
            transformer, attention, pool
        )

    def step(prefiller: CapturedPrefiller, decoder: PackedDecoder, tokens: int, rows: int) -> Tensor:
        prefix = text(prefiller, prompt(tokens, seed=tokens))
        return decoder.decode([Row(latents, 0.5, table, prefix)] * rows)[0].clone()

    together, apart = pair(pool), pair(None)
    for tokens, rows in ((20, 1), (200, 2), (20, 2), (500, 1), (200, 1), (20, 1)):
        assert torch.equal(step(*together, tokens, rows), step(*apart, tokens, rows))
