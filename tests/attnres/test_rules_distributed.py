"""DistributedDataParallel with every rule: it stops at a parameter that a pass does not use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_support import make_batch, make_model
from rules_support import CASES, default_spec
from torch import nn

from attnres.model import Transformer
from attnres.residual import specs


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone: the check for unused parameters is the same."""
    store: Path = tmp_path_factory.mktemp("gloo") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def two_steps(model: Transformer) -> None:
    """An unused parameter makes the second forward pass raise."""
    replica = nn.parallel.DistributedDataParallel(model)
    inputs_BT, targets_BT = make_batch(model)
    for _ in range(2):
        nn.functional.cross_entropy(replica(inputs_BT).flatten(0, 1), targets_BT.flatten()).backward()


@pytest.mark.parametrize("rule", specs.SPECS)
def test_every_parameter_is_used(rule: str) -> None:
    two_steps(make_model(default_spec(rule)))


@pytest.mark.parametrize("name", ["hyper_connections_static_n3", "mhc_n2_k3", "rms_block_s1", "rms_block_n1"])
def test_every_parameter_is_used_with_other_options(name: str) -> None:
    two_steps(make_model(CASES[name]))


def test_an_unused_parameter_is_found() -> None:
    model = make_model(CASES["rezero"])
    model.residual.unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        two_steps(model)
