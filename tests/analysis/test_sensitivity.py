"""The sensitivity table: each floor, and each arm's own best learning rate, reach the numbers."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.compare import paired_multiplier
from analysis.laws import size_means
from analysis.sensitivity import OWN_BEST, learning_rate_tables, sensitivity

RATE = "axis:optim.learning_rate"
COMPUTE = {"s": 1e13, "m": 8e13, "l": 9e14}


def table(rates: tuple[float, ...] = (0.004,)) -> pd.DataFrame:
    """Losses that are no exact law, so that a floor moves the multiplier; 0.004 is the best rate."""
    gaps = {"s": 0.02, "m": 0.012, "l": 0.016}
    rows = []
    for rate in rates:
        for rule in ("prenorm", "attnres_block"):
            for size, compute in COMPUTE.items():
                loss = 26 * compute**-0.08 * (1 - gaps[size] * (rule != "prenorm")) * (1 + abs(rate - 0.004))
                rows.append({"size": size, "rule": rule, "seed": 0, "compute_a": compute, RATE: rate})
                rows[-1] |= {"compute": compute, "loss": loss, "id": f"{size}-{rule}-{rate}"}
    return pd.DataFrame(rows)


def test_every_floor_is_that_of_means_above_it() -> None:
    points = table()
    rows = sensitivity(points, points, "prenorm", "attnres_block", ["a"])
    assert [row.floor for row in rows] == pytest.approx(
        [f * points["loss"].min() for f in (0, 0.25, 0.5, 0.75)]
    )
    for row in rows:
        direct = paired_multiplier(
            size_means(points, ["prenorm", "attnres_block"], row.floor), "prenorm", "attnres_block"
        )
        assert (row.multiplier, row.alpha) == pytest.approx((direct.multiplier, direct.alpha), rel=1e-9)
    assert rows[3].alpha > 1.5 * rows[0].alpha  # a floor that did nothing would leave it


def test_own_best_is_the_rate_of_the_lowest_loss() -> None:
    tuned = table((0.002, 0.004, 0.009))
    own = learning_rate_tables(tuned[tuned[RATE] == 0.002], tuned)[OWN_BEST]
    assert set(own[RATE]) == {0.004} and len(own) == 6
