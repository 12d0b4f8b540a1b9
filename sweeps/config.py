"""Typed, frozen, validated configuration of a sweep: which study, and how to launch it.

YAML comes in through `attnres.compose`, as for a single trial. Every mistake is a ConfigError.
A study is data: what its trials resolve to is `sweeps.study`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from attnres.compose import compose_mapping, group_options
from attnres.config import NAME_PATTERN, build
from attnres.errors import ConfigError, UserError
from sweeps.choices import Axis, RuleChoice, SizeChoice, parse_axes, parse_rule, parse_size
from sweeps.executor_config import ExecutorConfig, build_executor, check_executor_keys
from sweeps.rates import RatesConfig, build_rates, check_not_set_twice

# What a study sets by other means than an override; as an override it would break the comparison.
_SET_BY_STUDY = {
    "model": "choose sizes with study.sizes=[...]",
    "residual": "choose rules with study.rules=[...]",
    "seed": "choose seeds with study.seeds=[...]",
    "study_name": "the study's name is study.name",
    "runs_dir": "give runs_dir=... to the command",
}

_AXIS = "study.axes."
_OF_A_SWEEP = ("study", "launch", "executor", "rates", "runs_dir")  # other overrides are the trials'


@dataclass(frozen=True)
class Claim:
    """A compute multiplier that a report calls supported, rejected or undecided."""

    name: str
    multiplier: float  # compute of the baseline over compute of the rule, at equal loss

    def __post_init__(self) -> None:
        if self.multiplier <= 0:
            raise ConfigError("study.claims", self.multiplier, "a multiplier must be positive")


@dataclass(frozen=True)
class StudyConfig:
    """A named grid: sizes x rules x seeds x axes."""

    name: str
    purpose: str
    baseline: str  # label of one of the rules
    sizes: tuple[SizeChoice, ...]
    rules: tuple[RuleChoice, ...]
    seeds: tuple[int, ...]
    axes: tuple[Axis, ...]
    overrides: tuple[str, ...]
    claims: tuple[Claim, ...]
    too_small: str | None
    report: Literal["multiplier", "rows", "shape", "dynamics", "rates"] | None  # null: by the sizes

    def __post_init__(self) -> None:
        if not NAME_PATTERN.fullmatch(self.name):
            why = "use 1 to 64 letters, digits, . _ - (it names a folder)"
            raise ConfigError("study.name", self.name, why)
        _check_values("study.sizes", [size.name for size in self.sizes])
        _check_values("study.rules", self.rules)
        _check_values("study.seeds", self.seeds)
        for axis in self.axes:
            field = f"study.axes.{axis.key}"
            top = axis.key.partition(".")[0]
            if axis.key in _SET_BY_STUDY or top == "residual":
                raise ConfigError(field, list(axis.values), f"is not an axis: {_SET_BY_STUDY[top]}")
            _check_values(field, axis.values)


@dataclass(frozen=True)
class LaunchConfig:
    """How a study is launched; nothing here can change a trial's numbers."""

    workers: int | None  # trials at once; null: cores / (runtime.threads * runtime.processes)
    max_retries: int
    grace_seconds: float
    report_seconds: float
    on_failure: Literal["continue", "stop"]  # stop: what runs saves a checkpoint and stops, too
    max_failures: int | None  # after so many failed trials no more is started

    def __post_init__(self) -> None:
        for name in ("workers", "grace_seconds", "report_seconds", "max_failures"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"launch.{name}", value, "must be positive")
        if self.max_retries < 0:
            raise ConfigError("launch.max_retries", self.max_retries, "must not be negative")

    def worker_count(self, cores: int) -> int:
        """Trials at once, of so many cores each: one thread on every core, unless the user says otherwise."""
        return self.workers if self.workers is not None else max(1, available_cores() // cores)


@dataclass(frozen=True)
class SweepConfig:
    """What a sweep command was told."""

    study: StudyConfig
    launch: LaunchConfig
    executor: ExecutorConfig
    rates: RatesConfig
    runs_dir: str
    trial_overrides: tuple[str, ...]  # of every trial: the study's, then the command line's


def load_sweep(overrides: Sequence[str], config_dir: str | None = None) -> SweepConfig:
    """Command-line overrides (one of them `study=NAME`) -> SweepConfig.

    Raises UserError or ConfigError with one line for anything unknown, mistyped, empty or given twice.
    """
    groups = group_options(config_dir)
    ours = [word for word in overrides if _key(word).partition(".")[0] in _OF_A_SWEEP]
    if not any(_key(word) == "study" and word.partition("=")[2] for word in ours):
        raise UserError(f"study=: choose a study: {', '.join(groups.get('study', []))}")
    for word in ours:
        if _key(word) == "launch.threads":
            raise ConfigError(
                "launch.threads", word.partition("=")[2], "threads of a trial are runtime.threads"
            )
    check_executor_keys(ours)
    axes = {_key(word): word.partition("=")[2] for word in ours if _key(word).startswith(_AXIS)}
    mapping = compose_mapping("sweep", [word for word in ours if _key(word) not in axes], config_dir)
    given = {key.removeprefix(_AXIS): _parse(key, value) for key, value in axes.items()}
    study = build(StudyConfig, _normalised(mapping.pop("study"), groups, given), "study")
    _check_study_name(study.name, ours)
    theirs = [word for word in overrides if word not in ours]
    merged = _merge(study.overrides, theirs, groups)
    _check_overrides(merged, study)
    given_keys = {_key(word) for word in theirs}
    sizes = tuple(size.without(given_keys, given_keys & groups.keys()) for size in study.sizes)
    study = dataclasses.replace(study, sizes=sizes)
    executor = build_executor(mapping["executor"])
    chosen = dict(word.partition("=")[::2] for word in ours)
    rates = build_rates(mapping["rates"], chosen.get("rates", "none"))
    of_sizes = [key for size in sizes for key in size.options]
    check_not_set_twice(rates, [*map(_key, merged), *(axis.key for axis in study.axes), *of_sizes])
    fields = {**mapping, "study": study, "executor": executor, "rates": rates, "trial_overrides": merged}
    return build(SweepConfig, fields, "")


def available_cores() -> int:
    """Cores that this process may use (a container or taskset may allow fewer than the machine has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _parse(key: str, text: str) -> Any:
    """The value of `study.axes.KEY=[...]`; an axis that the study file does not have is new to Hydra."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    try:
        return OmegaConf.to_container(OmegaConf.create(f"value: {text}"))["value"]  # type: ignore[call-overload, index]
    except YAMLError:
        raise ConfigError(key, text, "cannot be read; an axis is a list such as [1e-3,2e-3]") from None


def _check_study_name(name: str, ours: Sequence[str]) -> None:
    """A copied study file that keeps the old name would write into the old study's folder."""
    given = dict(word.partition("=")[::2] for word in ours)
    if "study.name" not in given and name != given["study"]:
        why = f"its file is {given['study']}.yaml; a study is named after its file (or give study.name=...)"
        raise ConfigError("study.name", name, why)


def _normalised(
    study: Any, groups: Mapping[str, Sequence[str]], given_axes: Mapping[str, Any]
) -> dict[str, Any]:
    """The study's mapping with rules and axes parsed, and names of sizes and rules checked."""
    if not isinstance(study, Mapping):
        raise ConfigError("study", study, "must be a group of keys")
    study = dict(study)
    if isinstance(study.get("rules"), list):
        study["rules"] = [parse_rule(rule, groups["residual"]) for rule in study["rules"]]
    if isinstance(study.get("sizes"), list):
        study["sizes"] = [parse_size(size, groups["model"]) for size in study["sizes"]]
    axes = study.get("axes")
    if not isinstance(axes, Mapping):
        raise ConfigError("study.axes", axes, "must map trial keys to lists of values")
    study["axes"] = parse_axes({**axes, **given_axes})
    return study


def _check_values(field: str, values: Sequence[Any]) -> None:
    if not values:
        raise ConfigError(field, [], "is empty: a study needs at least one value")
    seen: list[Any] = []
    for value in values:
        if value in seen:
            raise ConfigError(field, str(value), "is given twice")
        seen.append(value)


def _merge(
    study: Sequence[str], command: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """The command line wins: over the same key, and by choosing a group over all that the study set in it."""
    given = {_key(word) for word in command}
    chosen = given & groups.keys()
    kept = [word for word in study if _key(word) not in given and _key(word).partition(".")[0] not in chosen]
    return (*kept, *command)


def _check_overrides(overrides: Sequence[str], study: StudyConfig) -> None:
    axes = {axis.key for axis in study.axes}
    for word in overrides:
        key, _, value = word.partition("=")
        top = key.partition(".")[0]
        if key in _SET_BY_STUDY or top == "residual":
            raise ConfigError(key, value, f"cannot be set for all trials: {_SET_BY_STUDY[top]}")
        if key in axes:
            raise ConfigError(key, value, "is an axis of this study: change study.axes")
