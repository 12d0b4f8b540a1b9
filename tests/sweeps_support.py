"""What the tests of sweeps share: a small corpus, a tiny study, and things to run in a trial's process."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnres.data.corpus import PackedCorpus
from attnres.trial import Trial
from sweeps.executor import Executor
from sweeps.interrupts import Interrupts
from sweeps.launch import launch
from sweeps.state import read_state
from sweeps.study import Study, load_study
from sweeps.trial_process import train_trial

WORDS = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma".split()
)

STUDY = """
name: tiny
purpose: A study for tests.
baseline: prenorm
sizes: [tiny_a, tiny_b]
rules: [prenorm, {rule: attnres_block, num_blocks: 2}]
seeds: [0]
overrides: [budget=tokens, budget.tokens=2560, tracking=none]
"""
SIZE = """
name: {name}
width: {width}
depth: 2
heads: 1
head_width: null
mlp_width: {width}
context: 32
batch_size: 2
learning_rate: 4.0e-3
tie_embeddings: false
rope_base: 10000.0
norm_eps: 1.0e-8
"""


def write_corpus(folder: Path) -> Path:
    """Twenty small text files, the same on every machine."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    for index in range(20):
        text = " ".join(draw.choice(WORDS) for _ in range(400))
        (folder / f"{index:02d}.txt").write_text(text)
    return folder


def write_configs(folder: Path, study: str = STUDY) -> Path:
    """A --config-dir with two tiny sizes and the study `tiny`."""
    for name, width in (("tiny_a", 8), ("tiny_b", 16)):
        write(folder / "model" / f"{name}.yaml", SIZE.format(name=name, width=width))
    write(folder / "study" / "tiny.yaml", study)
    return folder


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


class Workplace:
    """A folder with a corpus, configs and runs, and the overrides that make a study use them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.configs = write_configs(root / "configs")
        self.corpus = write_corpus(root / "text")
        self.runs = root / "runs"

    def overrides(self, *more: str) -> list[str]:
        """`more` wins: no key may be given twice."""
        words = [
            f"runs_dir={self.runs}",
            "data=text_files",
            f"data.path={self.corpus}",
            f"data.cache_dir={self.root / 'cache'}",
            "data.validation_fraction=0.2",
            "data.validation_tokens=1024",
            "data.interim_validation_tokens=512",
            *more,
        ]
        return list({word.partition("=")[0]: word for word in words}.values())

    def arguments(self, *more: str) -> list[str]:
        """Of a sweep command, for the study `tiny`."""
        study = [] if any(word.startswith("study=") for word in more) else ["study=tiny"]
        return [*study, *self.overrides(*more), "--config-dir", str(self.configs)]

    def study(self, *more: str) -> Study:
        study = [] if any(word.startswith("study=") for word in more) else ["study=tiny"]
        return load_study([*study, *self.overrides(*more)], str(self.configs))


class Notes:
    """A watch that remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.progress: Any = None

    def say(self, line: str) -> None:
        self.lines.append(line)

    def update(self, progress: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def about(self, name: str) -> list[str]:
        return [line.removeprefix(f"{name}: ") for line in self.lines if line.startswith(name)]


def run_study(study: Study, executor: Executor[Any], retry_failed: bool = False) -> Notes:
    """Launch a study here and now; returns what the launcher said, and the end of it."""
    notes = Notes()
    with Interrupts() as interrupts:
        notes.progress = launch(study, executor, notes, interrupts, retry_failed=retry_failed)
    return notes


# What trials' processes run in tests of failure. Training is real wherever a trial is not made to fail.


def fail_by_size_and_rule(trial: Trial, corpus: PackedCorpus) -> int:
    """tiny_a: prenorm is killed, block raises. tiny_b: prenorm writes nothing and exits 0, block trains."""
    match trial.config.model.name, trial.config.residual.rule:
        case "tiny_a", "prenorm":
            os.kill(os.getpid(), signal.SIGKILL)
        case "tiny_a", _:
            raise RuntimeError("no such luck")
        case "tiny_b", "prenorm":
            return 0
    return train_trial(trial, corpus)


def be_killed_once(trial: Trial, corpus: PackedCorpus) -> int:
    """The first attempt at each trial is killed."""
    marker = trial.folder / "was_here"
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return train_trial(trial, corpus)


def processes_with(marker: str) -> list[int]:
    """Living processes whose environment holds this text: a launcher started with it, and all it started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            zombie = (path.parent / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if marker.encode() in path.read_bytes() and not zombie:
                found.append(int(path.parent.name))
        except (OSError, ValueError):
            continue
    return found


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def assert_trained_once(folder: Path) -> None:
    state = read_state(folder)
    assert (state.state, state.attempts) == ("finished", 1)
    assert (folder / "log.txt").read_text().count("step 1/") == 1


TIMES = {"train_seconds": 1.0, "evaluation_seconds": 0.1, "wall_seconds": 2.0, "attempts": 1}


def finished_record(trial: str) -> dict[str, object]:
    """A record that follows the schema, of a trial that was never trained."""
    mappings = ("config", "parameters", "forward_flops_per_token", "training_flops", "data", "environment")
    numbers = ("seed", "tokens", "planned_tokens", "steps", "planned_steps")
    texts = dict.fromkeys(("name", "study", "size", "rule"), "a")
    return {
        "schema": 1,
        "trial_id": trial,
        **texts,
        "status": "finished",
        "reason": None,
        **{name: {} for name in mappings},
        **dict.fromkeys(numbers, 0),
        "schedule_complete": True,
        "learning_rate": 0.1,
        "validation": {"loss_nats": 2.0},
        "evaluations": [],
        "training": None,
        "timing": TIMES,
    }
