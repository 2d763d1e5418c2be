"""Rewrite the table of docs/licences.md: every package that docker/requirements.txt locks, and its licence as its own
metadata states it. pip takes the metadata from its index, and installs nothing."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "licences.md"
EMPTY = {"cuda-toolkit": "none stated: it has no files, and names NVIDIA's packages"}
HEAD = "| package | version | licence |\n|---|---|---|\n"


def metadata_of(pins: str, python: str) -> list[dict[str, Any]]:
    """What the wheels of `pins` say of themselves, for that Python on Linux."""
    with tempfile.TemporaryDirectory() as folder:
        pinned, report = Path(folder, "pins.txt"), Path(folder, "report.json")
        pinned.write_text(pins)
        dry_run = ("install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary", ":all:")
        target = ("--python-version", python, "--target", folder, "--report", report, "--requirement", pinned)
        subprocess.run([sys.executable, "-m", "pip", *dry_run, *target], check=True)
        return [package["metadata"] for package in json.loads(report.read_text())["install"]]


def licence(metadata: dict[str, Any]) -> str:
    """The expression if there is one, else the classifiers, else the licence field's first line; or "unknown"."""
    if expression := metadata.get("license_expression"):
        return str(expression)
    classifiers = [name.split(" :: ")[-1] for name in metadata.get("classifier", []) if name.startswith("License ::")]
    lines = metadata.get("license", "").strip().splitlines()
    if classifiers == ["Other/Proprietary License"] and lines:
        classifiers = []
    return " or ".join(classifiers) or (lines[0] if lines else EMPTY.get(metadata["name"], "unknown"))


def main() -> None:
    lock = (ROOT / "docker" / "requirements.txt").read_text()
    pins = "\n".join(line.removesuffix("\\") for line in lock.splitlines() if re.match(r"[a-z]", line))
    (python,) = set(re.findall(r"^FROM python:(3\.\d+)", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE))
    packages = sorted(metadata_of(pins, python), key=lambda metadata: metadata["name"].lower())
    rows = (f"| {package['name']} | {package['version']} | {licence(package)} |\n" for package in packages)
    PAGE.write_text(PAGE.read_text().partition(HEAD)[0] + HEAD + "".join(rows))


if __name__ == "__main__":
    main()
