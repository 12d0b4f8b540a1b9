"""An installed wheel carries its YAML and tables: the commands work away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content in an empty folder. Built from a copy: setuptools writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.split("\n"):
        if name.startswith(("attnres/", "sweeps/", "analysis/", "conf/", "pyproject", "README", "LICENSE")):
            copy = folder / "source" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."]
    subprocess.run([*command, "-w", str(folder)], cwd=folder / "source", check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "unpacked")
    return folder / "unpacked"


def test_wheel_has_every_config_and_module_and_nothing_else(unpacked: Path) -> None:
    shipped = {file.relative_to(unpacked / "attnres" / "conf") for file in unpacked.rglob("conf/**/*.yaml")}
    assert shipped == {file.relative_to(ROOT / "conf") for file in (ROOT / "conf").rglob("*.yaml")}
    modules = {
        file.relative_to(ROOT)
        for name in ("attnres", "sweeps", "analysis")
        for file in (ROOT / name).rglob("*.py")
    }
    assert {file.relative_to(unpacked) for file in unpacked.rglob("*.py")} == modules


@pytest.mark.parametrize("module", ["attnres.train", "sweeps.plan", "sweeps.launch", "sweeps.status"])
def test_commands_find_their_configs_in_a_wheel(unpacked: Path, tmp_path: Path, module: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "cpu_50k" in done.stdout or "smoke" in done.stdout
    where = "import attnres.compose as c; print(c.__file__, c.config_dir())"
    command = [sys.executable, "-c", where]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        str(unpacked / "attnres" / "compose.py"),
        str(unpacked / "attnres" / "conf"),
    ]
