"""From a report of rates to the config file that studies use: which optimum for whom, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from analysis.rates import RateCurve, RatesResult
from attnres.rates_file import Choice, Optimum, Refusal, rounded, write_rates_file
from attnres.words import counted


def write_choice(result: RatesResult, choice: Choice, how: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Write the file; lines for the terminal, and whether every size (and rule) has a rate in it.

    Shared is the baseline's optimum for all rules, as in the paper. UserError if nothing can be written.
    """
    data = result.data
    rules = (data.baseline,) if choice.kind == "shared" else data.rules
    curves = [curve for curve in result.curves if curve.rule in rules]
    optima = [_optimum(curve) for curve in curves if curve.vertex_rate is not None]
    refused = [
        Refusal(curve.size, curve.rule, f"best {curve.best_rate:.3g}: {curve.refused}")
        for curve in curves
        if curve.vertex_rate is None
    ]
    refused += [Refusal(*one) for one in result.absent if one[1] in rules]
    has = {(curve.size, curve.rule) for curve in curves} | {one[:2] for one in result.absent}
    sizes = dict.fromkeys([*result.sizes, *(one[0] for one in result.absent)])
    refused += [
        Refusal(size, rule, "has no trials") for size in sizes for rule in rules if (size, rule) not in has
    ]
    write_rates_file(choice.target, choice.kind, optima, refused, _source(result, how))
    lines = [f"refused: {one.size} {one.rule}: {one.why}" for one in refused]
    lines.append(f"rates: {choice.target.path} ({counted(len(optima), 'rate')}; use: {choice.target.usage})")
    return lines, not refused


def _optimum(curve: RateCurve) -> Optimum:
    assert curve.vertex_rate is not None
    about = {
        "interval_95": None if curve.interval is None else [rounded(end) for end in curve.interval],
        "between": [*curve.neighbours],
        "loss_nats": curve.vertex_loss,
        "tokens": int(curve.tokens),
        "seeds": curve.seeds,
        "diverged": [*curve.diverged],
        "trials": [*curve.trials],
    }
    return Optimum(curve.size, curve.rule, curve.vertex_rate, about)


def _source(result: RatesResult, how: Mapping[str, Any]) -> dict[str, Any]:
    data = result.data

    def values(column: str) -> list[str]:
        return sorted(set(map(str, data.table[column].dropna())))

    return {
        "study": data.name,
        "baseline": data.baseline,
        "date": datetime.now(UTC).date().isoformat(),
        "command": str(how["command"]),
        "commits": values("commit"),
        "data": values("data_fingerprint"),
        "validation": values("validation_fingerprint"),
        "method": "parabola in ln(rate) through the best rate and its neighbours; means over seeds",
        "let_pass": list(data.let_pass),
    }
