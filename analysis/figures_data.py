"""Numbers behind figures and tables, free of matplotlib."""

from __future__ import annotations

import numpy as np
import pandas as pd


def cell_summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Per size, in order of compute: mean compute, mean loss, its standard error (seeds; else validation
    set)."""
    groups = rows.groupby("size")
    cells = groups.agg(compute=("compute", "mean"), loss=("loss", "mean"), seeds=("loss", "size"))
    over_seeds = groups["loss"].std(ddof=1) / np.sqrt(cells["seeds"])
    within = groups["loss_standard_error"].mean()
    cells["error"] = over_seeds.where(cells["seeds"] > 1, within).fillna(0.0)
    return cells.sort_values("compute").reset_index()
