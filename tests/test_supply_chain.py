"""What the image installs: locked, hashed, in agreement with pyproject.toml and constraints.txt, new enough, and under
licences that let it be passed on. The steps that install run for real, on small wheels made here."""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.http_server import answering

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRA = "otel"  # of the optional packages, what the image has
OLDEST_SAFE = {"pillow": "13.0", "starlette": "1.3.1", "python-multipart": "0.0.34", "h11": "0.16", "torch": "2.10"}
TOOLS = ROOT / ".venv-tools" / "bin"
CUDA_PARTS = re.compile(r"torch|triton|nvidia-.*|cuda-.*")


def locked(name: str) -> dict[str, tuple[Requirement, list[str]]]:
    """Package → (its line, its hashes) of a file of docker/. Anything but pins and hashes is an error."""
    entries: dict[str, tuple[Requirement, list[str]]] = {}
    text = re.sub(r"^#.*\n", "", (ROOT / "docker" / name).read_text(), flags=re.MULTILINE)
    for entry in re.sub(r"\\\n", " ", text).splitlines():
        line, *hashes = re.split(r"\s--hash=", entry)
        requirement = Requirement(line)
        assert re.fullmatch(r"==[^,*]+", str(requirement.specifier)) and not requirement.url, line
        entries[canonicalize_name(requirement.name)] = requirement, [digest.strip() for digest in hashes]
    return entries


LOCKED = locked("requirements.txt")
TORCH_CPU = locked("torch-cpu.txt")


def version_of(requirement: Requirement) -> Version:
    (pin,) = requirement.specifier
    return Version(pin.version)


def direct() -> list[Requirement]:
    project = PROJECT["project"]
    names = project["dependencies"] + project["optional-dependencies"][EXTRA] + PROJECT["build-system"]["requires"]
    return [Requirement(name) for name in names]


def needed() -> set[str]:
    """Every package that the service needs where the tests run, from what is installed."""
    found: set[str] = set()
    waiting = [str(requirement) for requirement in direct()]
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        found.add(name)
        for other in map(Requirement, metadata.requires(name) or []):
            if other.marker is None or any(other.marker.evaluate({"extra": e}) for e in ("", *requirement.extras)):
                waiting.append(str(other))
    return found


@pytest.mark.parametrize("file", [LOCKED, TORCH_CPU], ids=["requirements.txt", "torch-cpu.txt"])
def test_every_line_has_hashes(file: dict[str, tuple[Requirement, list[str]]]) -> None:
    for name, (_, hashes) in file.items():
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in hashes), name


@pytest.mark.parametrize("requirement", direct(), ids=lambda requirement: requirement.name)
def test_what_the_project_asks_for_is_locked(requirement: Requirement) -> None:
    pin, _ = LOCKED[canonicalize_name(requirement.name)]
    assert version_of(pin) in requirement.specifier


def test_what_that_needs_is_locked_too() -> None:
    assert needed() >= {"jinja2", "sympy", "anyio"}
    assert not needed() - set(LOCKED)


def test_locked_versions_are_the_tested_ones() -> None:
    tested = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    versions = {canonicalize_name(requirement.name): version_of(requirement) for requirement in tested}
    assert {name: version_of(pin) for name, (pin, _) in LOCKED.items() if name in versions}.items() <= versions.items()
    untested = {name for name, (pin, _) in LOCKED.items() if name not in versions}
    assert all(CUDA_PARTS.fullmatch(name) or LOCKED[name][0].marker for name in untested), untested


@pytest.mark.parametrize("name", OLDEST_SAFE)
def test_nothing_with_a_known_hole(name: str) -> None:
    assert version_of(LOCKED[name][0]) >= Version(OLDEST_SAFE[name])
    (asked,) = [requirement for requirement in direct() if canonicalize_name(requirement.name) == name]
    (lowest,) = [bound.version for bound in asked.specifier if bound.operator == ">="]
    assert Version(lowest) >= Version(OLDEST_SAFE[name])


def test_both_builds_of_torch_have_one_version() -> None:
    assert set(TORCH_CPU) == {"torch"}
    assert version_of(TORCH_CPU["torch"][0]).public == str(version_of(LOCKED["torch"][0]))


def test_locked_for_the_images_python() -> None:
    (minor,) = set(re.findall(r"^FROM python:(3\.\d+)\.", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE))
    assert f"--python-version {minor} " in (ROOT / "Makefile").read_text()


def publish(index: Path, name: str, version: str, content: str = "") -> str:
    """Put a wheel into `index`, the folder of a package index, and return its line for a requirements file."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    page = index / name
    page.mkdir(parents=True, exist_ok=True)
    path = page / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{content}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    (page / "index.html").write_text(f'<a href="{path.name}">{path.name}</a>')
    return f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


class Image:
    """What docker/install.sh sees while an image is built: its folder, and two indexes of small wheels."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.index, self.torch_index = folder, folder / "index", folder / "torch-index"
        (folder / "docker").mkdir()
        shutil.copy(ROOT / "docker" / "install.sh", folder / "docker")
        names = ("torch", "triton", "nvidia-nccl", "cuda-parts", "other")
        self.lock = folder / "docker" / "requirements.txt"
        self.lock.write_text("# locked\n" + "".join(publish(self.index, name, "1.0") for name in names))
        (folder / "docker" / "torch-cpu.txt").write_text(publish(self.torch_index, "torch", "1.0+cpu"))

    def install(self, *, cpu: bool) -> str:
        """Run it, and return the last words of a refusal, or nothing."""
        settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": self.index.as_uri(), "PYTHON": sys.executable}
        settings["TORCH_INDEX_URL"] = self.torch_index.as_uri() if cpu else ""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")} | settings
        command = ["sh", self.folder / "docker" / "install.sh", self.folder / "easel"]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert (ran.returncode == 0) == ("ERROR" not in ran.stderr), ran.stderr
        return ran.stderr if ran.returncode else ""

    def installed(self) -> set[str]:
        (packages,) = (self.folder / "easel").glob("lib/python*/site-packages")
        found = {f"{found.metadata['Name']} {found.version}" for found in metadata.distributions(path=[str(packages)])}
        return {name for name in found if not name.startswith(("pip ", "setuptools "))}


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


def test_installs_what_is_locked(image: Image) -> None:
    assert not image.install(cpu=False)
    assert image.installed() == {"torch 1.0", "triton 1.0", "nvidia-nccl 1.0", "cuda-parts 1.0", "other 1.0"}


def test_the_cpu_image_has_nothing_of_cuda(image: Image) -> None:
    assert not image.install(cpu=True)
    assert image.installed() == {"torch 1.0+cpu", "other 1.0"}


def test_a_changed_file_is_refused(image: Image) -> None:
    publish(image.index, "other", "1.0", content="changed")
    assert "DO NOT MATCH THE HASHES" in image.install(cpu=False)


def test_a_changed_torch_is_refused(image: Image) -> None:
    publish(image.torch_index, "torch", "1.0+cpu", content="changed")
    assert "DO NOT MATCH THE HASHES" in image.install(cpu=True)


def test_a_lock_without_hashes_is_refused(image: Image) -> None:
    image.lock.write_text("other==1.0\n")
    assert "hashes are required" in image.install(cpu=False).lower()


def test_what_is_not_locked_is_refused(image: Image) -> None:
    publish(image.index, "unlocked", "1.0")
    locked = publish(image.index, "other", "1.0", content="Requires-Dist: unlocked==1.0\n")
    image.lock.write_text(locked)
    assert "unlocked==1.0" in image.install(cpu=False)


with_tools = pytest.mark.skipif(not TOOLS.exists(), reason="there is no .venv-tools: make test makes it")


class Advisories(BaseHTTPRequestHandler):
    """Answers as OSV does, and knows of one hole, in `holed`."""

    holed: str | None = None

    def do_POST(self) -> None:
        name = json.loads(self.rfile.read(int(self.headers["content-length"])))["package"]["name"]
        ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "999"}]}]
        affected = [{"package": {"name": name, "ecosystem": "PyPI"}, "ranges": ranges}]
        hole = {"id": "PYSEC-2026-1", "summary": "a hole", "modified": "2026-01-01T00:00:00Z", "affected": affected}
        answer = json.dumps({"vulns": [hole]} if name == self.holed else {}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


@pytest.fixture
def advisories() -> Iterator[str]:
    with answering(Advisories) as url:
        yield url


def audit(url: str) -> subprocess.CompletedProcess[str]:
    command = [TOOLS / "python", ROOT / ".ci" / "audit.py", "-s", "osv", "--osv-url", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@with_tools
def test_audit_fails_on_a_known_hole_alone(advisories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = audit(advisories)
    assert clean.returncode == 0 and "knows of 0 vulnerabilities" in clean.stdout, clean
    monkeypatch.setattr(Advisories, "holed", "pillow")
    holed = audit(advisories)
    assert holed.returncode == 1 and re.search(r"pillow [\d.]+: PYSEC-2026-1, fixed in 999", holed.stdout), holed


@with_tools
def test_audit_says_in_one_line_that_nobody_could_be_asked() -> None:
    silent = audit("http://127.0.0.1:1")
    assert silent.returncode == 3
    assert silent.stdout.startswith("audit: not run: ") and silent.stdout.count("\n") == 1


@with_tools
def test_the_sbom_lists_what_is_locked(tmp_path: Path) -> None:
    """cyclonedx-py validates what it writes, and ends with an error for a document that isn't valid."""
    (recipe,) = re.findall(r"^sbom:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    program, *options = recipe.replace("$(TOOLS)/bin", str(TOOLS)).replace("sbom.json", f"{tmp_path}/sbom.json").split()
    subprocess.run([program, *options], cwd=ROOT, check=True, capture_output=True, timeout=200)
    sbom = json.loads((tmp_path / "sbom.json").read_text())
    assert sbom["bomFormat"] == "CycloneDX" and sbom["metadata"]["component"]["name"] == "easel"
    listed = {component["purl"].partition("?")[0] for component in sbom["components"]}
    assert listed == {f"pkg:pypi/{name}@{version_of(pin)}" for name, (pin, _) in LOCKED.items()}
    assert all(component["externalReferences"][0]["hashes"] for component in sbom["components"])


def listed_licences() -> dict[str, tuple[str, str]]:
    """Package → (version, licence) of docs/licences.md."""
    page = (ROOT / "docs" / "licences.md").read_text()
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \|$", page, flags=re.MULTILINE)
    return {canonicalize_name(name): (version, licence) for name, version, licence in rows[1:]}


def test_licences_are_known_and_let_it_be_passed_on() -> None:
    licences = listed_licences()
    assert {name: version for name, (version, _) in licences.items()} == {
        name: str(version_of(pin))
        for name, (pin, _) in LOCKED.items()
        if pin.marker is None or pin.marker.evaluate({"sys_platform": "linux", "platform_machine": "x86_64"})
    }
    for name, (_, licence) in licences.items():
        assert not re.search(r"unknown|GPL|General Public|SSPL|EUPL|BUSL|NonCommercial|-NC", licence), (name, licence)
        assert "roprietary" not in licence or name.startswith("nvidia-"), (name, licence)


def test_licences_are_what_the_packages_state() -> None:
    licence = runpy.run_path(str(ROOT / ".ci" / "licences.py"))["licence"]
    listed = listed_licences()
    compared = [name for name in needed() if metadata.version(name) == listed[name][0]]
    assert len(compared) > 40
    for name in compared:
        assert licence(metadata.metadata(name).json) == listed[name][1], name
    assert licence({"name": "x", "license": "GPL-3.0\nthe text"}) == "GPL-3.0"
    assert licence({"name": "x", "classifier": ["Topic :: x"]}) == "unknown"
