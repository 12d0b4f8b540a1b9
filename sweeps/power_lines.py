"""What a planned study can tell: the planner of the analysis, with the study's own sizes and costs.

The only place where sweeps asks analysis for something; it asks for arithmetic, and for the noise of a
pilot's records. Imported by sweeps.plan when it is used, for pandas and scipy take a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.pilot import Pilot, read_pilot
from analysis.power import MIN_SIZES, RANGES, DesignPower, PowerPlan, SizeCost, plan_power
from attnres.errors import ConfigError, UserError
from attnres.words import counted
from sweeps.capacity import capacity
from sweeps.study import STUDY_FILE, Study

if TYPE_CHECKING:
    from sweeps.plan import PlanRow

ASSUMED_NOISE = 0.005  # of ln L per run; assumed: in the middle of what the planner's table covers
ASSUMED_ALPHA = 0.057  # of the paper's table, refitted
SEEDS = (1, 2, 3, 5, 8)


@dataclass(frozen=True)
class StudyPower:
    """Designs of 3 sizes up to all of the study's, by seeds; `own` is the study's.

    `source` says where noise and alpha are from; `careful` is the plan at the upper end of a pilot's noise.
    """

    plan: PowerPlan
    own: DesignPower
    source: str
    pilot: Pilot | None
    careful: PowerPlan | None

    def as_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "pilot": None if self.pilot is None else asdict(self.pilot),
            "study": asdict(self.own),
            **asdict(self.plan),
            "at_noise_high": None if self.careful is None else asdict(self.careful),
        }

    def lines(self) -> list[str]:
        """For people: from what, what the study itself can tell, the smallest design that suffices."""
        plan, own = self.plan, self.own
        lines = [
            f"power, if the multiplier is {plan.multiplier:.4g}: {self.source}",
            f"  this study, {own.sizes} sizes x {counted(own.seeds, 'seed')}: standard error of ln m "
            f"{own.standard_error:.3f}; shows m > 1 with probability {own.power_positive:.2f}, leaves "
            f"{plan.rival:.4g} outside its 95 % interval with {own.power_interval:.2f}",
            f"  {plan.reason}{_cost(plan.smallest)}",
        ]
        if self.careful is not None:
            careful = self.careful
            lines.append(
                f"  at the upper end of the pilot's noise, {careful.noise:.3g}: {careful.reason}"
                f"{_cost(careful.smallest)}"
            )
        return lines


def study_power(
    study: Study,
    rows: Sequence[PlanRow],
    pilot_study: str | None = None,
    budget_flops: float | None = None,
    budget_hours: float | None = None,
) -> StudyPower | str:
    """The planner on this study, or why it has nothing to say.

    Noise and alpha come from the records of `pilot_study`, which must have them, else from the study's own
    where they show them, else they are assumed.
    """
    seeds = len(dict.fromkeys(planned.seed for planned in study.trials))
    if (report := study.config.study.report) not in (None, "multiplier"):
        return f"power: study.report={report}: no multiplier to plan for"
    costs = size_costs(study, rows)
    if len(costs) < MIN_SIZES:
        return f"power: {counted(len(costs), 'size')}, fewer than the {MIN_SIZES} that a comparison needs"
    if len({planned.rule for planned in study.trials}) < 2:
        return "power: one rule; there is nothing to compare it with"
    pilot, noise, alpha, source = _noise(study, pilot_study)
    settings: dict[str, Any] = {
        "alpha": alpha,
        "sizes": range(MIN_SIZES, len(costs) + 1),
        "seeds": sorted({*SEEDS, seeds}),
        "cost_per_size": costs,
        "budget_flops": budget_flops,
        "budget_hours": budget_hours,
    }
    plan = plan_power(noise, **settings)
    (own,) = [d for d in plan.designs if (d.sizes, d.seeds) == (len(costs), seeds)]
    careful = plan_power(pilot.noise_high, **settings) if pilot is not None else None
    return StudyPower(plan, own, source, pilot, careful)


def size_costs(study: Study, rows: Sequence[PlanRow]) -> tuple[SizeCost, ...]:
    """Cost of one seed of each size, summed over the rules, at the first value of every other axis.

    Hours are of the wall clock, with all of the executor's workers busy; None where a time is not known.
    """
    first = study.trials[0]
    chosen: dict[str, list[PlanRow]] = {}
    for row in rows:
        if row.planned.seed == first.seed and row.planned.axes == first.axes:
            chosen.setdefault(row.planned.size, []).append(row)
    costs = []
    for size, members in chosen.items():
        seconds = [row.seconds for row in members if row.seconds is not None]
        hours = sum(seconds) / capacity(study).workers / 3600 if len(seconds) == len(members) else None
        costs.append(SizeCost(size, float(sum(row.planned.flops for row in members)), hours))
    return tuple(costs)


def _noise(study: Study, pilot_study: str | None) -> tuple[Pilot | None, float, float, str]:
    """Pilot, noise, alpha, and in words where they are from."""
    assumed = f"alpha {ASSUMED_ALPHA} (the paper's)"
    try:
        pilot = read_pilot(Path(study.config.runs_dir), pilot_study or study.name)
        if not pilot.noise >= RANGES["noise"][0]:
            raise ConfigError("--pilot", pilot_study, f"its runs do not differ (noise {pilot.noise:.3g})")
    except UserError as error:
        if pilot_study is not None:
            raise
        # A plan comes before its records: none, or too few of them, is the usual case and no mistake.
        why = str(error) if (study.folder / STUDY_FILE).exists() else "there are no records yet"
        text = f"assumed noise of ln L per run {ASSUMED_NOISE} and {assumed}, for {why}"
        return None, ASSUMED_NOISE, ASSUMED_ALPHA, text
    if pilot.alpha is not None and pilot.alpha > 0:
        return pilot, pilot.noise, pilot.alpha, pilot.text()
    return pilot, pilot.noise, ASSUMED_ALPHA, f"{pilot.text()}; assumed {assumed}"


def _cost(design: DesignPower | None) -> str:
    if design is None or design.flops is None:
        return ""
    hours = "" if design.hours is None else f", about {design.hours:.3g} h here"
    return f" ({design.flops:.3g} FLOPs{hours})"
