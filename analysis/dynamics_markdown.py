"""The section of report.md on the statistics over depth."""

from __future__ import annotations

import numpy as np

from analysis.dynamics import Dynamics, RuleProbes
from analysis.markdown import escape, name, table

# Figure 5 of the paper in words: it prints no numbers, these are read off the curves.
PAPER = (
    "The paper's Figure 5 (its scale; read off its curves): the baseline's output magnitude grows with "
    "depth, to about 12, Block AttnRes stays at about 1 to 2 and is periodic in the depth blocks; the "
    "baseline's gradient is largest in the first transformer blocks. A stream that sums all outputs grows in "
    "what is read; an output alone need not."
)


def dynamics_lines(dynamics: Dynamics) -> list[str]:
    """A table of the last probe, and the paper's finding beside it."""
    header = [
        "rule",
        "tokens",
        "output: first, last block",
        "largest over smallest",
        "last read over first",
        "gradient: first, last block",
        "largest over smallest",
        "entropy of depth weights, nats",
    ]
    rows = [_row(probes) for probes in dynamics.rules.values()]
    lines = ["## Over depth, at the last probe", ""]
    if rows:
        lines += table(header, rows)
        lines += [
            "Output: root mean square of attention output + MLP output of a transformer block. Read: of what "
            "the sublayers, and at the end the final norm, see. Gradient: norm of the mean loss's gradient "
            "over a block's parameters.",
            "",
        ]
    lines += [PAPER, "", *(f"- {escape(note)}." for note in dynamics.notes)]
    return [*lines, ""] if dynamics.notes else lines


def _row(probes: RuleProbes) -> list[str]:
    output, gradient = probes.block_output_rms[-1], probes.block_gradient_norm[-1]
    read, entropy = probes.read_rms[-1], probes.depth_entropy_nats
    known = entropy is not None and bool(np.isfinite(entropy[-1]).any())
    return [
        name(probes.rule),
        f"{probes.tokens[-1]:,.0f}",
        f"{output[0]:.3g}, {output[-1]:.3g}",
        f"{output.max() / output.min():.2f}",
        f"{read[-1] / read[0]:.2f}",
        f"{gradient[0]:.2g}, {gradient[-1]:.2g}",
        f"{gradient.max() / gradient.min():.2f}",
        f"{np.nanmean(entropy[-1]):.2f}" if entropy is not None and known else "",
    ]
