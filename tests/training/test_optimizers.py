"""Learning-rate schedules: transformers' numbers without what its module imports."""

import subprocess
import sys

import pytest
import torch
from helpers import ROOT, environment
from transformers import get_scheduler

from lightrlhf.training.optimizers import make_schedule


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "num_updates"), [(0, 10), (3, 10), (7, 7), (0, 0), (1, 1)])
def test_a_schedule_gives_the_numbers_of_transformers(name, warmup, num_updates):
    rates = []
    for make in (make_schedule, get_scheduler):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.7)
        schedule = make(name, optimizer, warmup, num_updates)
        stored = [schedule.state_dict()]
        for _ in range(num_updates + 3):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        stored.append(schedule.state_dict())
        schedule.load_state_dict(stored[0])
        rates += [stored, schedule.get_last_lr()]
    half = len(rates) // 2
    assert rates[:half] == rates[half:]


def test_a_schedule_imports_neither_peft_nor_bitsandbytes():
    lines = [
        "import sys, torch",
        "from lightrlhf.training.optimizers import make_schedule",
        "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.7)",
        "make_schedule('cosine', optimizer, 1, 9)",
        "print(sorted({'peft', 'bitsandbytes', 'transformers.trainer_utils'} & set(sys.modules)))",
    ]
    command = [sys.executable, "-c", "; ".join(lines)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
