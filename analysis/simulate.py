"""Studies whose answer is known: losses drawn from a stated law, as a table or as records on disk.

    ln L = ln A - alpha (ln C + ln m_rule) + misfit of the size + effect of the seed + noise of the trial

A size's misfit and a seed's effect are shared by the rules; m_baseline is 1. Used to check the estimators'
coverage, and by `python -m analysis.simulate` to try the report without training anything.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from attnres.cli import help_text, reject_options, run_command, wants_help
from attnres.config import NAME_PATTERN
from attnres.errors import ConfigError
from attnres.record import SCHEMA, write_record, write_text_atomic
from attnres.words import counted

BASELINE = "prenorm"
USAGE = """
python -m analysis.simulate study=NAME [key=value ...]

Writes runs_dir/NAME/ as a study whose true multipliers are known, for python -m analysis.report study=NAME.

  multipliers=1.25      true compute multiplier of each rule, comma separated
  sizes=5 seeds=3       design
  alpha=0.057           true exponent
  noise=0.002           standard deviation of ln L of one trial
  misfit=0.003          standard deviation of a size's shared misfit in ln L
  decades=2             range of compute
  overhead=0.02         FLOPs and seconds that a rule adds, as a fraction of the baseline's
  seed=0                of the simulation
  runs_dir=runs
"""
EXAMPLES = (
    "python -m analysis.simulate study=simulated && python -m analysis.report study=simulated",
    "python -m analysis.simulate study=hard multipliers=1.25,1.1 sizes=6 seeds=5 noise=0.005",
)


@dataclass(frozen=True)
class Truth:
    """What is drawn from. Compute in FLOP, losses in nats."""

    multipliers: Mapping[str, float] = field(default_factory=lambda: {"attnres_block": 1.25})
    sizes: int = 5
    seeds: int = 3
    alpha: float = 0.057
    loss_at_smallest: float = 2.2  # of the baseline, at the smallest compute
    smallest_compute: float = 1e13
    decades: float = 2.0
    noise: float = 0.002
    misfit: float = 0.003
    seed_effect: float = 0.0
    overhead: float = 0.0  # of each rule, in compute and in seconds

    @property
    def rules(self) -> tuple[str, ...]:
        return (BASELINE, *self.multipliers)

    @property
    def coefficient(self) -> float:
        """A of the baseline, C in FLOP."""
        return self.loss_at_smallest * self.smallest_compute**self.alpha


def simulate_table(truth: Truth, generator: np.random.Generator) -> pd.DataFrame:
    """One row per trial: size, rule, seed, compute (FLOP), loss (nats), train_seconds."""
    compute_S = np.geomspace(truth.smallest_compute, truth.smallest_compute * 10**truth.decades, truth.sizes)
    shape = (truth.sizes, len(truth.rules), truth.seeds)
    misfit_S11 = truth.misfit * generator.standard_normal((truth.sizes, 1, 1))
    seed_S1K = truth.seed_effect * generator.standard_normal((truth.sizes, 1, truth.seeds))
    noise_SRK = truth.noise * generator.standard_normal(shape)
    speed_SRK = 1e10 * np.exp(0.01 * generator.standard_normal(shape))  # FLOP/s
    multiplier_R = np.array([1.0, *truth.multipliers.values()])
    overhead_R = np.array([0.0, *(truth.overhead for _ in truth.multipliers)])
    compute_SR = compute_S[:, None] * (1 + overhead_R)
    ln_loss_SR = np.log(truth.coefficient) - truth.alpha * np.log(compute_SR * multiplier_R)
    loss_SRK = np.exp(ln_loss_SR[:, :, None] + misfit_S11 + seed_S1K + noise_SRK)
    size_SRK, rule_SRK, seed_SRK = np.indices(shape)
    return pd.DataFrame(
        {
            "size": [f"size{i + 1}" for i in size_SRK.ravel()],
            "rule": [truth.rules[i] for i in rule_SRK.ravel()],
            "seed": seed_SRK.ravel(),
            "compute": np.broadcast_to(compute_SR[:, :, None], shape).ravel(),
            "compute_without_residual": np.broadcast_to(compute_S[:, None, None], shape).ravel(),
            "loss": loss_SRK.ravel(),
            "train_seconds": (compute_SR[:, :, None] / speed_SRK).ravel(),
        }
    )


def write_study(
    folder: Path, table: pd.DataFrame, *, too_small: bool | str = False, purpose: str = "", axes: str = ""
) -> None:
    """Write study.json, and a record and metrics.jsonl for each row of the table.

    Numbers that a real record would have and the table lacks are made up consistently. `axes` names a column
    of the table that the plan lists as an axis.
    """
    trials = []
    for values in table.to_dict("records"):
        row = {str(key): value for key, value in values.items()}
        settings = {axes: row[axes]} if axes else {}
        record = make_record(folder.name, row, settings)
        trial_folder = folder / record["trial_id"]
        write_record(trial_folder, record)
        write_text_atomic(trial_folder / "metrics.jsonl", "".join(_metrics(record)))
        trials.append(
            {
                "id": record["trial_id"],
                "name": record["name"],
                "size": row["size"],
                "rule": row["rule"],
                "seed": row["seed"],
                "axes": settings,
                "parameters": record["parameters"]["non_embedding"],
                "tokens": record["tokens"],
                "flops": record["training_flops"]["total"],
            }
        )
    plan = {
        "schema": 1,
        "name": folder.name,
        "purpose": purpose,
        "baseline": BASELINE,
        "claims": [],
        "too_small": too_small,
        "trials": trials,
    }
    write_text_atomic(folder / "study.json", json.dumps(plan, indent=1) + "\n")


def make_record(study: str, row: Mapping[str, Any], axes: Mapping[str, Any]) -> dict[str, Any]:
    """A record that follows the schema, for one row of a table."""
    key = json.dumps([row["size"], row["rule"], row["seed"], dict(axes)])
    trial_id = hashlib.sha256(key.encode()).hexdigest()[:12]
    compute, loss, seconds = float(row["compute"]), float(row["loss"]), float(row["train_seconds"])
    base = float(row.get("compute_without_residual", compute))
    non_embedding = round((base / 120) ** 0.5)  # 6 N D = C and D = 20 N
    tokens = 20 * non_embedding
    table_share = 0.3 * (base / 1e13) ** -0.25  # of the embedding; it shrinks as models grow
    flops = {
        "total": compute,
        "without_residual": base,
        "6nd": 0.9 * base,
        "6nd_non_embedding": 0.9 * base / (1 + table_share),
        "6nd_all": 0.9 * base * (1 + table_share),
    }
    steps = 100
    checkpoints = [(step, (step / steps) ** -0.12) for step in (20, 40, 60, 80, 100)]
    return {
        "schema": SCHEMA,
        "trial_id": trial_id,
        "name": f"{row['size']}-{row['rule']}-s{row['seed']}-{trial_id[:6]}",
        "study": study,
        "status": "finished",
        "reason": None,
        "size": row["size"],
        "rule": row["rule"],
        "seed": int(row["seed"]),
        "config": {"simulated": True, **axes},
        "parameters": {"total": round(1.1 * non_embedding), "non_embedding": non_embedding},
        "forward_flops_per_token": {"mlp": compute / tokens / 3},
        "training_flops": flops,
        "tokens": tokens,
        "planned_tokens": tokens,
        "steps": steps,
        "planned_steps": steps,
        "schedule_complete": True,
        "learning_rate": float(axes.get("optim.learning_rate", 0.004)),
        "data": {"fingerprint": "simulated", "validation_fingerprint": "simulated", "corpus": "none"},
        "validation": {
            "loss_nats": loss,
            "standard_error": 0.002 * loss,
            "bits_per_byte": loss / float(np.log(2)),
            "tokens": 262144,
            "windows": 1024,
        },
        "evaluations": [
            {
                "step": step,
                "tokens": tokens * step // steps,
                "loss_nats": loss * factor,
                "standard_error": 0.01,
            }
            for step, factor in checkpoints
        ],
        "training": {"loss_nats": loss},
        "environment": {"cpu": "simulated", "threads": 1, "device": "cpu", "commit": "simulated"},
        "timing": {
            "train_seconds": seconds,
            "evaluation_seconds": 1.0,
            "wall_seconds": seconds + 1,
            "tokens_per_second": tokens / seconds,
            "median_step_seconds": seconds / steps,
            "attempts": 1,
        },
    }


def _metrics(record: Mapping[str, Any]) -> list[str]:
    """Lines of metrics.jsonl: a training loss that falls smoothly to the record's."""
    lines = []
    for step in range(2, record["steps"] + 1, 2):
        share = step / record["steps"]
        loss = record["validation"]["loss_nats"] * share**-0.12
        entry = {"kind": "train", "step": step, "tokens": round(record["tokens"] * share), "loss_nats": loss}
        lines.append(json.dumps(entry) + "\n")
    return lines


def main(argv: list[str]) -> int:
    """`python -m analysis.simulate study=NAME key=value ...`"""
    if wants_help(argv):
        print(help_text(USAGE, (), EXAMPLES))
        return 0
    reject_options(argv)
    options = _options(argv)
    study = options.pop("study", None)
    if study is None or not NAME_PATTERN.fullmatch(study):
        raise ConfigError("study", study, "name the study to write")
    folder = Path(options.pop("runs_dir", "runs")) / study
    if folder.exists():
        raise ConfigError("study", study, f"{folder} exists; choose another name or remove it")
    seed = round(_numbers("seed", options.pop("seed", "0"))[0])
    truth = _truth(options)
    table = simulate_table(truth, np.random.default_rng(seed))
    write_study(folder, table, purpose=f"Simulated: m = {', '.join(map(str, truth.multipliers.values()))}.")
    print(f"{counted(len(table), 'record')} in {folder}")
    print(f"now: python -m analysis.report study={study} runs_dir={folder.parent}")
    return 0


def _options(argv: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for word in argv:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(word, "", "write key=value; --help lists the keys")
        options[key] = value
    return options


def _truth(options: Mapping[str, str]) -> Truth:
    known = ("multipliers", "sizes", "seeds", "alpha", "noise", "misfit", "decades", "overhead")
    values: dict[str, Any] = {}
    for key, text in options.items():
        if key not in known:
            raise ConfigError(key, text, f"unknown key; there are study, runs_dir, seed, {', '.join(known)}")
        numbers = _numbers(key, text)
        if key == "multipliers":
            names = ("attnres_block", "attnres_full")
            labels = [names[i] if i < len(names) else f"rule_{i + 1}" for i in range(len(numbers))]
            values[key] = dict(zip(labels, numbers, strict=True))
        else:
            values[key] = round(numbers[0]) if key in ("sizes", "seeds") else numbers[0]
    return Truth(**({"overhead": 0.02} | values))


# Wide enough for any study; beyond them the losses leave the range of floating-point numbers.
_RANGES: Mapping[str, tuple[float, float]] = {
    "multipliers": (0.01, 100),
    "sizes": (1, 100),
    "seeds": (1, 1000),
    "seed": (0, 2**63),
    "alpha": (0.001, 2),
    "noise": (0, 1),
    "misfit": (0, 1),
    "decades": (0.01, 20),
    "overhead": (0, 10),
}


def _numbers(key: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(key, text, "must be a number") from None
    low, high = _RANGES[key]
    if not all(low <= number <= high for number in numbers):  # nan is in no range
        raise ConfigError(key, text, f"must be from {low:g} to {high:g}")
    return numbers


if __name__ == "__main__":
    sys.exit(run_command(main))
