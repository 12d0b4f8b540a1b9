"""The config group `executor`: what it accepts, refuses in one line, and says of a missing package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sweeps_support import Workplace, write

from attnres.errors import ConfigError
from sweeps.config import load_sweep
from sweeps.executor_config import LocalConfig, RayConfig, SlurmConfig
from sweeps.slurm_executor import job_parameters

STUDY = "study=smoke"


def test_local_is_the_default_and_the_keys_of_launch_stay() -> None:
    config = load_sweep([STUDY, "launch.workers=3", "launch.max_retries=0"])
    assert config.executor == LocalConfig("local")
    assert (config.launch.workers, config.launch.max_retries) == (3, 0)
    assert "executor=local" not in config.trial_overrides


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("executor=condor", "executor=condor: one of local, ray, slurm"),
        (
            "executor=slurm executor.memory=8",
            "executor.memory=8: write a number and K, M, G or T, such as 8G",
        ),
        ("executor=slurm executor.time_minutes=0", "executor.time_minutes=0: must be positive"),
        (
            "executor=slurm executor.time_minutes=2",
            "executor.time_minutes=2: must be longer than executor.signal_seconds=120",
        ),
        ("executor=slurm executor.gpus=-1", "executor.gpus=-1: must not be negative"),
        (
            "executor=slurm executor.on_interrupt=wait",
            "executor.on_interrupt=wait: one of cancel, leave",
        ),
        (
            "executor=slurm executor.parameters=['partition=a']",
            "executor.parameters=partition=a: set executor.partition instead",
        ),
        (
            "executor=slurm executor.parameters=['array=0-9']",
            "executor.parameters=array=0-9: is set by the executor itself",
        ),
        (
            "executor=slurm executor.parameters=['comment=$(id)']",
            "executor.parameters=comment=$(id): write name=value, or name alone, of a long option of sbatch"
            " (without --)",
        ),
        (
            "executor=slurm executor.parameters=['nice=1','nice=2']",
            "executor.parameters=['nice=1', 'nice=2']: nice is given twice",
        ),
        ("executor=ray executor.cpus=0", "executor.cpus=0.0: must be positive"),
        (
            "executor=ray executor.resources=['a100=0']",
            "executor.resources=a100=0: write name=amount, such as a100=1",
        ),
        (
            "executor=ray executor.resources=['GPU=1']",
            "executor.resources=GPU=1: set executor.cpus, gpus or memory instead",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_the_setting(overrides: str, line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_sweep([STUDY, *overrides.split(" ")])
    assert str(raised.value) == line


def test_a_setting_of_another_executor_is_named_as_such() -> None:
    why = "is an option of executor=slurm, and this is executor=local"
    with pytest.raises(ConfigError, match=f"executor.partition=gpu: {why}"):
        load_sweep([STUDY, "executor.partition=gpu"])
    with pytest.raises(ConfigError, match="executor.cpus=0: is an option of executor=ray or slurm"):
        load_sweep([STUDY, "executor.cpus=0"])
    with pytest.raises(ValueError, match="executor.partitoin=gpu: unknown key"):
        load_sweep([STUDY, "executor.partitoin=gpu"])


def test_a_cluster_of_ones_own_is_a_file_in_ones_own_folder(tmp_path: Path) -> None:
    shipped = Path(__file__).resolve().parents[2] / "conf" / "executor" / "slurm.yaml"
    text = shipped.read_text().replace("partition: null", "partition: gpu")
    write(tmp_path / "executor" / "our_cluster.yaml", text)
    executor = load_sweep([STUDY, "executor=our_cluster"], str(tmp_path)).executor
    assert isinstance(executor, SlurmConfig)
    assert executor.partition == "gpu"
    write(tmp_path / "executor" / "half.yaml", "name: slurm\n")
    with pytest.raises(ConfigError, match="executor.name=slurm: needs account, at_once, cpus"):
        load_sweep([STUDY, "executor=half"], str(tmp_path))


def test_what_slurm_is_asked_for() -> None:
    words = "executor.gpus=2 executor.memory=8G executor.parameters=['constraint=a100','exclusive']".split()
    settings = load_sweep([STUDY, "executor=slurm", "executor.time_minutes=90", *words]).executor
    assert isinstance(settings, SlurmConfig)
    asked = job_parameters(settings, "smoke", cores=3, gpus=0)
    assert (asked["time"], asked["cpus_per_task"], asked["gpus_per_node"], asked["mem"]) == (90, 3, 2, "8G")
    assert asked["additional_parameters"] == {"requeue": True, "constraint": "a100", "exclusive": True}
    by_default = load_sweep([STUDY, "executor=slurm"]).executor
    assert isinstance(by_default, SlurmConfig)
    assert job_parameters(by_default, "smoke", 1, gpus=1)["gpus_per_node"] == 1
    assert job_parameters(by_default, "smoke", 1, gpus=0)["gpus_per_node"] is None


def test_what_ray_is_asked_for() -> None:
    words = "executor.memory=2G executor.gpus=0.5 executor.resources=['a100=1','disk=0.5']".split()
    settings = load_sweep([STUDY, "executor=ray", *words]).executor
    assert isinstance(settings, RayConfig)
    assert (settings.memory_bytes, settings.gpus) == (2 * 2**30, 0.5)
    assert settings.amounts == {"a100": 1.0, "disk": 0.5}


@pytest.mark.parametrize(("executor", "package"), [("ray", "ray"), ("slurm", "submitit")])
def test_a_missing_package_is_one_line_and_exit_code_2(
    executor: str, package: str, workplace: Workplace
) -> None:
    # Where the package is installed, it is hidden.
    code = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *a: None if name == {package!r} else find(name, *a)\n"
        "from attnres.cli import run_command\n"
        "from sweeps.launch import main\n"
        "sys.exit(run_command(main))\n"
    )
    words = workplace.arguments(f"executor={executor}")
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: executor={executor}: needs pip install -e '.[{executor}]'"
