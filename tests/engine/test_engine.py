"""The facade and the worker over a real tiny checkpoint."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import Engine, EngineState
from engine.errors import EngineStopped, GenerationFailed, InvalidRequest, NotReady, QueueFull
from engine.request import GenerationParams, Progress, RequestEvent
from models.errors import CheckpointError
from tests.engine.conftest import running
from tests.oracle import psnr_db
from tests.pictures import photo

SMALL = GenerationParams("a red circle", seed=1, size_px=(64, 64), num_steps=3)
LONG = replace(SMALL, num_steps=200, size_px=(256, 256))


def on_progress(act: Callable[[], None]) -> Callable[[RequestEvent], None]:
    return lambda event: act() if isinstance(event, Progress) else None


async def test_a_mixed_batch_equals_the_same_requests_alone(checkpoint: Path) -> None:
    """Unequal prompt lengths, guidance, seeds and step counts share steps and change nothing but rounding."""
    mixed = [
        replace(SMALL, prompt="short", num_steps=6),
        replace(SMALL, prompt="a much longer prompt " * 20, seed=2, num_steps=4),
        replace(SMALL, negative_prompt="ugly", true_cfg_scale=4.0, seed=3, num_steps=5),
        replace(SMALL, prompt="two pictures", seed=4, num_images=2),
        replace(SMALL, prompt="another shape", size_px=(96, 64), seed=5),
    ]
    async with running(checkpoint) as engine:
        alone = [await engine.generate(params, request_id=f"a{i}") for i, params in enumerate(mixed)]
        together = await asyncio.gather(
            *(engine.generate(params, request_id=f"t{i}") for i, params in enumerate(mixed))
        )
    for one, batched in zip(alone, together, strict=True):
        for ours, theirs in zip(batched.images, one.images, strict=True):
            assert psnr_db(ours.pixels, theirs.pixels) > 60


async def test_the_same_request_alone_gives_the_same_bytes(checkpoint: Path) -> None:
    async with running(checkpoint) as engine:
        first, second = [await engine.generate(SMALL, request_id=name) for name in ("a", "b")]
    assert np.array_equal(first.images[0].pixels, second.images[0].pixels)


async def test_two_requests_with_one_id_each_get_their_own_picture(checkpoint: Path) -> None:
    async with running(checkpoint) as engine:
        wanted = [(await engine.generate(replace(SMALL, seed=seed), request_id="a")).images[0] for seed in (1, 2)]
        got = await asyncio.gather(*(engine.generate(replace(SMALL, seed=seed), request_id="same") for seed in (1, 2)))
    for result, image in zip(got, wanted, strict=True):
        assert psnr_db(result.images[0].pixels, image.pixels) > 60


async def test_image_i_has_seed_plus_i(checkpoint: Path) -> None:
    async with running(checkpoint) as engine:
        three = await engine.generate(replace(SMALL, seed=2**32 - 2, num_images=3), request_id="three")
        last = await engine.generate(replace(SMALL, seed=0), request_id="last")
    assert [image.seed for image in three.images] == [2**32 - 2, 2**32 - 1, 0]
    assert psnr_db(three.images[2].pixels, last.images[0].pixels) > 60
    assert psnr_db(three.images[0].pixels, three.images[1].pixels) < 40


@pytest.mark.parametrize("size_px", [(100, 70), (64, 64), (33, 95)])
async def test_exact_sizes_are_cut_from_the_centre(checkpoint: Path, size_px: tuple[int, int]) -> None:
    covered = tuple(-(-side // 32) * 32 for side in size_px)
    async with running(checkpoint) as engine:
        exact = await engine.generate(replace(SMALL, size_px=size_px), request_id="exact")
        whole = await engine.generate(replace(SMALL, size_px=covered), request_id="whole")  # type: ignore[arg-type]
    left, top = ((covered[axis] - size_px[axis]) // 2 for axis in (0, 1))
    cut = whole.images[0].pixels[top : top + size_px[1], left : left + size_px[0]]
    assert exact.images[0].pixels.shape == (size_px[1], size_px[0], 4)
    assert np.array_equal(exact.images[0].pixels, cut)


async def test_auto_size_follows_the_last_condition_image(checkpoint: Path) -> None:
    images = (photo("RGB", (64, 64)).convert("RGBA"), photo("RGB", (200, 100)).convert("RGBA"))
    params = GenerationParams("x", seed=0, num_steps=1, condition_images=images, resolution_px=128)
    async with running(checkpoint) as engine:
        result = await engine.generate(params, request_id="r")
        square = await engine.generate(GenerationParams("x", seed=0, num_steps=1), request_id="s")
    height, width, _ = result.images[0].pixels.shape
    assert (width, height) == (192, 96)
    assert square.images[0].pixels.shape == (256, 256, 4)


async def test_progress_counts_every_step(checkpoint: Path) -> None:
    seen: list[RequestEvent] = []
    async with running(checkpoint) as engine:
        await engine.generate(replace(SMALL, num_images=2), request_id="r", on_event=seen.append)
    progress = [event for event in seen if isinstance(event, Progress)]
    assert sorted((p.image_index, p.step, p.num_steps) for p in progress) == [
        (image, step, 3) for image in (0, 1) for step in (1, 2, 3)
    ]


async def test_what_has_no_effect_is_said(checkpoints: dict[str, Path]) -> None:
    async with running(checkpoints["turbo"]) as engine:
        no_negative = await engine.generate(replace(SMALL, true_cfg_scale=4.0, num_steps=None), request_id="a")
        no_scale = await engine.generate(replace(SMALL, negative_prompt="", num_steps=4), request_id="b")
        fixed = await engine.generate(replace(SMALL, num_steps=9), request_id="c")
    assert "negative_prompt" in no_negative.warnings[0] and len(no_negative.warnings) == 1
    assert "true_cfg_scale" in no_scale.warnings[0] and len(no_scale.warnings) == 1
    assert "num_inference_steps" in fixed.warnings[0] and fixed.num_steps == 4


async def test_a_prompt_over_the_token_limit_is_refused_not_cut(checkpoint: Path) -> None:
    async with running(checkpoint) as engine:
        with pytest.raises(InvalidRequest, match="tokens") as caught:
            await engine.generate(replace(SMALL, prompt="z1" * 15_000), request_id="r")
        assert caught.value.param == "prompt"
        with pytest.raises(InvalidRequest) as caught:
            params = replace(SMALL, negative_prompt="z1" * 15_000, true_cfg_scale=2.0)
            await engine.generate(params, request_id="r")
        assert caught.value.param == "negative_prompt"


async def test_a_full_queue_refuses_and_a_cancelled_place_is_free_at_once(checkpoint: Path) -> None:
    async with running(checkpoint, max_queue=2) as engine:
        tasks = [asyncio.create_task(engine.generate(LONG, request_id=f"long{i}")) for i in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as caught:
            await engine.generate(SMALL, request_id="third")
        assert caught.value.retry_after_s > 0
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        result = await engine.generate(SMALL, request_id="fourth")
        assert len(result.images) == 1
        assert (engine.num_running, engine.num_waiting) == (0, 0)


async def test_what_is_fetched_first_takes_a_place_and_is_fetched_for_those_that_have_one(checkpoint: Path) -> None:
    started, may_go = asyncio.Event(), asyncio.Event()

    async def prefetch() -> None:
        started.set()
        await may_go.wait()

    async with running(checkpoint, max_queue=1) as engine:
        gone = asyncio.create_task(engine.generate(SMALL, request_id="gone", prefetch=prefetch))
        await started.wait()
        started.clear()
        with pytest.raises(QueueFull):
            await engine.generate(SMALL, request_id="third", prefetch=prefetch)
        assert not started.is_set()
        gone.cancel()
        await asyncio.wait([gone])
        may_go.set()
        assert (await engine.generate(SMALL, request_id="next", prefetch=prefetch)).images
        may_go.clear()
        late = asyncio.create_task(engine.generate(SMALL, request_id="late", prefetch=prefetch))
        await asyncio.sleep(0)
        await engine.stop(0)
        may_go.set()
        with pytest.raises(EngineStopped):
            await late


async def test_cancelling_frees_the_worker_and_spares_the_neighbours(checkpoint: Path) -> None:
    started = asyncio.Event()
    async with running(checkpoint) as engine:
        gone = asyncio.create_task(engine.generate(LONG, request_id="gone", on_event=on_progress(started.set)))
        await started.wait()
        neighbour = asyncio.create_task(engine.generate(replace(LONG, num_steps=5), request_id="stays"))
        gone.cancel()
        result = await asyncio.wait_for(neighbour, 60)
        assert result.num_steps == 5
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert (engine.num_running, engine.num_waiting) == (0, 0)


async def test_stop_drains_then_refuses(checkpoint: Path) -> None:
    engine = Engine(EngineConfig(model=str(checkpoint), worker="inline"))
    await engine.start()
    started = asyncio.Event()
    task = asyncio.create_task(engine.generate(SMALL, request_id="r", on_event=on_progress(started.set)))
    await started.wait()
    stopping = asyncio.create_task(engine.stop(drain_s=60))
    await asyncio.sleep(0)
    with pytest.raises(NotReady):
        await engine.generate(SMALL, request_id="late")
    assert len((await task).images) == 1
    await stopping
    assert engine.state is EngineState.STOPPED


async def test_stop_without_drain_fails_what_is_left(checkpoint: Path) -> None:
    engine = Engine(EngineConfig(model=str(checkpoint), worker="inline"))
    await engine.start()
    started = asyncio.Event()
    task = asyncio.create_task(engine.generate(LONG, request_id="r", on_event=on_progress(started.set)))
    await started.wait()
    await engine.stop(drain_s=0)
    with pytest.raises(EngineStopped):
        await task


async def test_not_finite_latents_fail_and_the_next_request_works(checkpoint: Path) -> None:
    """Guidance by an absurd scale overflows float32; the answer is an error, never a black picture."""
    absurd = replace(SMALL, negative_prompt="", true_cfg_scale=1e38, num_steps=8)
    async with running(checkpoint) as engine:
        with pytest.raises(GenerationFailed) as caught:
            await engine.generate(absurd, request_id="r")
        assert caught.value.code == "generation_failed"
        assert len((await engine.generate(SMALL, request_id="s")).images) == 1


async def test_a_broken_checkpoint_fails_the_start_with_its_file(checkpoint: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(checkpoint, tmp_path / "broken"))
    (broken / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"no")
    engine = Engine(EngineConfig(model=str(broken), worker="inline"))
    with pytest.raises(CheckpointError, match="vae"):
        await engine.start()
    assert engine.state is EngineState.FAILED and "vae" in str(engine.failure)
    with pytest.raises(NotReady):
        await engine.generate(SMALL, request_id="r")
    await engine.stop(0)
