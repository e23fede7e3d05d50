"""Programs with something to check or to break on a rank, named by import path in the jobs of `two_ranks.py`."""

import os
import signal
import sys

from helpers import rewards
from lightrlhf import sft
from lightrlhf.training.metric_log import MetricLog
from lightrlhf.training.run import Run


def sharded(flags: list[str]) -> None:
    """SFT that fails if a rank holds more than its shard of the parameters."""
    setup = Run.setup

    def checked(run, *arguments):
        model = setup(run, *arguments)
        held = sum(p.to_local().numel() for p in model.parameters())
        assert held < 0.6 * sum(p.numel() for p in model.parameters()), held
        return model

    Run.setup = checked
    sft.main(flags)
    Run.setup = setup


def split(flags: list[str]) -> None:
    """SFT that fails unless each rank holds a quarter of each of its layers' matrices."""
    setup = Run.setup

    def checked(run, *arguments):
        model = setup(run, *arguments)
        for name, p in model.named_parameters():
            assert "_proj" not in name or 4 * p.to_local().numel() == p.numel(), (name, p.to_local().shape, p.shape)
        return model

    Run.setup = checked
    sft.main(flags)
    Run.setup = setup


def many_vowels(prompts, completions, **columns):
    """The reward of that name, for the first of two ranks that share layers: the other must be given its scores."""
    assert int(os.environ.get("LOCAL_RANK", 0)) % 2 == 0
    return rewards.many_vowels(prompts, completions)


def killed(flags: list[str]) -> None:
    """SFT whose rank 1 is killed after its second step, if torchrun has not restarted it."""
    speed = MetricLog.speed

    def then_killed(log, *arguments):
        if log.ranks.rank == 1 and log.progress.step == 2 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return speed(log, *arguments)

    MetricLog.speed = then_killed
    sft.main(flags)


if __name__ == "__main__":
    killed(sys.argv[1:])
