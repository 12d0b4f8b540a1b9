"""What a search has found: JSON, a table of the best, and the learning rates that a study can use."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attnres.errors import ConfigError
from attnres.rates_file import Choice, Optimum, Refusal, write_rates_file
from attnres.record import write_text_atomic
from attnres.words import counted
from sweeps.search_config import Choices, SearchConfig
from sweeps.search_journal import Journal, Suggestion
from sweeps.study import PlannedTrial, Study
from sweeps.table import print_table

JSON_FILE = "search.json"
SHOWN = 10  # rows of the table for each size and rule
EDGE = 0.05  # of the range, in its own scale: an optimum so near to an end is none
_WORDS = {"running": "without a result yet"}  # for people: it may have been stopped
FEWEST = 5  # suggestions that finished, for an optimum

TrialsOf = Callable[[str, Suggestion], list[PlannedTrial]]


def search_json(
    study: Study, search: SearchConfig, journals: Mapping[str, Journal], trials_of: TrialsOf
) -> dict[str, Any]:
    """Everything as plain data; the suggestions of a cell best first, then those without a loss."""
    first = {planned.cell: planned for planned in reversed(study.trials)}
    return {
        "search": search.name,
        "study": study.name,
        "folder": str(study.folder),
        "sampler": search.sampler,
        "seeds": list(study.config.study.seeds),
        "space": {key: vars(values) for key, values in search.space.items()},
        "cells": [
            {
                "size": first[cell].size,
                "rule": first[cell].rule,
                "asked": len(journal.suggestions()),
                "wanted": search.trials,
                "tokens": first[cell].trial.tokens,
                "suggestions": [
                    _row(cell, one, trials_of) for one in sorted(journal.suggestions(), key=_order)
                ],
            }
            for cell, journal in journals.items()
        ],
    }


def _order(one: Suggestion) -> tuple[float, int]:
    return (math.inf if one.loss_nats is None else one.loss_nats, one.number)


def _row(cell: str, one: Suggestion, trials_of: TrialsOf) -> dict[str, Any]:
    try:
        ids = [planned.trial.id for planned in trials_of(cell, one)]
    except ConfigError:
        ids = []
    return {
        "number": one.number,
        "values": dict(one.values),
        "state": one.told,
        "loss_nats": one.loss_nats,
        "reason": one.reason,
        "trials": ids,
    }


def write_search(folder: Path, found: Mapping[str, Any]) -> Path:
    path = folder / JSON_FILE
    write_text_atomic(path, json.dumps(found, indent=1, allow_nan=False) + "\n")
    return path


def print_search(found: Mapping[str, Any]) -> None:
    keys = list(found["space"])
    rows, counts, hidden = [], [], 0
    for cell in found["cells"]:
        for one in cell["suggestions"][:SHOWN]:
            loss = "" if one["loss_nats"] is None else f"{one['loss_nats']:.4f}"
            values = [_short(one["values"][key]) for key in keys]
            rows.append([cell["size"], cell["rule"], *values, loss, _word(one), ", ".join(one["trials"])])
        hidden += max(0, len(cell["suggestions"]) - SHOWN)
        states = [_word(one) for one in cell["suggestions"]]
        words = [f"{states.count(word)} {word}" for word in dict.fromkeys(states)]
        distinct = len({tuple(one["trials"]) for one in cell["suggestions"]})
        counts.append(
            f"{cell['size']} {cell['rule']}: {cell['asked']} of {cell['wanted']} suggestions, "
            f"{distinct} of them distinct: {', '.join(words) or 'none yet'}"
        )
    columns = ["size", "rule", *keys, "loss", "state", "trial"]
    title = (
        f"search {found['search']} by {found['sampler']}: the best of each size and rule, nats per token, "
        f"mean over seeds {found['seeds']}"
    )
    print_table(title, columns, rows, ["size", "rule", "state", "trial"])
    if hidden:
        print(f"the best {SHOWN} of each size and rule are shown; --json has the other {hidden}")
    print("\n".join([*counts, f"trials: {found['folder']}"]))


def _word(one: Mapping[str, Any]) -> str:
    return _WORDS.get(one["state"], one["state"])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def rates_of_search(
    found: Mapping[str, Any], choice: Choice, search: SearchConfig, baseline: str
) -> tuple[list[str], bool]:
    """Write the best learning rate of each cell; lines, and whether none was refused."""
    results = [
        _optimum(cell, search)
        for cell in found["cells"]
        if choice.kind == "per_rule" or cell["rule"] == baseline
    ]
    optima = [one for one in results if isinstance(one, Optimum)]
    refused = [one for one in results if isinstance(one, Refusal)]
    source = {
        "study": found["study"],
        "baseline": baseline,
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python -m sweeps.search ({found['sampler']}, {search.trials} suggestions)",
        "space": found["space"],
        "seeds": found["seeds"],
        "method": "rate of the lowest loss among all suggestions, means over seeds",
    }
    write_rates_file(choice.target, choice.kind, optima, refused, source)
    lines = [f"refused: {one.size} {one.rule}: {one.why}" for one in refused]
    return [
        *lines,
        f"rates: {choice.target.path} ({counted(len(optima), 'rate')}; use: {choice.target.usage})",
    ], not refused


def _optimum(cell: Mapping[str, Any], search: SearchConfig) -> Optimum | Refusal:
    size, rule = cell["size"], cell["rule"]
    finished = [one for one in cell["suggestions"] if one["loss_nats"] is not None]
    if len(finished) < FEWEST:
        return Refusal(size, rule, f"{len(finished)} finished suggestions are fewer than {FEWEST}")
    best = finished[0]
    ((key, values),) = search.space.items()
    rate = float(best["values"][key])
    if isinstance(values, Choices):
        ends = min(values.values), max(values.values)
        at_edge = rate in ends
    else:
        ends = values.low, values.high
        scale: Callable[[float], float] = math.log if values.log else float
        place = (scale(rate) - scale(ends[0])) / (scale(ends[1]) - scale(ends[0]))
        at_edge = not EDGE <= place <= 1 - EDGE
    if at_edge:
        return Refusal(
            size, rule, f"best {rate:.3g}: at the edge of the searched {ends[0]:g} to {ends[1]:g}: widen it"
        )
    rates = sorted(float(one["values"][key]) for one in finished)
    about = {
        "interval_95": None,
        "between": _neighbours(rate, rates),
        "loss_nats": best["loss_nats"],
        "tokens": cell["tokens"],
        "finished": len(finished),
        "trials": best["trials"],
    }
    return Optimum(size, rule, rate, about)


def _neighbours(rate: float, rates: Sequence[float]) -> list[float | None]:
    """The nearest other rates that were tried."""
    below = [one for one in rates if one < rate]
    above = [one for one in rates if one > rate]
    return [below[-1] if below else None, above[0] if above else None]
