"""lightrlhf.evaluate_env: who acts, from which starts, in how many repeats, and what the table says of it."""

import json
import threading
from pathlib import Path

import pytest

pytest.importorskip("gymnasium", reason="needs pip install -e '.[envs]'")

from helpers import CPU
from helpers.corridor import ACTIONS, Corridor, save_corridor_model
from helpers.errors import refused
from helpers.servers import Scripted, answering

from lightrlhf import evaluate, evaluate_env, reflect_rl
from lightrlhf.evaluate_env import acting_args, find_command
from lightrlhf.maths.ops import wilson_interval

ENV = ["--env", "helpers.corridor:Corridor"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[str, str, str]:
    """Experiment dir of a run with a reflector, its reflector, and a bare model folder."""
    folder = tmp_path_factory.mktemp("evaluated")
    reflector, bare = (save_corridor_model(folder / name, seed) for seed, name in ((3, "reflector"), (5, "bare")))
    flags = ["--model_name", bare, "--reflect_experiment_dir", reflector, "--reflect_max_new_tokens", "4"]
    flags += ["--max_steps", "1", "--rollout_size", "4", "--eval_interval", "0", "--with_history", "True"]
    return reflect_rl.main([*ENV, *CPU, "--log_dir", str(folder / "logs"), *flags]), reflector, bare


def call(*argv: object) -> list[dict]:
    return evaluate_env.main([*ENV, "--accelerator", "cpu", *map(str, argv)])


def test_oracle_and_random_are_always_there_and_starts_are_fixed(trained, capsys):
    oracle, lucky, *models = call("--experiment_dir", trained[0], trained[2], "--eval_reps", 3)
    assert [oracle["model"], lucky["model"]] == ["oracle", "random"]
    assert oracle["success"] == oracle["greedy_success"] == 1 and lucky["success"] < 0.9
    number = len(Corridor().starts("test"))
    for row in (oracle, lucky, *models):
        low, high = row["success_interval"]  # three episodes of a start are not three starts
        narrow, wide = (wilson_interval(row["success"] * n, n) for n in (3 * number, number))
        assert wide[0] - 1e-9 <= low <= narrow[0] + 1e-9 and narrow[1] - 1e-9 <= high <= wide[1] + 1e-9
        parts = [row[f"success, {level}"] for level in Corridor.levels]
        assert min(parts) <= row["success"] <= max(parts)
    assert models[0]["greedy_success"] != models[1]["greedy_success"] or models[0]["success"] != models[1]["success"]
    assert {"greedy_cost", "greedy_length", "greedy_invalid_ratio"} <= models[0].keys()
    table = capsys.readouterr().out
    assert "oracle" in table and "sampled 3 times each" in table and "1.000 [0." in table
    records = Path(trained[0]) / "eval" / "Corridor_test.jsonl"
    episodes = [json.loads(line) for line in records.read_text().splitlines()]
    assert len(episodes) == 3 * number and "=== " in episodes[0]["story"]
    assert sum(e["success"] for e in episodes) / len(episodes) == pytest.approx(models[0]["success"])


def test_the_number_of_samples_is_of_each_level_and_the_table_says_so(trained, capsys):
    call("--num_samples", 1)
    assert f"{len(Corridor.levels)} starts (at most 1 of each level)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_results_are_reproducible_and_levels_and_samples_choose_starts(trained):
    flags = ["--experiment_dir", trained[0], "--levels", "long way", "--num_samples", 2, "--split", "validation"]
    assert call(*flags) == call(*flags, "--num_envs", 1, "--rollout_mini_batch_size", 1)
    (row, *_) = call(*flags)
    assert not any("success, " in name for name in row)


@pytest.mark.slow
def test_an_experiment_acts_as_it_was_trained_unless_told_otherwise(trained):
    experiment, reflector, bare = trained
    assert acting_args(experiment, {}).with_history and acting_args(experiment, {}).reflect_max_new_tokens == 4
    assert not acting_args(experiment, {"with_history": False}).with_history
    assert acting_args(bare, {}).max_new_tokens == 1
    with_it = call("--experiment_dir", experiment)[2]
    assert with_it == call("--experiment_dir", experiment, "--reflect_experiment_dir", reflector)[2]
    assert with_it != call("--experiment_dir", experiment, "--reflect_experiment_dir", "none")[2]


class Guide(dict):
    """What the scripted server says to any message: nonsense first, then a command."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.texts, self.lock = texts, threading.Lock()

    def get(self, prompt, default=None):
        text = self.texts[1] if "names none" in prompt else self.texts[0]
        body = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
        return [lambda handler: handler.send(200, body)] * 1000


@pytest.mark.parametrize(
    "texts, attempts, success",
    [(("Hm.\nCommand: east", ""), 3, 0.5), (("I do not know", "east"), 2, 0.5), (("I do not know", "east"), 1, 0.0)],
    ids=["at once", "at the second try", "too late"],
)
def test_a_language_model_at_a_server_acts_and_may_correct_itself(texts, attempts, success, monkeypatch):
    monkeypatch.setattr("lightrlhf.evaluate_env.AGENT_ATTEMPTS", attempts)
    server = Scripted(Guide(*texts))
    with answering(server) as url:
        *_, row = call("--base_url", url, "--agent_model", "guide")
    assert row["model"] == "guide" and row["success"] == success  # half of the goals lie east
    assert row["invalid_ratio"] == (1 if success == 0 else 0)
    asked = next(text for text in server.asked if "Commands:" in text)
    assert asked.endswith("Commands:\n- west\n- east\n- wait")


@pytest.mark.parametrize(
    "text, command",
    [
        ("Command: east", "east"),
        ("east", "east"),
        ("I could wait.\n**Command: `west`**", "west"),
        ("Command: east\nCommand: wait.", "wait"),
        ("going east now", None),
        ("", None),
    ],
)
def test_the_command_of_a_reply(text, command):
    assert find_command(text, ACTIONS) == command


@pytest.mark.parametrize(
    "flags, line",
    [
        (["--levels", "deep"], "--levels deep"),
        (["--acting", "speed=3"], "--acting speed"),
        (["--acting", "temperature=0"], "--acting: --temperature 0"),
        (["--reflect_experiment_dir", "nowhere", "none"], "--reflect_experiment_dir"),
        (["--agent_model", "gpt"], "--agent_model"),
        (["--env", "nowhere"], "--env nowhere is unknown"),
        (["--acting", "with_history=text"], "--acting: --with_history 'text' is not True or False"),
        (["--env_options", "horizon=text"], "--env_options horizon 'text' is not a whole number"),
        (["--env_options", "width=3"], "its options are: horizon"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_flag_is_one_line(flags, line, trained, capsys):
    assert line in refused(
        capsys, evaluate_env.main, *(ENV if flags[0] != "--env" else []), "--experiment_dir", trained[0], *flags
    )


def test_evaluate_with_env_calls_this_program(trained, capsys):
    flags = ["--experiment_dir", trained[0], "--levels", "long way", "--num_samples", "2", "--accelerator", "cpu"]
    assert evaluate.main(["--by_turn", "False", *flags, *ENV]) == evaluate_env.main([*flags, *ENV])
    assert "--acting" in refused(capsys, evaluate.main, "--experiment_dir", trained[0], "--acting", "with_history=True")
