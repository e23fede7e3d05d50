"""The order of the data: epochs, numbers of steps, and the names of rows in errors."""

from types import SimpleNamespace

import pytest
from helpers import CPU, last_checkpoint

from lightrlhf.sft import main


def test_an_epoch_sees_every_row_once_and_the_last_batch_may_be_small(run):
    one = run(epochs=2)
    rows = [{"number": i} for i in range(11)]
    assert one.order.num_steps(range(11), 4) == 6
    drawn = [one.order.global_batch(rows, step, 4) for step in range(6)]
    batches = [[row["number"] for row in batch] for batch in drawn]
    assert [[row["row"] for row in batch] for batch in drawn] == batches and rows[0] == {"number": 0}
    assert [len(batch) for batch in batches] == [4, 4, 3, 4, 4, 3]
    assert sorted(sum(batches[:3], [])) == sorted(sum(batches[3:], [])) == list(range(11))
    assert batches[:3] != batches[3:]


def test_every_rank_has_a_row_of_fewer_than_half_as_many(run):
    order = run().order
    order.ranks = SimpleNamespace(world_size=5)
    assert order.draw(1, 0, 1) == [0] * 5


@pytest.mark.parametrize(
    "flags, steps",
    [
        ({}, 10),
        ({"epochs": 5}, 50),
        ({"max_steps": 3}, 3),
        ({"max_steps": 35}, 35),  # into the fourth epoch
        ({"epochs": 5, "max_steps": 35}, 35),
        ({"epochs": 1, "max_steps": 10}, 10),
    ],
)
def test_max_steps_alone_goes_on_through_epochs(run, capsys, flags, steps):
    assert run(**flags).order.num_steps(range(100), 10) == steps
    assert "--epochs" not in capsys.readouterr().out


def test_epochs_that_end_a_run_before_max_steps_say_so(run, capsys):
    assert run(epochs=1, max_steps=35).order.num_steps(range(100), 10) == 10
    assert "--epochs 1 ends this run at step 10, before --max_steps 35" in capsys.readouterr().out


def test_a_run_goes_on_into_the_next_epoch(sft_dir, cafe_data, base_model, tmp_path, capsys):
    """Unless its flags name a number of epochs."""
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--log_dir", str(tmp_path), *CPU]
    flags += ["--mini_batch_size", "20", "--micro_batch_size", "20", "--log_interval", "1", "--eval_interval", "0"]
    folder = main([*flags, "--max_steps", "5"])  # an epoch has 3
    assert last_checkpoint(folder).name == "checkpoint-000005"
    short = main([*flags, "--max_steps", "2", "--epochs", "1"])
    capsys.readouterr()
    main(["--resume_from", short, "--max_steps", "5"])
    assert last_checkpoint(short).name == "checkpoint-000003"
    assert "--epochs 1 ends this run at step 3, before --max_steps 5" in capsys.readouterr().out
    main(["--resume_from", short, "--max_steps", "5", "--epochs", "null"])
    assert last_checkpoint(short).name == "checkpoint-000005"
