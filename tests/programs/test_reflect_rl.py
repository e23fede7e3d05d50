"""Reflect-RL: losses by formula, advantages by hand, sampling equal to scoring, a run that learns and resumes."""

import dataclasses
import functools
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import helpers
import pytest
import torch
from helpers import CPU, RunOfOneStep, assert_same_gradients, last_checkpoint, metrics, run_program, weights
from helpers.errors import error_naming, refused
from helpers.killed import pair, wait_for_pair
from helpers.programs import assert_resumes

pytest.importorskip("gymnasium", reason="needs pip install -e '.[envs]'")

from helpers.corridor import STARTS, WAYS, Corridor, corridor_tokenizer, save_corridor_model

from lightrlhf import reflect_rl
from lightrlhf.cli.errors import StopTraining, UsageError
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.cli.patience import RANK
from lightrlhf.data.batch import response_batch
from lightrlhf.envs.agents import ModelAgent
from lightrlhf.envs.episodes import Decision, Episode, decision_batch, play
from lightrlhf.models.loading import load_policy, load_scalar
from lightrlhf.models.roles import TokenStats
from lightrlhf.reflect_rl import (
    DecisionBatch,
    ReflectRLArgs,
    estimate_advantages,
    policy_gradient_loss,
    ppo_loss,
    predict_values,
    replay_loss,
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
    return ModelAgent(load_policy(folder, ModelArgs(), tokenizer).eval(), tokenizer, args, 3, 16)


def float64_batch() -> tuple[DecisionBatch, TokenStats]:
    """Random decisions of one to three tokens, and the statistics of a policy."""
    batch = response_batch([[5, 6], [7], [8, 9, 4]], [[3], [4, 2, 1], [5, 1]], 0)
    mask = batch.action_mask
    old, new = (torch.randn(2, *mask.shape, dtype=torch.float64) - 3) * mask
    rows = torch.randn(3, 3, dtype=torch.float64)
    decisions = batch.extend(
        DecisionBatch,
        logprobs=old,
        allowed=torch.zeros(3, 1, 0, dtype=torch.bool),
        episode=torch.arange(3),
        rewards=rows[0],
        values=rows[1],
        advantages=torch.tensor([-1.0, 1.5, 0.5], dtype=torch.float64),
        returns=rows[2],
    )
    entropy = torch.rand(mask.shape, dtype=torch.float64).requires_grad_()
    return decisions, TokenStats(new.detach().requires_grad_(), entropy, None)


# ---------------------------------------------------------------------------------------------------------- formulas
@pytest.mark.parametrize("entropy_coeff", [0.0, 0.3])
@pytest.mark.parametrize("replayed", [None, False, True])
def test_the_policy_gradient_is_that_of_a_float64_reference(replayed, entropy_coeff):
    """Replayed without and with importance weights, too: a constant min(pi / pi_old, 2) of each decision."""
    batch, stats = float64_batch()
    weights = torch.ones(3).double()
    if replayed is None:
        loss, measured = policy_gradient_loss(stats, batch, entropy_coeff)
        assert measured == {}
    else:
        loss, measured = replay_loss(stats, batch, entropy_coeff, importance=replayed)
        for row in range(3) if replayed else []:
            ratios = [
                float((stats.logprobs.detach() - batch.logprobs)[row, t]) for t in batch.action_mask[row].nonzero()
            ]
            weights[row] = min(math.exp(sum(ratios)), 2)
        assert torch.allclose(measured["replay/weight"], weights, atol=1e-12)
    gradients = torch.autograd.grad(loss, stats[:2], allow_unused=True, materialize_grads=True)
    for row, column in batch.action_mask.nonzero().tolist():
        gain = float(weights[row] * batch.advantages[row])  # d log pi(a) / d log pi(token) = 1, for each token
        assert float(gradients[0][row, column]) == pytest.approx(-gain, abs=1e-12)
        assert float(gradients[1][row, column]) == pytest.approx(-entropy_coeff, abs=1e-12)
    for gradient in gradients:
        assert (gradient[~batch.action_mask] == 0).all()


def test_the_ppo_loss_and_its_gradient_equal_a_float64_reference():
    batch, stats = float64_batch()
    loss, measured = ppo_loss(stats, batch, 0.1, 0.2)
    gradient = torch.autograd.grad(loss, stats.logprobs, retain_graph=True)[0]
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
    assert torch.allclose(gradient, torch.autograd.grad(total, stats.logprobs)[0], atol=1e-12)
    ratios = (stats.logprobs - batch.logprobs)[batch.action_mask].exp()
    assert torch.allclose(measured["policy/ratio"], ratios)
    assert torch.equal(measured["policy/clipfrac"], ((ratios < 0.9) | (ratios > 1.1)).float())
    assert torch.allclose(measured["policy/approxkl"], ratios - 1 - ratios.log(), atol=1e-12)


def estimated(*rewards: list[float], values: float = 0.0, **changes) -> DecisionBatch:
    """Advantages of episodes with these rewards; prompts and actions do not matter."""
    tokens = {"prompt_ids": [5, 6], "response_ids": [20], "logprobs": [-1.0], "allowed": [0, 1, 2]}
    episodes = [Episode({}, decisions=[Decision("", **tokens, reward=r) for r in row]) for row in rewards]
    batch = decision_batch(episodes, 0, 3)
    return estimate_advantages(args_of(**changes), batch, batch.rewards, torch.full_like(batch.rewards, values))


def test_advantages_are_the_rewards_to_come():
    rewards = [[1.0, -2.0, 4.0], [0.5], [3.0, 1.0]]
    plain = estimated(*rewards, normalize_advantages=False)
    assert plain.advantages.tolist() == [3.0, 2.0, 4.0, 0.5, 4.0, 1.0]
    assert plain.returns.tolist() == plain.advantages.tolist()
    discounted = estimated(*rewards, normalize_advantages=False, gae_gamma=0.5)
    assert discounted.advantages.tolist() == [1.0, 0.0, 4.0, 0.5, 3.5, 1.0]
    with_values = estimated(*rewards, normalize_advantages=False, values=0.5, use_critic=True)
    assert with_values.advantages.tolist() == [2.5, 1.5, 3.5, 0.0, 3.5, 0.5] and plain.values.tolist() == [0.0] * 6
    assert with_values.returns.tolist() == plain.returns.tolist()
    raw = plain.advantages
    assert torch.allclose(estimated(*rewards).advantages, (raw - raw.mean()) / raw.std(correction=0), atol=1e-5)


def test_the_penalty_is_taken_off_the_reward_and_a_state_has_its_last_token_s_value():
    batch = response_batch([[5, 6], [7]], [[3], [4, 2]], 0)
    mask, ratio = torch.tensor([[True, True], [False, True]]), torch.tensor([[0.2, 0.4], [9.0, -1.0]])
    played = SimpleNamespace(rewards=torch.tensor([1.0, 2.0]), logprobs=ratio - 3.0, action_mask=mask)
    agent = SimpleNamespace(score=lambda run, policy, batch: torch.full((2, 2), -3.0))
    run = SimpleNamespace(args=SimpleNamespace(init_kl_coeff=0.5))
    charged, log_ratio = reflect_rl.penalize_rewards(run, played, "reference", agent)
    assert charged.tolist() == pytest.approx([0.7, 2.5]) and log_ratio.tolist()[1] == [0.0, -1.0]
    assert reflect_rl.penalize_rewards(run, played, None, agent) == (played.rewards, None)
    assert reflect_rl.state_values(lambda input_ids, attention_mask: input_ids, batch).tolist() == [6.0, 7.0]


def test_estimating_advantages_changes_nothing_in_place():
    decisions = [Decision("", prompt_ids=[5], response_ids=[6], logprobs=[-1.0], reward=r) for r in (2.0, 1.0)]
    batch = decision_batch([Episode({}, decisions=decisions)], 0, 0)
    rewards, values = torch.tensor([1.0, 1.0]), torch.tensor([0.5, 0.5])
    estimate_advantages(args_of(), batch, rewards, values)
    assert batch.rewards.tolist() == [2.0, 1.0] and rewards.tolist() == [1.0, 1.0] and values.tolist() == [0.5, 0.5]


def test_group_advantages_compare_the_discounted_returns_of_one_start():
    """The first decision's return is that of the whole episode; discounts apply, whitening does not."""
    group = {"rollout_size": 4, "num_generations": 2}
    advantages = estimated([1.0, 1.0], [0.0], [7.0], [7.0, 0.0], **group).advantages
    half = 0.5**0.5  # of two returns, the deviation with n - 1 is the root of 2 times the distance from the mean
    assert advantages.tolist() == pytest.approx([half, half, -half, 0, 0, 0], abs=1e-5)
    discounted = estimated([1.0, 1.0], [1.5], [0.0, 2.0], [1.0], gae_gamma=0.5, **group).advantages
    assert discounted.tolist() == pytest.approx([0] * 6, abs=1e-5)


# ------------------------------------------------------------------------------------------------ sampling and scoring
@pytest.mark.parametrize("way", WAYS)
def test_sampling_and_scoring_give_the_same_logprobs(way, policy_dir):
    args = args_of(temperature=0.8, micro_batch_size=5, mini_batch_size=5, **WAYS[way])
    agent = agent_of(policy_dir, args)
    episodes = play([Corridor() for _ in range(4)], STARTS, agent, "0")
    run = RunOfOneStep(args)
    batch = agent.batch(episodes)
    assert batch.num_actions == sum(len(d.response_ids) for one in episodes for d in one.decisions)
    assert float((agent.score(run, agent.policy, batch) - batch.logprobs).abs().max()) < 1e-5
    assert (batch.logprobs[batch.action_mask] < 0).all()


@pytest.mark.parametrize("way", ["labels", "written"])
def test_gradients_do_not_depend_on_micro_batches_and_are_divided_by_decisions(way, policy_dir):
    results = []
    for size in (64, 1, 7):
        args = args_of(entropy_coeff=0.1, micro_batch_size=size, mini_batch_size=size, use_critic=True, **WAYS[way])
        agent = agent_of(policy_dir, args)
        critic = load_scalar(policy_dir, ModelArgs(), corridor_tokenizer(), seed=0).eval()
        run = RunOfOneStep(args, policy=agent.policy, critic=critic)
        episodes = play([Corridor()], STARTS[:3], agent, "0")
        played = agent.batch(episodes)
        batch = estimate_advantages(args, played, played.rewards, predict_values(run, critic, played))
        loss = functools.partial(ppo_loss, clip_coeff=0.1, entropy_coeff=0.1)
        rows = update_minibatch(run, agent.policy, critic, batch, agent, loss)
        results.append((rows, run.gradients))
    for rows, gradients in results[1:]:
        for name in ("policy", "critic"):
            assert_same_gradients(results[0][1][name], gradients[name], atol=2e-6)
        assert rows == pytest.approx(results[0][0], abs=1e-4)


def test_replayed_decisions_are_weighted_by_their_ratio_at_most_two(policy_dir):
    results = {}
    for importance in (True, False):
        args = args_of(replay_importance=importance, micro_batch_size=4)
        agent = agent_of(policy_dir, args)
        run = RunOfOneStep(args, policy=agent.policy)
        episodes = play([Corridor()], STARTS[:4], agent, "0")
        for index, decision in enumerate(one for episode in episodes for one in episode.decisions):
            decision.logprobs = [decision.logprobs[0] + (math.log(4) if index % 2 else -math.log(4))]
        played = agent.batch(episodes)
        ones = torch.ones_like(played.rewards)
        batch = played.extend(DecisionBatch, values=ones, advantages=ones, returns=ones)
        loss = functools.partial(replay_loss, entropy_coeff=0.0, importance=importance)
        results[importance] = update_minibatch(run, agent.policy, None, batch, agent, loss)
    halves = [0.25 if index % 2 else 2.0 for index in range(len(batch))]  # ratios of 1/4 and 4
    assert results[True]["replay/weight"] == pytest.approx(sum(halves) / len(halves), abs=1e-4)
    assert results[False]["replay/weight"] == 1


# ---------------------------------------------------------------------------------------------------------------- runs
def train(folder: Path, *flags: object) -> str:
    return reflect_rl.main([*ENV, "--log_dir", str(folder / "logs"), *map(str, flags)])


def test_a_run_learns_the_corridor_and_leaves_what_others_read(policy_dir, tmp_path):
    flags = [
        "--model_name", policy_dir, "--max_steps", 14, "--seed", 1, "--learning_rate", 2e-3, "--entropy_coeff", 0.05,
    ]  # fmt: skip
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
    "--stages short;long_way",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_is_the_same_to_the_bit(name, policy_dir, reflector_dir, tmp_path, capsys):
    flags = ["--model_name", policy_dir, "--learning_rate", 1e-3, "--save_interval", 2, "--rollout_size", 8]
    flags += [word.replace("long_way", "long way") for word in RUNS[name].split()]
    if "reflector" in name:
        flags += ["--reflect_experiment_dir", reflector_dir]
    run = train(tmp_path, *flags, "--max_steps", 4)
    assert_resumes(reflect_rl.main, run)
    if "curriculum" in name:
        longer = reflect_rl.main, "--resume_from", run, "--max_steps", "12"  # step 5 would be in the first stage
        assert "--stages" in (told := refused(capsys, *longer)) and "is 12, and was 4" in told


@pytest.mark.slow
def test_two_ranks_share_the_episodes(policy_dir, reflector_dir, tmp_path, monkeypatch):
    """`--rollout_size` counts one rank's episodes: 4 from 2 starts an iteration, others than the other rank's."""
    flags = ["--model_name", policy_dir, "--reflect_experiment_dir", reflector_dir, "--reflect_max_new_tokens", "4"]
    flags += ["--rollout_size", "4", "--num_generations", "2", "--max_steps", "2", "--devices", "2"]
    monkeypatch.setenv("STARTS_DIR", str(tmp_path))
    where = ["--env", "helpers.corridor:LoggedCorridor", "--log_dir", tmp_path / "logs"]
    run_program("lightrlhf.reflect_rl", *ENV, *flags, *where)
    one, two = (path.read_text().splitlines() for path in tmp_path.iterdir() if path.is_file())
    for step in (slice(0, 4), slice(4, 8)):
        assert one[step][::2] == one[step][1::2] and len({*one[step], *two[step]}) == 4
    assert len(one) == len(two) == 8
    (experiment,) = [path.parent for path in tmp_path.rglob("args.json")]
    assert weights(last_checkpoint(experiment)) != weights(Path(policy_dir))


def test_ranks_with_a_critic_may_have_passes_of_different_numbers(policy_dir, tmp_path, monkeypatch):
    monkeypatch.setenv(RANK, "20")
    flags = ["--model_name", policy_dir, "--env", "helpers.corridor:LopsidedCorridor", "--use_critic", "True"]
    flags += ["--rollout_size", "2", "--micro_batch_size", "2", "--max_steps", "3", "--devices", "2"]
    pids = pair([lambda: train(tmp_path, *flags)] * 2, output := tmp_path / "ranks.txt")
    assert wait_for_pair(pids) == [0, 0], output.read_text()[-3000:]


@pytest.mark.slow
def test_ppo_starts_at_ratio_one_and_a_kl_of_zero(policy_dir, tmp_path):
    flags = ["--model_name", policy_dir, "--max_steps", 1, "--trainer", "ppo", "--ppo_epochs", 1, "--init_kl_coeff", 1]
    (row,) = metrics(train(tmp_path, *flags))
    assert row["policy/ratio"] == pytest.approx(1, abs=1e-5) and row["policy/clipfrac"] == 0
    assert row["policy/approxkl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_the_penalty_enters_the_loss_and_no_metric(policy_dir, tmp_path):
    rows = {}
    for coefficient in (0, 5):
        flags = ["--model_name", policy_dir, "--max_steps", 3, "--learning_rate", 1e-2, "--init_kl_coeff", coefficient]
        rows[coefficient] = metrics(train(tmp_path / str(coefficient), *flags))
    assert rows[0][0]["objective/score"] == rows[5][0]["objective/score"]
    assert rows[0][1]["policy/loss"] != rows[5][1]["policy/loss"]
    for row in rows[5]:
        assert row["objective/score"] == pytest.approx(-row["episodes/cost"])


# ------------------------------------------------------------------------------------------------------ from Python
@pytest.mark.slow
def test_objects_replace_what_the_flags_would_load(policy_dir, tmp_path):
    """The same numbers as from flags; args.json records the objects, and resuming requires them."""
    settings = {"accelerator": "cpu", "rollout_size": 8, "num_envs": 4, "eval_interval": 0, "learning_rate": 1e-3}
    settings |= {"max_steps": 2, "save_interval": 1, "use_critic": True}
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    from_flags = train(tmp_path, "--model_name", policy_dir, *flags)
    args = ReflectRLArgs(log_dir=str(tmp_path / "given"), **settings)

    def objects():
        tokenizer = corridor_tokenizer()
        return {"policy": load_policy(policy_dir, args, tokenizer), "tokenizer": tokenizer}

    logged = []
    experiment = reflect_rl.train(args, **objects(), envs=Corridor, on_step=lambda *row: logged.append(row))
    assert experiment.parent == tmp_path / "given" / "reflect-rl" / "Corridor" / "episodes"
    assert metrics(experiment) == metrics(from_flags)
    assert weights(last_checkpoint(experiment)) == weights(last_checkpoint(from_flags))
    assert [step for step, _ in logged] == [1, 2] and "objective/score" in logged[0][1]
    given = json.loads((experiment / "args.json").read_text())["given"]
    assert given["envs"].endswith(":Corridor") and given["policy"].startswith("Policy sha256:")

    shutil.rmtree(experiment / "checkpoint-000002")
    resumed = dataclasses.replace(args, resume_from=str(experiment))
    with pytest.raises(UsageError, match="policy"):
        reflect_rl.train(resumed, tokenizer=corridor_tokenizer(), policy=None, envs=Corridor)
    assert reflect_rl.train(resumed, **objects(), envs=[Corridor() for _ in range(4)]) == experiment
    assert weights(last_checkpoint(experiment)) == weights(last_checkpoint(from_flags))


@pytest.mark.slow
def test_on_step_ends_training_with_a_checkpoint_and_an_evaluation(policy_dir, tmp_path):
    def stop(step, row):
        if step == 2:
            raise StopTraining

    args = args_of(log_dir=str(tmp_path), accelerator="cpu", rollout_size=4, num_envs=4, max_steps=9)
    args = dataclasses.replace(args, model_name=policy_dir, eval_interval=50)
    experiment = reflect_rl.train(args, on_step=stop)
    assert last_checkpoint(experiment).name == "checkpoint-000002"
    assert {row["step"] for row in metrics(experiment)} == {1, 2} and "val/success" in metrics(experiment)[-1]


@pytest.mark.slow
def test_the_python_of_the_page_runs(tmp_path, monkeypatch, capsys):
    page = (helpers.ROOT / "howto" / "algorithms" / "reflect_rl.md").read_text(encoding="utf-8")
    save_corridor_model(tmp_path / "data" / "dangerous_taxi" / "base")
    monkeypatch.chdir(tmp_path)
    exec(page.split("```python\n")[1].split("```")[0], {})
    assert "\n1 -" in capsys.readouterr().out.replace("\r", "\n")
    assert list(tmp_path.glob("logs/reflect-rl/DangerousTaxi/episodes/*/checkpoint-000001"))


def test_a_policy_without_its_tokenizer_is_refused(policy_dir):
    policy = load_policy(policy_dir, ModelArgs(), corridor_tokenizer())
    with error_naming(UsageError, "tokenizer", "policy", "--model_name"):
        reflect_rl.train(ReflectRLArgs(), policy=policy, envs=Corridor)


# --------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    "flags, named",
    [
        (["--env", "nowhere"], "--env nowhere"),
        (["--env", "helpers.corridor:Nothing"], "--env helpers.corridor:Nothing"),
        (["--env_options", "horizon"], "--env_options horizon"),
        (["--env_options", "horizon=text"], "--env_options horizon 'text' is not a whole number"),
        (["--env_options", "width=3"], "its options are: horizon"),
        (["--levels", "deep"], "--levels deep is not a level of the environment; it has short, long way"),
        (["--stages", "short; deep+short"], "--stages deep is not a level of the environment; it has short, long way"),
        (["--stages", "short;"], "--stages 'short;'"),
        (["--stages", "short; long way", "--max_steps", "1"], "--max_steps 1"),
        (["--num_generations", "3"], "--rollout_size 16 must be a multiple of --num_generations 3"),
        (["--reflect_experiment_dir", "nowhere"], "--reflect_experiment_dir nowhere"),
        (["--strategy", "fsdp"], "--strategy fsdp"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_flag_is_one_line_and_status_two(flags, named, policy_dir, tmp_path, capsys):
    given = [*ENV, "--log_dir", str(tmp_path / "logs"), "--model_name", policy_dir]
    for flag in flags[::2]:
        if flag in given:
            del given[given.index(flag) : given.index(flag) + 2]
    assert named in refused(capsys, reflect_rl.main, *given, *flags)
    assert not list(tmp_path.rglob("args.json"))


def test_a_policy_to_start_from_is_required(capsys):
    assert "--model_name" in refused(capsys, reflect_rl.main, *ENV)
