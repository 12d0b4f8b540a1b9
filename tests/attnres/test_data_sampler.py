"""The sampler: pure in (seed, step), each epoch visits each window once, validation is fixed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data_support import data_config, write_texts
from hypothesis import given, settings
from hypothesis import strategies as st

from attnres.data import sampler
from attnres.data.corpus import open_corpus
from attnres.errors import DataError

GOLDEN_FIRST = [60, 70, 180, 150, 50, 130, 10, 90]
GOLDEN_STRADDLING = [10, 20, 60, 0, 10, 180, 90, 110]


def starts(inputs: np.ndarray) -> list[int]:
    """Where windows start, when token i of the corpus is i."""
    return inputs[:, 0].tolist()


@settings(max_examples=40, deadline=None)
@given(
    windows=st.integers(1, 40),
    context=st.integers(1, 9),
    rest=st.integers(0, 8),
    batch_size=st.integers(1, 50),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_epoch_visits_every_window_once(
    windows: int, context: int, rest: int, batch_size: int, seed: int
) -> None:
    tokens = np.arange(windows * context + 1 + rest % context, dtype=np.uint16)
    steps = -(-3 * windows // batch_size)  # at least three epochs
    seen = []
    for step in range(steps):
        inputs, targets = sampler.batch(tokens, seed, step, batch_size, context)
        assert inputs.shape == targets.shape == (batch_size, context)
        assert (targets == inputs + 1).all()
        seen += starts(inputs)
    for epoch in range(3):
        visited = sorted(seen[epoch * windows : (epoch + 1) * windows])
        assert visited == [window * context for window in range(windows)]


def test_a_step_does_not_depend_on_the_steps_before_it() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    in_order = [sampler.batch(tokens, 3, step, 7, 10) for step in range(40)]
    sampler._epoch_order.cache_clear()
    for step in (39, 0, 21, 20, 39):
        for found, expected in zip(sampler.batch(tokens, 3, step, 7, 10), in_order[step], strict=True):
            np.testing.assert_array_equal(found, expected)


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    tokens = np.arange(1001, dtype=np.uint16)
    epoch_0, epoch_1 = (starts(sampler.batch(tokens, 0, step, 100, 10)[0]) for step in (0, 1))
    other_seed = starts(sampler.batch(tokens, 1, 0, 100, 10)[0])
    assert epoch_0 != epoch_1 and epoch_0 != other_seed and epoch_0 != sorted(epoch_0)


def test_golden_order() -> None:
    """Changing the order changes every result: trials on both sides of the change do not compare."""
    tokens = np.arange(201, dtype=np.uint16)
    assert starts(sampler.batch(tokens, 0, 0, 8, 10)[0]) == GOLDEN_FIRST
    assert starts(sampler.batch(tokens, 7, 2, 8, 10)[0]) == GOLDEN_STRADDLING


def test_batches_are_contiguous_int64() -> None:
    for array in sampler.batch(np.arange(100, dtype=np.uint16), 0, 0, 4, 8):
        assert array.dtype == np.int64 and array.flags.c_contiguous


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_corpus_that_is_read_does_not_become_memory_of_the_process(tmp_path: Path) -> None:
    """Mapped pages would count: in the end the whole corpus, and no trial would fit."""
    file, count = tmp_path / "tokens", 32 * 2**20
    (np.arange(count, dtype=np.uint32) % 65521).astype(np.uint16).tofile(file)
    tokens = np.memmap(file, dtype=np.uint16, mode="r", shape=(count,)).view(np.ndarray)
    before, most = mapped_bytes(), 0
    for step in range(64):
        inputs, targets = sampler.batch(tokens, 0, step, count // 64 // 256, 255)
        assert np.array_equal((inputs + 1) % 65521, targets)
        most = max(most, mapped_bytes())
    assert most - before < file.stat().st_size / 4  # all of it was read


def mapped_bytes() -> int:
    """Pages of files that are in this process."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssFile")]
    return 1024 * int(line.split()[1])


def test_too_few_tokens_for_a_window_is_an_error_that_names_the_context() -> None:
    tokens = np.arange(8, dtype=np.uint16)
    with pytest.raises(DataError, match=r"model\.context=8: the training split has only 8 tokens"):
        sampler.batch(tokens, 0, 0, 1, 8)
    with pytest.raises(DataError, match=r"model\.context=8: the validation split has only 8 tokens"):
        sampler.validation_order(8, 100, 8)


@settings(max_examples=40, deadline=None)
@given(available=st.integers(1, 3000), asked=st.integers(1, 4000), context=st.integers(1, 16))
def test_validation_windows_are_distinct_and_evenly_spread(available: int, asked: int, context: int) -> None:
    order = sampler.validation_order(available * context + 1, asked * context, context)
    assert len(order) == min(asked, available)
    chosen = np.sort(order)
    assert len(np.unique(chosen)) == len(chosen) and 0 <= chosen[0] and chosen[-1] < available
    gaps = np.diff(np.concatenate([[-1], chosen, [available]]))
    # Bit reversal halves the gaps one after the other: the widest is at most twice the nominal one.
    nominal = 2 ** np.ceil(np.log2(available / len(order)))
    assert gaps.max() <= 2 * nominal


@settings(max_examples=40, deadline=None)
@given(available=st.integers(1, 500), small=st.integers(1, 600), more=st.integers(0, 600))
def test_a_smaller_validation_set_is_the_first_part_of_a_larger_one(
    available: int, small: int, more: int
) -> None:
    tokens = available * 4 + 1
    first, larger = (sampler.validation_order(tokens, 4 * asked, 4) for asked in (small, small + more))
    np.testing.assert_array_equal(first, larger[: len(first)])


def test_validation_windows_hold_the_tokens_of_the_validation_split(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    corpus = open_corpus(data_config(tmp_path / "texts", tmp_path / "cache"))
    inputs, targets = sampler.validation_windows(corpus, 512, 32)
    tokens = corpus.validation()
    assert inputs.shape == (16, 32)
    for row, window in enumerate(sampler.validation_order(len(tokens), 512, 32)):
        np.testing.assert_array_equal(inputs[row], tokens[window * 32 : window * 32 + 32])
        np.testing.assert_array_equal(targets[row], tokens[window * 32 + 1 : window * 32 + 33])


def test_a_short_validation_split_is_read_whole(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    corpus = open_corpus(data_config(tmp_path / "texts", tmp_path / "cache"))
    _, targets = sampler.validation_windows(corpus, 10**9, 32)
    assert len(targets) == (corpus.validation_tokens - 1) // 32
