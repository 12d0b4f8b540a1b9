"""What is refused, and what `--allow` can let pass: one line that names the offenders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from analysis.laws import MIN_SIZES
from attnres.errors import ConfigError, UserError
from attnres.words import counted

NAMED_OFFENDERS = 6  # a line names this many and counts the rest

# What `--allow` can let pass, and what is then done.
ALLOWABLE: Mapping[str, str] = {
    "missing": "trials without a record are left out",
    "torn": "records that cannot be read are left out",
    "history": "W&B runs whose history is not whole or not that of their record are used as they are",
    "conflict": "of W&B runs of one trial with different results the latest finished one is used",
    "diverged": "diverged trials are left out",
    "failed": "failed trials are left out",
    "unfinished": "trials whose schedule had not ended are used as they are",
    "mixed_data": "trials on different training data are compared",
    "mixed_validation": "losses on different validation sets are compared",
    "mixed_settings": "trials that differ in more than the rule and the seed are compared",
}


class StudyError(UserError):
    """Records from which no honest comparison can be made; the message names the offenders."""


class Gate:
    """Refuses offenders, unless `--allow` names their kind; remembers what it let pass."""

    def __init__(self, source: str, allow: Sequence[str], offers: bool = True) -> None:
        """`source` begins every line: study=NAME, say; `offers`: whether the command has --allow.

        Raises ConfigError for a kind that does not exist.
        """
        for name in allow:
            if name not in ALLOWABLE:
                raise ConfigError("--allow", name, f"one of {', '.join(ALLOWABLE)}")
        self.source = source
        self.allow, self.offers = tuple(allow), offers
        self.let_pass: list[str] = []

    def check(self, kind: str, offenders: Sequence[str], what: str, hint: str = "") -> None:
        """`hint` follows a refusal: what else may be the reason."""
        if not offenders:
            return
        line = f"{what}: {name_some(offenders)}"
        if kind not in self.allow:
            how = f" (--allow {kind}: {ALLOWABLE[kind]})" if self.offers else ""
            raise StudyError(f"{self.source}: {line}{how}{'; ' if hint else ''}{hint}")
        self.let_pass.append(f"{kind}: {line}; {ALLOWABLE[kind]}")


def name_some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:NAMED_OFFENDERS])
    return shown if len(names) <= NAMED_OFFENDERS else f"{shown} and {len(names) - NAMED_OFFENDERS} more"


def and_more(lines: Sequence[str]) -> str:
    return f" and {len(lines) - 1} more" if len(lines) > 1 else ""


def rules_of(chosen: pd.DataFrame, baseline: str, least: int = 2) -> tuple[str, ...]:
    """Rules in the plan's order, the baseline first; at least so many."""
    rules = list(dict.fromkeys(chosen["rule"]))
    if baseline not in rules:
        raise ConfigError("baseline", baseline, f"is not a rule of this study; it has {', '.join(rules)}")
    if len(rules) < least:
        raise ConfigError(
            "baseline", baseline, "is the only rule of this study; there is nothing to compare it with"
        )
    return (baseline, *(rule for rule in rules if rule != baseline))


def check_losses(rows: pd.DataFrame, source: str) -> None:
    for column, what in (("loss", "loss"), ("compute", "compute")):
        for _, row in rows.iterrows():
            if not (math.isfinite(row[column]) and row[column] > 0):
                raise StudyError(
                    f"{source}: {what}={row[column]} of {row['trial']}: must be finite and positive"
                )


def why_no_multiplier(rows: pd.DataFrame, source: str) -> str | None:
    """The one line that says why these sizes give no law of loss against compute, or None."""
    sizes = list(dict.fromkeys(rows["size"]))
    if len(sizes) < MIN_SIZES:
        return f"{source}: {counted(len(sizes), 'size')} ({', '.join(sizes)}): a comparison needs {MIN_SIZES}"
    compute = rows.groupby("size")["compute"].mean()
    if compute.nunique() == 1:
        return f"{source}: compute={compute.iloc[0]:.6g} FLOP at every size: no slope can be fitted"
    return None
