"""The paper's own losses for rows that a study shares with it: Table 4 and Figure 6 of arXiv:2603.15031.

The numbers are those of analysis/paper/, as `analysis.published` reads them. They are of another scale: to be
laid beside ours, never mixed with them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from analysis.published_fits import BASELINE, read_table

PAPER_SCALE = "its scale: 436M active parameters, 16 transformer blocks, 87.9B tokens, one run a row"
FIGURE_7_SCALE = "its scale: about 230M active parameters and 6.5e19 FLOP, one run a shape"
# Label of a rule here -> row of Table 4. The paper's model has 16 heads, S = 4 and a window of 8.
TABLE_4: Mapping[str, str] = {
    "prenorm": "prenorm",
    "denseformer": "denseformer",
    "mhc_n4": "mhc",
    "attnres_full": "attnres_full",
    "attnres_full_input": "attnres_full_input_dependent_query",
    "attnres_full_static": "attnres_full_input_independent_mixing",
    "attnres_full_sigmoid": "attnres_full_sigmoid",
    "attnres_full_no_key_norm": "attnres_full_without_key_rmsnorm",
    "attnres_window_w8": "attnres_sliding_window_8_plus_embedding",
    "attnres_block_s4": "attnres_block_size_4",
    "attnres_block_s4_h16": "attnres_block_multihead_16",
    "attnres_block_s4_no_key_norm": "attnres_block_without_key_rmsnorm",
}


@dataclass(frozen=True)
class PaperRow:
    """A loss that the paper prints, in nats per token, and how far it is from its prenorm."""

    place: str  # Table 4, Figure 6
    row: str
    loss_nats: float
    difference_nats: float


def block_size_of(rule: str) -> int | None:
    """S of a plain AttnRes rule by its label; full is 1. None for every other rule."""
    if rule == "attnres_full":
        return 1
    match = re.fullmatch(r"attnres_block_s(\d+)", rule)
    return int(match.group(1)) if match else None


def paper_row(rule: str) -> PaperRow | None:
    """The paper's row for a rule's label, from Table 4, else from Figure 6; None where it has none."""
    if rule in TABLE_4:
        return _row("Table 4", _losses("ablation", "variant"), TABLE_4[rule], BASELINE)
    size = str(block_size_of(rule))
    losses = figure_6()
    return _row("Figure 6", losses, size, "baseline") if size in losses else None


def figure_6() -> Mapping[str, float]:
    """Loss by block size as text, and of the `baseline`."""
    return _losses("block_size", "block_size_layers")


def figure_7() -> pd.DataFrame:
    """What the text and the figure give of Figure 7: quantity, value."""
    return read_table("shape")


@functools.cache
def _losses(name: str, key: str) -> dict[str, float]:
    table = read_table(name)
    return {str(row[key]): float(row["val_loss"]) for _, row in table.iterrows()}


def _row(place: str, losses: Mapping[str, float], row: str, baseline: str) -> PaperRow:
    return PaperRow(place, row, losses[row], losses[row] - losses[baseline])
