"""What the planner predicts, against what is loaded, and what it advises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import planner
from engine.config import EngineConfig
from engine.loading import load_runner, read_configs
from engine.planner import Machine, Planner
from models.errors import CheckpointError
from models.precision import Precision

FP8 = Precision(transformer="fp8", text_encoder="fp8")
ROOMY = Machine(torch.device("cuda"), torch.bfloat16, True, True, 2**40, 2**40)


def plan(folder: Path, machine: Machine = ROOMY, **choices: object) -> Planner:
    config = EngineConfig(model=str(folder), **choices)  # type: ignore[arg-type]
    return Planner(config, read_configs(config), machine)


@pytest.mark.parametrize("precision", [Precision(), FP8, replace(FP8, last_steps=1)], ids=["stored", "fp8", "exact"])
def test_weights_are_predicted_to_the_byte(checkpoints: dict[str, Path], precision: Precision) -> None:
    config = EngineConfig(model=str(checkpoints["first"]), device="cpu", precision=precision)
    model = load_runner(config).model
    networks = {model.text_encoder, model.transformer, model.exact, model.vae}
    exact = sum(weight.nbytes for network in networks for weight in network.parameters())
    count = sum(1 for network in networks for _ in network.parameters())
    predicted = Planner(config, read_configs(config), Machine.look(config)).asked().weights_bytes
    assert exact <= predicted <= exact + 256 * count


def test_what_costs_more_needs_less(checkpoints: dict[str, Path]) -> None:
    choices = list(plan(checkpoints["first"]).choices())
    weights = {choice.flags: choice.weights_bytes for choice in choices}
    assert next(iter(weights)) == "" and len(weights) == 6
    fp8 = "--transformer-dtype fp8 --text-encoder-dtype fp8"
    assert weights[""] > weights[fp8] and weights[""] > weights["--offload component"]
    assert weights[fp8] > weights[f"{fp8} --offload component"]
    assert all((choice.host_bytes > 0) == (choice.offload != "none") for choice in choices)


def test_the_first_choice_that_fits_is_recommended(checkpoints: dict[str, Path]) -> None:
    for wanted in plan(checkpoints["first"]).choices():
        tight = replace(ROOMY, free_bytes=wanted.device_bytes)
        found = plan(checkpoints["first"], tight).recommended()
        assert found is not None and found.device_bytes <= wanted.device_bytes
    assert plan(checkpoints["first"], replace(ROOMY, free_bytes=0)).recommended() is None
    no_host = plan(checkpoints["first"], replace(ROOMY, host_free_bytes=0)).recommended()
    assert no_host is not None and no_host.offload == "none"


def test_larger_pictures_and_whole_decodes_need_more(checkpoints: dict[str, Path]) -> None:
    sizes = [plan(checkpoints["first"], max_output_pixels=side**2).asked().device_bytes for side in (512, 1024, 2048)]
    assert sizes[0] < sizes[1] < sizes[2]
    assert plan(checkpoints["first"], vae_tiling="off").asked().device_bytes > sizes[2]


def test_captured_prefills_need_their_room(checkpoints: dict[str, Path]) -> None:
    def beside_weights(machine: Machine = ROOMY, prefix_kv: str = "auto", **choices: object) -> int:
        planned = plan(checkpoints["first"], machine, precision=Precision(prefix_kv=prefix_kv), **choices)
        return planned.asked().device_bytes - planned.asked().weights_bytes

    without = beside_weights(decode_graphs=False)
    assert without < beside_weights(prefix_kv="fp8") < beside_weights(prefix_kv="fp8_v") < beside_weights()
    block = beside_weights(offload="block")
    assert block == beside_weights(offload="block", decode_graphs=False)
    plain = replace(ROOMY, fused=False)
    assert beside_weights(plain) == beside_weights(plain, decode_graphs=False)


def test_a_start_that_cannot_fit_is_refused_with_advice(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = plan(checkpoints["first"]).asked()
    tight = plan(checkpoints["first"], replace(ROOMY, free_bytes=asked.weights_bytes - 1))
    tight.check()  # so small a model is not looked at
    monkeypatch.setattr(planner, "SMALL_BYTES", 0)
    with pytest.raises(CheckpointError, match="does not fit"):
        tight.check()
    plan(checkpoints["first"], replace(ROOMY, free_bytes=asked.weights_bytes + 1)).check()
    assert "smaller --max-output-pixels" in caplog.text


def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(CheckpointError, match="cuda:77"):
        Machine.look(EngineConfig(model="x", device="cuda:77"))
