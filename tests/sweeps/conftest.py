from __future__ import annotations

from pathlib import Path

import pytest
from sweeps_support import Workplace


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


@pytest.fixture(scope="module")
def shared_workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """For tests that only read: the corpus is packed once."""
    return Workplace(tmp_path_factory.mktemp("workplace"))
