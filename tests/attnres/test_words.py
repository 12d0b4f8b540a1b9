"""Words about counts, and about failures."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from attnres.data.corpus import _map_tokens
from attnres.data.packing import token_file
from attnres.errors import DataError
from attnres.origin import origin_of
from attnres.words import counted


def test_one_and_many() -> None:
    assert [counted(n, "trial") for n in (0, 1, 1200)] == ["0 trials", "1 trial", "1,200 trials"]
    assert counted(1, "trial was", "trials were") == "1 trial was"
    assert counted(2, "trial was", "trials were") == "2 trials were"


def test_data_that_went_missing_is_no_fault_of_the_trial(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        _map_tokens(tmp_path, "train", 100)
    assert origin_of(missing.value) == "outside"
    file = token_file(tmp_path, "train")
    np.zeros(50, dtype=np.uint16).tofile(file)
    with pytest.raises(DataError, match="is not whole") as short:
        _map_tokens(tmp_path, "train", 100)
    assert str(file) in str(short.value) and origin_of(short.value) == "outside"
    assert origin_of(OSError(errno.EINVAL, os.strerror(errno.EINVAL))) == "own"
    assert origin_of(ValueError("no luck")) == "own"


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EROFS", "EIO", "ENOMEM", "EMFILE", "ESTALE", "ENOENT"])
def test_what_the_machine_does_to_a_trial_is_not_its_own(name: str) -> None:
    """Here, and where another error was raised from it. A launch would leave an own failure as it is."""
    number = getattr(errno, name)
    error = OSError(number, os.strerror(number))
    assert origin_of(error) == "outside"
    with pytest.raises(RuntimeError) as wrapped:
        raise RuntimeError("cannot save") from error
    assert origin_of(wrapped.value) == "outside"


def test_no_memory_is_not_the_trials_own() -> None:
    assert origin_of(MemoryError()) == "outside"
