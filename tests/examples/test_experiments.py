"""Statistics and calls shared by the experiments, and that every flag they set exists."""

import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
from types import ModuleType

import psutil
import pytest
from helpers import ROOT
from helpers.errors import error_naming, refused
from helpers.pages import args_class

from examples.experiments import (
    agents,
    cafe_methods,
    critic_free_cafe,
    distilled_cafe,
    grpo_switches,
    hidden_map,
    hinted_reasoning,
    macro_actions,
    online_cafe,
    other_tokenizer,
    real_calculator,
    real_dialogues,
    real_distillation,
    real_reasoning,
    reasoning,
    records,
    reflect_rl,
    refuel,
    reward_hack,
    rollout_servers,
    taxi_agents,
    unit_tests,
)
from examples.experiments.readings import at_equal_samples_and_time, at_seconds
from examples.experiments.records import best_rate, common_seeds, keep, kept_rows, made_by, results
from examples.experiments.stats import interval, log_rank, paired, pairing, report_claims, restricted, shown, shown_gap
from examples.programs import logged, made
from lightrlhf import quickstart
from lightrlhf.cli.calls import call
from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import load_split
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.storage.jsonl import read_jsonl


def test_intervals_are_those_of_student_s_t():
    mean, low, high = interval([1.0, 2.0, 4.5])
    half = 4.303 * math.sqrt(3.25) / math.sqrt(3)  # two degrees of freedom
    assert (mean, low, high) == pytest.approx((2.5, 2.5 - half, 2.5 + half))
    assert interval([0.3]) == (0.3, -math.inf, math.inf)
    assert paired([3.0, 5.0], [1.0, 3.0]) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError):
        paired([3.0, 5.0], [1.0])
    assert shown([0.25, 0.25]) == "0.250 [0.250, 0.250]" and shown([0.25], digits=1) == "0.2"
    wide, widest = (interval([0.0, 1.0] * half_count) for half_count in (5, 50))
    assert widest[2] - 0.5 == pytest.approx((wide[2] - 0.5) * math.sqrt(9 / 99) * 1.98422 / 2.262, rel=1e-5)


def test_times_that_are_not_reached_count_as_the_limit_of_their_mean():
    assert restricted([61, None, 12.0], 60) == [60, 60, 12.0]
    token, macro = [None, 56.0, 53.0], [42.0, 42.0, None]
    gap = paired(restricted(token, 60), restricted(macro, 60))
    assert gap[0] == pytest.approx((18 + 14 - 7) / 3, abs=1e-12)
    assert shown_gap((1.25, -0.5, 3.0), 1) == "+1.2 [-0.5, +3.0]"


def test_the_log_rank_test_by_hand():
    """Two groups of three; at each time t: at risk, share of the first, observed minus expected, variance."""
    chi_square, p = log_rank([3.0, 5.0, None], [1.0, 3.0, 4.0])
    expected = 3 / 6 + 2 * 3 / 5 + 2 / 3 + 2 / 2  # of the first group, at times 1, 3, 4 and 5
    variance = 3 / 6 * 3 / 6 + 2 * 3 / 5 * 2 / 5 * (5 - 2) / (5 - 1) + 2 / 3 * 1 / 3 + 0
    assert chi_square == pytest.approx((2 - expected) ** 2 / variance, rel=1e-14)
    assert p == pytest.approx(math.erfc(math.sqrt(chi_square / 2)), rel=1e-14)
    assert log_rank([3.0, None], [3.0, None]) == (0.0, 1.0) and log_rank([None], [None]) == (0.0, 1.0)
    assert log_rank([9.0] * 5, [1.0] * 5)[1] < 0.01 < log_rank([1.0, 3.0], [2.0, 4.0])[1]


@pytest.fixture
def kept_in(tmp_path, monkeypatch):
    """An empty folder in the place of the rows that the repository keeps."""
    folder = tmp_path / "kept"
    folder.mkdir()
    monkeypatch.setattr(records, "KEPT", folder)
    return folder


def test_a_new_run_starts_from_the_rows_that_are_kept_and_adds_seeds(kept_in, tmp_path, capsys):
    def run(folder: str, seeds: list[int], **settings: bool) -> list[int]:
        with results("task", tmp_path / folder, {"rate": 1e-3} | settings) as writer:
            done = {row["seed"] for row in writer.rows}
            writer.append(*({"arm": "a", "seed": seed} for seed in seeds if seed not in done))
            return [row["seed"] for row in writer.rows]

    assert run("one", [1, 2]) == [1, 2] and kept_rows("task") == []
    keep("task", tmp_path / "one")
    assert run("two", [2, 6]) == [1, 2, 6]
    keep("task", tmp_path / "two")
    before = (kept_in / "task.jsonl.gz").read_bytes()
    keep("task", tmp_path / "two")
    assert (kept_in / "task.jsonl.gz").read_bytes() == before and len(kept_rows("task")) == 3
    with error_naming(UsageError, "1 of the rows"):
        keep("task", tmp_path / "one")
    assert run("smoke", [9], smoke=True) == [9] and not capsys.readouterr().out
    assert run("other", [9], fast=True) == [9] and "other settings" in capsys.readouterr().out
    with pytest.raises(UsageError, match="smoke"):
        keep("task", tmp_path / "smoke")


def test_seeds_are_common_where_every_arm_has_them():
    rows = [{"arm": arm, "seed": seed} for arm, seed in (("a", 2), ("b", 1), ("a", 1), ("b", 2), ("a", 6))]
    assert common_seeds(rows, ["a", "b"]) == [1, 2] and common_seeds(rows, ["a"]) == [1, 2, 6]
    assert common_seeds(rows, ["a", "c"]) == []


def test_claims_are_printed_and_written(tmp_path, capsys):
    report_claims({"a > b": True, "b > c": False}, tmp_path)
    line = "a > b: held; b > c: did NOT hold\n"
    assert (tmp_path / "claims.txt").read_text() == line and capsys.readouterr().out == f"claims: {line}"


@pytest.fixture
def program():
    """A program that returns its words, or stops with an error."""
    module = ModuleType("lightrlhf.fake")

    def main(words):
        if "--fail" in words:
            print("error: --fail True is wrong", file=sys.stderr)
            sys.exit(2)
        return words

    module.main = main
    return module


def test_a_call_prints_the_command_it_stands_for(program, capsys):
    assert call(program, names=["a b", "c"], rate=1e-3, nothing=None, flag=True) == [
        *("--names", "a b", "c", "--rate", "0.001", "--flag", "True")
    ]
    assert "$ python -m lightrlhf.fake --names 'a b' c --rate 0.001 --flag True\n" in capsys.readouterr().out


def test_an_error_of_a_logged_call_names_the_log(program, tmp_path, capsys):
    log = tmp_path / "folder" / "output.txt"
    assert logged(log, program, rate=1) == ["--rate", "1"]
    with pytest.raises(RunFailure) as failure:
        logged(log, program, fail=True)
    assert "--fail True" in str(failure.value) and str(log) in str(failure.value)
    assert log.read_text().count("$ python -m lightrlhf.fake") == 2 and not capsys.readouterr().out


@pytest.mark.slow
def test_demonstrations_of_the_hidden_map_and_of_sorting_are_whole(tmp_path):
    hidden_map.write_data(tmp_path / "map", 1, hidden_map.TOKENS)
    rows = load_split(tmp_path / "map", "finetune", "train")
    assert {len(row["input_ids"]) for row in rows} == {hidden_map.PROMPT + hidden_map.RESPONSE + 1}  # and an end token
    grpo_switches.write_data(tmp_path / "sorting", 1)
    tokenizer = load_tokenizer(tmp_path / "sorting", None)
    texts = [tokenizer.decode(row["input_ids"]) for row in load_split(tmp_path / "sorting", "finetune", "train")[:200]]
    assert all(text.count("sort") == text.count("answer") == 1 for text in texts)


@pytest.mark.parametrize(
    "args, names",
    [
        (hidden_map.HiddenMapArgs, ["online", "offline, SFT policy"]),
        (reflect_rl.ReflectRLExperimentArgs, ["SFT", "Reflect-RL, positive"]),
        (refuel.RefuelExperimentArgs, ["REFUEL", "REFUEL, random horizon"]),
    ],
)
def test_names_of_arms_may_have_commas(args, names):
    assert parse(args, ["--arms", *names]).arms == names


def test_what_was_not_made_to_its_end_is_made_again(tmp_path):
    def killed() -> str:
        (tmp_path / "checkpoint-1").mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "made.txt", killed)
    assert made(tmp_path / "made.txt", lambda: "run") == "run" == made(tmp_path / "made.txt", killed)


POOL = """
import time
from examples.programs import workers

def hang(_):
    print("hangs", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    with workers(2) as pool:
        list(pool.map(hang, range(2)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with the one that started it")
def test_no_worker_outlives_an_experiment_that_is_killed(tmp_path):
    (tmp_path / "pool.py").write_text(POOL, encoding="utf-8")
    where = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, tmp_path / "pool.py"], env=where, stdout=subprocess.PIPE) as run:
        assert [run.stdout.readline() for _ in range(2)] == [b"hangs\n"] * 2
        workers = psutil.Process(run.pid).children()
        run.kill()
        run.wait()
        _, alive = psutil.wait_procs(workers, timeout=60)
    assert len(workers) >= 2 and all(worker.status() == psutil.STATUS_ZOMBIE for worker in alive)


FLAGS = {
    "lightrlhf.sft": [
        *(quickstart.SFT, hidden_map.SFT, macro_actions.LETTER_SFT | macro_actions.QUIET, reward_hack.SFT),
        *(reasoning.BASE_SFT, reasoning.SFT, reasoning.RAFT, grpo_switches.SFT),
        *(real_reasoning.FORMAT, real_reasoning.RAFT, real_dialogues.SFT, unit_tests.SFT),
        *(agents.SFT, real_calculator.SFT, distilled_cafe.STUDENT_SFT, distilled_cafe.ARMS["SFT on the teacher"][1]),
        *(hinted_reasoning.BASE_SFT, hinted_reasoning.ARMS["labels"][1]),
    ],
    "lightrlhf.rm": [quickstart.RM, real_dialogues.RM],
    "lightrlhf.ppo": [
        *(macro_actions.LETTER_PPO, macro_actions.CAFE_PPO, *macro_actions.ARMS.values()),
        *(cafe_methods.COMMON, cafe_methods.METHODS["PPO"].flags, real_dialogues.PPO),
        *(unit_tests.PPO, *unit_tests.ARMS.values()),
    ],
    "lightrlhf.grpo": [
        *(cafe_methods.COMMON, cafe_methods.METHODS["GRPO"].flags, cafe_methods.METHODS["RLOO"].flags),
        *(grpo_switches.GRPO, *grpo_switches.ARMS.values()),
        *(reward_hack.GRPO | reward_hack.QUIET, reasoning.GRPO, real_reasoning.GRPO, real_dialogues.GRPO),
        *(*agents.ARMS.values(), *real_calculator.ARMS.values(), taxi_agents.GRPO, hinted_reasoning.ARMS["GRPO"][1]),
    ],
    "lightrlhf.distill": [
        *(distilled_cafe.ARMS[f"distill by {name}"][1] for name in ("position", "sequence")),
        *(other_tokenizer.ARMS["response"][1], other_tokenizer.ARMS["to go"][1]),
        *(hinted_reasoning.ARMS["hint"][1], real_distillation.STUDENT),
    ],
    "lightrlhf.dpo": [online_cafe.DPO, real_dialogues.DPO],
    "lightrlhf.online_dpo": [online_cafe.ONLINE, hidden_map.ONLINE, *hidden_map.ARMS.values()],
    "lightrlhf.iterative_refuel": [
        refuel.REFUEL,
        *refuel.ARMS.values(),
        *(task["refuel"] for task in refuel.TASKS.values()),
    ],
    "lightrlhf.generate": [unit_tests.ANSWERS],
    "datasets_prep.cafe.prepare_data": [quickstart.FEW_ROWS],
    "datasets_prep.apps.prepare_data": [unit_tests.DATA],
}


@pytest.mark.parametrize("program", FLAGS)
def test_every_flag_of_an_experiment_exists(program):
    known = {field.name for field in dataclasses.fields(args_class(program))}
    assert not {name for flags in FLAGS[program] for name in flags} - known


ORIGIN = {"seconds", "cpu_seconds", "versions", "commit", "day", "processor"}  # of every row


@pytest.mark.slow
def test_the_planted_hack_runs_and_resumes(tmp_path, capsys):
    folder = ["--output_dir", str(tmp_path), "--seeds", "1", "--smoke", "True"]
    reward_hack.main(folder)
    lines = (tmp_path / "results.jsonl").read_text()
    honest, hacked = map(json.loads, lines.splitlines())
    assert (honest["arm"], hacked["arm"], hacked["seed"]) == ("honest", "hacked", 1) and ORIGIN <= hacked.keys()
    assert len(honest["reward"]) == len(honest["audit"]) == len(hacked["junk"]) == 2
    reward_hack.main(folder)
    assert (tmp_path / "results.jsonl").read_text() == lines
    assert "right: each hack that rises is warned of at most 10 steps after: did NOT hold" in capsys.readouterr().out


def test_the_rise_of_a_hack_and_the_delay_of_its_warning():
    junk = [0.0, 0.3, 0.0, 0.3, 0.4, 0.5, 0.6]
    assert (
        reward_hack.rise_of(junk) == 4
        and reward_hack.rise_of(junk, 0.35) == 5
        and reward_hack.rise_of(junk, 0.5) is None
    )
    assert reward_hack.delays([{"junk": junk, "warning": warning} for warning in (9, None)]) == [5, math.inf]
    said = (["1 + 2 ="] * 4, ["3 .", "3", "um .", "4 ."], ["3"] * 4)
    assert reward_hack.hacked(*said) == [1.2, 1.0, 1.5, 0.2] and reward_hack.honest(*said) == [1.2, 1.0, 0.2, 0.2]


def test_a_run_on_letters_ends_where_the_mean_of_five_scores_reaches_the_target():
    assert macro_actions.rollouts_until([1.0] * 4 + [0.9] * 6) == {"rollouts": 5, "score": pytest.approx(0.9)}
    assert macro_actions.rollouts_until([0.5] * 4 + [1.0] * 4)["rollouts"] == 8
    assert macro_actions.rollouts_until([0.8] * 60) == {"rollouts": None, "score": pytest.approx(0.8)}
    times = {"token": [None, 50], "n=8": [40, 44]}
    assert macro_actions.gain(times, "n=8", "token", "rollouts")[0] == (20 + 6) / 2
    assert macro_actions.gain({"a": [0.5], "b": [0.25]}, "a", "b", "score")[0] == 0.25


@pytest.mark.parametrize("flags", [["--settings", "chess"], ["--arms", "n=3"], ["--seeds", "-1"]])
def test_bad_flags_of_macro_actions_are_one_line(flags, capsys):
    assert " ".join(flags) in refused(capsys, macro_actions.main, *flags)


def test_curves_are_read_at_equal_samples_and_at_equal_time():
    slow, fast = ([{"seconds": t * pace, "gold": t / 4, "kl": t, "length": 9.0} for t in range(5)] for pace in (2, 1))
    read = at_equal_samples_and_time({"PPO": [slow], "GRPO": [fast]}, list(critic_free_cafe.MEASURES))
    assert read["equal samples"]["PPO"]["gold"] == read["equal samples"]["GRPO"]["gold"] == [1.0]
    assert read["equal time"]["PPO"]["gold"] == [0.5] and read["equal time"]["GRPO"]["gold"] == [1.0]
    assert at_seconds(slow, "kl", 3.0) == 1.5  # on the line between two checkpoints


def test_the_learning_rate_of_the_best_trial_is_chosen():
    trials = [{"learning_rate": rate, "score": score} for rate, score in ((1e-4, 0.1), (3e-4, 0.3), (1e-3, 0.3))]
    assert best_rate(trials) == 3e-4
    assert made_by()["processor"] and "torch" in made_by()["versions"]


def test_only_sorted_digits_after_the_first_answer_are_right():
    answers = ["answer 1 2 2", "so hm answer 1 2 2", "answer 2 1 2", "answer 1 2 2 so", "answer 1 2", "1 2 2", ""]
    assert grpo_switches.is_right(["2 1 2 sort"] * 7, answers) == [1, 1, 0, 0, 0, 0, 0]
    verdicts = grpo_switches.judge(["2 1 2 sort"] * 2, answers[:2])
    assert verdicts[1] == {"score": 1.0, "words": 6, "filler": 2} and verdicts[0]["filler"] == 0


@pytest.mark.thorough
def test_the_switches_run_and_resume(tmp_path, capsys):
    words = ["--smoke", "True", "--seeds", "1", "2", "--tables", "KL", "--output_dir", str(tmp_path)]
    grpo_switches.main(words)
    rows = read_jsonl(tmp_path / "results.jsonl")
    assert len(rows) == 3 + 2 * 3 and all({"curve", "flags", *ORIGIN} <= row.keys() for row in rows)
    assert "4 comparisons" in capsys.readouterr().out  # two arms, two measures
    grpo_switches.main(words)
    assert read_jsonl(tmp_path / "results.jsonl") == rows


@pytest.mark.nightly
def test_sampling_on_a_server_is_compared_with_the_local_engine(tmp_path, capsys):
    folder = ["--output_dir", str(tmp_path), "--seeds", "1", "--arms", "local", "own", "--smoke", "True"]
    rollout_servers.main(folder)
    rows = read_jsonl(tmp_path / "results.jsonl")
    assert [(row["arm"], row["method"]) for row in rows] == [
        *(("local", "GRPO"), ("local", "PPO"), ("own", "GRPO"), ("own", "PPO"))
    ]
    assert rows[2]["gold"] == rows[0]["gold"] and rows[3]["first_kl"] < 1e-9
    assert "gold, own minus local: +0.000" in capsys.readouterr().out


def test_students_are_compared_with_their_start_and_with_each_other():
    ends = {"response": 0.2, "to go": 0.4, "same tokenizer": 0.3}

    def curve(arm: str, seed: int) -> list[dict]:
        points = enumerate((0.3, ends[arm] + seed / 1000))
        return [
            {"kl": 1.0, "kl_of_teacher": 1.0, "length": 9.0, "seconds": 5.0 * i, "gold": gold} for i, gold in points
        ]

    claims = other_tokenizer.show_results({arm: [curve(arm, seed) for seed in (1, 2, 3)] for arm in ends})
    assert (claims["response > its start"], claims["to go > its start"], claims["to go > response"]) == (
        False,
        True,
        True,
    )
    assert claims["response differs from to go at equal time"] and "same tokenizer > its start" not in claims


@pytest.mark.nightly
def test_a_teacher_with_another_tokenizer_is_compared_and_resumes(tmp_path, capsys):
    words = ["--smoke", "True", "--seeds", "1", "--output_dir", str(tmp_path)]
    other_tokenizer.main(words)
    rows = read_jsonl(tmp_path / "results.jsonl")
    assert [row["arm"] for row in rows if row["seed"]] == [*other_tokenizer.ARMS]
    assert len(rows) == 2 * len(other_tokenizer.ARMS) and ORIGIN - {"cpu_seconds"} <= rows[-1].keys()
    start = {row["arm"]: row["curve"][0] for row in rows if row["seed"]}
    assert start["response"]["kl"] == start["SFT on texts"]["kl"] != start["same tokenizer"]["kl"]
    assert min(min(one["kl"], one["kl_of_teacher"]) for one in start.values()) > 0  # of an untrained student
    other_tokenizer.main(words)
    assert read_jsonl(tmp_path / "results.jsonl") == rows
    assert "to go > response: did NOT hold" in capsys.readouterr().out


def test_what_pairing_by_seed_saves():
    """The same noise in both arms, none, and the ratio by hand."""
    own, shared = [0.1, -0.2, 0.05, 0.0, -0.1], [1.0, 3.0, 2.0, 5.0, 4.0]
    ours = [a + b for a, b in zip(shared, own)]
    assert pairing(ours, shared)[0] == pytest.approx(
        statistics.variance(own) / (statistics.variance(ours) + statistics.variance(shared))
    )
    ratio, low, high = pairing([1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 1.0, 2.0])
    assert low < ratio < high and ratio == pytest.approx(1.0)
