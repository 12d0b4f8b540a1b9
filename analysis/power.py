"""What a design can tell: power of the size-paired comparison, its cost, the smallest design that suffices.

Model: the gap in ln L at a size is alpha ln m plus noise; with K paired seeds its variance is 2 s^2 / K plus
that of a true scatter over sizes. ln m is the mean gap over alpha, judged by Student's t over S sizes, so its
power is a noncentral t probability (exact for a known alpha; alpha's error is added by the delta method).

`python -m analysis.power study=X` takes noise, alpha and costs from records, or from options.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import nctdtr, stdtrit

from attnres.cli import reject_options, run_command, take_flag, take_option, wants_help
from attnres.config import NAME_PATTERN
from attnres.errors import ConfigError, UserError
from attnres.words import counted

if TYPE_CHECKING:
    from analysis.pilot import Pilot

CLAIMED = 1.25  # the paper's claim: 20 % saving
RIVAL = 4 / 3  # 25 % saving
LEVEL = 0.05
ENOUGH_POWER = 0.8
MIN_SIZES = 3
SURE = 500.0  # standard errors between truth and tested value at which a test of 3 or more sizes never fails
MOST_OF_EITHER = 10_000  # sizes, seeds
MOST_COST = 1e40  # FLOP or hours of a size
# What a user can mean; far beyond, the arithmetic overflows.
RANGES = {"noise": (1e-9, 10.0), "alpha": (1e-4, 10.0), "multiplier": (0.01, 100.0), "rival": (0.01, 100.0)}


@dataclass(frozen=True)
class SizeCost:
    """Cost of one seed of one size, summed over all rules of the study."""

    name: str
    flops: float
    hours: float | None = None


@dataclass(frozen=True)
class DesignPower:
    """What S sizes x K seeds can tell if the true multiplier is `PowerPlan.multiplier`."""

    sizes: int
    seeds: int
    standard_error: float  # of ln m
    power_positive: float  # P(one-sided 5 % test rejects m <= 1)
    power_rival: float  # P(one-sided 5 % test rejects the rival)
    power_interval: float  # P(the report's 95 % interval leaves the rival out on the right side)
    flops: float | None
    hours: float | None


@dataclass(frozen=True)
class PowerPlan:
    """Designs in order of cost (or of runs), and the smallest that tells `multiplier` from `rival`.

    `smallest` is None when no design within the budget does; `reason` then says so.
    """

    noise: float
    alpha: float
    size_scatter: float
    multiplier: float
    rival: float
    enough: float
    designs: tuple[DesignPower, ...]
    smallest: DesignPower | None
    reason: str


def standard_error(
    noise: float,
    alpha: float,
    sizes: int,
    seeds: int,
    size_scatter: float = 0.0,
    multiplier: float = CLAIMED,
    log_compute_spread: float = math.inf,
) -> float:
    """Standard error of ln m.

    `noise` is the standard deviation of ln L over runs (paired: that of the difference over sqrt 2),
    `size_scatter` that of the true gap in ln L over sizes. `log_compute_spread` is the sum over sizes of
    (ln C - mean)^2, which sets the error of alpha; infinite means alpha is known.
    """
    gap_variance = (2 * noise**2 / seeds + size_scatter**2) / sizes
    alpha_variance = noise**2 / (2 * seeds * log_compute_spread)  # slope through both arms' points
    return math.sqrt(gap_variance + math.log(multiplier) ** 2 * alpha_variance) / alpha


def t_power(distance: float, error: float, freedom: int, level: float = LEVEL) -> float:
    """P(one-sided t test at `level` rejects) when the truth is `distance` beyond the tested value."""
    if error == 0:
        return float(distance > 0)
    if abs(distance) / error > SURE:  # the distribution's own code gives nan far out
        return float(distance > 0)
    return float(1 - nctdtr(freedom, distance / error, stdtrit(freedom, 1 - level)))


def plan_power(
    noise: float,
    alpha: float,
    sizes: Sequence[int] = (3, 4, 5, 6),
    seeds: Sequence[int] = (1, 2, 3, 5, 8),
    cost_per_size: Sequence[SizeCost] = (),
    size_scatter: float = 0.0,
    multiplier: float = CLAIMED,
    rival: float = RIVAL,
    enough: float = ENOUGH_POWER,
    budget_flops: float | None = None,
    budget_hours: float | None = None,
) -> PowerPlan:
    """Power and cost of every design sizes x seeds.

    With `cost_per_size` a design of S sizes is the S cheapest, and designs of more sizes than there are costs
    are left out. `multiplier` is the assumed truth, `rival` the value it must be told from; a design suffices
    when its 95 % interval excludes the rival with probability `enough`. Raises ConfigError.
    """
    _check(noise, alpha, sizes, seeds, cost_per_size, size_scatter, multiplier, rival, enough)
    for option, limit in (("--budget-flops", budget_flops), ("--budget-hours", budget_hours)):
        if limit is not None and not 0 < limit < math.inf:
            raise ConfigError(option, limit, "must be positive and finite")
    costs = sorted(cost_per_size, key=lambda cost: cost.flops)
    rows = []
    for count in sorted(set(sizes)):
        if costs and count > len(costs):
            continue
        chosen = costs[:count]
        log_compute = np.log([cost.flops for cost in chosen])
        if costs and np.ptp(log_compute) == 0:
            raise ConfigError("size_flops", chosen[0].flops, f"is that of all of the {count} cheapest sizes")
        spread = float(((log_compute - log_compute.mean()) ** 2).sum()) if costs else math.inf
        for repeats in sorted(set(seeds)):
            error = standard_error(noise, alpha, count, repeats, size_scatter, multiplier, spread)
            hours = [cost.hours for cost in chosen if cost.hours is not None]
            rows.append(
                DesignPower(
                    sizes=count,
                    seeds=repeats,
                    standard_error=error,
                    power_positive=t_power(math.log(multiplier), error, count - 1),
                    power_rival=t_power(abs(math.log(rival / multiplier)), error, count - 1),
                    power_interval=t_power(abs(math.log(rival / multiplier)), error, count - 1, LEVEL / 2),
                    flops=repeats * sum(cost.flops for cost in chosen) if costs else None,
                    hours=repeats * sum(hours) if costs and len(hours) == count else None,
                )
            )
    rows.sort(key=lambda row: (row.flops or 0.0, row.sizes * row.seeds, row.sizes))
    affordable = [row for row in rows if _within(row, budget_flops, budget_hours)]
    smallest = next((row for row in affordable if row.power_interval >= enough), None)
    return PowerPlan(
        noise=noise,
        alpha=alpha,
        size_scatter=size_scatter,
        multiplier=multiplier,
        rival=rival,
        enough=enough,
        designs=tuple(rows),
        smallest=smallest,
        reason=_reason(smallest, rows, affordable, multiplier, rival, enough),
    )


def _check(
    noise: float,
    alpha: float,
    sizes: Sequence[int],
    seeds: Sequence[int],
    costs: Sequence[SizeCost],
    size_scatter: float,
    multiplier: float,
    rival: float,
    enough: float,
) -> None:
    for name, value in (("noise", noise), ("alpha", alpha), ("multiplier", multiplier), ("rival", rival)):
        low, high = RANGES[name]
        if not low <= value <= high:
            raise ConfigError(name, value, f"must be from {low:g} to {high:g}")
    if not 0 <= size_scatter <= RANGES["noise"][1]:
        raise ConfigError("size_scatter", size_scatter, f"must be from 0 to {RANGES['noise'][1]:g}")
    if multiplier == rival:
        raise ConfigError("rival", rival, "equals the multiplier; there is nothing to tell apart")
    if not 0 < enough < 1:
        raise ConfigError("enough", enough, "a probability between 0 and 1")
    if not sizes or min(sizes) < MIN_SIZES:
        raise ConfigError("sizes", list(sizes), f"a comparison needs at least {MIN_SIZES} sizes")
    if not seeds or min(seeds) < 1:
        raise ConfigError("seeds", list(seeds), "at least 1")
    for name, counts in (("sizes", sizes), ("seeds", seeds)):
        if max(counts) > MOST_OF_EITHER:
            raise ConfigError(name, list(counts), f"at most {MOST_OF_EITHER:,}")
    for cost in costs:
        for unit, spent in (("FLOP", cost.flops), ("hours", cost.hours)):
            if spent is not None and not 0 < spent <= MOST_COST:
                raise ConfigError(f"cost of {cost.name}", spent, f"must be positive {unit}")
    if costs and min(sizes) > len(costs):
        raise ConfigError("sizes", list(sizes), f"costs are known for {counted(len(costs), 'size')} only")


def _within(row: DesignPower, flops: float | None, hours: float | None) -> bool:
    for option, limit, cost in (("--budget-flops", flops, row.flops), ("--budget-hours", hours, row.hours)):
        if limit is not None and cost is None:
            raise ConfigError(
                option, limit, "the costs of the sizes are not known: state, measure or read them"
            )
        if limit is not None and cost is not None and cost > limit:
            return False
    return True


def _reason(
    smallest: DesignPower | None,
    rows: Sequence[DesignPower],
    affordable: Sequence[DesignPower],
    multiplier: float,
    rival: float,
    enough: float,
) -> str:
    question = f"tell {multiplier:.4g}x from {rival:.4g}x with power {enough:.0%}"
    if smallest is not None:
        design = f"{smallest.sizes} sizes x {counted(smallest.seeds, 'seed')}"
        return f"{design} is the smallest design that can {question}"
    if not affordable:
        return f"no design is within the budget; the cheapest needs {_cost_text(rows[0])}"
    within = "" if len(affordable) == len(rows) else " within the budget"
    best = max(affordable, key=lambda row: row.power_interval)
    return (
        f"none of the {len(affordable)} designs{within} can {question}; the best, "
        f"{best.sizes} sizes x {counted(best.seeds, 'seed')}, has power {best.power_interval:.0%}"
    )


def _cost_text(row: DesignPower) -> str:
    flops = "" if row.flops is None else f"{row.flops:.3g} FLOP"
    return flops + ("" if row.hours is None else f", {row.hours:.3g} h")


def format_plan(plan: PowerPlan) -> str:
    """The plan as a table in plain text, with the verdict as the last line."""
    lines = [
        f"noise of ln L per run {plan.noise:.3g}, alpha {plan.alpha:.4g}, scatter over sizes "
        f"{plan.size_scatter:.3g}; if the multiplier is {plan.multiplier:.4g} "
        f"(saving {1 - 1 / plan.multiplier:.0%})",
        f"{'sizes x seeds':>13}  {'SE(ln m)':>8}  {'P(m > 1)':>8}  {f'P(not {plan.rival:.4g})':>12}  "
        f"{'95 % interval':>13}  {'cost':>20}",
    ]
    for row in plan.designs:
        lines.append(
            f"{f'{row.sizes} x {row.seeds}':>13}  {row.standard_error:8.4f}  {row.power_positive:8.3f}  "
            f"{row.power_rival:12.3f}  {row.power_interval:13.3f}  {_cost_text(row):>20}"
        )
    lines.append(
        "P: one-sided 5 % t tests; 95 % interval: the report's interval leaves the rival out (2.5 % a side)"
    )
    return "\n".join([*lines, plan.reason])


HELP = """\
What can a study of S sizes x K seeds tell? Power, cost, and the smallest design that suffices.

usage: python -m analysis.power study=NAME [runs_dir=runs] [where="KEY=VALUE"] [options]
                                                                       noise, alpha, costs from a pilot
       python -m analysis.power --noise .002 --alpha .057 [options]    stated values

  --noise S           standard deviation of ln L over runs of one size and rule (overrides the pilot's, which
                      is that of the paired difference of two rules over sqrt 2: what seeds share cancels)
  --alpha A           exponent of L = A C^-alpha (overrides the pilot's)
  --size-scatter S    standard deviation over sizes of the true gap in ln L [0]
  --sizes 3,4,5,6     numbers of sizes            --seeds 1,2,3,5,8   numbers of seeds
  --size-flops F,..   FLOP of one seed of each size, all rules together (for stated values)
  --size-hours H,..   hours of the same
  --multiplier M      the assumed truth [1.25]    --rival M           what it must be told from [4/3]
  --enough P          power that suffices [0.8]
  --budget-flops F    --budget-hours H            designs above are not chosen
  --json              the plan as JSON on standard output

A pilot is 3 or more seeds of two rules at the cheapest sizes. With fewer than 3 sizes give --alpha.

Examples:
  python -m analysis.power --noise .002 --alpha .057 --sizes 5 --seeds 3
  python -m analysis.power study=PILOT --budget-hours 10"""


def main(argv: list[str]) -> int:
    if not argv or wants_help(argv):
        print(HELP)
        return 0
    pilot = _pilot(argv)
    noise, alpha = _number(argv, "--noise"), _number(argv, "--alpha")
    as_json = take_flag(argv, "--json")
    given = {
        name: value
        for name in ("size_scatter", "multiplier", "rival", "enough", "budget_flops", "budget_hours")
        if (value := _number(argv, "--" + name.replace("_", "-"))) is not None
    }
    flops, hours = _numbers(argv, "--size-flops"), _numbers(argv, "--size-hours")
    counts = {
        name: [_count(f"--{name}", value) for value in values]
        for name in ("sizes", "seeds")
        if (values := _numbers(argv, f"--{name}"))
    }
    reject_options(argv)
    if argv:
        raise UserError(f"{argv[0]}: not an argument of analysis.power; --help lists them")
    costs = _stated_costs(flops, hours) or (pilot.costs if pilot else ())
    noise = noise if noise is not None else pilot.noise if pilot else None
    alpha = alpha if alpha is not None else pilot.alpha if pilot else None
    if noise is None:
        raise UserError("--noise: give it, or study=NAME with records of 2 or more seeds")
    if alpha is None:
        raise UserError("--alpha: give it; a pilot of fewer than 3 sizes does not show it")
    if costs and "sizes" not in counts:
        counts["sizes"] = list(range(MIN_SIZES, max(MIN_SIZES, len(costs)) + 1))
    settings: dict[str, Any] = {"alpha": alpha, "cost_per_size": costs, **counts, **given}
    plan = plan_power(noise, **settings)
    careful = plan_power(pilot.noise_high, **settings) if pilot is not None and noise == pilot.noise else None
    if as_json:
        document = {
            "pilot": None if pilot is None else asdict(pilot),
            **asdict(plan),
            "at_noise_high": None if careful is None else asdict(careful),
        }
        print(json.dumps(document, indent=1, allow_nan=False))
        return 0
    print((pilot.text() + "\n" if pilot else "") + format_plan(plan))
    if careful is not None:
        print(f"at the upper end of the pilot's noise, {careful.noise:.3g}: {careful.reason}")
    return 0


def _pilot(argv: list[str]) -> Pilot | None:
    """Take study= and runs_dir= out of argv and read the pilot, if one is named."""
    settings = dict(word.split("=", 1) for word in argv if "=" in word and not word.startswith("-"))
    for key in settings:
        if key not in ("study", "runs_dir", "where"):
            raise ConfigError(key, settings[key], "unknown; one of study, runs_dir, where")
    argv[:] = [word for word in argv if word.startswith("-") or "=" not in word]
    if "study" not in settings:
        return None
    if not NAME_PATTERN.fullmatch(settings["study"]):
        raise ConfigError("study", settings["study"], "name the study of the pilot, for example study=smoke")
    from analysis.pilot import read_pilot  # pandas: the planner itself starts without it
    from analysis.rows import parse_where

    where = parse_where(settings.get("where", ""))
    return read_pilot(Path(settings.get("runs_dir", "runs")), settings["study"], where=where)


def _number(argv: list[str], option: str) -> float | None:
    values = _numbers(argv, option)
    if len(values) > 1:
        raise ConfigError(option, ",".join(map(str, values)), "one number")
    return values[0] if values else None


def _numbers(argv: list[str], option: str) -> list[float]:
    text = take_option(argv, option)
    if text is None:
        return []
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(option, text, "numbers separated by commas") from None


def _count(option: str, value: float) -> int:
    if not math.isfinite(value) or value != int(value):
        raise ConfigError(option, value, "whole numbers separated by commas")
    return int(value)


def _stated_costs(flops: Sequence[float], hours: Sequence[float]) -> tuple[SizeCost, ...]:
    if hours and len(hours) != len(flops):
        raise ConfigError("--size-hours", len(hours), f"as many as --size-flops ({len(flops)})")
    costs = tuple(SizeCost(f"size {i + 1}", value) for i, value in enumerate(flops))
    return (
        tuple(replace(cost, hours=hour) for cost, hour in zip(costs, hours, strict=True)) if hours else costs
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
