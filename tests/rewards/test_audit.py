"""The audit: its warning on synthetic honest and hacked curves, its state, and its metrics in training.

The thresholds of `rewards/audit.py` come from `false_warnings` and `delays` with 1,000 runs a curve.
"""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import torch
from helpers import CPU, metrics
from helpers.rollouts import rollout_of, scores_of

from lightrlhf import grpo, ppo
from lightrlhf.cli.groups import AuditArgs
from lightrlhf.rewards.audit import KEPT, DivergenceMonitor, Moments, RewardAudit, Step, change, moments
from lightrlhf.training.ranks import LocalRanks

STEPS = 200
RISING, FLAT = np.linspace(0.1, 0.9, STEPS), np.full(STEPS, 0.5)


# ------------------------------------------------------------------------------------------------- synthetic curves
def sigmoid(middle: float, width: float) -> np.ndarray:
    return 1 / (1 + np.exp((middle - np.arange(STEPS)) / width))


def wandering(rng: np.random.Generator, memory: float, deviation: float) -> np.ndarray:
    """A stationary walk: each step keeps `memory` of the last one."""
    walk = rng.normal(size=STEPS) * deviation
    for t in range(1, STEPS):
        walk[t] = memory * walk[t - 1] + math.sqrt(1 - memory**2) * walk[t]
    return walk


def right_or_wrong(rng: np.random.Generator, share: np.ndarray, count: int) -> list[Moments]:
    """Scores of 0 and 1."""
    means = rng.binomial(count, share.clip(0, 1)) / count
    return [Moments(mean, mean * (1 - mean) * count / (count - 1), count) for mean in means.tolist()]


def graded(
    rng: np.random.Generator, mean: np.ndarray, count: int, deviation: np.ndarray | float = 0.5
) -> list[Moments]:
    """Normal scores."""
    means = mean + rng.normal(size=STEPS) * deviation / math.sqrt(count)
    variances = deviation**2 * rng.chisquare(count - 1, size=STEPS) / (count - 1)
    return [Moments(one, variance, count) for one, variance in zip(means.tolist(), variances.tolist())]


def both_rise(rng):
    curve = 0.1 + 0.8 * sigmoid(rng.uniform(20, 150), rng.uniform(2, 25))
    return right_or_wrong(rng, curve, 128), right_or_wrong(rng, curve, 128)


def flat_audit(rng):
    return right_or_wrong(rng, RISING, 64), right_or_wrong(rng, FLAT, 64)


def few_samples(rng):
    return right_or_wrong(rng, RISING, 16), right_or_wrong(rng, FLAT, 16)


def rarely_right(rng):
    return right_or_wrong(rng, RISING, 64), right_or_wrong(rng, FLAT * 0.04, 64)


def nearly_always_right(rng):
    return right_or_wrong(rng, RISING, 64), right_or_wrong(rng, FLAT + 0.48, 64)


def both_flat(rng):
    return graded(rng, FLAT, 64), graded(rng, FLAT, 64)


def noisy_start(rng):
    noise = np.where(np.arange(STEPS) < 20, 2.0, 0.5)
    return graded(rng, RISING, 64, noise), graded(rng, FLAT, 64, noise)


def wandering_policy(rng):
    """Both wander, slowly, by as much as the sampling error of a step."""
    own = [wandering(rng, 0.9, 0.5 / math.sqrt(64)) for _ in range(2)]
    return graded(rng, RISING + own[0], 64), graded(rng, FLAT + own[1], 64)


HONEST = (
    both_rise, flat_audit, few_samples, rarely_right, nearly_always_right, both_flat, noisy_start, wandering_policy,
)  # fmt: skip


def hacked(rng, width: float, count: int):
    """Right answers rise to .7; then junk, paid 1.3, takes over. Returns also the step where its share exceeds .1."""
    junk = sigmoid(rng.uniform(60, 120), width)
    right = (0.2 + 0.5 * sigmoid(20, 8)) * (1 - junk)
    reward = graded(rng, right + 1.3 * junk, count)
    return reward, right_or_wrong(rng, right, count), int((junk > 0.1).argmax())


def warnings_of(rewards: list[Moments], audits: list[Moments]) -> list[int]:
    """Steps with a new warning."""
    watch = DivergenceMonitor()
    return [step for step, pair in enumerate(zip(rewards, audits)) if watch.update(Step(*pair))[1]]


def false_warnings(curves, num_runs: int) -> float:
    """Share of runs with a warning."""
    return sum(bool(warnings_of(*curves(np.random.default_rng(seed)))) for seed in range(num_runs)) / num_runs


def delays(width: float, count: int, num_runs: int) -> list[float]:
    """Steps from a share of junk of .1 to the first warning, infinite without one."""
    found = []
    for seed in range(num_runs):
        reward, audit, start = hacked(np.random.default_rng(seed), width, count)
        found.append(min(warnings_of(reward, audit), default=math.inf) - start)
    return found


# ---------------------------------------------------------------------------------------------------- the warning
@pytest.mark.parametrize("curves", HONEST, ids=lambda curves: curves.__name__)
def test_fewer_than_one_in_twenty_honest_runs_warns(curves):
    assert false_warnings(curves, 200) < 1 / 20


@pytest.mark.parametrize(("width", "count"), [(1, 32), (2, 64), (3, 128)])
def test_a_hack_that_takes_over_within_twenty_steps_warns_within_ten(width, count):
    found = delays(width, count, 100)
    assert all(0 <= delay <= 10 for delay in found), found


def test_a_slow_hack_warns_once():
    rng = np.random.default_rng(0)
    reward, audit, start = hacked(rng, 12, 128)
    (warned,) = warnings_of(reward, audit)
    assert start < warned


def test_a_second_hack_warns_again():
    rng = np.random.default_rng(0)
    two_falls = 0.9 - 0.4 * sigmoid(60, 1) - 0.4 * sigmoid(150, 1)
    first, second = warnings_of(graded(rng, 1 - two_falls, 64, 0.2), graded(rng, two_falls, 64, 0.2))
    assert 60 <= first <= 70 and 150 <= second <= 160


@pytest.mark.parametrize(("reward", "audit"), [(RISING, FLAT), (FLAT, 1 - RISING), (1 - RISING, 1 - RISING)])
def test_scores_without_any_noise_warn_only_of_a_rise_with_a_fall(reward, audit):
    exact = [[Moments(mean, 0.0, 8) for mean in curve.tolist()] for curve in (reward, audit)]
    assert not warnings_of(*exact)
    assert warnings_of(
        [Moments(mean, 0.0, 8) for mean in RISING.tolist()], [m._replace(mean=-i) for i, m in enumerate(exact[0])]
    )


def test_a_change_is_beyond_noise_and_beyond_half_a_deviation():
    earlier = [Moments(0.0, 1.0, 10_000)] * 12
    assert change(earlier, [Moments(0.51, 1.0, 10_000)] * 4) == pytest.approx(0.51)
    assert change(earlier, [Moments(0.49, 1.0, 10_000)] * 4) == 0  # beyond noise, but small
    few = [moment._replace(size=16) for moment in earlier]
    error = math.sqrt((1 / 12 + 1 / 4) / 16)
    assert change(few, [Moments(-4.1 * error, 1.0, 16)] * 4) == pytest.approx(-4.1 * error)
    assert change(few, [Moments(-3.9 * error, 1.0, 16)] * 4) == 0


def test_samples_of_a_prompt_that_are_all_alike_do_not_hide_the_noise_between_steps():
    """Eight copies of each score look eight times as certain as they are."""
    rng = np.random.default_rng(0)
    means = rng.normal(size=16) * 0.3
    window = [Moments(mean, 0.1, 64) for mean in means.tolist()]
    squares = np.concatenate([np.diff(means[:12]), np.diff(means[12:])]) ** 2
    error = math.sqrt(squares.mean() / 2 * (1 / 12 + 1 / 4))
    gap = means[12:].mean() - means[:12].mean()
    shifted = [one._replace(mean=one.mean - gap + 3.9 * error) for one in window[12:]]
    assert change(window[:12], shifted) == 0
    shifted = [one._replace(mean=one.mean + 0.2 * error) for one in shifted]
    assert change(window[:12], shifted) > 0


# ------------------------------------------------------------------------------------------------------ the state
@pytest.mark.parametrize("stop", [5, 50, 85, 95, 130])
def test_a_watch_restored_from_its_state_goes_on_the_same(stop):
    reward, audit, _ = hacked(np.random.default_rng(3), 3, 64)
    steps = [Step(*pair) for pair in zip(reward, audit)]
    whole, first = DivergenceMonitor(), DivergenceMonitor()
    expected = [whole.update(step) for step in steps]
    found = [first.update(step) for step in steps[:stop]]
    second = DivergenceMonitor(json.loads(json.dumps(first.state())))
    assert found + [second.update(step) for step in steps[stop:]] == expected
    assert sum(new for _, new in expected) == 1
    assert len(whole.history) == KEPT


def test_a_step_without_scores_is_left_out():
    watch = DivergenceMonitor()
    assert watch.update(Step(Moments(1.0, 0.0, 4), Moments(math.nan, 0.0, 0))) == (False, False)
    assert watch.state()["history"] == []


# -------------------------------------------------------------------------------------------------------- moments
def test_moments_leave_out_what_is_not_scored_and_add_over_ranks():
    one = torch.tensor([1.0, math.nan, 4.0, math.inf]), torch.full((4,), math.nan)
    other = torch.tensor([2.0]), torch.tensor([math.nan])
    parts = [[], []]
    for rank, columns in enumerate((one, other)):
        moments(columns, lambda sums, rank=rank: parts[rank].append(sums) or sums)
    reward, audit = moments(one, lambda sums: sums + parts[1][0])
    values = torch.tensor([1.0, 4.0, 2.0])
    assert reward == (pytest.approx(values.mean().item()), pytest.approx(values.var().item()), 3)
    assert math.isnan(audit.mean) and audit[1:] == (0, 0)


# ------------------------------------------------------------------------------------------------------ in training
GROUPS = ["--num_generations", "2", "--rollout_size", "2"]
PROGRAMS = {"ppo": (ppo.main, ["--rollout_size", "4"]), "grpo": (grpo.main, GROUPS)}


@pytest.fixture(params=PROGRAMS)
def train(request, cafe_data, sft_dir, tmp_path):
    """A program that trains for so many steps of four responses, with further flags; returns its experiment dir."""
    main, own = PROGRAMS[request.param]
    flags = ["--data_dir", str(cafe_data), "--sft_experiment_dir", sft_dir, "--log_dir", str(tmp_path), *CPU, *own]
    flags += ["--mini_batch_size", "4", "--micro_batch_size", "4", "--max_new_tokens", "4", "--eval_interval", "0"]
    flags += ["--log_interval", "1", "--save_interval", "2"]

    def run(num_steps: int, reward: str, *more: str) -> str:
        return main([*flags, "--max_steps", str(num_steps), "--reward_function", f"helpers.rewards:{reward}", *more])

    run.resume = lambda folder, steps: main(["--resume_from", folder, "--max_steps", str(steps)])
    return run


@pytest.mark.slow
def test_the_audit_is_logged_beside_the_score_and_changes_no_weight(train):
    plain = train(2, "length")
    audited = train(2, "length", "--audit_function", "helpers.rewards:vowels")
    own = [row.keys() - {"step"} for row in metrics(audited) if "objective/score" in row]
    assert all({"audit/score", "audit/valid_ratio", "audit/warning"} <= row for row in own)
    for one, other in zip(metrics(plain), metrics(audited)):
        timeless = {name: value for name, value in one.items() if not name.startswith("time/")}
        assert timeless == {name: other[name] for name in timeless}


@pytest.mark.slow
def test_a_resumed_run_watches_as_if_it_had_not_stopped(train, monkeypatch, capfd):
    """Three steps are enough here: any fall beside any rise is warned of."""
    for name, value in {"RECENT": 1, "EARLIER": 2, "DISTANCES": (0,), "Z": 0, "EFFECT": 0}.items():
        monkeypatch.setattr(f"lightrlhf.rewards.audit.{name}", value)
    whole = train(6, "growing", "--audit_function", "helpers.rewards:shrinking")
    lines = re.findall(r"warning: .*", capfd.readouterr().out)
    assert len(lines) == 1 and "step 3" in lines[0]
    half = train(4, "growing", "--audit_function", "helpers.rewards:shrinking")
    assert len(re.findall(r"warning: .*", capfd.readouterr().out)) == 1
    train.resume(half, 6)
    assert not re.findall(r"warning: .*", capfd.readouterr().out)
    warned = [[row["audit/warning"] for row in metrics(run) if "audit/warning" in row] for run in (whole, half)]
    assert warned[0] == warned[1] == [0, 0, 1, 1, 1, 1]


def test_unscored_samples_are_left_out_of_the_audits_mean(tokenizer):
    audit = RewardAudit(AuditArgs(audit_function="helpers.rewards:every_other"), LocalRanks())
    audits = audit.score(rollout_of([[5, 6]] * 4, [[7, 1]] * 4, tokenizer=tokenizer))
    assert audits.isnan().tolist() == [False, True, False, True]
    assert audit.compare(1, dataclasses.replace(scores_of([0.0] * 4), audit=audits)) == {
        "audit/score": 1.0,
        "audit/valid_ratio": 0.5,
        "audit/warning": 0.0,
    }


def test_an_audit_that_hangs_costs_its_own_samples_only(tokenizer):
    args = AuditArgs(audit_function="helpers.answers:sleeps_on_silence", reward_timeout=0.5)
    audit = RewardAudit(args, LocalRanks())
    columns = [{"answer": " x"}] * 2
    ids = tokenizer("x", add_special_tokens=False)["input_ids"]
    rollout = rollout_of([[5, 6]] * 2, [[1], [*ids, 1]], columns=columns, tokenizer=tokenizer)
    assert audit.score(rollout).isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("helpers.rewards:nothing", "cannot be imported"),
        ("helpers.rewards:takes_no_columns", "must accept **columns"),
        ("helpers.rewards:length", "is the reward itself"),
    ],
)
def test_an_audit_that_cannot_be_one_is_refused(train, capsys, path, words):
    with pytest.raises(SystemExit) as stop:
        train(1, "length", "--audit_function", path)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and f"--audit_function {path}" in line and words in line
