"""Options of the rules: what is refused and how, what they resolve to, what they cost."""

from __future__ import annotations

import pytest
from model_support import block, full

from attnres.compose import compose_trial
from attnres.errors import ConfigError
from attnres.residual import specs


def attnres_block(num_blocks: int | None, block_size: int | None) -> specs.AttnResBlock:
    return specs.AttnResBlock("fused", num_blocks=num_blocks, block_size=block_size)


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "message"),
    [
        (4, 4, "residual.num_blocks=4: and residual.block_size=4 are both given"),
        (None, None, "residual.num_blocks=None: give num_blocks, or block_size"),
        (0, None, "residual.num_blocks=0: must be at least 1"),
        (None, -1, "residual.block_size=-1: must be at least 1"),
        (17, None, "residual.num_blocks=17: is more than the model's 16 sublayers (2 x model.depth=8)"),
        (None, 17, "residual.block_size=17: is more than the model's 16 sublayers (2 x model.depth=8)"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(
    num_blocks: int | None, block_size: int | None, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        attnres_block(num_blocks, block_size).check(layers=16, width=24)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["residual.num_blocks=17"], "residual.num_blocks=17: is more than"),
        (["residual.block_size=3"], "residual.num_blocks=8: and residual.block_size=3"),
        (["residual.num_blocks=null"], "residual.num_blocks=None: give num_blocks"),
        (["residual.num_blocks=2.5"], "residual.num_blocks=2.5: must be a whole number"),
        (["residual.implementation=magic"], "residual.implementation=magic: one of fused, reference"),
    ],
)
def test_the_command_line_refuses_them_too(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_trial(["residual=attnres_block", "model.depth=8", *overrides])
    assert str(caught.value).startswith(message)


def test_the_edges_fit() -> None:
    for spec in (attnres_block(1, None), attnres_block(16, None), attnres_block(None, 16)):
        spec.check(layers=16, width=24)


@pytest.mark.parametrize(
    ("num_blocks", "layers", "size"),
    [(8, 16, 2), (8, 24, 3), (8, 20, 3), (1, 16, 16), (16, 16, 1), (3, 16, 6)],
)
def test_num_blocks_gives_blocks_of_the_next_whole_size(num_blocks: int, layers: int, size: int) -> None:
    assert attnres_block(num_blocks, None).resolved_block_size(layers) == size


def test_labels_name_the_option_that_was_given_and_not_the_implementation() -> None:
    assert specs.PreNorm().label() == "prenorm"
    assert {full(how).label() for how in ("fused", "reference")} == {"attnres_full"}
    assert attnres_block(8, None).label() == "attnres_block_n8"
    assert {block(4, how).label() for how in ("fused", "reference")} == {"attnres_block_s4"}


def test_sources_of_each_read() -> None:
    assert full().sources(4) == (1, 2, 3, 4, 5)
    assert block(2).sources(4) == (1, 2, 2, 3, 3)  # the third read starts a block: no running sum yet
    assert block(3).sources(4) == (1, 2, 2, 2, 3)  # a short last block is a source of the output
    assert block(4).sources(4) == (1, 2, 2, 2, 2)


def test_implementation_is_no_part_of_a_trial_id(tmp_path) -> None:
    from tiny_trial import tiny_trial

    ids = {
        tiny_trial(tmp_path, "residual=attnres_full", f"residual.implementation={how}")[0].id
        for how in ("fused", "reference")
    }
    assert len(ids) == 1
