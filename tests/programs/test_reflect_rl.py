"""Reflect-RL: losses by formula, advantages by hand, sampling equal to scoring, a run that learns and resumes."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path

import helpers
import pytest
import torch
from helpers import CPU, RunOfOneStep, assert_same_gradients, last_checkpoint, metrics, weights
from helpers.processes import PATIENCE

pytest.importorskip("gymnasium", reason="needs pip install -e '.[envs]'")

from helpers.corridor import STARTS, WAYS, Corridor, corridor_tokenizer, save_corridor_model

from lightrlhf import reflect_rl
from lightrlhf.cli.args import ModelArgs
from lightrlhf.data.batch import response_batch
from lightrlhf.envs import prompts
from lightrlhf.envs.agents import Decision, Episode, ModelAgent, play
from lightrlhf.envs.curriculum import Stage, curriculum, starts_of
from lightrlhf.models.loading import load_policy, load_scalar
from lightrlhf.models.roles import TokenStats
from lightrlhf.reflect_rl import (
    DecisionBatch,
    ReflectRLArgs,
    Replay,
    ValueHead,
    estimate_advantages,
    group_advantages,
    make_batch,
    policy_gradient_loss,
    ppo_loss,
    score,
    update_minibatch,
)

ENV = ["--env", "helpers.corridor:Corridor", *CPU, "--eval_interval", "0", "--rollout_size", "16", "--num_envs", "8"]


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory):
    return save_corridor_model(tmp_path_factory.mktemp("corridor") / "policy")


@pytest.fixture(scope="module")
def reflector_dir(tmp_path_factory):
    return save_corridor_model(tmp_path_factory.mktemp("corridor") / "reflector", seed=3)


def args_of(**changes) -> ReflectRLArgs:
    return ReflectRLArgs(model_name="tiny", env="helpers.corridor:Corridor", **changes)


def agent_of(folder: str, args: ReflectRLArgs) -> ModelAgent:
    tokenizer = corridor_tokenizer()
    return ModelAgent(load_policy(folder, ModelArgs(), tokenizer).eval(), tokenizer, prompts, args, 3, 16)


def float64_batch() -> tuple[DecisionBatch, TokenStats, torch.Tensor]:
    """Decisions of one to three tokens with made-up numbers, and what a policy might say of them."""
    batch = response_batch([[5, 6], [7], [8, 9, 4]], [[3], [4, 2, 1], [5, 1]], 0)
    mask = batch.action_mask
    old, new = (torch.randn(2, *mask.shape, dtype=torch.float64) - 3) * mask
    rows = torch.randn(3, 3, dtype=torch.float64)
    found = DecisionBatch(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        action_mask=mask,
        logprobs=old,
        allowed=torch.zeros(3, 1, 0, dtype=torch.bool),
        rewards=rows[0],
        values=rows[1],
        advantages=torch.tensor([-1.0, 1.5, 0.5], dtype=torch.float64),
        returns=rows[2],
    )
    entropy = torch.rand(mask.shape, dtype=torch.float64).requires_grad_()
    return found, TokenStats(new.detach().requires_grad_(), entropy, None), torch.tensor([0.5, 1.0, 2.0]).double()


# ---------------------------------------------------------------------------------------------------------- formulas
@pytest.mark.parametrize("entropy_coeff", [0.0, 0.3])
def test_the_policy_gradient_is_that_of_a_float64_reference(entropy_coeff):
    batch, stats, importance = float64_batch()
    loss = policy_gradient_loss(stats, batch, importance, entropy_coeff)
    found = torch.autograd.grad(loss, stats[:2], allow_unused=True, materialize_grads=True)
    for row, column in batch.action_mask.nonzero().tolist():
        gain = float(importance[row] * batch.advantages[row])  # d log pi(a) / d log pi(token) = 1, for each token
        assert float(found[0][row, column]) == pytest.approx(-gain, abs=1e-12)
        assert float(found[1][row, column]) == pytest.approx(-entropy_coeff, abs=1e-12)
    for gradient in found:
        assert (gradient[~batch.action_mask] == 0).all()


def test_the_ppo_loss_and_its_gradient_equal_a_float64_reference():
    batch, stats, _ = float64_batch()
    loss = ppo_loss(stats, batch, 0.1, 0.2)
    found = torch.autograd.grad(loss, stats.logprobs, retain_graph=True)[0]
    total, clipped = torch.zeros((), dtype=torch.float64), 0
    for row, column in batch.action_mask.nonzero().tolist():
        ratio = (stats.logprobs[row, column] - batch.logprobs[row, column]).exp()
        advantage, bounded = float(batch.advantages[row]), min(max(ratio.item(), 0.9), 1.1)
        if ratio.item() * advantage <= bounded * advantage:
            total = total - ratio * advantage
        else:
            total, clipped = total - bounded * advantage, clipped + 1
        total = total - 0.2 * stats.entropy[row, column]
    assert 0 < clipped < batch.num_actions
    assert float(loss) == pytest.approx(float(total), abs=1e-10)
    assert torch.allclose(found, torch.autograd.grad(total, stats.logprobs)[0], atol=1e-12)


def played(*rewards: list[float]) -> list[Episode]:
    """Episodes with these rewards; prompts and actions do not matter."""
    said = {"prompt_ids": [5, 6], "response_ids": [20], "logprobs": [-1.0], "allowed": [0, 1, 2]}
    return [Episode({}, decisions=[Decision("", **said, reward=r) for r in row]) for row in rewards]


def estimated(policy_dir, episodes, whitened=True, **changes) -> DecisionBatch:
    args = args_of(**changes)
    run = RunOfOneStep(args)
    batch = make_batch(run, episodes, agent_of(policy_dir, args))
    estimate_advantages(run, batch, episodes, None, whitened)
    return batch


def test_advantages_are_the_rewards_to_come(policy_dir):
    episodes = played([1.0, -2.0, 4.0], [0.5], [3.0, 1.0])
    plain = estimated(policy_dir, episodes, normalize_advantages=False)
    assert plain.advantages.tolist() == [3.0, 2.0, 4.0, 0.5, 4.0, 1.0]
    assert plain.returns.tolist() == plain.advantages.tolist()
    discounted = estimated(policy_dir, episodes, normalize_advantages=False, gae_gamma=0.5)
    assert discounted.advantages.tolist() == [1.0, 0.0, 4.0, 0.5, 3.5, 1.0]
    whitened = estimated(policy_dir, episodes).advantages
    raw = plain.advantages
    assert torch.allclose(whitened, (raw - raw.mean()) / raw.std(correction=0), atol=1e-5)
    assert estimated(policy_dir, episodes, whitened=False).advantages.tolist() == raw.tolist()


def test_group_advantages_compare_episodes_of_one_start(policy_dir):
    episodes = played([1.0, 1.0], [0.0], [7.0], [7.0, 0.0])
    found = estimated(policy_dir, episodes, rollout_size=4, group_size=2).advantages
    assert found.tolist() == pytest.approx([1, 1, -1, 0, 0, 0], abs=1e-5)
    assert group_advantages(torch.tensor([0.3, 0.3, 0.3]), 3).tolist() == [0, 0, 0]


# ------------------------------------------------------------------------------------------------ sampling and scoring
@pytest.mark.parametrize("way", WAYS)
def test_sampling_and_scoring_give_the_same_logprobs(way, policy_dir):
    args = args_of(temperature=0.8, micro_batch_size=5, mini_batch_size=5, **WAYS[way])
    agent = agent_of(policy_dir, args)
    episodes = play([Corridor() for _ in range(4)], STARTS, agent, "0")
    run = RunOfOneStep(args)
    batch = make_batch(run, episodes, agent)
    assert batch.num_actions == sum(len(d.response_ids) for one in episodes for d in one.decisions)
    assert float((score(run, agent.policy, batch, agent) - batch.logprobs).abs().max()) < 1e-5
    assert (batch.logprobs[batch.action_mask] < 0).all()


@pytest.mark.parametrize("way", ["labels", "written"])
def test_gradients_do_not_depend_on_micro_batches_and_are_divided_by_decisions(way, policy_dir):
    found = []
    for size in (64, 1, 7):
        args = args_of(entropy_coeff=0.1, micro_batch_size=size, mini_batch_size=size, use_critic=True, **WAYS[way])
        agent = agent_of(policy_dir, args)
        critic = load_scalar(policy_dir, ModelArgs(), corridor_tokenizer(), seed=0).eval()
        run = RunOfOneStep(args, policy=agent.policy, critic=critic)
        episodes = play([Corridor()], STARTS[:3], agent, "0")
        batch = make_batch(run, episodes, agent)
        estimate_advantages(run, batch, episodes, critic)
        rows = update_minibatch(run, agent.policy, critic, batch, agent, clip=False)
        found.append((rows, run.gradients))
    for rows, gradients in found[1:]:
        for name in ("policy", "critic"):
            assert_same_gradients(found[0][1][name], gradients[name], atol=2e-6)
        assert rows == pytest.approx(found[0][0], abs=1e-4)


def test_replayed_decisions_are_weighted_by_their_ratio_at_most_two(policy_dir):
    weighed = {}
    for importance in (True, False):
        args = args_of(replay_importance=importance)
        agent = agent_of(policy_dir, args)
        run = RunOfOneStep(args, policy=agent.policy)
        episodes = play([Corridor()], STARTS[:4], agent, "0")
        for index, decision in enumerate(one for episode in episodes for one in episode.decisions):
            decision.logprobs = [decision.logprobs[0] + (math.log(4) if index % 2 else -math.log(4))]
        batch = make_batch(run, episodes, agent)
        batch.advantages = torch.ones_like(batch.advantages)
        weighed[importance] = update_minibatch(run, agent.policy, None, batch, agent, clip=False, replayed=True)
    halves = [0.25 if index % 2 else 2.0 for index in range(len(batch))]  # ratios of 1/4 and 4
    assert weighed[True]["replay/weight"] == pytest.approx(sum(halves) / len(halves), abs=1e-4)
    assert weighed[False]["replay/weight"] == 1


def test_the_replay_keeps_the_last_successes_of_one_stage():
    replay = Replay(3)
    won, lost = Episode({}, success=True), Episode({}, success=False)
    replay.enter(Stage((0,)))
    replay.add([won, lost, won, won, won])
    assert replay.episodes == [won] * 3
    copy = Replay(3)
    copy.load(replay.state())
    assert copy == replay
    replay.enter(Stage((1,)))
    assert not replay.episodes


def test_a_shared_critic_gives_no_gradient_to_the_policy(policy_dir):
    args = args_of(use_critic=True, shared_critic=True)
    agent = agent_of(policy_dir, args)
    agent.policy.requires_grad_(True)
    critic = ValueHead(agent.policy, 0)
    batch = response_batch([[5, 6], [7, 3, 4]], [[20], [21]], 0)
    critic(batch.input_ids, batch.attention_mask).sum().backward()
    assert all(p.grad is None for p in agent.policy.parameters())
    assert [name for name, _ in critic.named_parameters()] == ["score.weight"] and critic.score.weight.grad is not None


# ---------------------------------------------------------------------------------------------------------- curriculum
@pytest.mark.parametrize(
    "flags, stages",
    [
        ({}, [(0, 1, 2, 3)]),
        ({"levels": ["c", "b"]}, [(1, 2)]),
        ({"depth_curriculum": True}, [(0,), (1,), (2,), (3,)]),
        ({"depth_curriculum": True, "merge_first_two": True}, [(0, 1), (2,), (3,)]),
        ({"depth_curriculum": True, "merge_after_first_k": 2}, [(0,), (1,), (2, 3)]),
        ({"depth_curriculum": True, "merge_first_two": True, "merge_after_first_k": 1}, [(0, 1), (2, 3)]),
        ({"depth_curriculum": True, "merge_after_first_k": 9}, [(0,), (1,), (2,), (3,)]),
    ],
)
def test_the_stages_of_a_curriculum(flags, stages):
    found = curriculum(args_of(**flags), ["a", "b", "c", "d"])
    assert [stage.levels for stage in found] == stages
    begun = curriculum(args_of(first_step=True, **flags), ["a", "b", "c", "d"])
    assert begun[0] == Stage(stages[0], most_decisions=1) and begun[1:] == found


def test_every_stage_is_reached_and_lasts_its_share():
    """The published trigger is 0 where there are fewer iterations than tasks, and never fires."""
    for num_stages in (1, 2, 3, 5):
        for num_steps in range(num_stages, 40):
            order = [step * num_stages // num_steps for step in range(num_steps)]
            assert order == sorted(order) and set(order) == set(range(num_stages))
            sizes = [order.count(stage) for stage in range(num_stages)]
            assert max(sizes) - min(sizes) <= 1


def test_starts_come_round_evenly_and_in_groups():
    train = {0: [{"n": n} for n in range(5)], 1: [{"n": n} for n in range(5, 7)]}
    args = args_of(group_size=2, leaveout_prob=0.25)
    drawn = [start for step in range(7) for start in starts_of(Stage((0, 1)), train, step, 3, args)]
    assert all(start["leaveout_prob"] == 0.25 for start in drawn)
    assert drawn[::2] == drawn[1::2]
    numbers = [start["n"] for start in drawn[::2]]
    assert sorted(numbers[:7]) == list(range(7)) and sorted(numbers) == sorted(list(range(7)) * 3)


# ---------------------------------------------------------------------------------------------------------------- runs
def train(folder: Path, *flags: object) -> str:
    return reflect_rl.main([*ENV, "--log_dir", str(folder / "logs"), *map(str, flags)])


def test_a_run_learns_the_corridor_and_leaves_what_others_read(policy_dir, tmp_path):
    flags = [
        "--model_name",
        policy_dir,
        "--max_steps",
        14,
        "--seed",
        1,
        "--learning_rate",
        2e-3,
        "--entropy_coeff",
        0.05,
    ]
    experiment = Path(train(tmp_path, *flags, "--rollout_size", 32, "--eval_interval", 7))
    rows = metrics(experiment)
    success = [row["episodes/success"] for row in rows if "episodes/success" in row]
    assert sum(success[:2]) / 2 < 0.5 < 0.7 < sum(success[-2:]) / 2
    assert rows[-1]["val/success"] > 0.7 and {"val/success/short", "val/success/long_way"} <= rows[-1].keys()
    assert all(row["objective/score"] == pytest.approx(-row["episodes/cost"]) for row in rows if "episodes/cost" in row)
    assert "Action: " in (experiment / "trajectories" / "000014.txt").read_text()
    assert load_policy(str(experiment), ModelArgs(), corridor_tokenizer()) is not None


RUNS = {
    "pg, reflector, replay": "--replay_buffer_size 8 --reflect_prob 0.5 --reflect_max_new_tokens 4",
    "ppo, critic, KL": "--trainer ppo --use_critic True --init_kl_coeff 0.1 --mini_batch_size 32 --micro_batch_size 32",
    "lora, shared critic, curriculum": "--finetune_mode lora --use_critic True --shared_critic True "
    "--depth_curriculum True",
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_is_the_same_to_the_bit(name, policy_dir, reflector_dir, tmp_path):
    flags = ["--model_name", policy_dir, "--learning_rate", 1e-3, "--save_interval", 2, "--rollout_size", 8]
    flags += RUNS[name].split()
    if "reflector" in name:
        flags += ["--reflect_experiment_dir", reflector_dir]
    whole = train(tmp_path, *flags, "--max_steps", 4)
    kept = weights(Path(whole) / "checkpoint-000004")
    logged = metrics(whole)
    half = train(tmp_path / "half", *flags, "--max_steps", 4)
    shutil.rmtree(Path(half) / "checkpoint-000004")
    assert reflect_rl.main(["--resume_from", half]) == half
    assert weights(last_checkpoint(half)) == kept
    assert metrics(half) == logged


@pytest.mark.slow
def test_two_ranks_share_the_episodes(policy_dir, reflector_dir, tmp_path):
    """`--rollout_size` is of each rank: 4 episodes of 2 starts an iteration, which the other rank does not play."""
    flags = ["--model_name", policy_dir, "--reflect_experiment_dir", reflector_dir, "--reflect_max_new_tokens", "4"]
    flags += ["--rollout_size", "4", "--group_size", "2", "--max_steps", "2", "--devices", "2"]
    command = [sys.executable, "-m", "lightrlhf.reflect_rl", *ENV, "--env", "helpers.corridor:Noted", *flags]
    environment = helpers.environment() | {"NOTES": str(tmp_path)}
    command += ["--log_dir", str(tmp_path / "logs")]
    subprocess.run(command, env=environment, timeout=PATIENCE, check=True, stdout=subprocess.DEVNULL)
    one, two = (path.read_text().splitlines() for path in tmp_path.iterdir() if path.is_file())
    for step in (slice(0, 4), slice(4, 8)):
        assert one[step][::2] == one[step][1::2] and len({*one[step], *two[step]}) == 4
    assert len(one) == len(two) == 8
    (experiment,) = [path.parent for path in tmp_path.rglob("args.json")]
    assert weights(last_checkpoint(experiment)) != weights(Path(policy_dir))


def test_ppo_starts_at_ratio_one_and_a_kl_of_zero(policy_dir, tmp_path):
    flags = ["--model_name", policy_dir, "--max_steps", 1, "--trainer", "ppo", "--ppo_epochs", 1, "--init_kl_coeff", 1]
    (row,) = metrics(train(tmp_path, *flags))
    assert row["policy/ratio"] == pytest.approx(1, abs=1e-5) and row["policy/clipfrac"] == 0
    assert row["policy/approxkl"] == pytest.approx(0, abs=1e-6)


def test_the_penalty_enters_what_is_learned_and_no_metric(policy_dir, tmp_path):
    rows = {}
    for coefficient in (0, 5):
        flags = ["--model_name", policy_dir, "--max_steps", 3, "--learning_rate", 1e-2, "--init_kl_coeff", coefficient]
        rows[coefficient] = metrics(train(tmp_path / str(coefficient), *flags))
    assert rows[0][0]["objective/score"] == rows[5][0]["objective/score"]
    assert rows[0][1]["policy/loss"] != rows[5][1]["policy/loss"]
    for row in rows[5]:
        assert row["objective/score"] == pytest.approx(-row["episodes/cost"])


# --------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    "flags, line",
    [
        (["--env", "nowhere"], "--env nowhere is unknown"),
        (["--env", "helpers.corridor:Nothing"], "--env helpers.corridor:Nothing cannot be imported"),
        (["--env_options", "horizon"], "must be name=value"),
        (["--env_options", "width=3"], "its options are: horizon"),
        (["--levels", "deep"], "--levels deep is none of the environment's: short, long way"),
        (["--depth_curriculum", "True", "--max_steps", "1"], "--max_steps 1 is less than the 2 stages"),
        (["--merge_first_two", "True"], "need --depth_curriculum True"),
        (["--group_size", "3"], "--rollout_size 16 must be a multiple of --group_size 3"),
        (["--group_size", "2", "--use_critic", "True"], "--group_size 2 is a baseline already"),
        (["--shared_critic", "True"], "--shared_critic True needs --use_critic True"),
        (["--gae_lambd", "0.9"], "--gae_lambd 0.9 needs values"),
        (["--trainer", "ppo", "--lr_scheduler_type", "cosine"], "use constant or constant_with_warmup"),
        (["--do_sample", "False"], "episodes must be sampled"),
        (["--reflect_prob", "2"], "--reflect_prob 2.0 must lie in [0, 1]"),
        (["--reflect_experiment_dir", "nowhere"], "--reflect_experiment_dir nowhere does not exist"),
        (["--horizon", "0"], "--horizon 0 must be at least 1"),
        (["--strategy", "fsdp"], "--strategy fsdp splits models"),
        (["--replay_buffer_size", "5", "--devices", "2"], "--replay_buffer_size 5 is for one device"),
        (["--shuffle_action", "True", "--max_new_tokens", "9"], "has no labels to shuffle"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_flag_is_one_line_and_status_two(flags, line, policy_dir, tmp_path, capsys):
    given = [*ENV, "--log_dir", str(tmp_path / "logs"), "--model_name", policy_dir]
    for flag in flags[::2]:
        if flag in given:
            del given[given.index(flag) : given.index(flag) + 2]
    with pytest.raises(SystemExit) as stopped:
        reflect_rl.main([*given, *flags])
    said = [text for text in capsys.readouterr().err.splitlines() if text.strip()]
    assert stopped.value.code == 2 and len(said) == 1 and line in said[0]
    assert not list(tmp_path.rglob("args.json"))


def test_a_policy_to_start_from_is_needed(capsys):
    with pytest.raises(SystemExit):
        reflect_rl.main([*ENV])
    assert "the policy to start from" in capsys.readouterr().err
