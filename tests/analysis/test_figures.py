"""Figures: nothing cut off, labels apart, torn metrics tolerated, ticks that people can read."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from matplotlib.text import Text

from analysis import figures, style
from analysis.load import load_study
from analysis.results import StudyResult, compute_results
from analysis.simulate import Truth, simulate_table, write_study

SIX = {f"attnres_block_n{n}": 1 + 0.04 * n for n in range(1, 6)}
TRUTHS = {
    "plain": Truth({"attnres_full": 1.3, "attnres_block_n8": 1.25}, overhead=0.02),
    "small": Truth(
        {"attnres_full": 1.3, "attnres_block_n8": 1.25}, sizes=3, seeds=1, decades=0.6, noise=0.004
    ),
    "many": Truth(SIX, sizes=6, seeds=2),
    "worse": Truth({"slow": 0.7}, alpha=0.15),
    "large": Truth({"attnres_full": 1.3}, smallest_compute=1e19, decades=1.0),
}


OFTEN = ("plain", "many")


@pytest.fixture(
    scope="module",
    params=[name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in TRUTHS],
)
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    return make_result(tmp_path_factory.mktemp("runs"), TRUTHS[request.param])


def make_result(runs: Path, truth: Truth) -> StudyResult:
    write_study(runs / "s", simulate_table(truth, np.random.default_rng(0)))
    return compute_results(load_study(runs, "s"), draws=100)


def visible_texts(figure: Figure) -> list[Text]:
    shown = figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_visible())
    return [text for text in shown if isinstance(text, Text) and text.get_text().strip()]


@pytest.mark.parametrize("drawing", ["loss_against_compute", "size_gaps", "training_curves"])
def test_no_text_leaves_the_figure(result: StudyResult, drawing: str) -> None:
    with style.style():
        draw = getattr(figures, drawing)
        figure = draw(result.data if drawing == "training_curves" else result)
        figure.draw_without_rendering()
        width, height = figure.bbox.size
        undrawn = undrawn_tick_labels(figure)
        for text in visible_texts(figure):
            parent = text.axes
            if parent is not None and not parent.get_visible():
                continue
            box = text.get_window_extent()
            if box.width == 0 or id(text) in undrawn:
                continue
            assert box.x0 > -1 and box.x1 < width + 1, f"{text.get_text()!r} is cut at the side"
            assert box.y0 > -1 and box.y1 < height + 1, f"{text.get_text()!r} is cut above or below"


def undrawn_tick_labels(figure: Figure) -> set[int]:
    """Ids of labels whose tick lies outside the limits: they exist but are not drawn."""
    found = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high]
            found |= {id(label) for tick in ticks for label in (tick.label1, tick.label2)}
    return found


def test_direct_labels_do_not_overlap(result: StudyResult) -> None:
    with style.style():
        figure = figures.loss_against_compute(result)
        figure.draw_without_rendering()
        upper = figure.axes[0]
        labels = [
            text for text in upper.texts if any(text.get_text().startswith(r) for r in result.data.rules)
        ]
        assert len(labels) == len(result.data.rules)
        boxes = sorted((Text.get_window_extent(label) for label in labels), key=lambda box: box.y0)
        for below, above in zip(boxes[:-1], boxes[1:], strict=True):
            assert below.y1 <= above.y0 + 1


def test_figures_are_the_same_each_time(tmp_path: Path) -> None:
    result = make_result(tmp_path, Truth(seeds=1))
    with style.style():
        first = style.save(figures.size_gaps(result), tmp_path / "a", "x")
        second = style.save(figures.size_gaps(result), tmp_path / "b", "x")
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes()


def test_torn_metrics_are_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"kind": "train", "tokens": 10, "loss_nats": 5.0}\n'
        '{"kind": "evaluation", "tokens": 10, "loss_nats": 4.9}\n'
        '{"kind": "train", "tokens": 20, "loss_nats": 4.0}\n'
        '{"kind": "train", "tokens": 30, "lo'
    )
    assert figures.read_curve(path) == ([10.0, 20.0], [5.0, 4.0])
    assert figures.read_curve(tmp_path / "none.jsonl") == ([], [])


def test_curves_without_metrics_still_draw(tmp_path: Path) -> None:
    write_study(tmp_path / "s", simulate_table(Truth(), np.random.default_rng(0)))
    for path in (tmp_path / "s").glob("*/metrics.jsonl"):
        path.unlink()
    with style.style():
        assert figures.training_curves(load_study(tmp_path, "s")).axes


@pytest.mark.parametrize(
    ("low", "high"), [(1.5, 2.4), (1.69, 1.75), (0.8, 60), (1e13, 1e15), (7e12, 5e13), (2, 2e6)]
)
def test_ticks_are_few_round_and_apart(low: float, high: float) -> None:
    ticks = np.array(style.log_ticks(low, high))
    assert 3 <= len(ticks) <= 9
    assert np.all((ticks >= low) & (ticks <= high))
    assert np.all(np.diff(np.log(ticks)) > np.log(high / low) / 12)
    assert all(len(f"{tick:.4g}") <= 6 for tick in ticks)


def test_spread_moves_as_little_as_it_must() -> None:
    assert style.spread([0.0, 1.0, 2.0], 0.5) == pytest.approx([0.0, 1.0, 2.0])
    assert style.spread([1.0, 1.0], 0.5) == pytest.approx([0.75, 1.25])
    placed = style.spread([0.3, 0.1, 0.32, 0.31], 0.1)
    assert np.all(np.diff(np.sort(placed)) >= 0.1 - 1e-12)
    assert np.argsort(placed).tolist() == np.argsort([0.3, 0.1, 0.32, 0.31]).tolist()


def test_units_and_counts() -> None:
    assert style.compute_unit(1e15) == (1.0, "FLOP")
    assert style.compute_unit(1e20)[1] == "PFLOP/s-days"
    assert [style.count_text(v) for v in (1.5e6, 2e9, 900, 0)] == ["1.5M", "2B", "900", "0"]
    assert style.tick_text(1e13, True) == "$10^{13}$"
    assert style.tick_text(3e13, True) == r"$3\times10^{13}$"
    assert style.tick_text(1.8, False) == "1.8"


def test_the_gap_of_the_figure_is_that_of_the_tables(result: StudyResult) -> None:
    """Above 0 the rule is better; a size's point is 1 - L_rule / L_baseline at equal compute, in percent."""
    with style.style():
        lower = figures.loss_against_compute(result).axes[1]
    drawn = [line.get_ydata() for line in lower.lines]
    for r in result.rules.values():
        expected = [-100 * np.expm1(-gap) for gap in r.multiplier.per_size_gap.values()]
        assert any(len(y) == len(expected) and np.allclose(y, expected) for y in drawn)
        assert any(np.allclose(y, 100 * r.multiplier.loss_gap) for y in drawn)


def test_every_figure_names_itself_and_its_bands(result: StudyResult) -> None:
    with style.style():
        curves, gaps = figures.training_curves(result.data), figures.size_gaps(result)
    assert "Loss over training: s" in [text.get_text() for text in visible_texts(curves)]
    assert "bar and band: 95% interval of the pooled m" in gaps.axes[0].get_xlabel()


def test_a_full_disk_leaves_the_old_figure_whole_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = Figure()
    style.save(figure, tmp_path, "one")
    old = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(old) == ["one.png", "one.svg"] and old["one.png"].startswith(b"\x89PNG")

    def half(self: Figure, path: Path, **options: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError) as caught:
        style.save(figure, tmp_path, "one")
    assert caught.value.filename == str(tmp_path / "one.png")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == old
