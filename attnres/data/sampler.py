"""Which tokens a training step and an evaluation read. Pure functions: a resumed run needs no sampler state.

Orders come from raw Philox output and a stable sort, whose results numpy keeps from version to version; the
streams of numpy.random.Generator it does not.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attnres.errors import DataError

if TYPE_CHECKING:
    from attnres.data.corpus import PackedCorpus

Tokens = npt.NDArray[np.uint16]
Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def count_windows(tokens: int, context: int) -> int:
    """How many windows of `context` inputs fit without overlap; the last needs one more token as target."""
    return max(0, (tokens - 1) // context)


def batch(tokens: Tokens, seed: int, step: int, batch_size: int, context: int) -> Batch:
    """Inputs and targets (one token later) of training step `step`, from 0; each int64 [batch_size, context].

    Each epoch visits every window once, in an order of its own that (seed, epoch) decides; a batch may end
    one epoch and begin the next. Equal for all trials that share seed, batch size and context.
    """
    windows = count_windows(len(tokens), context)
    if windows == 0:
        raise DataError(f"model.context={context}: the training split has only {len(tokens):,} tokens")
    samples = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs = samples // windows
    chosen = np.empty(batch_size, dtype=np.int64)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        mask = epochs == epoch
        chosen[mask] = _epoch_order(seed, epoch, windows)[samples[mask] % windows]
    return _inputs_and_targets(read_windows(tokens, chosen, context))


# A step needs one order, or two where an epoch ends; an order takes 8 bytes per window.
@functools.lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, windows: int) -> npt.NDArray[np.int64]:
    digest = hashlib.sha256(f"windows seed={seed} epoch={epoch}".encode()).digest()
    keys = np.random.Philox(key=int.from_bytes(digest[:16], "big")).random_raw(windows)
    order = np.argsort(keys, kind="stable")
    order.flags.writeable = False
    return order


def read_windows(tokens: Tokens, windows: npt.NDArray[np.int64], context: int) -> Tokens:
    """Tokens of windows, each with the target of its last input at the end: [len(windows), context + 1]."""
    rows = tokens[windows[:, None] * context + np.arange(context + 1)]
    _let_go(tokens)
    return rows


def _let_go(tokens: Tokens) -> None:
    """Take the pages of a mapped file out of this process; they stay in the system's cache.

    Each page that was read would count as this process's memory, in the end the whole corpus, although the
    system takes such pages back when it needs them.
    """
    mapped = getattr(tokens.base, "base", None)  # a view of a numpy.memmap, whose base is the map
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        with suppress(OSError):  # pages that someone has locked stay
            mapped.madvise(mmap.MADV_DONTNEED)


def _inputs_and_targets(rows: Tokens) -> Batch:
    wide = rows.astype(np.int64)
    return np.ascontiguousarray(wide[:, :-1]), np.ascontiguousarray(wide[:, 1:])


def validation_order(split_tokens: int, validation_tokens: int, context: int) -> npt.NDArray[np.int64]:
    """Indices of the windows that an evaluation reads: validation_tokens // context of them, at least one.

    All windows of the split are put in bit-reversed order, of which any beginning is spread evenly over the
    whole split; a smaller validation set is therefore the first part of a larger one. A split with fewer
    windows than asked for is read whole: the length of the result is what is used.
    """
    available = count_windows(split_tokens, context)
    if available == 0:
        raise DataError(f"model.context={context}: the validation split has only {split_tokens:,} tokens")
    order = np.zeros(1, dtype=np.int64)
    while len(order) < available:
        order = np.concatenate([2 * order, 2 * order + 1])
    return order[order < available][: max(1, validation_tokens // context)]


def validation_windows(corpus: PackedCorpus, validation_tokens: int, context: int) -> Batch:
    """Inputs and targets of the fixed validation set, each int64 [windows, context]; see `validation_order`.

    The first k windows are what a smaller `validation_tokens` gives. `targets.size` is the tokens used.
    """
    tokens = corpus.validation()
    windows = validation_order(len(tokens), validation_tokens, context)
    return _inputs_and_targets(read_windows(tokens, windows, context))
