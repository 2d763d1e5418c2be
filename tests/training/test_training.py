"""Everything around the training forward: examples, encoding, the loss, the optimiser, saving and exporting."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from app.evaluation.render import SceneBatch, draw
from app.evaluation.scenes import COLOURS, HELD_OUT_PAIRS, SHAPES
from app.evaluation.suite import judge, scene_cases
from models.folder import embedded_checkpoint
from models.image_model import CheckpointConfigs, ImageModel
from models.preprocess import PromptTokenizer
from models.sigmas import sigma_schedule
from models.vae import Vae
from tests.closeness import relative_error
from training import examples as examples_module
from training.encode import SceneEncoder, Statistics
from training.examples import Examples, load_examples, make_examples, save_examples
from training.export import export
from training.flow import Flow, Kind, draw_sigmas, flow_loss
from training.muon import Average, Matrix, Muon, orthogonalised
from training.networks import new_text_encoder, new_transformer, new_vae
from training.sample import Sampler, sigmas
from training.schedule import Clock
from training.spec import GRID_SIDE, SCHEDULER, VAE
from training.state import load_published, load_state, save_state

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trainee:
    flow: Flow
    vae: Vae
    statistics: Statistics


@pytest.fixture(scope="module")
def trainee(processor: Path) -> Trainee:
    torch.manual_seed(0)
    flow = Flow(new_text_encoder(processor), new_transformer())
    torch.nn.init.normal_(flow.transformer.proj_out.weight, std=0.1)
    return Trainee(flow, new_vae().eval(), Statistics(torch.randn(16), torch.rand(16) + 0.5))


@pytest.fixture
def few(processor: Path, monkeypatch: pytest.MonkeyPatch) -> list[Examples]:
    monkeypatch.setattr(examples_module, "CHUNK", 6)
    return [make_examples(processor, images, 6, 2, processes=1) for images in range(3)]


def test_examples_are_seeded_saved_and_never_held_out(processor: Path, few: list[Examples], tmp_path: Path) -> None:
    again = make_examples(processor, 1, 6, 2, processes=1)
    assert torch.equal(again.input_ids, few[1].input_ids)
    save_examples(few[2], tmp_path / "examples.safetensors")
    loaded = load_examples(tmp_path / "examples.safetensors")
    assert torch.equal(loaded.labels, few[2].labels) and len(loaded.scenes) == 3 * len(loaded)
    pairs = {tuple(pair) for pair in few[0].labels[:, :6].reshape(-1, 2).tolist()}
    assert not pairs & {(SHAPES.index(shape) + 1, list(COLOURS).index(colour) + 1) for shape, colour in HELD_OUT_PAIRS}


@pytest.mark.parametrize("images", [0, 2])
def test_loss_reaches_every_weight_that_serves(
    trainee: Trainee, few: list[Examples], processor: Path, images: int
) -> None:
    encoder = SceneEncoder(trainee.vae, CPU, rows=6, compiled=False)
    encoded = encoder.encode(few[images], trainee.statistics)
    assert encoded.latents.shape == (6, images + 1, GRID_SIDE**2, 16)
    assert encoded.touched.any() and not encoded.touched.all()
    kind = Kind(trainee.flow, encoded, processor, CPU)
    losses = flow_loss(trainee.flow, kind.joint, kind.draw(2, torch.Generator()), torch.Generator(), 1.0)
    losses["total"].backward()
    silent = {name for name, parameter in trainee.flow.named_parameters() if parameter.grad is None}
    trainee.flow.zero_grad(set_to_none=True)
    visual = {name for name, _ in trainee.flow.named_parameters() if ".visual." in name or "text_head" in name}
    assert silent <= visual if images == 0 else silent <= {"text_head.weight", "text_head.bias"}


def test_noise_levels_cover_their_range() -> None:
    drawn = draw_sigmas(4000, torch.Generator().manual_seed(0), CPU)
    assert 0 < drawn.min() < 0.02 and 0.98 < drawn.max() < 1
    assert 0.5 < drawn.mean() < 0.65


def test_sampler_walks_the_service_schedule() -> None:
    service = sigma_schedule(SCHEDULER, 28, GRID_SIDE**2)
    assert torch.allclose(torch.tensor(sigmas(28)), torch.tensor(service), atol=1e-6)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    for shape in ((3, 20, 50), (2, 50, 20)):
        values = torch.linalg.svdvals(orthogonalised(torch.randn(shape)))
        assert values.min() > 0.4 and values.max() < 1.4


def test_muon_lowers_a_loss_and_average_follows() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8, bias=False)
    wanted = torch.randn(8, 8)
    muon, average = Muon([Matrix(layer.weight, parts=2)]), Average(layer)
    first = relative_error(layer.weight.detach(), wanted)
    for _ in range(300):
        layer.weight.grad = layer.weight.detach() - wanted
        muon.step(0.02)
        average.update(0.9)
    assert relative_error(layer.weight.detach(), wanted) < first / 3
    before = layer.weight.detach().clone()
    average.swap()
    assert 0 < relative_error(layer.weight.detach(), before) < 0.2


def test_clock_warms_up_and_falls_to_zero() -> None:
    clock = Clock(seconds=1e6, log_seconds=1, span=(0.0, 1.0))
    assert clock.rate(0) < 0.02 and clock.rate(500) == 1.0
    assert Clock(seconds=1e-9, log_seconds=1).rate(500) == 0.0
    assert Clock(seconds=1e6, log_seconds=1, span=(0.9, 1.0)).rate(500) < 0.25


def test_state_carries_on(trainee: Trainee, processor: Path, tmp_path: Path) -> None:
    muon, adam = trainee.flow.optimisers()
    average = Average(trainee.flow)
    for parameter in trainee.flow.parameters():
        parameter.grad = torch.randn_like(parameter)
    muon.step(0.01)
    adam.step()
    trainee.flow.zero_grad(set_to_none=True)
    save_state(tmp_path, trainee.flow, average, muon, adam, trainee.statistics)
    assert all(path.stat().st_size < 16 * 2**20 for path in tmp_path.iterdir())
    other = Flow(new_text_encoder(processor), new_transformer())
    other_muon, other_adam = other.optimisers()
    statistics = load_state(tmp_path, other, Average(other), other_muon, other_adam, CPU)
    assert torch.equal(statistics.std, trainee.statistics.std)
    assert torch.equal(other.transformer.proj_out.weight, trainee.flow.transformer.proj_out.weight)
    assert relative_error(other_muon.momentum[0], muon.momentum[0]) < 0.01
    assert len(other_adam.state) == len(adam.state)


def test_exported_checkpoint_loads_and_draws_what_the_training_forward_draws(
    trainee: Trainee, processor: Path, tmp_path: Path
) -> None:
    export(trainee.flow, trainee.vae, trainee.statistics, processor, tmp_path / "demo")
    model = ImageModel.load(CheckpointConfigs.read(tmp_path / "demo"), CPU, torch.float32)
    prompt = PromptTokenizer(processor)("a red star")
    assert relative_error(model.text_encoder.encode(prompt), trainee.flow.encoder.encode(prompt)) < 0.02  # bfloat16
    picture = torch.from_numpy(draw([scene_cases(1)[0].target])).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.inference_mode():
        z = trainee.vae.quant_conv(trainee.vae.encoder(picture)).chunk(2, dim=1)[0]
    normal = (z - trainee.statistics.mean[:, None, None]) / trainee.statistics.std[:, None, None]
    assert relative_error(model.vae.encode(picture), normal) < 0.02
    started = Flow(new_text_encoder(processor), new_transformer())
    load_published(tmp_path / "demo", started, Average(started))
    assert (
        relative_error(started.transformer.img_in.weight.detach(), trainee.flow.transformer.img_in.weight.detach())
        < 0.01
    )


def test_embedded_checkpoint_is_small_and_has_the_recipe_s_numbers() -> None:
    folder = embedded_checkpoint()
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 14_000_000
    configs = CheckpointConfigs.read(folder)
    assert (configs.vae.dim_mult, configs.vae.z_dim) == (VAE.dim_mult, VAE.z_dim)
    assert dict(configs.scheduler) == SCHEDULER


def test_sampler_and_shipped_weights_agree(processor: Path) -> None:
    """The training's own sampler, started from the shipped checkpoint, draws what is asked for."""
    flow = Flow(new_text_encoder(processor), new_transformer())
    vae, statistics = load_published(embedded_checkpoint(), flow, Average(flow))
    sampler = Sampler(flow, vae, statistics, embedded_checkpoint() / "processor", CPU)
    cases = scene_cases(2)
    pictures = sampler.decode(sampler([case.prompt for case in cases], [()] * 2, seed=1))
    for case, picture in zip(cases, pictures, strict=True):
        assert all(judge(case, picture.numpy()).verdict.values())


def test_scene_batches_can_be_cut() -> None:
    batch = SceneBatch.of([case.target for case in scene_cases(5)])
    assert len(batch[1:3]) == 2 and torch.equal(batch[1:3].kind, batch.kind[1:3])
