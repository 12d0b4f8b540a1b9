"""Trials of a study's folder that its plan does not have: in what they differ, for people. Torch-free.

The plan (study.json) is that of the last launch. Whoever launches other seeds, sizes or rules under the same
name finds the earlier trials again by launching all of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnres.words import counted

_NAMED = 4  # values of a key that are named


def describe_unplanned(
    records: Sequence[Mapping[str, Any]], planned: Sequence[Mapping[str, Any]], others: int = 0
) -> str:
    """One line. `records` of trials that are not `planned`; `others`: trials without a readable record.

    Both have `size`, `rule` and `seed`.
    """
    differ, seeds = [], ""
    for key in ("size", "rule", "seed"):
        theirs, ours = (_values(trials, key) for trials in (records, planned))
        if more := [value for value in theirs if value not in ours]:
            differ.append(f"{key} {_some(more)} where the plan has {_some(ours)}")
            if key == "seed":
                seeds = f" (study.seeds=[{','.join(map(str, sorted({*ours, *more}, key=_order)))}], say)"
    what = ", ".join(differ) or "other settings (another budget, corpus, rate or version, say)"
    count = counted(len(records) + others, "other trial folder is", "other trial folders are")
    back = f"; the plan is that of the last launch: one with all of them{seeds} has them again"
    return f"{count} not in this plan: {what}{back if differ else ''}"


def _values(trials: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return list(dict.fromkeys(trial[key] for trial in trials))


def _some(values: Sequence[Any]) -> str:
    more = f" and {len(values) - _NAMED} more" if len(values) > _NAMED else ""
    return ", ".join(map(str, values[:_NAMED])) + more


def _order(value: Any) -> tuple[int, str]:
    return (value, "") if isinstance(value, int) else (0, str(value))
