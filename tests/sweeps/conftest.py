from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_launch import end_all
from ray_lab import RayLab
from slurm_lab import SlurmLab
from sweeps_support import Workplace


@pytest.fixture(scope="session", autouse=True)
def _signals_as_from_a_terminal() -> None:
    """A shell that starts the tests in the background, and nohup, ignore these; launches would inherit it."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture(autouse=True)
def _no_launch_is_left() -> Iterator[None]:
    """When a test fails, too: what it has launched, or suspended, ends with it."""
    yield
    end_all()


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


@pytest.fixture(scope="module")
def shared_workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """For tests that only read: the corpus is packed once."""
    return Workplace(tmp_path_factory.mktemp("workplace"))


@pytest.fixture(scope="session")
def slurm_lab() -> Iterator[SlurmLab]:
    with SlurmLab() as lab:
        yield lab


@pytest.fixture
def lab(slurm_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLab]:
    """A real Slurm that commands of this process use; its jobs end with the test."""
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("SLURM_CONF", str(slurm_lab.config))
    # Jobs import this checkout, and the tests' own targets.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "tests")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield slurm_lab
    slurm_lab.run("scancel", "--user=root", "--signal=KILL", check=False)
    slurm_lab.run("scancel", "--user=root", check=False)


@pytest.fixture(scope="session")
def ray_lab() -> Iterator[RayLab]:
    with RayLab() as lab:
        yield lab


@pytest.fixture
def ray_cluster(ray_lab: RayLab) -> RayLab:
    """A real Ray with all its nodes."""
    ray_lab.mend()
    return ray_lab
