"""Data flows down the page: who may import whom, and what must start without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {
    "attnres": ("sweeps", "analysis"),
    "sweeps": ("torch", "attnres.model", "attnres.train"),
    "analysis": ("torch", "sweeps", "attnres.model", "attnres.train"),
}
TORCH_FREE = [
    "sweeps.plan",
    "sweeps.launch",
    "sweeps.status",
    "sweeps.executors",
    "sweeps.search",
    "sweeps.power_lines",
    "analysis.report",
    "analysis.wandb_source",
    "attnres.compose",
    "attnres.trial",
]


def imports_of(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: relative import"
            assert all(alias.name != "*" for alias in node.names), f"{file}: star import of {node.module}"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_run_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        for name in imports_of(file):
            bad = [f for f in FORBIDDEN[package] if name == f or name.startswith(f + ".")]
            assert not bad, f"{file.relative_to(ROOT)} imports {name}"


def test_sweeps_ask_the_analysis_for_power_alone() -> None:
    """A plan says what it can tell, by the analysis' arithmetic; no more of it steers a run."""
    for file in sorted((ROOT / "sweeps").rglob("*.py")):
        used = {name for name in imports_of(file) if name.split(".")[0] == "analysis"}
        allowed = ("analysis.power", "analysis.pilot") if file.name == "power_lines.py" else ()
        assert all(name.startswith(allowed) if allowed else False for name in used), f"{file.name}: {used}"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_starts_without_torch_and_wandb(module: str) -> None:
    slow = ("torch", "wandb", "ray", "optuna")
    code = f"import sys, {module}; print([m for m in {slow} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
