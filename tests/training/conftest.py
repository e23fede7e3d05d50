"""A run of no program, for tests of its parts."""

import pytest

from lightrlhf.cli.groups import TrainArgs
from lightrlhf.training.run import Run


@pytest.fixture
def run(tmp_path):
    """A run that has begun its loop, so that its folder is there."""
    loops = []

    def make(**changes) -> Run:
        one = Run(TrainArgs(log_dir=str(tmp_path), accelerator="cpu", **changes), "test")
        loops.append(one.steps(99))
        next(loops[-1])
        return one

    yield make
    for loop in loops:
        loop.close()
