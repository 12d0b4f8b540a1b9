"""A W&B project, or a folder of W&B's local files, as the input of a report: `source=wandb:...`.

Every run of ours carries its record, so the study is checked as records on disk are (analysis.study_data);
besides, a run's history must have all the rows that it says it logged, and end with the record's loss.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.gate import Gate, StudyError, name_some
from analysis.load import check_against_plan, parse_plan
from analysis.rows import same_value
from analysis.settings import leaves
from analysis.study_data import Curve, Found, StudyData, build_study, check_convention
from analysis.wandb_offline import read_folder
from analysis.wandb_online import read_project
from analysis.wandb_runs import LoggedRun, Outcome, ended, history_fault, outcome_of, training_curve
from attnres.config import NAME_PATTERN
from attnres.errors import ConfigError
from attnres.words import counted

PREFIX = "wandb:"
USUAL_BASELINE = "prenorm"
AXIS_GROUPS = (
    "model",
    "optim",
    "schedule",
    "budget",
    "data",
)  # where a study without a plan may have an axis


def load_wandb(
    source: str,
    *,
    study: str | None = None,
    group: str | None = None,
    out: Path | None = None,
    convention: str = "total",
    where: Mapping[str, str] | None = None,
    allow: Sequence[str] = (),
    baseline: str | None = None,
) -> StudyData:
    """Read and check the runs of `wandb:FOLDER` or `wandb:entity/project`.

    `study` and `group` choose among the runs: the study they were trained for, and W&B's group. The report
    goes to `out`, or to <study>-wandb. Raises UserError with one line that names what stands in the way.
    """
    gate = Gate(f"source={source}", allow)
    check_convention(convention)
    runs = _read(source, group)
    ours, notes = _ours(runs, study, gate)
    by_trial: dict[str, list[LoggedRun]] = {}
    for run in ours:
        by_trial.setdefault(str(run.trial_id), []).append(run)
    outcomes = {trial: outcome_of(attempts) for trial, attempts in by_trial.items()}
    unnamed = [f"{run.place}: {run.broken}" for run in runs if run.broken and run.trial_id is None]
    found = _found(ours[0].study, outcomes, unnamed, notes, out, baseline, gate)
    return build_study(found, gate, convention, where or {}, baseline)


def _read(source: str, group: str | None) -> list[LoggedRun]:
    path = source.removeprefix(PREFIX)
    if not path:
        raise ConfigError("source", source, "name a folder or entity/project after wandb:")
    folder = Path(path).expanduser()
    if folder.exists():
        return [run for run in read_folder(folder) if group is None or run.group == group]
    if path.count("/") > 1 or path.startswith((".", "/", "~")):
        raise StudyError(f"source={source}: there is no such folder")
    return read_project(path, group)


def _ours(runs: Sequence[LoggedRun], study: str | None, gate: Gate) -> tuple[list[LoggedRun], list[str]]:
    """Runs that this project wrote for one study, and a note about the others."""
    ours = [run for run in runs if run.trial_id is not None]
    if not ours:
        broken = [f"{run.place} {run.broken}" for run in runs if run.broken]
        found = counted(len(runs), "run")
        why = f"of {found} none was written by this project (config has no trial_id of ours)"
        raise StudyError(f"{gate.source}: {why}{': ' + name_some(broken) if broken else ''}")
    notes = []
    others = [run.name for run in runs if run.trial_id is None and not run.broken]
    if others:
        notes.append(f"ignored, of other programs: {counted(len(others), 'W&B run')}: {name_some(others)}")
    studies = list(dict.fromkeys(run.study for run in ours))
    if study is not None and study not in studies:
        raise ConfigError("study", study, f"no run is of it; the studies are {name_some(studies)}")
    if study is None and len(studies) > 1:
        choose = " or ".join(f"study={name}" for name in studies)
        raise StudyError(f"{gate.source}: runs of {len(studies)} studies: choose {choose}")
    return [run for run in ours if study in (None, run.study)], notes


def _found(
    name: str,
    outcomes: Mapping[str, Outcome],
    unnamed: Sequence[str],
    notes: list[str],
    out: Path | None,
    baseline: str | None,
    gate: Gate,
) -> Found:
    """Plan, records and what is the matter with either; unreadable runs and histories go through the gate."""
    if not NAME_PATTERN.fullmatch(name):  # it names the report's folder
        raise ConfigError("study_name", name, f"of a run in {gate.source}: no name of a study")
    text, differing = _plan_text(outcomes)
    notes += differing
    place = f"{gate.source}: study.json"
    if text is None:
        plan = derive_plan(outcomes, baseline)
        notes.append("no run carries the study's plan: that all of its trials are here was not checked")
    else:
        plan = parse_plan(text, place)
    planned = {trial["id"]: trial for trial in plan["trials"]}
    stray = [outcome.chosen.name for trial, outcome in outcomes.items() if trial not in planned]
    if stray:
        notes.append(f"ignored, not in the plan: {counted(len(stray), 'run')}: {name_some(stray)}")
    kept = {trial: outcome for trial, outcome in outcomes.items() if trial in planned}
    records = {trial: outcome.record for trial, outcome in kept.items() if outcome.record is not None}
    check_against_plan(records, planned, {trial: kept[trial].chosen.place for trial in records}, gate)
    conflicts = [outcome.conflict for outcome in kept.values() if outcome.conflict]
    gate.check("conflict", conflicts, f"several results of {counted(len(conflicts), 'trial')}")
    torn = [outcome.why for outcome in kept.values() if outcome.absent == "torn"] + list(unnamed)
    gate.check("torn", torn, f"unreadable: {counted(len(torn), 'W&B run')}")
    unended = [f"{o.chosen.name} ({o.why})" for o in kept.values() if o.absent == "missing"]
    if unended:
        notes.append(f"{len(unended)} W&B runs have no record: {name_some(unended)}")
    return Found(
        name=name,
        folder=out or Path(f"{name}-wandb"),
        plan=plan,
        plan_place=place,
        records=records,
        absent={trial: outcome.absent for trial, outcome in kept.items() if outcome.absent},
        notes=notes,
        curves=_check_histories(kept, gate),
    )


def _check_histories(outcomes: Mapping[str, Outcome], gate: Gate) -> dict[str, Curve]:
    """Training curves by trial; histories that are not whole go through the gate."""
    curves, faults = {}, []
    for trial, outcome in outcomes.items():
        if outcome.record is None or outcome.record["status"] != "finished":
            continue
        rows = outcome.history()
        curves[trial] = training_curve(rows)
        if fault := history_fault(outcome, rows):
            faults.append(fault)
    gate.check("history", faults, f"{len(faults)} of {len(curves)} histories are not those of their records")
    return curves


def _plan_text(outcomes: Mapping[str, Outcome]) -> tuple[str | None, list[str]]:
    """The study's plan as the run that ended last carries it, and a note if others carry another one."""
    carried = [
        (ended(outcome.record), str(outcome.chosen.summary["study_plan"]), outcome.chosen.name)
        for outcome in outcomes.values()
        if outcome.record is not None and outcome.chosen.summary.get("study_plan")
    ]
    if not carried:
        return None, []
    _, text, name = max(carried)
    others = [other for _, carried_text, other in carried if carried_text != text]
    if not others:
        return text, []
    return text, [
        f"the plan of the study is that of the run that ended last, {name}; another is carried by "
        f"{counted(len(others), 'run')}: {name_some(others)}"
    ]


def derive_plan(outcomes: Mapping[str, Outcome], baseline: str | None) -> dict[str, Any]:
    """A plan in the form of study.json from what ran: cells that no run tried are not missed."""
    entries: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for trial, outcome in outcomes.items():
        record, config = outcome.record, outcome.chosen.config
        seed = record["seed"] if record else config.get("seed")
        entry = {
            "id": trial,
            "name": outcome.chosen.name,
            "size": record["size"] if record else str((config.get("model") or {}).get("name")),
            "rule": record["rule"] if record else str(config.get("rule")),
            "seed": seed if isinstance(seed, int) else str(seed),
            "flops": record["training_flops"]["total"] if record else float("inf"),
        }
        entries.append(({"axes": {}, **entry}, dict(leaves(record["config"] if record else config, ""))))
    axes = _derived_axes(entries)
    for entry, settings in entries:
        entry["axes"] = {key: settings.get(key) for key in axes}
    smallest: dict[str, float] = {}
    for entry, _ in entries:
        smallest[entry["size"]] = min(entry["flops"], smallest.get(entry["size"], float("inf")))
    rules = sorted({entry["rule"] for entry, _ in entries})
    chosen = baseline or (USUAL_BASELINE if USUAL_BASELINE in rules else "")
    trials = [entry for entry, _ in entries]
    trials.sort(key=lambda e: (smallest[e["size"]], e["rule"] != chosen, e["rule"], str(e["seed"]), e["id"]))
    return {"baseline": chosen, "trials": trials}


def _derived_axes(entries: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    """Settings that differ between trials of one size, rule and seed."""
    first: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    axes: dict[str, None] = {}
    for entry, settings in entries:
        reference = first.setdefault((entry["size"], entry["rule"], entry["seed"]), settings)
        for key, value in settings.items():
            same = same_value(value, json.dumps(reference.get(key)))
            if key.partition(".")[0] in AXIS_GROUPS and not same:
                axes[key] = None
    return list(axes)
