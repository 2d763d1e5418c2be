"""Ask which known vulnerabilities have the packages that docker/requirements.txt locks; options go to pip-audit.

PyPI is asked, and OSV where PyPI does not answer. Exit 0: none. 1: some, all of them printed. 3: nobody could be asked.
pip-audit itself ends with 0 where its source answers "not found" for every package: a mirror without advisories does.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LOCK = Path(__file__).resolve().parent.parent / "docker" / "requirements.txt"
PIP_AUDIT = (sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--desc", "off")


def ask(service: str, options: list[str]) -> tuple[list[dict[str, Any]], str]:
    """What `service` says of each locked package; where it says nothing, the reason."""
    locked = ("--requirement", LOCK, "--disable-pip", "--require-hashes")
    ran = subprocess.run([*PIP_AUDIT, *locked, "-s", service, *options], capture_output=True, text=True)
    try:
        packages = json.loads(ran.stdout)["dependencies"]
    except ValueError:
        return [], (ran.stderr.strip() or "no answer").splitlines()[-1]
    if all("skip_reason" in package for package in packages):
        return [], f"knows none of {len(packages)} packages"
    return packages, ""


def main(options: list[str]) -> int:
    reasons = []
    for service in ("pypi", "osv"):
        packages, reason = ask(service, options)
        if packages:
            break
        reasons.append(f"{service}: {reason}")
    else:
        print(f"audit: not run: {'; '.join(reasons)}")
        return 3
    found = [(package, hole) for package in packages for hole in package.get("vulns", [])]
    for package, hole in found:
        fixed = ", ".join(hole["fix_versions"]) or "no version"
        print(f"{package['name']} {package['version']}: {hole['id']}, fixed in {fixed}")
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    unknown = f"; not known there: {', '.join(skipped)}" if skipped else ""
    print(f"audit: {service} knows of {len(found)} vulnerabilities in {len(packages) - len(skipped)} packages{unknown}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
