"""The paper's own numbers, refitted; `python -m analysis.published` prints, writes and draws them.

The tables in analysis/paper/ were typed from "Attention Residuals" (arXiv:2603.15031): Table 2 (losses of
five sizes), Figure 4 (curves), Figure 6 (block sizes), Table 4 (ablation), Table 1 (memory traffic). The
paper does not print C; conventions below are ours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.bootstrap import BootstrapInterval, wild_cluster_bootstrap
from analysis.checks import (
    EqualExponents,
    LeaveLargestOut,
    equal_exponents,
    leave_largest_out,
    leave_one_size_out,
)
from analysis.claims import STANDARD_CLAIMS, Judgement, judge
from analysis.compare import Multiplier, paired_multiplier
from analysis.laws import FloorFit, PowerLaw, fit_power_law, fit_power_law_with_floor, size_means
from attnres.counts import FLOP_PER_PFLOPS_DAY

PAPER = Path(__file__).resolve().parent / "paper"
BASELINE = "prenorm"
RULES = ("attnres_block", "attnres_full", "mhc_lite")
UNIT = "PFLOP/s-days"
HEADLINE = "6nd"
CONVENTIONS: Mapping[str, str] = {
    "6nd": "6 N D, N active parameters",
    "6nd_causal": "6 N D + causal attention, 6 L_b d T D",
    "6nd_attention": "6 N D + attention over the whole square, 12 L_b d T D",
    "6nd_causal_rule": "6 N D + causal attention + the AttnRes reads (4 d FLOP per source, three passes)",
}
FLOORS = (0.0, 0.7, 1.4)
NEAR = 8  # depth blocks of Block AttnRes, "about 8" in the paper
LOSS_ROUNDING = 0.0005  # half a unit of the last printed digit, nats
COEFFICIENT_ROUNDING = 0.0005  # the same for A and alpha of Figure 4
FIGURE_4_COMPUTE = 5.6  # PFLOP/s-days, where the paper reads 1.25x

# Table 1: traffic of the residual path per token and layer, in elements; d width, N blocks, S layers a block,
# m streams. The paper's typical shape is L = 128 layers, N = 8, S = 16, m = 4; the width is Table 2's 436M
# model.
TYPICAL_WIDTH, TYPICAL_BLOCKS, TYPICAL_BLOCK_SIZE, TYPICAL_STREAMS = 1168, 8, 16, 4
MEMORY_IO: Mapping[str, Callable[[int, int, int, int], float]] = {
    "prenorm": lambda d, N, S, m: 3 * d,
    "mhc": lambda d, N, S, m: (8 * m + 2) * d + 2 * m**2 + 4 * m,
    "attnres_full_two_phase": lambda d, N, S, m: (S + N) * d,
    "attnres_block_two_phase": lambda d, N, S, m: (N / S + 5) * d,
}


@dataclass(frozen=True)
class PublishedRule:
    """One rule of Table 2 against PreNorm."""

    multiplier: Multiplier  # C = 6 N D
    judgements: tuple[Judgement, ...]
    by_convention: Mapping[str, Multiplier]  # without the conventions that are not known for the rule
    by_floor: Mapping[float, Multiplier]
    without_size: Mapping[str, float]
    largest_out: LeaveLargestOut | None
    exponents: EqualExponents
    bootstrap: BootstrapInterval
    loss_rounding: tuple[float, float]  # m if every printed loss erred against or for the rule


@dataclass(frozen=True)
class Published:
    """Everything that `python -m analysis.published` prints, writes and draws."""

    table: pd.DataFrame  # Table 2: size, rule, compute_<convention> in PFLOP/s-days, loss
    fits: Mapping[str, Mapping[str, PowerLaw]]  # convention -> rule -> own fit
    floors: Mapping[str, FloorFit]  # C = 6 N D
    rules: Mapping[str, PublishedRule]
    between: Mapping[str, Multiplier]  # "full over block", ...
    curves: Mapping[str, tuple[float, float]]  # Figure 4's A and alpha
    curve_multiplier: Mapping[float, tuple[float, float, float]]  # C -> value, lowest, highest by rounding
    ablation: pd.DataFrame
    block_size: pd.DataFrame
    memory_io: Mapping[str, float]  # elements per token and layer in units of d, at the paper's typical shape


def read_table(name: str) -> pd.DataFrame:
    """A table of analysis/paper/ by file name without ending."""
    return pd.read_csv(PAPER / f"{name}.csv")


def table_2() -> pd.DataFrame:
    """Table 2 as rows size x rule, with C by every convention (NaN where it is not known)."""
    wide = read_table("scaling_law")
    rows = []
    for rule in (BASELINE, *RULES):
        for size in wide.to_dict(orient="records"):
            row = {"size": f"{size['active_params_m']:.0f}M", "rule": rule, "loss": size[f"loss_{rule}"]}
            for convention in CONVENTIONS:
                flops = flops_per_token(size, rule, convention) * size["tokens_b"] * 1e9
                row[f"compute_{convention}"] = flops / FLOP_PER_PFLOPS_DAY
            rows.append(row)
    return pd.DataFrame(rows)


def flops_per_token(size: Mapping[Any, Any], rule: str, convention: str) -> float:
    """Training FLOP per token of a row of Table 2."""
    attention = size["transformer_blocks"] * size["d_model"] * size["context_length"]
    flops = 6e6 * size["active_params_m"]
    if convention in ("6nd_causal", "6nd_causal_rule"):
        flops += 6 * attention
    if convention == "6nd_attention":
        flops += 12 * attention
    if convention == "6nd_causal_rule":
        flops += 3 * rule_flops_per_token(rule, 2 * int(size["transformer_blocks"]), int(size["d_model"]))
    return float(flops)


def rule_flops_per_token(rule: str, layers: int, width: int) -> float:
    """Forward FLOP of the residual path; NaN for mHC-lite, whose work the table does not tell.

    A read of n sources costs 2 d n for logits and 2 d n for the mix; PreNorm adds once per layer.
    """
    if rule == BASELINE:
        return layers * width
    if rule == "mhc_lite":
        return math.nan
    if rule == "attnres_full":
        return 4.0 * width * sum(range(2, layers + 2))
    block = math.ceil(layers / NEAR)
    # Before layer l: the embedding, the finished blocks and, inside a block, its running sum.
    sources = sum(1 + done // block + (done % block > 0) for done in range(1, layers + 1))
    return 4.0 * width * sources + layers * width


def compute_published() -> Published:
    """Read the tables and fit everything."""
    table = table_2()
    return Published(
        table=table,
        fits={convention: _own_fits(table, convention) for convention in CONVENTIONS},
        floors={
            str(rule): fit_power_law_with_floor(rows[f"compute_{HEADLINE}"], rows["loss"], unit=UNIT)
            for rule, rows in table.groupby("rule", sort=False)
        },
        rules={rule: _compare(table, rule) for rule in RULES},
        between={
            f"{rule} over {other}": paired_multiplier(_under(table, HEADLINE), other, rule)
            for rule, other in (("attnres_full", "attnres_block"), ("attnres_block", "mhc_lite"))
        },
        curves=_curves(),
        curve_multiplier={compute: curve_multiplier(compute) for compute in (1.0, FIGURE_4_COMPUTE)},
        ablation=read_table("ablation"),
        block_size=read_table("block_size"),
        memory_io={
            name: io(TYPICAL_WIDTH, TYPICAL_BLOCKS, TYPICAL_BLOCK_SIZE, TYPICAL_STREAMS) / TYPICAL_WIDTH
            for name, io in MEMORY_IO.items()
        },
    )


def _under(table: pd.DataFrame, convention: str) -> pd.DataFrame:
    return table.assign(compute=table[f"compute_{convention}"])


def _own_fits(table: pd.DataFrame, convention: str) -> dict[str, PowerLaw]:
    fits = {}
    for rule, rows in _under(table, convention).groupby("rule", sort=False):
        if rows["compute"].notna().all():
            fits[str(rule)] = fit_power_law(rows["compute"], rows["loss"], unit=UNIT, convention=convention)
    return fits


def _compare(table: pd.DataFrame, rule: str) -> PublishedRule:
    arms = table[table["rule"].isin((BASELINE, rule))]
    headline = _under(arms, HEADLINE)
    means = size_means(headline, [BASELINE, rule])
    multiplier = paired_multiplier(means, BASELINE, rule)
    return PublishedRule(
        multiplier=multiplier,
        judgements=tuple(judge(claim, multiplier) for claim in STANDARD_CLAIMS),
        by_convention={
            convention: paired_multiplier(_under(arms, convention), BASELINE, rule)
            for convention in CONVENTIONS
            if arms[f"compute_{convention}"].notna().all()
        },
        by_floor={floor: paired_multiplier(headline, BASELINE, rule, floor=floor) for floor in FLOORS},
        without_size=leave_one_size_out(means, BASELINE, rule),
        largest_out=leave_largest_out(means, BASELINE, rule),
        exponents=equal_exponents(means, BASELINE),
        bootstrap=wild_cluster_bootstrap(means, BASELINE, rule),
        loss_rounding=_loss_rounding(headline, rule),
    )


def _loss_rounding(arms: pd.DataFrame, rule: str) -> tuple[float, float]:
    """m when all losses of the rule err one way and all of the baseline the other, by half a digit."""
    values = []
    for sign in (1, -1):
        shift = np.where(arms["rule"] == rule, sign, -sign) * LOSS_ROUNDING
        values.append(paired_multiplier(arms.assign(loss=arms["loss"] + shift), BASELINE, rule).multiplier)
    return values[0], values[1]


def _curves() -> dict[str, tuple[float, float]]:
    fits = read_table("fits")
    return {
        str(row["variant"]): (float(row["coefficient"]), float(row["exponent"])) for _, row in fits.iterrows()
    }


def curve_multiplier(compute: float, rule: str = "attnres_block") -> tuple[float, float, float]:
    """m read off Figure 4's curves at C (PFLOP/s-days), and its range if A and alpha are off by rounding."""
    (base_a, base_alpha), (rule_a, rule_alpha) = _curves()[BASELINE], _curves()[rule]

    def read(base_a: float, base_alpha: float, rule_a: float, rule_alpha: float) -> float:
        loss = rule_a * compute**-rule_alpha
        return (base_a / loss) ** (1 / base_alpha) / compute

    corners = itertools.product((-COEFFICIENT_ROUNDING, COEFFICIENT_ROUNDING), repeat=4)
    printed = (base_a, base_alpha, rule_a, rule_alpha)
    values = [read(*(v + e for v, e in zip(printed, errors, strict=True))) for errors in corners]
    return read(*printed), min(values), max(values)
