"""PPO on episodes of several turns: advantages go through observations and rows, an outcome is terminal."""

import copy
import dataclasses
import random
import shutil
from statistics import mean

import pytest
import torch
from helpers import RunOfOneStep, assert_same_gradients, last_checkpoint, metrics, tiny_model, tiny_scalar, weights
from helpers.agent_runs import KEEPS, PROMPTS, REWRITES, SIZES, Game, model_of
from helpers.episodes import WORDS, LocalPool, all_episodes, tiny_words
from helpers.errors import error_naming
from helpers.templates import ZOO
from helpers.updates import observation_losses

from lightrlhf import PPOArgs, ppo
from lightrlhf.data.tokens import decode, encode_text, prompt_text
from lightrlhf.envs import episode_sampler
from lightrlhf.envs.episode_sampler import episode_batch
from lightrlhf.generation.engine import Completions
from lightrlhf.generation.rollout import make_rollout, score_logprobs
from lightrlhf.maths import macro_actions
from lightrlhf.models.probes import enable_packing
from lightrlhf.models.roles import Policy
from lightrlhf.rewards import kl
from lightrlhf.rewards.rewards import Rewards
from lightrlhf.rewards.scorers import EnvScorer
from lightrlhf.storage.jsonl import read_jsonl


class Paid(Game):
    """Pays for each turn, and nothing for the outcome."""

    has_outcome = False

    def finish(self, stop_reason):
        return 0.0


TURNS = {name: value for name, value in SIZES.items() if name != "num_generations"}


def ppo_args(**changes) -> PPOArgs:
    sizes = {
        "rollout_size": 3,
        "mini_batch_size": 2,
        "micro_batch_size": 2,
        "actor_learning_rate": 1e-2,
        "critic_learning_rate": 1e-1,
    }
    return PPOArgs(**({"env": "helpers.episodes:Told", **TURNS, **sizes} | changes))


def only_env() -> Rewards:
    return Rewards([EnvScorer()], ("env",), torch.ones(1, dtype=torch.float64))


@pytest.fixture
def pools(monkeypatch):
    """The kind of environment of runs, which are played in this process."""
    kind = [Game]
    monkeypatch.setattr(episode_sampler, "open_pool", lambda run: LocalPool(kind[0], size=4))
    return kind


def trained(name: str, tmp_path, on_step=None, **changes):
    given = {"policy": model_of(name), "tokenizer": copy.deepcopy(ZOO[name].tokenizer), "prompts": 4 * PROMPTS}
    return ppo.train(ppo_args(log_dir=str(tmp_path), **({"max_steps": 2} | changes)), **given, on_step=on_step)


@pytest.fixture
def played(tmp_path, monkeypatch):
    """Makes the second step of a run: its rollout, the batch that is learned from, and the critic before the update."""
    update, steps = ppo.update, []

    def kept(run, model, critic, batch, *more):
        steps.append([copy.deepcopy(critic.module), batch])
        return update(run, model, critic, batch, *more)

    def play(name: str, **changes):
        rollouts = []
        options = {"rollout_size": 12, "mini_batch_size": 6} | changes
        trained(name, tmp_path, lambda step, metrics, rollout: rollouts.append(rollout), **options)
        return rollouts[-1], *reversed(steps[-1])

    monkeypatch.setattr(ppo, "update", kept)
    return play


# ------------------------------------------------------------------------------------------------------ a run
@pytest.mark.parametrize("name", [KEEPS, REWRITES])
def test_a_run_learns_tells_what_happened_and_resumes_bitwise(name, pools, tmp_path):
    options = {
        "mini_batch_size": 3,
        "micro_batch_size": 3,
        "log_rollouts": 6,
        "save_interval": 1,
        "eval_interval": 1,
        "termination_condition": "turn",
    }
    folder = trained(name, tmp_path, **options)
    first = metrics(folder)[0]
    assert first["policy/ratio"] == pytest.approx(1, abs=1e-4) and first["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert first["policy/grad_norm"] > 0 and first["value/grad_norm"] > 0 and first["episodes/stop_done_ratio"] == 1
    assert (first["episodes/rows"] > 1) == (name == REWRITES) and first["policy/updates"] == 1
    assert first["completions/macro_length"] == pytest.approx(first["episodes/tokens"] / first["episodes/turns"])
    rows = read_jsonl(folder / "rollouts.jsonl")
    assert rows[0]["columns"]["episode"]["stop_reason"] == "done" and any(rows[0]["values"])
    end = weights(last_checkpoint(folder))
    shutil.rmtree(folder / "checkpoint-000002")
    assert trained(name, tmp_path, resume_from=str(folder), **options) == folder
    assert weights(last_checkpoint(folder)) == end and read_jsonl(folder / "rollouts.jsonl") == rows


def test_a_fault_is_no_reward_and_carries_no_loss(pools, played, monkeypatch):
    finish = Game.finish
    monkeypatch.setattr(Game, "finish", lambda self, stop_reason: finish(self, stop_reason) / (self.word != "tea"))
    rollout, batch, _ = played(REWRITES, max_steps=1)
    failed = torch.tensor([columns["word"] == "tea" for columns in rollout.columns])
    assert failed.any() and not batch.action_mask[failed].any() and batch.action_mask[~failed].any(1).all()
    assert not batch.advantages[failed].any() and not batch.returns[failed].any()


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"termination_condition": "ppl"}, ["--env", "--termination_condition ppl"]),
        ({"ngram": 3}, ["--env", "--ngram 3"]),
        ({"teacher_coeff": 0.1, "teacher": "x"}, ["--env", "--teacher_coeff 0.1"]),
        (
            {"env": None, "reward_function": ["x:y"], "termination_condition": "turn", "max_turns": 8},
            ["turn", "--tools"],
        ),
        ({"env": None, "reward_function": ["x:y"], "env_workers": 2, "max_turns": 8}, ["--env_workers 2", "or --mcp"]),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given, facts):
    with error_naming(ValueError, *facts):
        ppo_args(**given)


# ------------------------------------------------------------------------------------------- an episode token by token
def walked(args, rollout, critic) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns (B, T-1) by a walk along each episode, in plain Python; KL weight .1, clip at 1.5."""
    found = torch.zeros(2, *rollout.action_mask.shape)
    numbers = rollout.last_rows().tolist()
    for last in sorted(set(numbers)):
        facts = rollout.columns[last]["episode"]
        paid = [*facts["rewards"][:-1], facts["score"] - sum(facts["rewards"][:-1])]
        steps = []  # of each token: row, place, turn, value before it, reward
        for row in (row for row, number in enumerate(numbers) if number == last):
            ids = rollout.input_ids[row].tolist()
            for t in rollout.action_mask[row].nonzero()[:, 0].tolist():
                reward = -0.1 * float(rollout.logprobs[row, t] - rollout.ref_logprobs[row, t])
                steps.append([row, t, int(rollout.turn[row, t]), value_of(critic, ids[: t + 1]), reward])
        for step, after in zip(steps, [*steps[1:], None]):
            if after is None or after[2] != step[2]:
                step[4] += min(max(paid[step[2]], -1.5), 1.5)
        if args.termination_condition == "turn":
            parts = [[step for step in steps if step[2] == turn] for turn in range(facts["turns"])]
        else:
            parts = [[step] for step in steps]
        ahead = rollout.next_prompts[last]
        value, advantage = (value_of(critic, ahead) if ahead else 0.0), 0.0
        for part in reversed(parts):
            own, reward = mean(step[3] for step in part), sum(step[4] for step in part)
            delta = reward + args.gae_gamma * value - own
            value, advantage = own, delta + args.gae_gamma * args.gae_lambd * advantage
            for row, t, *_ in part:
                found[:, row, t] = torch.tensor([advantage, advantage + own])
    return found[0], found[1]


@torch.no_grad()
def value_of(critic, ids: list[int]) -> float:
    return float(critic(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool))[0, -1])


EXACT = {"normalize_advantages": False, "gae_gamma": 0.9, "gae_lambd": 0.7, "reward_clip_value": 1.5, "max_turns": 2}


@pytest.mark.parametrize("name", [KEEPS, REWRITES])
@pytest.mark.parametrize("condition", ["fixed", "turn"])
@pytest.mark.parametrize("kind", [Game, Paid])
def test_advantages_are_those_of_a_walk_along_each_episode(name, condition, kind, pools, played):
    """Both ways to end: with an outcome, which is terminal, and by a limit while rewards come with turns alone."""
    pools[0] = kind
    rollout, batch, critic = played(name, termination_condition=condition, **EXACT)
    stops = {columns["episode"]["stop_reason"] for columns in rollout.columns}
    assert stops == {"done", "turns"} and (rollout.episode is not None) == (name == REWRITES)
    assert any(rollout.next_prompts) == (kind is Paid)
    args = ppo_args(termination_condition=condition, **EXACT)
    for found, expected in zip((batch.advantages, batch.returns), walked(args, rollout, critic)):
        assert found.abs().max() > 0.1
        assert torch.allclose(found, expected, atol=1e-4), (found - expected).abs().max()
    assert (batch.values != 0).eq(batch.action_mask).all()


@pytest.mark.parametrize("name", [KEEPS, REWRITES])
def test_what_a_cut_episode_would_have_read_next_is_its_dialogue_as_a_prompt(name, pools, played):
    pools[0] = Paid
    rollout, *_ = played(name, **EXACT)
    for row, ids in enumerate(rollout.next_prompts):
        facts, messages = (rollout.columns[row][name] for name in ("episode", "messages"))
        assert bool(ids) == (facts["cut"] and bool(rollout.ends()[row]))
        if ids and name == KEEPS:
            own = rollout.input_ids[row][rollout.attention_mask[row]].tolist()
            assert ids[: len(own)] == own and messages[-1]["content"] in decode(rollout.tokenizer, ids[len(own) :])
        elif ids:
            assert ids == encode_text(rollout.tokenizer, prompt_text(rollout.tokenizer, messages))


def test_another_reward_is_of_the_outcome_and_makes_a_cut_terminal(pools, played):
    pools[0] = Paid
    rollout, _, critic = played(KEEPS, **EXACT)
    scores = only_env()(rollout)
    assert ppo.predict_beyond(ppo_args(), critic, rollout, scores).any()
    two = dataclasses.replace(scores, weights=torch.tensor([1.0, 1.0]))
    assert ppo.predict_beyond(ppo_args(), critic, rollout, two) is None


def test_a_cut_episode_is_penalised_on_its_last_turn(pools, played):
    rollout, *_ = played(REWRITES, **EXACT)
    rollout.truncated = torch.zeros(len(rollout), dtype=torch.bool)  # few of these replies end by themselves
    plain, punished = (
        ppo.bound_scores(ppo_args(missing_eos_penalty=penalty, clip_rewards=False), rollout, only_env()(rollout))
        for penalty in (0, 2)
    )
    cut = torch.tensor([columns["episode"]["stop_reason"] == "turns" for columns in rollout.columns])
    assert cut.any() and not cut.all()
    for row, columns in enumerate(rollout.columns):
        facts = columns["episode"]
        assert float(plain[0].total[row]) == pytest.approx(facts["score"])
        expected = [2.0 * (bool(cut[row]) and turn == facts["turns"] - 1) for turn in range(4)]
        assert (plain[1] - punished[1])[row].tolist() == pytest.approx(expected)


# ------------------------------------------------------------------------------------------------ gradients
@pytest.mark.parametrize("name", [KEEPS, REWRITES])
def test_micro_batches_and_packing_change_no_gradient(name, pools, played):
    _, batch, critic = played(name, termination_condition="turn", entropy_coeff=0.1)
    policy = Policy(model_of(name)).eval()
    enable_packing(policy)
    enable_packing(critic)
    assert policy.packs and critic.packs
    found = []
    for size, packs in ((6, True), (6, False), (1, True), (2, False)):
        policy.packs = critic.packs = packs
        args = ppo_args(rollout_size=6, mini_batch_size=6, micro_batch_size=size, entropy_coeff=0.1)
        run = RunOfOneStep(args, policy=policy, critic=critic)
        ppo.update_minibatch(run, policy, critic, batch)
        found.append(copy.deepcopy(run.gradients))
        policy.zero_grad()
        critic.zero_grad()
    for other in found[1:]:
        for role in ("policy", "critic"):
            assert_same_gradients(other[role], found[0][role], atol=2e-6)


def test_observations_have_their_cross_entropy_beside_the_policys_loss(pools, played):
    _, batch, critic = played(KEEPS)
    policy, found = Policy(model_of(KEEPS)).eval(), []
    for weight in (0.0, 0.7):
        run = RunOfOneStep(ppo_args(observation_weight=weight), policy=policy, critic=critic)
        ppo.update_minibatch(run, policy, critic, batch)
        found.append(copy.deepcopy(run.gradients))
        policy.zero_grad()
        critic.zero_grad()
    assert_same_gradients(*(one["critic"] for one in found))
    exact = copy.deepcopy(policy).double()
    (0.7 * observation_losses(exact, batch, 1.0).mean()).backward()
    for key, parameter in exact.named_parameters():
        change = found[1]["policy"][key] - found[0]["policy"][key]
        torch.testing.assert_close(change.double(), parameter.grad, atol=2e-6, rtol=0)


def test_minibatches_hold_whole_episodes_and_of_one_row_the_same_as_ever(pools, played):
    _, batch, _ = played(REWRITES, rollout_size=3, mini_batch_size=2)
    parts = [*ppo.minibatches(batch, 2, 3, torch.Generator().manual_seed(1))]
    assert [len(part.episode.unique()) for part in parts] == [2, 1]
    assert sorted(len(part) for part in parts) != [1, 2] and sum(map(len, parts)) == len(batch)
    assert not {*parts[0].episode.tolist()} & {*parts[1].episode.tolist()}
    batch.episode = None
    rows = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1)).tensor_split(3)
    parts = ppo.minibatches(batch, 2, 6, torch.Generator().manual_seed(1))
    assert all(torch.equal(part.row, batch.row[own]) for part, own in zip(parts, rows))


# ---------------------------------------------------------------------------------------------------------- enumeration
@pytest.fixture(scope="module", params=[True, False], ids=["few rows", "a row a turn"])
def enumerated(request):
    """All episodes of up to two turns of up to two words: policy, rollout, their probabilities and true gradient."""
    tokenizer, size = tiny_words(request.param), {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    model = tiny_model("llama", vocab_size=len(WORDS), **size).double()
    policy = Policy(model).eval()
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    episodes = all_episodes(tokenizer, num_turns=2, length=2)
    assert {one.num_turns for one in episodes} == {1, 2} and {one.num_tokens for one in episodes} == {2, 3, 4}
    batch, turn, contexts = episode_batch(episodes, 0)
    batch.logprobs = score_logprobs(policy, batch, 1.0, 64)
    rollout = make_rollout(
        batch, contexts, Completions([], [], [False] * len(batch), 0.0), tokenizer, reference, 1.0, 64
    )
    rollout = dataclasses.replace(rollout, turn=turn, group=batch.episode)

    def log_probability(one, of) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for played in one.conversation.turns:
            ids = one.conversation.rows[played.row].ids
            for t in range(played.start, played.end):
                total = total + of.model(input_ids=torch.tensor([ids[:t]])).logits[0, -1].log_softmax(-1)[ids[t]]
        return total

    logs = torch.stack([log_probability(one, policy) for one in episodes])
    with torch.no_grad():
        others = torch.stack([log_probability(one, reference) for one in episodes])
    assert float(logs.detach().exp().sum()) == pytest.approx(1)
    scores = torch.tensor([one.score for one in episodes], dtype=torch.float64)
    (logs.exp() * (scores - 0.3 * (logs - others))).sum().backward()
    expected = {name: -p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()
    return policy, rollout, logs.detach().exp(), batch.episode, expected


def true_values(rollout, by_token, probabilities, number) -> torch.Tensor:
    """What is to come on the mean from the state before each action, given the words before it: (B, T-1)."""
    courses = {}  # of an episode: its words, places and rewards
    for row, one in enumerate(number.tolist()):
        for t in rollout.action_mask[row].nonzero()[:, 0].tolist():
            course = courses.setdefault(one, [])
            course.append((int(rollout.input_ids[row, t + 1]), row, t, float(by_token[row, t])))
    sums = {}  # of the words before: probability, and that times what came
    for one, course in courses.items():
        for i in range(len(course)):
            before = tuple(step[0] for step in course[:i])
            mass, value = sums.get(before, (0.0, 0.0))
            p = float(probabilities[one])
            sums[before] = mass + p, value + p * sum(step[3] for step in course[i:])
    values = torch.zeros(by_token.shape)
    for course in courses.values():
        for i, (_, row, t, _) in enumerate(course):
            mass, value = sums[tuple(step[0] for step in course[:i])]
            values[row, t] = value / mass
    return values


@pytest.mark.parametrize("condition", ["fixed", "turn"])
@pytest.mark.parametrize(("critic", "lambd"), [("random", 1.0), ("true", 0.3)])
def test_the_expected_gradient_is_that_of_the_mean_reward(condition, critic, lambd, enumerated):
    """With a KL in the reward. A baseline of states changes nothing at lambda 1, the true values at none."""
    policy, rollout, probabilities, number, expected = enumerated
    options = {"normalize_advantages": False, "gae_lambd": lambd, "termination_condition": condition}
    options |= dict.fromkeys(("rollout_size", "mini_batch_size", "micro_batch_size"), 512)
    args = ppo_args(value_function="first", clip_rewards=False, **options)
    scores, by_turn = ppo.bound_scores(args, rollout, only_env()(rollout))
    by_token = kl.token_rewards(rollout, by_turn, 0.3)
    values = true_values(rollout, by_token, probabilities, number)
    if critic == "random":  # one value for all episodes that are in one state
        rng, drawn = random.Random(0), {}
        values.apply_(lambda value: drawn.setdefault(round(value, 4), rng.gauss(0, 1)))
    segments, _ = ppo.segment_responses(args, rollout, torch.rand(len(rollout), 4), None)
    batch = ppo.estimate_advantages(args, rollout, by_token, values * rollout.action_mask, segments)
    assert (macro_actions.lengths(segments).max() == 2) == (condition == "turn")
    batch.correction = (batch.num_actions * probabilities[number])[:, None].expand(batch.action_mask.shape).float()
    value_model = tiny_scalar("llama", vocab_size=len(WORDS))
    run = RunOfOneStep(args, policy=policy, critic=value_model)
    ppo.update_minibatch(run, policy, value_model, batch)
    assert_same_gradients(run.gradients["policy"], expected, atol=2e-6)
    policy.zero_grad()
