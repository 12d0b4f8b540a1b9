"""Records of a study on disk -> StudyData, or one line that says what is wrong with them.

Reads runs_dir/<study>/study.json (what was planned) and runs_dir/<study>/*/record.json (what came out), and
nothing else.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from analysis.gate import Gate, StudyError, and_more, name_some
from analysis.study_data import REPORTS, Found, StudyData, build_study, check_convention
from attnres.errors import RecordError
from attnres.record import RECORD_FILE, read_record
from attnres.unplanned import describe_unplanned, differences
from attnres.words import counted

STUDY_FILE = "study.json"


def load_study(
    runs_dir: Path,
    study: str,
    *,
    convention: str = "total",
    where: Mapping[str, str] | None = None,
    allow: Sequence[str] = (),
    baseline: str | None = None,
) -> StudyData:
    """Read and check a study. Raises UserError with one line that names what stands in the way."""
    gate = Gate(f"study={study}", allow)
    check_convention(convention)
    folder = runs_dir / study
    plan = read_plan(folder, study)
    found = read_records(study, folder, plan, gate)
    return build_study(found, gate, convention, where or {}, baseline)


def read_plan(folder: Path, study: str) -> dict[str, Any]:
    """study.json, checked as far as the analysis needs it."""
    path = folder / STUDY_FILE
    if not folder.is_dir():
        raise StudyError(
            f"study={study}: there is no folder {folder}; first python -m sweeps.launch study={study}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise StudyError(f"{path}: is missing; {_without_plan(folder, study)}") from None
    except UnicodeDecodeError as error:
        raise StudyError(f"{path}: torn or not JSON ({error})") from None
    return parse_plan(text, str(path))


def _without_plan(folder: Path, study: str) -> str:
    """How a folder of trials becomes a report: those of attnres.train belong to no study."""
    launch = f"python -m sweeps.launch study={study} writes it"
    if any(folder.glob(f"*/{RECORD_FILE}")) and any(folder.rglob("run-*.wandb")):
        source = shlex.quote(f"source=wandb:{folder}")
        return (
            f"{launch}; trials of attnres.train have no plan, and their W&B files make a report where they "
            f"have two rules or more: python -m analysis.report {source}"
        )
    return launch


def parse_plan(text: str, place: str) -> dict[str, Any]:
    """The text of a study.json, from wherever; `place` names it in messages."""
    try:
        plan = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StudyError(f"{place}: torn or not JSON ({error})") from None
    trials = plan.get("trials") if isinstance(plan, dict) else None
    if not isinstance(trials, list) or not trials or not isinstance(plan.get("baseline"), str):
        raise StudyError(f"{place}: needs a baseline and a list of trials")
    for trial in trials:
        _check_trial(trial, place)
    overrides = plan.get("overrides") or []
    if not (isinstance(overrides, list) and all(isinstance(text, str) for text in overrides)):
        raise StudyError(f"{place}: overrides={overrides!r}: must be a list of texts")
    for key, kinds in (("claims", list), ("too_small", (bool, str)), ("purpose", str)):
        if not isinstance(plan.get(key), (kinds, type(None))):
            raise StudyError(f"{place}: {key}={plan[key]!r}: is of the wrong type")
    if not isinstance(plan.get("rates"), (dict, type(None))):
        raise StudyError(f"{place}: rates={plan['rates']!r}: is of the wrong type")
    if plan.get("report") not in (None, *REPORTS):
        raise StudyError(f"{place}: report={plan['report']!r}: one of {', '.join(REPORTS)}")
    return plan


# Key of a planned trial -> the types that it may have. JSON's true is an int to Python, but no seed.
_TRIAL_KEYS: Mapping[str, tuple[type, ...]] = {"id": (str,), "size": (str,), "rule": (str,), "seed": (int,)}


def _check_trial(trial: Any, place: str) -> None:
    if not isinstance(trial, dict):
        raise StudyError(f"{place}: trials: {trial!r}: each must be an object with {', '.join(_TRIAL_KEYS)}")
    for key, kinds in _TRIAL_KEYS.items():
        if key not in trial:
            raise StudyError(f"{place}: trials: {key}: is missing")
        if not isinstance(trial[key], kinds) or isinstance(trial[key], bool):
            raise StudyError(f"{place}: trials: {key}={trial[key]!r}: is of the wrong type")
    for key, kind in (("axes", dict), ("name", str)):
        if not isinstance(trial.get(key), (kind, type(None))):
            raise StudyError(f"{place}: trials: {key}={trial[key]!r}: is of the wrong type")


def read_records(study: str, folder: Path, plan: Mapping[str, Any], gate: Gate) -> Found:
    """Records of planned trials. Others are ignored and counted; torn ones go through the gate."""
    planned = {trial["id"]: trial for trial in plan["trials"]}
    records: dict[str, dict[str, Any]] = {}
    torn: dict[str, str] = {}
    stray: dict[str, Path] = {}
    misplaced = []
    paths = sorted(folder.glob(f"*/{RECORD_FILE}"))
    if not paths:
        raise StudyError(f"{gate.source}: no records in {folder} (of {len(planned)} planned trials)")
    for path in paths:
        trial = path.parent.name
        if trial not in planned:
            stray[trial] = path
            continue
        try:
            records[trial] = read_record(path)
        except RecordError as error:
            torn[trial] = str(error)
            continue
        if records[trial]["trial_id"] != trial:
            misplaced.append(f"{path} says trial_id={records[trial]['trial_id']}")
    if misplaced:
        raise StudyError(f"{gate.source}: records in the wrong folder: {name_some(misplaced)}")
    check_against_plan(
        records, planned, {trial: str(folder / trial / RECORD_FILE) for trial in records}, gate
    )
    gate.check("torn", list(torn.values()), f"{len(torn)} of {counted(len(paths), 'record')} cannot be read")
    notes, unplanned = [], ""
    if stray:
        others = _readable(stray.values())
        unplanned = describe_unplanned(others, plan["trials"], len(stray) - len(others))
        why = f" ({'; '.join(differ)})" if (differ := differences(others, plan["trials"])) else ""
        notes.append(
            f"ignored, not in the plan: {counted(len(stray), 'record')}{why}: {name_some(list(stray))}"
        )
    absent = dict.fromkeys(torn, "torn")
    return Found(study, folder, plan, str(folder / STUDY_FILE), records, absent, notes, None, unplanned)


def _readable(paths: Iterable[Path]) -> list[dict[str, Any]]:
    records = []
    for path in paths:
        with suppress(RecordError):
            records.append(read_record(path))
    return records


def check_against_plan(
    records: Mapping[str, Mapping[str, Any]],
    planned: Mapping[str, Mapping[str, Any]],
    places: Mapping[str, str],
    gate: Gate,
) -> None:
    """A record's size, rule and seed are those that the plan has under its id."""
    foreign = [
        f"{places[trial]} says {key}={record[key]}, the plan {key}={planned[trial][key]}"
        for trial, record in records.items()
        for key in ("size", "rule", "seed")
        if str(record[key]) != str(planned[trial][key])
    ]
    if foreign:
        line = f"records that disagree with {STUDY_FILE}: {foreign[0]}{and_more(foreign)}"
        raise StudyError(f"{gate.source}: {line}")
