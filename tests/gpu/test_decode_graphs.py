"""Captured decode steps: equal to eager ones bit for bit, whoever's prefix they read, bounded, safe without memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.config import TransformerConfig
from models.decoding import GraphResult, PackedDecoder, PlainDecoder
from models.graphs import GraphPool
from models.layout import Grid, PrefixLayout, prefix_layout
from models.packed import PackedRows, Row
from models.prefix_kv import PrefixKV
from models.rope import target_table
from models.transformer import Transformer
from tests.closeness import relative_error

if torch.cuda.is_available():
    from models.fused import FusedOps, TwoPartAttention, flash_block

GRID = Grid(8, 8)
CONFIG = TransformerConfig(
    num_layers=3, num_attention_heads=4, attention_head_dim=64, axes_dims_rope=(16, 24, 24), in_channels=16,
    context_in_dim=48, mlp_ratio=2, causal_condition=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def transformer() -> Transformer:
    torch.manual_seed(0)
    with torch.device("cuda"):
        network = Transformer(CONFIG, FusedOps.of(torch.device("cuda"), CONFIG.attention_head_dim))
    return network.bfloat16().eval().requires_grad_(False)


@pytest.fixture(params=["installed", "two parts"])
def decoder(request: pytest.FixtureRequest, transformer: Transformer) -> Callable[..., PackedDecoder]:
    """Makes decoders over the fastest attention that is installed, and over the one that always is."""

    def make(graphs: bool = True, max_graphs: int = 8) -> PackedDecoder:
        installed = FusedOps.of(torch.device("cuda"), CONFIG.attention_head_dim).decode_attention
        attention = installed if request.param == "installed" else TwoPartAttention(flash_block)
        return PackedDecoder(transformer, attention, GraphPool() if graphs else None, max_graphs=max_graphs)

    return make


@pytest.fixture(autouse=True)
def inference() -> object:
    with torch.inference_mode():
        yield


def row(transformer: Transformer, seed: int, text_len: int = 20, grid: Grid = GRID, images: int = 0) -> Row:
    draw = torch.Generator("cuda").manual_seed(seed)
    layout: PrefixLayout = prefix_layout([False] * text_len + ([True] * 4 + [False]) * images, [Grid(4, 4)] * images)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=draw).bfloat16()

    conditions = [randn(16, CONFIG.in_channels) for _ in range(images)]
    prefix = transformer.prefill(randn(text_len + images, CONFIG.context_in_dim), conditions, layout)
    assert isinstance(prefix, PrefixKV)
    table = target_table(grid, layout.target_position, CONFIG.axes_dims_rope).cuda()
    return Row(randn(grid.num_tokens, CONFIG.in_channels), 0.1 + 0.05 * seed, table, prefix)


def decode(decoder: PackedDecoder, rows: Sequence[Row]) -> tuple[Tensor, GraphResult]:
    velocity, result = decoder.decode(rows)
    return velocity.clone(), result


def plain(transformer: Transformer, rows: Sequence[Row]) -> Tensor:
    """The same rows by the plain path, in float32."""
    with torch.device("cuda"):
        wide = Transformer(CONFIG)
    wide.load_state_dict({name: tensor.float() for name, tensor in transformer.state_dict().items()})
    wide_rows = [
        replace(
            row, latents=row.latents.float(), prefix=PrefixKV(row.prefix.layout, *(part.float() for part in kv_of(row)))
        )
        for row in rows
    ]
    return PlainDecoder(wide).decode(wide_rows)[0]


def kv_of(row: Row) -> tuple[Tensor, Tensor]:
    assert isinstance(row.prefix, PrefixKV)
    keys, values = row.prefix.keys, row.prefix.values
    assert isinstance(keys, Tensor)
    assert isinstance(values, Tensor)
    return keys, values


def test_replay_equals_eager_bit_for_bit_and_the_plain_path_closely(transformer, decoder) -> None:  # type: ignore[no-untyped-def]
    captured, eager = decoder(), decoder(graphs=False)
    for count in (1, 3):
        for turn in range(3):
            rows = [row(transformer, 10 * turn + index, 5 + 30 * index) for index in range(count)]
            velocity, result = decode(captured, rows)
            assert result is (GraphResult.HIT if turn else GraphResult.CAPTURED)
            expected, eager_result = decode(eager, rows)
            assert eager_result is GraphResult.OFF
            assert torch.equal(velocity, expected)
            assert relative_error(velocity, plain(transformer, rows)) < 3e-2


def test_no_prompt_length_needs_a_new_capture(transformer, decoder) -> None:  # type: ignore[no-untyped-def]
    captured = decoder()
    results = [decode(captured, [row(transformer, 1, length)])[1] for length in (1, 7, 64, 200, 333, 1000)]
    assert results == [GraphResult.CAPTURED] + [GraphResult.HIT] * 5


def test_two_requests_of_one_shape_take_turns(transformer, decoder) -> None:  # type: ignore[no-untyped-def]
    captured, eager = decoder(), decoder(graphs=False)
    first, second = row(transformer, 1, 20), row(transformer, 2, 300)
    for one in (first, second, first, second):
        assert torch.equal(decode(captured, [one])[0], decode(eager, [one])[0])


def test_a_batch_that_changes_keeps_nothing_of_the_one_before(transformer, decoder) -> None:  # type: ignore[no-untyped-def]
    captured, eager = decoder(), decoder(graphs=False)
    rows = [row(transformer, seed, 400 - 90 * seed) for seed in range(4)]
    for chosen in ((0, 1), (2, 3), (3, 0), (1, 1)):
        batch = [rows[index] for index in chosen]
        assert torch.equal(decode(captured, batch)[0], decode(eager, batch)[0])


def test_a_poisoned_neighbour_leaves_no_trace(transformer, decoder) -> None:  # type: ignore[no-untyped-def]
    captured, eager = decoder(), decoder(graphs=False)
    healthy, sick = row(transformer, 1, 33), row(transformer, 2, 500)
    expected = decode(eager, [healthy, healthy])[0]
    sick.latents.fill_(float("nan"))
    for part in kv_of(sick):
        part.fill_(float("nan"))
    for place in (0, 1):
        beside = decode(captured, [sick, healthy] if place else [healthy, sick])[0]
        assert torch.isnan(beside[1 - place]).any()
        assert torch.equal(beside[place], expected[place])
    assert torch.equal(decode(captured, [healthy, healthy])[0], expected)


def test_a_prefix_changed_in_place_is_seen(transformer, decoder) -> None:  # type: ignore[no-untyped-def]
    captured, eager = decoder(), decoder(graphs=False)
    one = row(transformer, 1)
    before = decode(captured, [one])[0]
    for part in kv_of(one):
        part.mul_(-1)
    after = decode(captured, [one])[0]
    assert not torch.equal(before, after)
    assert torch.equal(after, decode(eager, [one])[0])


def test_layouts_of_equal_token_count_share_a_graph_and_differ(transformer, decoder) -> None:  # type: ignore[no-untyped-def]
    captured, eager = decoder(), decoder(graphs=False)
    square, wide = row(transformer, 1, grid=Grid(8, 8)), row(transformer, 1, grid=Grid(4, 16))
    first, second = decode(captured, [square])[0], decode(captured, [wide])
    assert second[1] is GraphResult.HIT
    assert not torch.equal(first, second[0])
    assert torch.equal(second[0], decode(eager, [wide])[0])
    with_images = row(transformer, 1, images=2)
    assert torch.equal(decode(captured, [with_images])[0], decode(eager, [with_images])[0])


def test_graphs_are_bounded_and_the_oldest_goes_before_a_new_one_is_allocated(  # type: ignore[no-untyped-def]
    transformer, decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = decoder(max_graphs=2)
    shapes = [[row(transformer, 1)] * count for count in (1, 2, 3)]
    held: list[int] = []
    allocate = PackedRows.allocate.__func__  # type: ignore[attr-defined]

    def watched(cls: type[PackedRows], *args: object) -> PackedRows:
        held.append(len(captured._graphs))
        return allocate(cls, *args)

    monkeypatch.setattr(PackedRows, "allocate", classmethod(watched))
    results = [decode(captured, shapes[index])[1] for index in (0, 1, 0, 2, 0, 1)]
    new, hit = GraphResult.CAPTURED, GraphResult.HIT
    assert results == [new, new, hit, new, hit, new]
    assert held == [0, 1, 1, 1]


@pytest.mark.parametrize("phase", ["allocation", "warm-up", "capture"])
def test_without_memory_for_a_capture_steps_go_on_without(  # type: ignore[no-untyped-def]
    transformer, decoder, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    captured, eager = decoder(), decoder(graphs=False)
    rows = [row(transformer, 1)]
    expected = decode(eager, rows)[0]
    failed: list[str] = []

    def failing(work: Callable[..., object], when: Callable[[], bool]) -> Callable[..., object]:
        def run(*args: object) -> object:
            done = work(*args)
            if when() and not failed:
                failed.append(phase)
                raise torch.OutOfMemoryError("injected")
            return done

        return run

    capturing = torch.cuda.is_current_stream_capturing
    if phase == "allocation":
        monkeypatch.setattr(captured, "_packed", failing(captured._packed, lambda: True))
    else:
        monkeypatch.setattr(captured, "_step", failing(captured._step, lambda: capturing() == (phase == "capture")))
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    velocity, result = decode(captured, rows)
    assert (result, failed) == (GraphResult.NO_MEMORY, [phase])
    assert torch.equal(velocity, expected)
    assert decode(captured, rows)[1] is GraphResult.NO_MEMORY
    assert not captured._graphs
    del velocity
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert decode(captured, [row(transformer, 1)] * 2)[1] is GraphResult.CAPTURED  # another shape is another matter
    captured.clear()
    assert decode(captured, rows)[1] is GraphResult.CAPTURED  # there may be memory again


def test_steps_are_captured_again_after_a_clear(transformer, decoder) -> None:  # type: ignore[no-untyped-def]
    captured, rows = decoder(), [row(transformer, 1)]
    before, _ = captured.decode(rows)
    exact = before.clone()
    captured.clear()  # while what the step returned is still held, and with it a block of the graphs' memory
    again, result = captured.decode(rows)
    assert result is GraphResult.CAPTURED
    assert torch.equal(again, exact)
    assert before.shape == again.shape


def test_clear_gives_the_memory_back(transformer, decoder) -> None:  # type: ignore[no-untyped-def]
    captured = decoder()
    rows = [row(transformer, 1)]
    gc.collect()
    before = torch.cuda.memory_allocated()
    decode(captured, rows)
    captured.clear()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert decode(captured, rows)[1] is GraphResult.CAPTURED
