"""`python -m analysis.report study=NAME`: records -> results.json, tables, figures, report.md, and a
verdict."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from analysis.claims import parse_claims
from analysis.compare import DEFAULT_CONFIDENCE
from analysis.differences_report import REPORT_FOLDER, write_differences
from analysis.gate import ALLOWABLE, StudyError
from analysis.load import load_study
from analysis.markdown import render
from analysis.rates import compute_rates
from analysis.rates_choice import write_choice
from analysis.rates_report import write_result
from analysis.results import DEFAULT_DRAWS, StudyResult, compute_results
from analysis.rows import parse_where
from analysis.serialise import to_json, write_json, write_tables
from analysis.settings import ABSENT
from analysis.study_data import StudyData
from analysis.table_source import load_table
from analysis.wandb_source import PREFIX, load_wandb
from attnres.cli import help_text, reject_options, run_command, take_flag, take_option, wants_help
from attnres.config import NAME_PATTERN
from attnres.counts import CONVENTIONS
from attnres.errors import ConfigError
from attnres.rates_file import take_choice
from attnres.record import write_text_atomic

KEYS = ("study", "runs_dir", "baseline", "convention", "where", "claims", "confidence", "draws")
WANDB_KEYS = (
    "source",
    "study",
    "group",
    "baseline",
    "convention",
    "where",
    "out",
    "claims",
    "confidence",
    "draws",
)
TABLE_KEYS = ("source", "columns", "baseline", "out", "claims", "confidence", "draws")
USAGE = f"""
python -m analysis.report study=NAME [key=value ...] [--allow KIND,...] [--no-figures]
python -m analysis.report source=wandb:PROJECT-OR-FOLDER [key=value ...] [--allow KIND,...] [--no-figures]
python -m analysis.report source=TABLE.csv columns=... baseline=RULE [key=value ...]

Reads runs_dir/NAME/study.json and the records beside it (no torch) and writes runs_dir/NAME/report/:
report.md, results.json (docs/results.md), CSV tables, figures as PNG and SVG. A study of fewer than 3 sizes,
or one that asks for it (docs/studies.md), gets a table of rules against the baseline instead of multipliers.

  runs_dir=runs        where the studies are
  baseline=RULE        instead of the study's own
  convention=total     how C is counted: {", ".join(CONVENTIONS)}
  where="KEY=VALUE"    one value of an axis that the study has besides size, rule and seed; comma separated
  claims=1.15,30%      further claims: a multiplier, or a saving in percent
  confidence=0.95      of the intervals
  draws=2000           of the bootstrap

source=wandb:entity/project reads the runs of a W&B project, source=wandb:FOLDER the offline runs in a folder,
at any depth; all that was planned, recorded and logged comes from the runs. Keys as above, and:
  study=NAME           runs trained for this study; needed where there are several
  group=NAME           runs of this W&B group
  out=FOLDER           writes FOLDER/report/ [NAME-wandb]

source=TABLE.csv takes a table of finished runs, one row per run:
  columns=size=SIZE,rule=RULE,loss=VAL_LOSS,compute=FLOP
                       its columns; COLUMN*NUMBER scales one. For compute also N=...,D=... (6 N D); seed,
                       seconds (of training) and standard_error where the table has them
  out=FOLDER           writes FOLDER/report/ [the file's name without .csv]

--write-rates NAME --config-dir DIR, or --write-rates DIR/rates/NAME.yaml, for a report of learning rates:
writes the rates that it found to a config file, which studies use by rates=NAME --config-dir DIR
(docs/hyperparameters.md). A size whose optimum is at an edge is refused and named: exit code 1.
  --shared             the baseline's optimum for all rules of a size (the default)
  --per-rule           the optimum of each rule

--allow lets pass, and the report says so:
{chr(10).join(f"  {kind:17s} {what}" for kind, what in ALLOWABLE.items())}
"""
EXAMPLES = (
    "python -m analysis.report study=smoke",
    "python -m analysis.report study=scaling_law convention=6nd claims=1.2",
    "python -m analysis.report study=learning_rate --write-rates mine --config-dir my_configs",
    'python -m analysis.report study=rates where="optim.learning_rate=0.004"',
    "python -m analysis.report study=scaling_law --allow missing,diverged",
    "python -m analysis.report source=wandb:my-team/attnres study=scaling_law",
    "python -m analysis.report source=wandb:runs/scaling_law",
    "python -m analysis.report source=runs.csv columns=rule=method,compute=pf_days*8.64e19 baseline=prenorm",
)


def main(argv: list[str]) -> int:
    """Command line; returns the exit code."""
    if wants_help(argv):
        print(help_text(USAGE, (), EXAMPLES))
        return 0
    command = shlex.join(["python", "-m", "analysis.report", *argv])
    allow = tuple(filter(None, (take_option(argv, "--allow") or "").replace(" ", "").split(",")))
    with_figures = not take_flag(argv, "--no-figures")
    choice = take_choice(argv)
    reject_options(argv)
    options = parse_options(argv)
    claims = parse_claims(options.get("claims", ""))
    confidence = _number(options, "confidence", DEFAULT_CONFIDENCE, 0.5, 0.9999)
    draws = int(_number(options, "draws", DEFAULT_DRAWS, 100, 1_000_000))
    data = _load(options, allow)
    if data.report == "multiplier" and data.no_multiplier:  # asked for by name
        raise StudyError(
            f"{data.no_multiplier} (study.report=rows, in its YAML or given to the launch, "
            "compares the rules at each size; nothing is trained again)"
        )
    if choice is not None and data.report != "rates":
        raise ConfigError(
            "--write-rates", str(choice.target.path), f"study={data.name} has no report of rates"
        )
    whole = True
    if data.wants_multiplier:
        result = compute_results(data, claims=claims, confidence=confidence, draws=draws)
        path = write_report(result, command, with_figures)
        lines = [r.verdict_line for r in result.rules.values()]
    elif data.report == "rates":
        curves, how = compute_rates(data), describe_how(data, command)
        path, lines = write_result(curves, how, with_figures)
        if choice is not None:
            more, whole = write_choice(curves, choice, how)
            lines = [*lines, *more]
    else:
        path, lines = write_differences(data, describe_how(data, command), confidence, with_figures)
    print("\n".join([*lines, f"report: {path}"]))
    return 0 if whole else 1


def _load(options: Mapping[str, str], allow: Sequence[str]) -> StudyData:
    """Records of a study, W&B runs, or a CSV table."""
    if options.get("source", "").startswith(PREFIX):
        return load_wandb(
            options["source"],
            study=options.get("study"),
            group=options.get("group"),
            out=Path(options["out"]) if "out" in options else None,
            convention=options.get("convention", "total"),
            where=parse_where(options.get("where", "")),
            allow=allow,
            baseline=options.get("baseline"),
        )
    if "source" in options:
        path = Path(options["source"])
        if not options["source"]:
            raise ConfigError("source", "", "name a CSV table, or wandb:entity/project, or wandb:FOLDER")
        if path.is_dir():
            why = "is a folder; name a CSV table, or wandb:FOLDER for W&B's files"
            raise ConfigError("source", options["source"], why)
        folder = Path(options.get("out", path.with_suffix("")))
        if "baseline" not in options:
            raise ConfigError("baseline", "", "name the rule that the others are compared with")
        return load_table(path, options.get("columns", ""), options["baseline"], folder, allow)
    study = options.get("study", "")
    if not NAME_PATTERN.fullmatch(study):
        raise ConfigError("study", study, "name the study to report on, for example study=smoke")
    return load_study(
        Path(options.get("runs_dir", "runs")),
        study,
        convention=options.get("convention", "total"),
        where=parse_where(options.get("where", "")),
        allow=allow,
        baseline=options.get("baseline"),
    )


def parse_options(argv: list[str]) -> dict[str, str]:
    """key=value words -> mapping; an unknown key is an error."""
    keys: tuple[str, ...] = KEYS
    if source := next((word for word in argv if word.startswith("source=")), None):
        keys = WANDB_KEYS if source.startswith(f"source={PREFIX}") else TABLE_KEYS
    options: dict[str, str] = {}
    for word in argv:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(word, "", "write key=value; --help lists the keys")
        if key not in keys:
            raise ConfigError(key, value, f"unknown key; one of {', '.join(keys)}")
        options[key] = value
    return options


def _number(options: Mapping[str, str], key: str, default: float, low: float, high: float) -> float:
    text = options.get(key)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise ConfigError(key, text, f"must be a number from {low:g} to {high:g}")
    return value


def write_report(result: StudyResult, command: str, with_figures: bool = True) -> Path:
    """Write everything below the study's folder; returns the path of report.md."""
    folder = result.data.folder / REPORT_FOLDER
    how = describe_how(result.data, command)
    figures: list[str] = []
    if with_figures:
        from analysis.figures import draw_all  # matplotlib takes longer to import than all the rest

        figures = [path.name for path in draw_all(result, folder)]
    write_json(folder / "results.json", to_json(result, how))
    write_tables(result, folder)
    path = folder / "report.md"
    write_text_atomic(path, render(result, how, figures))
    return path


def describe_how(data: StudyData, command: str) -> dict[str, Any]:
    """Command, commits and versions, for whoever wants to make the report again."""
    used = data.tuned
    commits = {str(commit) for commit in used["commit"].dropna()}
    torch_versions = set(used["torch"]) - {ABSENT} if "torch" in used.columns else set()
    return {
        "command": command,
        "commit": source_commit(),
        "record_commits": sorted(commits),
        "record_torch_versions": sorted(torch_versions),
        "versions": f"Python {platform.python_version()}, numpy {np.__version__}, scipy {scipy.__version__}",
    }


def source_commit() -> str | None:
    """Commit of the checkout that this code runs from, with "+changes" if tracked files differ; else None."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


if __name__ == "__main__":
    sys.exit(run_command(main))
