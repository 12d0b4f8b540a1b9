"""Study -> trials: the grid of a study, resolved once against its corpus.

Pure but for packing the corpus on first use: nothing is launched here. A trial's id is the hash of everything
that can change its numbers, so the same study planned twice is the same trials.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnres.compose import Composed, compose_trial, group_options
from attnres.config import DataConfig, TrialConfig, to_mapping
from attnres.data.corpus import PackedCorpus, open_corpus
from attnres.errors import ConfigError
from attnres.record import write_text_atomic
from attnres.trial import Trial, resolve
from sweeps.choices import override_value
from sweeps.config import SweepConfig, load_sweep
from sweeps.rates import FOLLOWING

STUDY_SCHEMA = 1
STUDY_FILE = "study.json"


@dataclass(frozen=True)
class PlannedTrial:
    """A trial and its place in the grid."""

    trial: Trial
    corpus: PackedCorpus
    size: str
    rule: str  # label of the rule with its options
    seed: int
    axes: Mapping[str, Any]
    overrides: tuple[str, ...]  # that compose this trial, but for the seed

    @property
    def cell(self) -> str:
        """What the trial shares with its other seeds, for tables."""
        return " ".join([self.size, self.rule, *(f"{key}={value}" for key, value in self.axes.items())])

    @property
    def title(self) -> str:
        """For lines that stand alone: names do not say the values of axes."""
        return with_axes(self.trial.name, self.axes)

    @property
    def flops(self) -> int:
        """Training FLOPs of the whole run, convention "total"."""
        return self.trial.training_flops()["total"]


def with_axes(name: str, axes: Mapping[str, Any] | None) -> str:
    """A trial's name and its place on the study's axes."""
    values = ", ".join(f"{key}={value}" for key, value in (axes or {}).items())
    return f"{name} ({values})" if values else name


@dataclass(frozen=True)
class _Cell:
    """A place of the grid without its seed, composed."""

    size: str
    axes: dict[str, Any]
    overrides: tuple[str, ...]
    config: TrialConfig


@dataclass(frozen=True)
class Study:
    """A resolved study."""

    config: SweepConfig
    trials: tuple[PlannedTrial, ...]  # sizes outermost, then axes, rules, seeds

    @property
    def name(self) -> str:
        return self.config.study.name

    @property
    def folder(self) -> Path:
        return Path(self.config.runs_dir) / self.name

    @property
    def threads(self) -> int:
        """Threads of a trial (the most that any of them asks for)."""
        return max(planned.trial.config.runtime.threads for planned in self.trials)

    @property
    def processes(self) -> int:
        """Processes of a trial, each with so many threads or a GPU (the most that any of them asks for)."""
        return max(planned.trial.config.runtime.processes for planned in self.trials)

    @property
    def cores(self) -> int:
        """Cores that a trial keeps busy."""
        return max(planned.trial.config.runtime.cores for planned in self.trials)

    @property
    def workers(self) -> int:
        """Trials at once."""
        return self.config.launch.worker_count(self.cores)


def load_study(
    overrides: Sequence[str],
    config_dir: str | None = None,
    progress: Callable[[str], None] | None = None,
    pack: bool = True,
    check: Callable[[SweepConfig], None] | None = None,
) -> Study:
    """Resolve the study that the overrides name (`study=NAME`, then any other override).

    Raises ConfigError or DataError with one line, before any work starts, for whatever a user can get wrong.
    `progress` is told, in words, when a corpus has to be packed first; without `pack` that is NotPacked.
    `check` sees the settings before anything slow happens.
    """
    config = load_sweep(overrides, config_dir)
    if check is not None:
        check(config)
    corpora: dict[tuple[DataConfig, int], PackedCorpus] = {}  # the context decides what is validated on
    trials = []
    for cell in list(_cells(config, config_dir)):  # all of them first: no corpus is packed for a mistake
        data, context = cell.config.data, cell.config.model.context
        key = data, context
        if key not in corpora:
            corpora[key] = open_corpus(data, context, progress, pack)
        label = cell.config.residual.label()
        for seed in config.study.seeds:
            trial = resolve(dataclasses.replace(cell.config, seed=seed), corpora[key])
            planned = PlannedTrial(trial, corpora[key], cell.size, label, seed, cell.axes, cell.overrides)
            trials.append(planned)
    study = Study(config, tuple(trials))
    _check_labels(study)
    _check_distinct(study.trials)
    check_comparable(study.trials, FOLLOWING if config.rates.kind == "per_rule" else ())
    return study


def outline(overrides: Sequence[str], config_dir: str | None = None) -> dict[str, Any]:
    """What can be said of a study without its corpus: as study.json, without what follows from the data."""
    config = load_sweep(overrides, config_dir)
    trials = [
        {
            "id": None,
            "name": f"{cell.size}-{cell.config.residual.label()}-s{seed}",
            "size": cell.size,
            "rule": cell.config.residual.label(),
            "seed": seed,
            "axes": cell.axes,
        }
        for cell in _cells(config, config_dir)
        for seed in config.study.seeds
    ]
    return {
        "name": config.study.name,
        "folder": str(Path(config.runs_dir) / config.study.name),
        "trials": trials,
    }


def write_study(study: Study) -> Path:
    """Write runs_dir/<study>/study.json: what was planned, for the analysis and `sweeps.status`."""
    path = study.folder / STUDY_FILE
    write_text_atomic(path, json.dumps(describe(study), indent=1, allow_nan=False) + "\n")
    return path


def describe(study: Study) -> dict[str, Any]:
    """The content of study.json."""
    config = study.config.study
    return {
        "schema": STUDY_SCHEMA,
        "name": config.name,
        "purpose": config.purpose,
        "overrides": list(study.config.trial_overrides),
        "baseline": config.baseline,
        "claims": [dataclasses.asdict(claim) for claim in config.claims],
        "too_small": config.too_small if config.too_small is not None else False,
        "report": config.report,
        "rates": study.config.rates.described([(p.size, p.rule, p.trial.tokens) for p in study.trials]),
        "trials": [
            {
                "id": planned.trial.id,
                "name": planned.trial.name,
                "size": planned.size,
                "rule": planned.rule,
                "seed": planned.seed,
                "axes": dict(planned.axes),
                "parameters": planned.trial.counts.non_embedding_parameters,
                "tokens": planned.trial.tokens,
                "steps": planned.trial.steps,
                "flops": planned.flops,
            }
            for planned in study.trials
        ],
    }


def _cells(config: SweepConfig, config_dir: str | None) -> Iterator[_Cell]:
    """Every cell of the grid, composed: sizes outermost, then axes, then rules."""
    groups = group_options(config_dir)
    composed_groups: Composed = {}  # a study has many cells of few files
    study = config.study
    for size, values in itertools.product(study.sizes, itertools.product(*(a.values for a in study.axes))):
        axes = {axis.key: value for axis, value in zip(study.axes, values, strict=True)}
        for rule in study.rules:
            overrides = (
                *size.overrides,
                *rule.overrides,
                f"study_name={override_value(study.name)}",
                f"runs_dir={override_value(config.runs_dir)}",
                *config.trial_overrides,
                *(axis.override(axes[axis.key], groups) for axis in study.axes),
            )
            composed = compose_trial(overrides, config_dir, composed_groups)
            if rate := config.rates.overrides(size.name, composed.residual.label()):
                overrides = (*overrides, *rate)
                composed = compose_trial(overrides, config_dir, composed_groups)
            if composed.model.name != size.name:
                why = f"its file says name: {composed.model.name}; a size is named after its file"
                raise ConfigError("study.sizes", size.name, why)
            yield _Cell(size.name, axes, overrides, composed)


def _check_labels(study: Study) -> None:
    """Labels of rules are distinct, and the baseline is one of them."""
    labels = dict.fromkeys(planned.rule for planned in study.trials)
    config = study.config.study
    if len(labels) < len(config.rules):
        raise ConfigError(
            "study.rules", [str(rule) for rule in config.rules], "two of these rules are the same"
        )
    if config.baseline not in labels:
        raise ConfigError(
            "study.baseline", config.baseline, f"is not a rule of this study: {', '.join(labels)}"
        )


def _check_distinct(trials: Sequence[PlannedTrial]) -> None:
    """No two places of the grid are the same trial."""
    by_id: dict[str, PlannedTrial] = {}
    for planned in trials:
        other = by_id.setdefault(planned.trial.id, planned)
        if other is not planned:
            why = f"is the same trial as ({other.cell} seed={other.seed}): their numbers cannot differ"
            raise ConfigError("study", f"({planned.cell} seed={planned.seed})", why)


def check_comparable(trials: Sequence[PlannedTrial], free: Sequence[str] = ()) -> None:
    """Trials that are compared differ only in the rule (and `free` keys), seeds of a cell only in the seed.

    A config file may set keys outside its own group: that is a ConfigError, which names the first one.
    """
    references: dict[tuple[Any, ...], PlannedTrial] = {}
    for planned in trials:
        reference = references.setdefault((planned.size, json.dumps(planned.axes)), planned)
        mine, theirs = comparison_key(planned), comparison_key(reference)
        for key, value in mine.items():
            if theirs.get(key) != value and key not in free:
                other = f"{reference.cell} has {theirs.get(key)!r}"
                why = f"has {key}={value!r} where {other}; only the rule may differ"
                raise ConfigError("study.rules", planned.cell, why)


def comparison_key(planned: PlannedTrial) -> dict[str, Any]:
    """Everything about a trial that must be equal across the rules and seeds of a size, by dotted key."""
    trial = planned.trial
    mapping = to_mapping(trial.config)
    del mapping["residual"], mapping["seed"]
    resolved = {
        "steps": trial.steps,
        "batch_tokens": trial.batch_tokens,
        "warmup_steps": trial.warmup_steps,
        "evaluation_steps": trial.evaluation_steps,
        "data_fingerprint": trial.data_fingerprint,
        "device": trial.device,
    }
    return dict(_leaves(mapping, "")) | resolved


def _leaves(mapping: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
