"""The curriculum: which stages a text means, and which starts an iteration takes."""

import pytest
from helpers.errors import error_naming

pytest.importorskip("gymnasium", reason="needs pip install -e '.[envs]'")

from lightrlhf.cli.errors import UsageError
from lightrlhf.envs.curriculum import Stage, curriculum, split_stages, starts_of

NAMES = ["a", "b c", "d", "x/10"]


@pytest.mark.parametrize(
    "options, stages",
    [
        ({}, [Stage((0, 1, 2, 3))]),
        ({"levels": ["d", "b c"]}, [Stage((1, 2))]),
        ({"stages": "a;b c;d"}, [Stage((0,)), Stage((1,)), Stage((2,))]),
        ({"stages": " d + b c ; a"}, [Stage((2, 1)), Stage((0,))]),
        ({"stages": "a/1; a; b c+d"}, [Stage((0,), 1), Stage((0,)), Stage((1, 2))]),
        ({"stages": "a+b c/1; a"}, [Stage((0, 1), 1), Stage((0,))]),
        ({"stages": "x/10; x/10/1"}, [Stage((3,)), Stage((3,), 1)]),
    ],
    ids=str,
)
def test_the_stages_of_a_curriculum(options, stages):
    assert curriculum(NAMES, **options) == stages


@pytest.mark.parametrize("text", ["", ";", "a;", "a;;d", "a+", "/1", " +a"])
def test_a_level_without_a_name_is_refused(text):
    with pytest.raises(ValueError, match="--stages"):
        split_stages(text)


@pytest.mark.parametrize(
    "options, named", [({"levels": ["e"]}, "--levels e"), ({"stages": "a; d+a/2"}, "--stages a/2")]
)
def test_an_unknown_level_is_refused(options, named):
    with error_naming(UsageError, named):
        curriculum(NAMES, **options)


def test_every_stage_is_reached_and_lasts_its_share():
    """The published trigger is 0 if there are fewer iterations than tasks, and then never fires."""
    for num_stages in (1, 2, 3, 5):
        for num_steps in range(num_stages, 40):
            order = [step * num_stages // num_steps for step in range(num_steps)]
            assert order == sorted(order) and set(order) == set(range(num_stages))
            sizes = [order.count(stage) for stage in range(num_stages)]
            assert max(sizes) - min(sizes) <= 1


def test_starts_come_round_evenly_and_in_groups():
    pools = {0: [{"n": n} for n in range(5)], 1: [{"n": n} for n in range(5, 7)]}
    options = {"seed": 42, "repeats": 2, "leaveout_prob": 0.25}
    steps = [starts_of(Stage((0, 1)), pools, step, 3, **options) for step in range(7)]
    drawn = [start for _, starts in steps for start in starts]
    assert [start["n"] for start in drawn] == [row for rows, _ in steps for row in rows]  # numbered level after level
    assert all(start["leaveout_prob"] == 0.25 and "first_step" not in start for start in drawn)
    assert drawn[::2] == drawn[1::2]
    numbers = [start["n"] for start in drawn[::2]]
    assert sorted(numbers[:7]) == list(range(7)) and sorted(numbers) == sorted(list(range(7)) * 3)
    assert pools[0][0] == {"n": 0}


def test_an_environment_learns_that_an_episode_is_a_single_decision():
    rows, (start,) = starts_of(Stage((0,), max_decisions=1), {0: [{"n": 0}]}, 0, 1, seed=42)
    assert rows == [0] and start == {"n": 0, "first_step": True}
