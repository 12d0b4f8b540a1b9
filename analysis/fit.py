"""`python -m analysis.fit data.csv --law ...`: a scaling law on any table, as a library and a command line.

`fit_csv` returns the document that `--json` prints; docs/analysis.md has its schema.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from analysis.compute_law import fit_compute_law
from analysis.isoflop import BUDGET_TOLERANCE, fit_isoflop
from analysis.multistart import Objective, check_search, intervals_as_json, parse_objective
from analysis.parametric import fit_parametric
from analysis.points import Points, read_points
from attnres.cli import reject_options, run_command, take_flag, take_option, wants_help
from attnres.errors import ConfigError, UserError

SCHEMA = 1
NEEDED: Mapping[str, tuple[str, ...]] = {
    "power": ("C", "loss"),
    "power_floor": ("C", "loss"),
    "parametric": ("N", "D", "loss"),
    "isoflop": ("N", "C", "loss"),
}
DEFAULT_OBJECTIVE: Mapping[str, str] = {
    "power": "log-least-squares",
    "power_floor": "log-least-squares",
    "parametric": "huber:1e-3",
    "isoflop": "least-squares",
}
DEFAULT_STARTS = 500
DEFAULT_DRAWS = 200

HELP = f"""\
Fit a scaling law to a table of finished runs.

usage: python -m analysis.fit data.csv --law LAW --columns N=...,D=...,C=...,loss=... [options]

  --law power         L = A C^-alpha
        power_floor   L = E + A C^-alpha
        parametric    L = E + A N^-alpha + B D^-beta
        isoflop       a parabola in ln N per budget C, then N_opt = k C^a
  --columns MAP       NAME=column of the file; also column*1e6, a/6/b. Of N, D, C a missing one is C = 6 N D
  --where COND        rows to use: "C<1e21", "N>=1e8 and rule==prenorm"
  --drop-highest K    leave out the K rows of highest loss, after --where
  --drop-empty        leave out rows with an empty needed cell (otherwise they are an error)
  --objective OBJ     huber:DELTA, lad, log-least-squares (of ln L), least-squares (of L)
                      [parametric huber:1e-3; power laws log-least-squares]
  --starts S          random starts [{DEFAULT_STARTS}]
  --bootstrap K       draws for intervals, 0 for none [{DEFAULT_DRAWS}]
  --resample KIND     case (rows), or wild (residuals with random signs; least squares only) [case]
  --budget-tolerance  isoflop: budgets closer than this share are one [{BUDGET_TOLERANCE}]
  --seed S            of starts and draws [0]
  --json              the result as JSON on standard output

Examples:
  python -m analysis.fit runs.csv --law parametric --columns N=params,D=tokens,loss=val_loss --json
  python -m analysis.fit analysis/paper/scaling_law.csv --law power \\
      --columns "N=active_params_m*1e6,D=tokens_b*1e9,loss=loss_prenorm\""""


MOST_LOSS_RATIO = 100.0  # of the highest to the lowest; a table with more has another quantity for its loss


def fit_csv(
    path: Path,
    law: str,
    columns: str,
    where: str | None = None,
    drop_highest: int = 0,
    drop_empty: bool = False,
    objective: str | None = None,
    starts: int = DEFAULT_STARTS,
    bootstrap: int = DEFAULT_DRAWS,
    resample: str = "case",
    seed: int = 0,
    budget_tolerance: float = BUDGET_TOLERANCE,
) -> dict[str, Any]:
    """Read a table, fit a law, return the document of `--json`. Raises UserError with one line."""
    if law not in NEEDED:
        raise ConfigError("--law", law, f"one of {', '.join(NEEDED)}")
    chosen = parse_objective(objective or DEFAULT_OBJECTIVE[law])
    check_search(chosen, starts, bootstrap, resample, seed)  # whether or not the law will need them
    points = read_points(path, columns, NEEDED[law], where, drop_highest, drop_empty)
    search = {"starts": starts, "seed": seed, "bootstrap": bootstrap, "resample": resample}
    if law == "parametric":
        values = points.values
        result = fit_parametric(
            values["N"], values["D"], values["loss"], chosen, starts, seed, bootstrap, resample
        ).as_json()
    elif law == "isoflop":
        if chosen != Objective("least-squares"):
            raise ConfigError("--objective", str(chosen), "isoflop parabolas are fitted by least-squares")
        values = points.values
        result = fit_isoflop(values["N"], values["C"], values["loss"], budget_tolerance).as_json()
    else:
        result = _fit_compute(points, law, chosen, search)
    low, high = points.values["loss"].min(), points.values["loss"].max()
    if high > MOST_LOSS_RATIO * low:
        text = f"the loss runs from {low:.4g} to {high:.4g}: is {points.expressions['loss']} a loss?"
        result["warnings"] = [text, *result["warnings"]]
    return {"schema": SCHEMA, "file": str(path), **result, **_provenance(points, where, drop_highest)}


def _fit_compute(points: Points, law: str, objective: Objective, search: dict[str, Any]) -> dict[str, Any]:
    C, L = points.values["C"], points.values["loss"]
    if objective.kind == "log-least-squares":
        return _power(C, L) if law == "power" else _power_floor(C, L)
    fit = fit_compute_law(C, L, objective, with_floor=law == "power_floor", **search)
    return {
        "law": law,
        "equation": _equation(law),
        "parameters": {"A": fit.A, "alpha": fit.alpha, "E": fit.E},
        "fixed": [] if fit.with_floor else ["E"],
        **intervals_as_json(fit.standard_errors, fit.intervals),
        "interval_method": fit.bootstrap,
        "objective": fit.objective,
        "objective_value": fit.objective_value,
        "points_used": fit.points_used,
        "starts": fit.starts,
        "starts_agreeing": fit.starts_agreeing,
        "fitted_range": {"C": list(fit.c_range)},
        "warnings": list(fit.warnings),
    }


def _equation(law: str) -> str:
    return "L = A*C^-alpha" if law == "power" else "L = E + A*C^-alpha"


def _power(C: np.ndarray, L: np.ndarray) -> dict[str, Any]:
    """Least squares of ln L: a closed form, so there are no starts."""
    from analysis.laws import fit_power_law  # pandas: the other laws start without it

    fit = fit_power_law(C, L)
    freedom = L.size - 2
    reach = float(stdtrit(freedom, 0.975))
    x = np.log(C)
    error_log_a = fit.log_residual_std * float(
        np.sqrt(1 / x.size + x.mean() ** 2 / np.sum((x - x.mean()) ** 2))
    )
    errors = {"alpha": fit.exponent_standard_error, "A": fit.coefficient * error_log_a}
    a_low, a_high = (fit.coefficient * float(np.exp(sign * reach * error_log_a)) for sign in (-1, 1))
    return {
        "law": "power",
        "equation": _equation("power"),
        "parameters": {"A": fit.coefficient, "alpha": fit.exponent, "E": 0.0},
        "fixed": ["E"],
        "standard_errors": errors,
        "intervals": {
            "A": [a_low, a_high],
            "alpha": [fit.exponent - reach * errors["alpha"], fit.exponent + reach * errors["alpha"]],
        },
        "interval_method": f"Student t, {freedom} degrees of freedom, 95 %",
        "objective": "log-least-squares",
        "objective_value": fit.log_residual_std**2 * freedom,
        "points_used": fit.points,
        "starts": None,
        "starts_agreeing": None,
        "fitted_range": {"C": [fit.compute_min, fit.compute_max]},
        "warnings": [],
    }


def _power_floor(C: np.ndarray, L: np.ndarray) -> dict[str, Any]:
    """Least squares of ln L, profiled over E; parameters are null where the profile cannot tell E from 0."""
    from analysis.laws import fit_power_law_with_floor

    fit = fit_power_law_with_floor(C, L)
    return {
        "law": "power_floor",
        "equation": _equation("power_floor"),
        "parameters": {"A": fit.coefficient, "alpha": fit.exponent, "E": fit.floor},
        "fixed": [],
        "identified": fit.identified,
        "standard_errors": None,
        "intervals": {"E": [fit.floor_low, fit.floor_high]},
        "interval_method": "profile of E, 95 %",
        "objective": "log-least-squares",
        "objective_value": float(fit.profile_log_rms.min() ** 2 * fit.points),
        "points_used": fit.points,
        "starts": None,
        "starts_agreeing": None,
        "fitted_range": {"C": [float(C.min()), float(C.max())]},
        "warnings": [] if fit.identified else [f"E is not identified: {fit.reason}"],
    }


def _provenance(points: Points, where: str | None, drop_highest: int) -> dict[str, Any]:
    return {
        "points_in_file": points.rows,
        "points_left_out": dict(points.left_out),
        "columns": dict(points.expressions),
        "where": where,
        "outlier_rule": f"the {drop_highest} rows of highest loss are left out" if drop_highest else "none",
    }


def format_fit(document: Mapping[str, Any]) -> str:
    """The document for people."""
    left_out = ", ".join(f"{count} by {why}" for why, count in document["points_left_out"].items() if count)
    lines = [
        f"{document['law']}: {document['equation']}",
        f"points: {document['points_used']} used of {document['points_in_file']}"
        + (f" (left out: {left_out})" if left_out else ""),
        "columns: " + ", ".join(f"{name} = {text}" for name, text in document["columns"].items()),
        f"objective: {document['objective']}, value {document['objective_value']:.8g} (summed over points)",
    ]
    if document["starts"]:
        lines.append(f"starts: {document['starts_agreeing']} of {document['starts']} reach the best optimum")
    errors, intervals = document["standard_errors"] or {}, document["intervals"] or {}
    for name, value in {**document["parameters"], **document.get("derived", {})}.items():
        text = f"  {name:16s} " + ("not identified" if value is None else f"{value:.8g}")
        if name in document.get("fixed", ()):
            text += "  (fixed)"
        if errors.get(name) is not None:
            text += f"  se {errors[name]:.3g}"
        if name in intervals and None not in intervals[name]:
            text += f"  [{intervals[name][0]:.6g}, {intervals[name][1]:.6g}]"
        lines.append(text)
    lines.append(f"intervals: {document['interval_method'] or 'none'}")
    for name, (low, high) in document["fitted_range"].items():
        lines.append(f"fitted range of {name}: {low:.6g} to {high:.6g}")
    return "\n".join([*lines, *(f"warning: {text}" for text in document["warnings"])])


def main(argv: list[str]) -> int:
    if not argv or wants_help(argv):
        print(HELP)
        return 0
    law, columns = take_option(argv, "--law"), take_option(argv, "--columns")
    options: dict[str, Any] = {
        "where": take_option(argv, "--where"),
        "objective": take_option(argv, "--objective"),
        "drop_empty": take_flag(argv, "--drop-empty"),
    }
    as_json = take_flag(argv, "--json")
    for name, option, convert in (
        ("drop_highest", "--drop-highest", int),
        ("starts", "--starts", int),
        ("bootstrap", "--bootstrap", int),
        ("seed", "--seed", int),
        ("resample", "--resample", str),
        ("budget_tolerance", "--budget-tolerance", float),
    ):
        text = take_option(argv, option)
        if text is not None:
            options[name] = _convert(option, text, convert)
    reject_options(argv)
    if len(argv) != 1:
        raise UserError(f"one CSV file is expected, got {' '.join(argv) or 'none'}; --help shows the usage")
    if law is None or columns is None:
        raise UserError(f"{'--law' if law is None else '--columns'}: is needed; --help shows the usage")
    document = fit_csv(Path(argv[0]), law, columns, **options)
    print(json.dumps(document, indent=1, allow_nan=False) if as_json else format_fit(document))
    return 0


def _convert(option: str, text: str, convert: type) -> Any:
    try:
        return convert(text)
    except ValueError:
        raise ConfigError(option, text, "a whole number" if convert is int else "a number") from None


if __name__ == "__main__":
    sys.exit(run_command(main))
