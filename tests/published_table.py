"""The published scaling table as a tidy table, C = 6 N D in PFLOP/s-days."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

import analysis
from attnres.counts import FLOP_PER_PFLOPS_DAY

RULES = ("prenorm", "attnres_block", "attnres_full", "mhc_lite")


def paper_table() -> pd.DataFrame:
    """Columns size, rule, compute, loss."""
    raw = pd.read_csv(Path(analysis.__file__).parent / "paper" / "scaling_law.csv")
    compute = 6 * raw["active_params_m"] * 1e6 * raw["tokens_b"] * 1e9 / FLOP_PER_PFLOPS_DAY
    return pd.concat(
        [
            pd.DataFrame(
                {
                    "size": raw["active_params_m"].astype(str),
                    "rule": rule,
                    "compute": compute,
                    "loss": raw[f"loss_{rule}"],
                }
            )
            for rule in RULES
        ],
        ignore_index=True,
    )
