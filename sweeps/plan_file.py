"""The plan of a study for who looks at it: as study.json has it, or as the configuration would have it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnres.config import NAME_PATTERN
from attnres.data.corpus import NotPacked
from attnres.errors import ConfigError, RecordError
from attnres.json_file import Check, check_fields, is_count, is_number, is_text, or_null, read_object
from sweeps.study import STUDY_FILE, describe, load_study, outline

_WHERE = ("study", "runs_dir")
_CHECKS: Mapping[str, Check] = {
    # The name of a folder below the study's.
    "id": lambda value: is_text(value) and NAME_PATTERN.fullmatch(value) is not None,
    **dict.fromkeys(("name", "size", "rule"), is_text),
    "seed": is_count,  # JSON's true is no seed
    "axes": or_null(lambda value: isinstance(value, dict)),
    **dict.fromkeys(("parameters", "tokens", "flops"), or_null(is_number)),
    "steps": or_null(is_count),  # study.json of an older version has none
}


def load_plan(argv: Sequence[str], config_dir: str | None) -> tuple[Path, dict[str, Any]]:
    """The study's folder, and its plan: its `name` and `trials`.

    Where the corpus is not packed, ids are not known: they are null, and the plan has `unknown`, in words.
    """
    given: dict[str, str] = {}
    for key, _, value in (word.partition("=") for word in argv):
        if key in given:
            raise ConfigError(key, value, f"is given twice, also as {key}={given[key]}")
        given[key] = value
    if given.keys() <= set(_WHERE) and given.get("study"):
        if not NAME_PATTERN.fullmatch(given["study"]):
            raise ConfigError("study", given["study"], "is not a name of a study")
        folder = Path(given.get("runs_dir", "runs")) / given["study"]
        plan = read_plan(folder / STUDY_FILE)
        if plan is not None:
            return folder, plan
    try:
        study = load_study(argv, config_dir, lambda line: print(line, file=sys.stderr), pack=False)
    except NotPacked as error:
        plan = outline(argv, config_dir)
        why = f"{error}: the trials' ids, and what has become of them, are known only once it is"
        return Path(plan["folder"]), {**plan, "unknown": why}
    described = describe(study)
    return study.folder, {name: described[name] for name in ("name", "trials")}


def read_plan(path: Path) -> dict[str, Any] | None:
    """The plan in a study.json; None if there is no file. RecordError for one that is not a plan."""
    try:
        plan = read_object(path)
        return None if plan is None else _checked(plan, str(path))
    except RecordError as error:
        raise RecordError(f"{error}; not a study's plan: sweeps.launch writes it again") from None


def _checked(plan: Mapping[str, Any], where: str) -> dict[str, Any]:
    check_fields(plan, {"name": is_text, "trials": _are_trials}, where)
    for number, trial in enumerate(plan["trials"]):
        check_fields(trial, _CHECKS, f"{where}: trials[{number}]")
    return {"name": plan["name"], "trials": plan["trials"]}


def _are_trials(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(trial, dict) for trial in value)
