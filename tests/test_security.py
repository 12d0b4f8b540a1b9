"""What a runs folder may hold and a name say: no code is run, no path leaves the folder, no key is kept."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from sweeps_support import STUDY, Workplace
from tiny_trial import tiny_overrides, tiny_trial

from analysis.simulate import Truth, simulate_table, write_study
from attnres import cli, multirun, record
from attnres.checkpoint import DIGEST_BYTES, Checkpoints
from attnres.cli import run_command
from attnres.compose import compose_trial
from attnres.config import NAME_PATTERN
from attnres.errors import ConfigError, RecordError, UserError
from attnres.lock import TrialLock
from attnres.notice import warn
from attnres.train import train
from attnres.wandb_key import hide
from sweeps import cancel, launch, status
from sweeps.trial_process import open_log

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("attnres", "sweeps", "analysis")
PICKLERS = {"dill", "cloudpickle", "joblib", "shelve", "marshal"}
KEY = "0123456789abcdef" * 3  # as W&B's are: longer than any word
NASTY = "a|b`c`<script>alert(1)</script>\n# heading"


class Canary:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def sources() -> Iterator[tuple[Path, ast.AST]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                yield path, node


# Pickles


@pytest.mark.parametrize("valid_digest", [True, False], ids=["well made", "thrown in"])
def test_a_checkpoint_that_holds_code_is_set_aside_and_not_executed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], valid_digest: bool
) -> None:
    """Even one with the right digest and format, as whoever can write in the folder could make it."""
    trial, corpus = tiny_trial(tmp_path, steps=4)
    trial.folder.mkdir(parents=True)
    canary = tmp_path / "canary"
    state = {"format": 2, "trial_id": trial.id, "learner": Canary(canary)}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert canary.exists()  # the file does what it was made for
    canary.unlink()
    content = buffer.getvalue()
    digest = hashlib.sha256(content).digest() if valid_digest else b""
    assert len(digest) in (0, DIGEST_BYTES)
    (trial.folder / "checkpoint.pt").write_bytes(digest + content)
    assert Checkpoints(trial.folder, trial.id).load() is None
    assert not canary.exists()
    assert (trial.folder / "checkpoint.damaged").exists()
    (trial.folder / "checkpoint.pt").write_bytes(digest + content)
    assert train(trial, corpus)["status"] == "finished"
    assert not canary.exists()
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.slow
def test_no_file_of_a_runs_folder_is_unpickled(tmp_path: Path) -> None:
    """Every file that a trial leaves, as a pickle and as an archive of one, below whatever reads it."""
    workplace = Workplace(tmp_path)
    study = workplace.study("study.sizes=[tiny_a]", "study.rules=[prenorm]", "study.baseline=prenorm")
    (planned,) = study.trials
    trial = planned.trial
    train(trial, planned.corpus)
    names = {path.name for path in trial.folder.iterdir()} | {"checkpoint.pt", "weights.pt", "slurm.json"}
    canary = tmp_path / "canary"
    bare = pickle.dumps(Canary(canary))
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("step.npy", _npy_object(canary))
        file.writestr("archive/data.pkl", bare)
    for content in (bare, archive.getvalue()):
        for name in names - {"lock"}:
            (trial.folder / name).write_bytes(content)
        assert run_command(status.main, workplace.arguments("study.sizes=[tiny_a]")) == 0
        assert train(trial, planned.corpus)["status"] == "finished"
        for name in names - {"lock", "record.json", "metrics.jsonl"}:
            (trial.folder / name).write_bytes(content)
        _report(workplace)
        assert not canary.exists()


def _npy_object(canary: Path) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Canary(canary)], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def _report(workplace: Workplace) -> None:
    command = [sys.executable, "-m", "analysis.report", "study=tiny", f"runs_dir={workplace.runs}"]
    subprocess.run([*command, "--no-figures"], cwd=workplace.root, capture_output=True, env=_environment())


def test_no_source_unpickles_or_evaluates() -> None:
    """torch.load with weights_only, numpy.load without allow_pickle, YAML by its safe loader, no eval."""
    loads = 0
    for path, node in sources():
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            dotted = f"{node.value.id}.{node.attr}"
            assert dotted not in ("pickle.load", "pickle.loads", "pickle.Unpickler"), where
            assert dotted not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "pd.read_pickle"), where
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & {"dill", "cloudpickle", "joblib", "shelve"}, (
                where
            )
        if isinstance(node, ast.Call):
            keywords = {word.arg: word.value for word in node.keywords}
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "os.system"), where
            assert "shell" not in keywords, where
            if called == "torch.load":
                loads += 1
                assert ast.unparse(keywords["weights_only"]) == "True", where
            if called == "np.load":
                loads += 1
                assert ast.unparse(keywords["allow_pickle"]) == "False", where
    assert loads >= 3


# Names


@pytest.mark.parametrize(
    "name", ["..", "../up", "/elsewhere/a", "a/b", ".hidden", "", "a\n", "a b", "x" * 65]
)
def test_no_name_leaves_the_runs_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert not NAME_PATTERN.fullmatch(name)
    with pytest.raises(UserError):
        compose_trial([*tiny_overrides(tmp_path), f"study_name={json.dumps(name)}"])
    workplace = Workplace(tmp_path)
    (workplace.configs / "study" / "tiny.yaml").write_text(
        STUDY.replace("tiny\n", json.dumps(name) + "\n", 1)
    )
    before = {path for path in tmp_path.rglob("*")}
    for main in (launch.main, status.main, cancel.main):
        assert run_command(main, workplace.arguments()) == 2
        assert run_command(main, [f"study={name}", f"runs_dir={workplace.runs}"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 6 and all(line.startswith("error: ") for line in said)
    assert {path for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("name", ["../../outside", "/elsewhere/outside", "..", "a/b"])
def test_a_plan_whose_ids_lead_elsewhere_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """study.json of somebody else: `cancel` would leave a file in every folder that it names."""
    trial = {"id": name, "name": "a", "size": "a", "rule": "prenorm", "seed": 0}
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    plan = {"name": "tiny", "trials": [trial]}
    (tmp_path / "runs" / "tiny" / "study.json").write_text(json.dumps(plan))
    for main in (status.main, cancel.main):
        assert run_command(main, ["study=tiny", f"runs_dir={tmp_path / 'runs'}"]) == 2
    assert "not a study's plan" in capsys.readouterr().err
    assert not (tmp_path / "outside").exists()


def test_a_record_of_another_trial_is_not_believed(tmp_path: Path) -> None:
    trial, corpus = tiny_trial(tmp_path, steps=4)
    train(trial, corpus)
    other = trial.folder.with_name("0123456789ab")
    other.mkdir()
    (other / "record.json").write_text((trial.folder / "record.json").read_text())
    with pytest.raises(RecordError, match="belongs to another trial"):
        record.read_trial_record(other)


def test_a_trial_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    link = tmp_path / "0123456789ab"
    link.symlink_to(outside)
    for attempt in (lambda: TrialLock(link).__enter__(), lambda: open_log(link / "log.txt")):
        with pytest.raises(OSError, match="is a symbolic link"):
            attempt()
    assert not list(outside.iterdir())


def test_ids_of_trials_are_ids_that_wandb_takes(tmp_path: Path) -> None:
    trial, _ = tiny_trial(tmp_path)
    assert set(trial.id) <= set("0123456789abcdef")


# Reports


@pytest.mark.slow
def test_names_in_a_report_and_its_figures_do_nothing(tmp_path: Path) -> None:
    truth = Truth({NASTY: 1.25}, sizes=4, seeds=2)
    folder = tmp_path / "s"
    write_study(folder, simulate_table(truth, np.random.default_rng(0)))
    plan = json.loads((folder / "study.json").read_text())
    plan["purpose"] = plan["too_small"] = NASTY
    plan["claims"] = [{"name": NASTY, "multiplier": 1.25}]
    (folder / "study.json").write_text(json.dumps(plan))
    command = [sys.executable, "-m", "analysis.report", "study=s", f"runs_dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=_environment())
    assert done.returncode == 0, done.stderr
    report = (folder / "report" / "report.md").read_text()
    assert "script" in report
    assert "<script" not in report.replace(r"\<script", "")
    assert not any(line.startswith("# heading") for line in report.splitlines())
    for line in report.splitlines():
        if "alert" in line:
            assert r"a\|b" in line and r"\`c\`" in line, line
    drawn = list((folder / "report").rglob("*.svg"))
    assert drawn
    for path in drawn:
        assert not [e for e in ElementTree.parse(path).iter() if e.tag.endswith("script")]
    assert not list((folder / "report").rglob("*.html"))


# Secrets


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    return KEY


def _environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)} | more


def files_with(folder: Path, text: str) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and text.encode() in p.read_bytes()]


def test_a_key_is_hidden_in_whatever_is_said(
    key: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    warn(f"server said {key}")
    assert cli.one_line(str(ConfigError("tracking.entity", key, "no"))) == "tracking.entity=***: no"
    record.write_text_atomic(tmp_path / "file", f'{{"reason": "{key}"}}')
    assert json.loads((tmp_path / "file").read_text()) == {"reason": "***"}

    def fail(error: Exception) -> int:
        raise error

    for error in (ConfigError("tracking.entity", key, "no"), RuntimeError(key)):
        assert multirun._guarded(lambda error=error: fail(error)) in (1, 2)  # type: ignore[misc]
    assert run_command(launch.main, ["study=smoke", f"tracking.api_key={key}"]) == 2
    assert run_command(launch.main, ["study=smoke", f"+tracking.api_key={key}"]) == 2
    assert key not in "".join(capsys.readouterr())


def test_a_key_of_the_netrc_file_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert hide(KEY) == KEY
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert hide(f"a {KEY} b") == "a *** b"


@pytest.mark.slow
@pytest.mark.parametrize("tracking", ["none", "wandb_offline"])
def test_a_key_reaches_no_file_of_a_launch(tmp_path: Path, tracking: str) -> None:
    """In the environment, in the netrc file, in an override of the user's, and in what an exception says."""
    workplace = Workplace(tmp_path / "work")
    home = tmp_path / "home"
    home.mkdir()
    other = KEY[::-1]
    (home / ".netrc").write_text(f"machine api.wandb.ai login user password {other}\n")
    words = ["study.sizes=[tiny_a]", f"tracking={tracking}", f"tracking.tags=[{KEY[:32]}]"]
    command = [sys.executable, "-m", "sweeps.launch", *workplace.arguments(*words)]
    environment = _environment(WANDB_API_KEY=KEY[:32], HOME=str(home), OMP_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, cwd=workplace.root, env=environment)
    assert done.returncode == 0, done.stderr
    assert KEY[:32] not in done.stdout + done.stderr
    for secret in (KEY[:32], other):
        assert not files_with(workplace.root, secret)
    assert len(list(workplace.runs.rglob("record.json"))) == 2


@pytest.mark.parametrize("of", ["trial_process import redirect", "detach import _redirect as redirect"])
def test_a_key_in_an_exception_reaches_no_log(tmp_path: Path, key: str, of: str) -> None:
    """Of a trial, and of a launch in the background, which begins its log with its command line."""
    script = (
        f"import sys\nfrom pathlib import Path\nfrom sweeps.{of}\n"
        f"redirect(Path(sys.argv[1]))\nprint('said', {key!r})\nraise RuntimeError({key!r})\n"
    )
    log = tmp_path / "0123456789ab" / "log.txt"
    log.parent.mkdir()
    log.touch()
    done = subprocess.run([sys.executable, "-c", script, log], env=_environment(), capture_output=True)
    assert done.returncode == 1
    assert log.read_text().count("***") >= 2 and key not in log.read_text()


@pytest.mark.slow
def test_a_key_in_an_exception_of_one_of_several_processes_reaches_no_log(tmp_path: Path) -> None:
    workplace = Workplace(tmp_path / "work")
    spoil = tmp_path / "spoil"
    spoil.mkdir()
    (spoil / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'LOCAL_RANK' in os.environ:\n"
        "    from attnres.learner import Learner\n"
        "    def step(*_):\n"
        "        raise RuntimeError('server said ' + os.environ['WANDB_API_KEY'])\n"
        "    Learner.step = step\n"
    )
    words = ["study.sizes=[tiny_a]", "study.rules=[prenorm]", "runtime=ddp", "runtime.device=cpu"]
    command = [sys.executable, "-m", "sweeps.launch", *workplace.arguments(*words)]
    environment = _environment(WANDB_API_KEY=KEY, OMP_NUM_THREADS="1")
    environment["PYTHONPATH"] = os.pathsep.join([str(spoil), environment["PYTHONPATH"]])
    done = subprocess.run(command, capture_output=True, text=True, cwd=workplace.root, env=environment)
    assert done.returncode == 1 and "server said ***" in done.stdout
    (log,) = workplace.runs.rglob("log.txt")
    assert "RuntimeError: server said ***" in log.read_text()
    assert not files_with(workplace.root, KEY) and KEY not in done.stdout + done.stderr


def test_a_key_in_a_traceback_of_a_command_is_hidden(key: str) -> None:
    script = (
        f"from attnres.cli import run_command\ndef main(argv): raise RuntimeError({key!r})\nrun_command(main)"
    )
    done = subprocess.run([sys.executable, "-c", script], env=_environment(), capture_output=True, text=True)
    assert done.returncode == 1 and key not in done.stderr and "RuntimeError: ***" in done.stderr


def test_what_a_cluster_is_given_holds_no_key(tmp_path: Path, key: str) -> None:
    """The arguments of a job are the trial, its corpus and numbers; none of them has seen the environment."""
    trial, corpus = tiny_trial(tmp_path, "tracking=wandb_online")
    assert key.encode() not in pickle.dumps((trial, corpus))
    for path, node in sources():
        if isinstance(node, ast.Constant) and node.value in ("env_vars", "runtime_env", "WANDB_API_KEY"):
            assert path.name in ("wandb_key.py", "ray_executor.py", "tracking.py"), path
