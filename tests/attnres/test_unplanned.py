"""What is said of trials that a plan does not have."""

from __future__ import annotations

from typing import Any

import pytest

from attnres.unplanned import describe_unplanned

BACK = "a launch with the settings that they were trained with, and with both"


def trial(size: str = "a", rule: str = "prenorm", seed: int = 0, steps: int = 9) -> dict[str, Any]:
    """With the keys of a record and of a planned trial."""
    return {"size": size, "rule": rule, "seed": seed, "steps": steps, "planned_steps": steps}


@pytest.mark.parametrize(
    ("records", "others", "said"),
    [
        (
            [trial(seed=4), trial(seed=3)],
            0,
            "2 other trial folders are not in this plan: seed 4, 3 where the plan has 0, 1; "
            f"{BACK} (study.seeds=[0,1,3,4], say), has them again",
        ),
        (
            [trial(size="b")],
            0,
            f"1 other trial folder is not in this plan: size b where the plan has a; {BACK}, has them again",
        ),
        (
            [trial(seed=2, steps=5), trial(steps=7)],
            0,
            "not in this plan: seed 2 where the plan has 0, 1, 5, 7 steps of a where the plan has 9; ",
        ),
        (
            [trial()],
            1,
            "2 other trial folders are not in this plan: other settings (another budget, corpus, rate or "
            "version, say)",
        ),
        (
            [trial(rule=f"r{i}") for i in range(6)],
            0,
            "rule r0, r1, r2, r3 and 2 more where the plan has prenorm",
        ),
    ],
)
def test_what_differs_is_named(records: list[dict[str, Any]], others: int, said: str) -> None:
    line = describe_unplanned(records, [trial(), trial(seed=1)], others)
    assert said in line
    assert line.startswith(f"{len(records) + others} other")


def test_steps_of_a_mangled_plan_are_passed_over() -> None:
    plan = [{**trial(), "steps": steps} for steps in ([9], "9", None, 9)]
    assert "steps" not in describe_unplanned([trial(seed=1)], plan)
    assert "7 steps of a where the plan has 9" in describe_unplanned([trial(seed=1, steps=7)], plan)
