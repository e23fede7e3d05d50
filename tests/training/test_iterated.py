"""Programs in iterations: what they have in common."""

import dataclasses

import pytest

from lightrlhf.dpo import DPOLossArgs
from lightrlhf.iterative_refuel import IterativeRefuelArgs
from lightrlhf.online_dpo import OnlineDPOArgs
from lightrlhf.refuel import RefuelArgs


@pytest.mark.parametrize("program, loss", [(OnlineDPOArgs, DPOLossArgs), (IterativeRefuelArgs, RefuelArgs)])
def test_a_flag_of_the_loss_has_the_default_of_the_loss(program, loss):
    """Unless the program declares it again; the flags of all training programs come after those of the loss."""
    before, now = ({field.name: field.default for field in dataclasses.fields(one)} for one in (loss, program))
    own = program.__dict__["__annotations__"]
    assert {name: now[name] for name in before if name not in own} == {n: v for n, v in before.items() if n not in own}
    assert now["log_interval"] == 1 and now["disable_dropout"] is True
