"""The Reflect-RL experiment: one short seed through the kinds of arms, and that a second call repeats nothing."""

import json

import pytest

pytest.importorskip("gymnasium", reason="needs pip install -e '.[envs]'")

from helpers.errors import refused

from examples.experiments import reflect_rl


@pytest.fixture
def here(monkeypatch):
    """No worker processes: each would import everything again."""

    class Now:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, function, *args):
            class Done:
                result = staticmethod(lambda: function(*args))

            return Done()

    monkeypatch.setattr(reflect_rl, "workers", Now)
    monkeypatch.setattr(reflect_rl, "as_completed", lambda jobs: jobs)


@pytest.mark.slow
def test_a_short_seed_and_then_nothing_is_done_twice(here, tmp_path, capsys, monkeypatch):
    arms = ["SFT", "SFT+RL", "Reflect-RL"]
    flags = ["--output_dir", str(tmp_path), "--seeds", "7", "--smoke", "True", "--arms", *arms]
    claims = reflect_rl.main(flags)
    assert list(claims) == ["SFT+RL > SFT"]  # the arm between the other two was not run
    assert capsys.readouterr().out.splitlines()[-1].startswith("claims: SFT+RL > SFT: ")
    rows = [json.loads(line) for line in (tmp_path / "taxi" / "seed-7" / "results.jsonl").read_text().splitlines()]
    assert [row["arm"] for row in rows] == arms
    assert [[result["iterations"] for result in row["results"]] for row in rows] == [[0], [1, 2], [1, 2]]
    assert all(0 <= result["success"] <= 1 for row in rows for result in row["results"])
    assert (tmp_path / "taxi" / "curves.png").stat().st_size > 10_000
    monkeypatch.setattr(reflect_rl, "run_arm", None)
    assert reflect_rl.main(flags) == claims


def test_an_arm_that_was_interrupted_goes_on(here, tmp_path, monkeypatch):
    flags = ["--output_dir", str(tmp_path), "--seeds", "7", "--smoke", "True", "--arms", "SFT+RL"]
    learn, measure = reflect_rl.reflect_rl.main, reflect_rl.evaluate.main
    calls = []

    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(reflect_rl.evaluate, "main", interrupted)
    with pytest.raises(SystemExit):
        reflect_rl.main(flags)
    monkeypatch.setattr(reflect_rl.evaluate, "main", measure)
    monkeypatch.setattr(reflect_rl.reflect_rl, "main", lambda argv: calls.append(argv) or learn(argv))
    reflect_rl.main(flags)
    (begun,) = (tmp_path / "taxi" / "seed-7" / "logs" / "SFT+RL").rglob("args.json")
    assert calls == [["--resume_from", str(begun.parent)]]


@pytest.mark.slow
def test_a_base_is_made_once_for_all_seeds_and_goes_on_after_a_kill(here, tmp_path, monkeypatch):
    taxi = reflect_rl.TASKS["taxi"]._replace(base=reflect_rl.READER)
    monkeypatch.setitem(reflect_rl.TASKS, "taxi", taxi)
    flags = ["--output_dir", str(tmp_path), "--smoke", "True", "--arms", "SFT", "--seeds"]
    fine_tune, calls = reflect_rl.sft.main, []

    def interrupted(argv):
        calls.append(argv)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return fine_tune(argv)

    monkeypatch.setattr(reflect_rl.sft, "main", interrupted)
    with pytest.raises(SystemExit):
        reflect_rl.main([*flags, "7"])
    reflect_rl.main([*flags, "7", "8"])
    models = [argv[argv.index("--model_name") + 1] for argv in calls]
    base = str(tmp_path / "taxi" / "base" / "data" / "base")
    stages = [(tmp_path / "taxi" / "base" / f"stage-{number}.txt").read_text() for number in (0, 1)]
    first, second = (f"{stage}/checkpoint-000002" for stage in stages)
    assert models == [base, first, first, second, second]  # the second stage twice, then a policy for each seed


def test_a_program_s_error_is_reported_with_its_log(here, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(reflect_rl.TASKS, "taxi", reflect_rl.TASKS["taxi"]._replace(sft={"epochs": -1}))
    line = refused(
        capsys, reflect_rl.main, "--output_dir", tmp_path, "--seeds", "7", "--smoke", "True", "--arms", "SFT", status=1
    )
    assert "--epochs -1" in line
    assert str(tmp_path / "taxi" / "seed-7" / "output.txt") in line


def test_every_task_runs_what_it_compares():
    assert set(reflect_rl.RUN) == set(reflect_rl.COMPARISONS) == set(reflect_rl.TASKS)
    for task, arms in reflect_rl.RUN.items():
        assert set(reflect_rl.COMPARISONS[task]) <= set(arms) <= set(reflect_rl.ARMS | reflect_rl.CONTROLS)
        assert reflect_rl.TASKS[task].rounds[-1] == reflect_rl.TASKS[task].rl["max_steps"]


def test_bad_flags_are_one_line(capsys):
    for flags in (["--task", "chess"], ["--arms", "RL"], ["--seeds", "-1"]):
        assert " ".join(flags) in refused(capsys, reflect_rl.main, *flags)
