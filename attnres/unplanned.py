"""Trials of a study's folder that its plan does not have: in what they differ, for people. Torch-free.

Whoever launches other seeds, sizes or rules under the same name has a plan of these alone. The earlier trials
are found again by a launch that has both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnres.words import counted

_NAMED = 4  # values of a key that are named


def describe_unplanned(
    records: Sequence[Mapping[str, Any]], planned: Sequence[Mapping[str, Any]], others: int = 0
) -> str:
    """One line. `records` of trials that are not `planned`; `others`: trials without a readable record."""
    count = counted(len(records) + others, "other trial folder is", "other trial folders are")
    if not (differ := differences(records, planned)):
        return f"{count} not in this plan: other settings (another budget, corpus, rate or version, say)"
    seeds = sorted({trial["seed"] for trial in (*records, *planned)})
    say = f" (study.seeds=[{','.join(map(str, seeds))}], say)" if any("seed" in one for one in differ) else ""
    back = f"a launch with the settings that they were trained with, and with both{say}, has them again"
    return f"{count} not in this plan: {', '.join(differ)}; {back}"


def differences(records: Sequence[Mapping[str, Any]], planned: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sizes, rules, seeds and numbers of steps of the records that the plan does not have.

    Both have `size`, `rule` and `seed`; a record has `planned_steps`, a planned trial `steps` or nothing.
    """
    found = []
    for key in ("size", "rule", "seed"):
        theirs, ours = (list(dict.fromkeys(trial[key] for trial in trials)) for trials in (records, planned))
        if more := [value for value in theirs if value not in ours]:
            found.append(f"{key} {_some(more)} where the plan has {_some(ours)}")
    for size in dict.fromkeys(trial["size"] for trial in planned):
        # A plan mangled by hand may have anything there.
        of_plan = (trial.get("steps") for trial in planned if trial["size"] == size)
        steps = {count for count in of_plan if type(count) is int}
        other = {record["planned_steps"] for record in records if record["size"] == size} - steps
        if steps and other:
            found.append(f"{_some(sorted(other))} steps of {size} where the plan has {_some(sorted(steps))}")
    return found


def _some(values: Sequence[Any]) -> str:
    more = f" and {len(values) - _NAMED} more" if len(values) > _NAMED else ""
    return ", ".join(map(str, values[:_NAMED])) + more
