"""Progress: when something with an interval is due."""

from lightrlhf.training.progress import Progress


def test_things_are_due_at_their_interval_and_after_the_last_step():
    progress = Progress(num_steps=7)
    due = []
    for progress.step in range(1, 8):
        due.append(progress.due(3))
    assert due == [False, False, True, False, False, True, True]
    assert not progress.due(0)
    assert Progress(2, num_steps=7, is_last=True).due(3)  # stopped early


def test_in_a_dry_run_they_are_due_after_the_last_step_alone():
    assert not Progress(3, num_steps=7, is_dry=True).due(3)
    assert Progress(2, num_steps=7, is_dry=True, is_last=True).due(3)
