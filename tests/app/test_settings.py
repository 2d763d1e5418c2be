"""Sources and their order, and the refusal of whatever is not known. The environment is empty of EASEL_ variables."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import ValidationError

from app.settings import Settings, SettingsError, load_settings
from engine.config import EngineConfig
from models.folder import embedded_checkpoint
from models.precision import Precision


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith("EASEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "easel.yaml"
    path.write_text("port: 3\nmax_queue: 3\nmax_side: 3000\napi_key: [one, 'two,three']\nmodel: null\n")
    return path


def test_defaults_fit_together() -> None:
    settings = load_settings()
    assert settings.host == "127.0.0.1"
    assert settings.api_key == ()
    assert "gpt-image-1" in settings.model_aliases
    as_data_urls = 4 * settings.max_image_bytes * 4 / 3
    assert as_data_urls < settings.max_body_bytes < settings.max_bodies_bytes
    assert settings.max_output_pixels <= settings.max_side**2


def test_flag_beats_variable_beats_file_beats_default(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EASEL_PORT", "2")
    monkeypatch.setenv("EASEL_MAX_QUEUE", "2")
    settings = load_settings(config=config, port="1")
    assert (settings.port, settings.max_queue, settings.max_side, settings.min_side) == (1, 2, 3000, 64)
    assert settings.model is None


def test_file_named_by_variable(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EASEL_CONFIG", str(config))
    settings = load_settings()
    assert settings.max_side == 3000
    assert [key.get_secret_value() for key in settings.api_key] == ["one", "two,three"]


def test_empty_file_sets_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert load_settings(config=tmp_path / "empty.yaml").port == 8000


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("prot: 1", "prot: there is no such setting"),
        ("max-queue: 1", "max-queue: there is no such setting"),
        ("- port", "does not hold a mapping"),
        ("1: 2", "does not hold a mapping"),
        ("port: [", "not valid YAML"),
        ("port: many", "port: Input should be a valid integer"),
    ],
)
def test_faulty_file(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "easel.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=fault):
        load_settings(config=path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="config: can't read"):
        load_settings(config=tmp_path / "absent.yaml")


def test_unknown_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EASEL_MAX_QUEU", "1")
    with pytest.raises(SettingsError, match="unknown environment variable: EASEL_MAX_QUEU"):
        load_settings()


def test_lists_in_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EASEL_API_KEY", "a, b")
    monkeypatch.setenv("EASEL_MODEL_ALIASES", "")
    settings = load_settings()
    assert [key.get_secret_value() for key in settings.api_key] == ["a", "b"]
    assert settings.model_aliases == ()


def test_empty_key_is_not_an_open_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EASEL_API_KEY", "")
    with pytest.raises(SettingsError, match="api_key: a key is empty"):
        load_settings()


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ({"port": "65536"}, "^port: "),
        ({"device": "gpu"}, "^device: "),
        ({"dtype": "float16"}, "^dtype: "),
        ({"model": ""}, "^model: "),
        ({"max_queue": 0}, "^max_queue: "),
        ({"max_aspect": "0.5"}, "^max_aspect: "),
        ({"drain_seconds": "nan"}, "^drain_seconds: "),
        ({"worker": "thread"}, "^worker: "),
        ({"policy": "longest"}, "^policy: "),
        ({"max_stretch": "0.9"}, "^max_stretch: "),
        ({"hang_timeout_seconds": 0}, "^hang_timeout_seconds: "),
        ({"min_side": 5000}, "min_side .5000. is greater than max_side"),
        ({"min_side": 1024, "max_output_pixels": 1024}, "max_output_pixels .1024. is less"),
        ({"prot": 1}, "prot: there is no such setting"),
    ],
)
def test_value_out_of_range(flags: dict[str, object], fault: str) -> None:
    with pytest.raises(SettingsError, match=fault):
        load_settings(**flags)


def test_every_fault_has_its_line() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(port=-1, max_queue=0)
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == ["port", "max_queue"]


def test_secrets_stay_out_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "hunter2" not in repr(load_settings(api_key=["hunter2"]))
    with pytest.raises(SettingsError) as caught:
        load_settings(api_key={"hunter2": 1})
    assert "hunter2" not in str(caught.value)


def test_settings_never_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_settings().port = 1


def test_every_setting_is_described() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description and field.description.endswith("."), name


def test_engine_config_is_handed_every_choice() -> None:
    choices: dict[str, object] = {
        "model": "org/name",
        "device": "cuda:1",
        "dtype": "bfloat16",
        "worker": "inline",
        "decode_graphs": False,
        "vae_tiling": "on",
        "offload": "block",
        "eager": True,
        "policy": "fcfs",
        "max_stretch": 3.5,
        "max_output_pixels": 512 * 512,
        "max_queue": 2,
        "max_batch_rows": 4,
        "default_num_steps": 9,
    }
    other = {"hang_timeout_seconds": 5, "default_resolution": 512, "warm_sizes": "64x96,128x128"}
    parts = {"transformer": "fp8", "text_encoder": "fp8", "prefix_kv": "fp8_v"}
    counts = {"first_blocks": 1, "last_blocks": 2, "first_steps": 3, "last_steps": 4}
    other |= {f"{name}_dtype": value for name, value in parts.items()} | {"fp8_ignored_layers": "a,b"}
    other |= {f"fp8_{name}": value for name, value in counts.items()}
    config = load_settings(**choices, **other).engine_config()
    renamed = {
        "precision": Precision(**parts, **counts, ignored_layers=("a", "b")),
        "hang_timeout_s": 5.0,
        "default_resolution_px": 512,
        "warm_sizes_px": ((64, 96), (128, 128)),
    }
    assert config == EngineConfig(**choices, **renamed)  # type: ignore[arg-type]
    assert {*choices, *renamed} == {field.name for field in fields(EngineConfig)}


def test_defaults_of_the_engine_are_the_same_everywhere() -> None:
    assert load_settings(model="org/name").engine_config() == EngineConfig(model="org/name")


def test_engine_config_falls_back_to_the_embedded_checkpoint() -> None:
    assert load_settings().engine_config().model == str(embedded_checkpoint())
