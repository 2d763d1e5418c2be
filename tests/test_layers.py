"""The architecture, as far as a program can check it: who imports whom, who reads the environment, and how long."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {"app": {"app", "engine", "models"}, "engine": {"engine", "models"}, "models": {"models"}}
SOURCES = sorted(path for layer in MAY_IMPORT for path in (ROOT / layer).rglob("*.py"))
HTTP_PACKAGES = {"fastapi", "starlette", "uvicorn", "pydantic", "pydantic_settings", "httpx", "httpx2", "httpcore2"}
HTTP_SERVER = {"fastapi", "starlette", "uvicorn"}
WITHOUT_TORCH = [
    "app.settings",
    "app.cli",
    "app.launch",
    "app.server",
    "engine.config",
    "engine.errors",
    "engine.request",
    "engine.batching",
    "engine.scheduler",
    "models.layout",
]
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60

each_source = pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def imported_names(nodes: Iterator[ast.AST]) -> set[str]:
    """Dotted names that the import statements among `nodes` may load: `from a import b` gives a and a.b."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "relative imports hide the layer they cross"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def top_packages(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported_names(ast.walk(ast.parse(path.read_text())))}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def nodes_run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_type_checking(child):
            continue
        yield child
        yield from nodes_run_at_import(child)


def test_there_is_something_to_check() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(MAY_IMPORT)
    assert "app.settings" in MODULES


@each_source
def test_layers_point_one_way(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    forbidden = {"tests", "benchmarks", *MAY_IMPORT} - MAY_IMPORT[layer]
    if layer != "app":
        forbidden |= HTTP_PACKAGES
    assert not top_packages(path) & forbidden


@each_source
def test_only_settings_read_the_environment(path: Path) -> None:
    if path == ROOT / "app" / "settings.py":
        return
    tree = ast.parse(path.read_text())
    reads = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | imported_names(ast.walk(tree))
    assert not reads & {"environ", "environb", "getenv", "os.environ", "os.getenv"}


@each_source
def test_lengths(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, f"{node.name} is too long"


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_loads_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_worker_is_launched_before_the_web_framework_is_imported() -> None:
    code = f"import sys, app.cli, app.launch; sys.exit(bool({HTTP_SERVER!r} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_no_import_cycles() -> None:
    imports = {
        name: imported_names(nodes_run_at_import(ast.parse(path.read_text()))) & MODULES.keys() - {name}
        for name, path in MODULES.items()
    }
    while leaves := {name for name, targets in imports.items() if not targets & imports.keys()}:
        imports = {name: targets for name, targets in imports.items() if name not in leaves}
    assert not imports, "these modules import each other, or a module that does"
