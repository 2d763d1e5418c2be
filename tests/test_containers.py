"""The container files against the code that they start. No Docker engine is needed: the files are read, and the
steps that install run in a copy of what the image would hold."""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from app.cli import build_parser
from app.settings import ENV_PREFIX, Settings, load_settings
from tests.http_server import answering

ROOT = Path(__file__).resolve().parent.parent
INSTRUCTIONS = [
    tuple(line.split(maxsplit=1))
    for line in re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
    if line and not line.startswith("#")
]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
ALL_SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVICES = {name: service for name, service in ALL_SERVICES.items() if service["image"] == "easel"}

each_service = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES.keys())
every_container = pytest.mark.parametrize("service", ALL_SERVICES.values(), ids=ALL_SERVICES.keys())


def instructions(name: str) -> list[str]:
    return [argument for instruction, argument in INSTRUCTIONS if instruction == name]


def image_environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for line in instructions("ENV") for pair in shlex.split(line))


def copied_from_context() -> list[tuple[str, str]]:
    """(source, destination folder) of every COPY that takes files of this repository."""
    copies = []
    for line in instructions("COPY"):
        *sources, destination = line.split()
        if not sources[0].startswith("--from"):
            copies.extend((source, destination) for source in sources)
    return copies


def settings_of(environment: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        if name.startswith(ENV_PREFIX) and value is not None:  # without a value, the shell's own is passed on
            monkeypatch.setenv(name, value)
    return load_settings()


def seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


def test_image_copies_what_exists_and_is_not_ignored() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for source, _ in copied_from_context():
        assert (ROOT / source).exists(), source
        assert source.partition("/")[0] in kept, source


def test_image_is_pinned_and_not_root() -> None:
    stages = {line.split()[2] for line in instructions("FROM") if " AS " in line}
    bases = [line.split()[0] for line in instructions("FROM") if line.split()[0] not in stages]
    assert len(set(bases)) == 1
    assert re.fullmatch(r"python:3\.12\.\d+-slim-\w+", bases[0])
    (user,) = instructions("USER")
    assert int(user) > 0
    assert f"useradd --uid {user} " in " ".join(instructions("RUN"))


def test_image_serves_on_the_exposed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(image_environment(), monkeypatch)
    assert settings.host == "0.0.0.0"
    assert instructions("EXPOSE") == [str(settings.port)]
    (health,) = instructions("HEALTHCHECK")
    assert "/health/ready" in health


def test_image_starts_a_command_that_exists() -> None:
    (entrypoint,) = instructions("ENTRYPOINT")
    program, *arguments = yaml.safe_load(entrypoint)
    assert program == "easel"
    assert build_parser().parse_args(arguments).command == "serve"


def test_models_are_kept_in_a_volume() -> None:
    assert instructions("VOLUME") == [image_environment()["HF_HOME"]]
    assert SERVICES["easel-gpu"]["volumes"] == [f"models:{image_environment()['HF_HOME']}"]
    assert "models" in COMPOSE["volumes"]


@each_service
def test_service_settings_are_real(service: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(service["environment"], monkeypatch)
    assert seconds(service["stop_grace_period"]) > settings.drain_seconds + 10
    arguments = build_parser().parse_args(["serve", *service.get("command", [])])
    assert getattr(arguments, "model", None) == (service.get("command") or [None])[0]


@each_service
def test_service_is_looked_after(service: dict[str, Any]) -> None:
    (health,) = instructions("HEALTHCHECK")
    assert health.endswith(service["healthcheck"]["test"].replace("$$", "$"))
    (user,) = instructions("USER")
    assert service["user"] == f"{user}:{user}"


@every_container
def test_container_is_hardened(service: dict[str, Any]) -> None:
    assert service["init"] is True and service["read_only"] is True
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"] and service["mem_limit"]
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}
    assert service["restart"].startswith("on-failure:"), "ends with 0 when asked to, and must not crash for ever"
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_the_service_behind_the_edge_reaches_nobody() -> None:
    assert COMPOSE["networks"]["inner"]["internal"] is True
    assert SERVICES["easel-inner"]["networks"] == ["inner"] and "ports" not in SERVICES["easel-inner"]
    edge = ALL_SERVICES["edge"]
    assert edge["environment"]["EASEL_UPSTREAM"] == "easel-inner:8000"
    assert seconds(edge["stop_grace_period"]) >= seconds(SERVICES["easel-inner"]["stop_grace_period"])


@every_container
def test_only_who_downloads_a_checkpoint_reaches_others(service: dict[str, Any]) -> None:
    networks = COMPOSE["networks"]
    closed = {name for name, options in networks.items() if options and "driver_opts" in options}
    assert closed == {"published"} and set(networks["published"]["driver_opts"].values()) == {"false"}
    open_ones = set(service["networks"]) - closed - {"inner"}
    assert open_ones == ({"outside"} if service.get("command") else set())


@every_container
def test_what_is_mounted_exists(service: dict[str, Any]) -> None:
    for source, *_ in (volume.split(":") for volume in service.get("volumes", [])):
        assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]


def test_plain_up_starts_the_cpu_service_alone() -> None:
    assert [name for name, service in ALL_SERVICES.items() if not service.get("profiles")] == ["easel"]
    assert SERVICES["easel-gpu"]["profiles"] == ["gpu"]
    (device,) = SERVICES["easel-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_published_ports_differ_and_reach_the_image() -> None:
    published = [port.split(":") for service in ALL_SERVICES.values() for port in service.get("ports", [])]
    ours = [port.split(":") for service in SERVICES.values() for port in service.get("ports", [])]
    assert {container for *_, container in ours} == set(instructions("EXPOSE"))
    assert len({host for _, host, _ in published}) == len(published)


def test_code_is_installed_after_what_it_needs() -> None:
    """A change of the code must not fetch gigabytes again: the locked packages are a layer of their own."""
    stages = re.split(r"^FROM .* AS (\w+)$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert stages[1] == "dependencies" and "docker/install.sh" in stages[2]
    assert not re.search(r"\b(app|engine|models|pyproject\.toml)\b", stages[2].partition("ENV")[2])


def test_the_gpu_image_can_compile_and_load_kernels() -> None:
    """Triton needs a C compiler, and loads what it built from its cache; Docker mounts a tmpfs noexec unless told."""
    assert any(re.search(r"install .*\bgcc libc6-dev\b", line) for line in instructions("RUN"))
    (tmpfs,) = SERVICES["easel-gpu"]["tmpfs"]
    folder, _, options = tmpfs.partition(":")
    assert Path(folder) in Path(image_environment()["TRITON_CACHE_DIR"]).parents and "exec" in options.split(",")
    (cpu_tmpfs,) = SERVICES["easel"]["tmpfs"]
    assert "exec" not in cpu_tmpfs.partition(":")[2].split(",")


def test_installs_from_what_the_image_copies(tmp_path: Path) -> None:
    """The image's own commands on the project alone; the gigabytes that it needs are borrowed from this environment."""
    for source, destination in copied_from_context():
        if destination.startswith("/"):
            continue  # of the last stage, after the installation
        target = tmp_path / "src" / destination
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, target)
    build, install = (re.sub(r"--mount=\S+", "", line) for line in instructions("RUN") if "/wheels" in line)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "easel"], check=True)
    for command, pip in ((build, f"{sys.executable} -m pip"), (install, f"{tmp_path}/easel/bin/pip")):
        command = command.replace("/opt/easel/bin/pip", pip).replace("/wheels", f"{tmp_path}/wheels")
        subprocess.run(command, shell=True, cwd=tmp_path / "src", check=True, timeout=300)
    shutil.rmtree(tmp_path / "src")

    borrowed = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    easel = tmp_path / "easel" / "bin" / "easel"
    version = subprocess.run([easel, "--version"], cwd=tmp_path, env=borrowed, check=True, capture_output=True)
    assert version.stdout.startswith(b"easel ")
    (installed,) = (tmp_path / "easel").glob("lib/python*/site-packages/models/demo")
    files = {path.relative_to(ROOT / "models" / "demo") for path in (ROOT / "models" / "demo").rglob("*")}
    assert files and files == {path.relative_to(installed) for path in installed.rglob("*")}


class Probe(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health/ready" else 503)
        self.end_headers()


@pytest.fixture
def probed() -> Iterator[str]:
    with answering(Probe) as url:
        yield url


def test_healthcheck(probed: str) -> None:
    def check(url: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([sys.executable, ROOT / "docker" / "healthcheck.py", url], capture_output=True)

    assert check(f"{probed}/health/ready").returncode == 0
    loading = check(f"{probed}/loading")
    assert loading.returncode == 1
    assert b"503" in loading.stderr
    assert check("http://127.0.0.1:1/health/ready").returncode == 1


KUBERNETES: dict[str, dict[str, Any]] = {
    manifest["kind"]: manifest
    for manifest in yaml.safe_load_all((ROOT / "docker" / "kubernetes" / "easel.yaml").read_text())
}
POD = KUBERNETES["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
each_manifest = pytest.mark.parametrize("manifest", KUBERNETES.values(), ids=KUBERNETES.keys())


@each_manifest
def test_kubernetes_manifests_follow_its_schemas(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    misspelt = manifest | {"spec": manifest["spec"] | {"selectr": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(misspelt, kubernetes_validate.latest_version(), strict=True)


def test_kubernetes_starts_what_the_image_and_the_settings_know(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of({entry["name"]: entry.get("value") for entry in CONTAINER["env"]}, monkeypatch)
    assert POD["enableServiceLinks"] is False
    before = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["terminationGracePeriodSeconds"] > before + settings.drain_seconds + 10
    (port,) = CONTAINER["ports"]
    assert [str(port["containerPort"])] == instructions("EXPOSE")
    parsed = build_parser().parse_args(["serve", *CONTAINER["args"]])
    assert parsed.model == CONTAINER["args"][0]
    assert {entry["name"]: entry["mountPath"] for entry in CONTAINER["volumeMounts"]} == {
        "models": image_environment()["HF_HOME"],
        "tmp": str(Path(image_environment()["TRITON_CACHE_DIR"]).parent),
    }


def test_kubernetes_probes_ask_for_the_right_thing() -> None:
    probes = {name: CONTAINER[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["httpGet"]["path"] for name, probe in probes.items()} == {
        "startup": "/health/ready",
        "readiness": "/health/ready",
        "liveness": "/health/live",  # a worker that is replaced must not end the process that replaces it
    }
    assert all(probe["httpGet"]["port"] == CONTAINER["ports"][0]["name"] for probe in probes.values())
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 1800, "a checkpoint's download"


def test_kubernetes_gives_the_pod_nothing_it_does_not_need() -> None:
    (user,) = instructions("USER")
    assert POD["securityContext"]["runAsNonRoot"] is True and POD["securityContext"]["runAsUser"] == int(user)
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert POD["automountServiceAccountToken"] is False
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert CONTAINER["resources"]["limits"]["memory"] and CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == 1
    policy = KUBERNETES["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    names, world = policy["egress"]
    assert {rule["port"] for rule in names["ports"]} == {53} and {rule["port"] for rule in world["ports"]} == {443}
    outside = [ipaddress.ip_network(block) for block in world["to"][0]["ipBlock"]["except"]]
    for inner in ("10.1.2.3", "172.20.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"):
        assert any(ipaddress.ip_address(inner) in block for block in outside), inner


def test_kubernetes_selects_and_scales_the_deployment() -> None:
    labels = KUBERNETES["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert KUBERNETES["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert KUBERNETES["Service"]["spec"]["selector"] == labels
    assert KUBERNETES["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert KUBERNETES["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    scaler = KUBERNETES["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == KUBERNETES["Deployment"]["metadata"]["name"]
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == "easel_backlog_seconds"
    assert "replicas" not in KUBERNETES["Deployment"]["spec"], "applied again, it would undo what the autoscaler did"
