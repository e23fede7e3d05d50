"""GRPO on episodes of several turns: what is trained is what was played, and an episode counts once."""

import copy
import dataclasses
import math
import shutil

import pytest
import torch
from helpers import RunOfOneStep, assert_same_gradients, last_checkpoint, metrics, tiny_model, weights
from helpers.agent_runs import KEEPS, PROMPTS, REWRITES, Game, agent_args, model_of, trained
from helpers.episodes import WORDS, LocalPool, all_episodes, tiny_words
from helpers.errors import error_naming
from helpers.mcp_server import COMMAND
from helpers.templates import ZOO
from helpers.updates import observation_losses

from lightrlhf import UsageError, cpu, grpo
from lightrlhf.cpu import decoder
from lightrlhf.cpu.cache import has_fast_sums
from lightrlhf.envs import episode_sampler
from lightrlhf.envs.episode_sampler import EpisodeSampler, episode_batch
from lightrlhf.generation.engine import Completions
from lightrlhf.generation.episodes import Episode
from lightrlhf.generation.rollout import make_rollout, score_logprobs
from lightrlhf.models.probes import enable_packing
from lightrlhf.models.roles import Policy
from lightrlhf.rewards.rewards import Rewards
from lightrlhf.rewards.scorers import EnvScorer
from lightrlhf.storage.jsonl import read_jsonl


@pytest.fixture
def pools(monkeypatch):
    """The pools of runs, in this process."""
    made = []

    def open_pool(run):
        made.append(LocalPool(Game, size=4, order=len(made)))
        return made[-1]

    monkeypatch.setattr(episode_sampler, "open_pool", open_pool)
    return made


def rollout_of(name: str, tmp_path, **changes):
    """The first rollout of a run."""
    rollouts = []

    def keep(step, metrics, rollout):
        rollouts.append(rollout)

    trained(name, tmp_path, on_step=keep, **({"max_steps": 1, "init_kl_coeff": 0.1} | changes))
    return rollouts[0]


@pytest.mark.parametrize("name", [KEEPS, REWRITES])
def test_a_run_on_episodes_learns_and_tells_what_happened(name, pools, tmp_path):
    folder = trained(name, tmp_path, init_kl_coeff=0.1, log_rollouts=6, save_interval=1)
    first = metrics(folder)[0]
    assert first["policy/ratio"] == pytest.approx(1, abs=1e-4) and first["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert first["policy/grad_norm"] > 0 and first["episodes/turns"] >= 1 and first["episodes/stop_done_ratio"] == 1
    assert (first["episodes/rows"] > 1) == (name == REWRITES)
    assert first["objective/score"] == pytest.approx(first["reward/env"]) and first["episodes/no_reward_ratio"] == 0
    assert first["objective/reward"] == pytest.approx(first["objective/score"], abs=1e-4)
    rows = read_jsonl(folder / "rollouts.jsonl")
    episode = rows[0]["columns"]["episode"]
    assert episode["stop_reason"] == "done" and len(episode["rewards"]) == episode["turns"]
    assert rows[0]["score"] == episode["score"] and rows[0]["columns"]["word"] in "tea water milk"
    end = weights(last_checkpoint(folder))
    shutil.rmtree(folder / "checkpoint-000002")
    resumed = trained(name, tmp_path, init_kl_coeff=0.1, log_rollouts=6, save_interval=1, resume_from=str(folder))
    assert resumed == folder and weights(last_checkpoint(folder)) == end
    assert read_jsonl(folder / "rollouts.jsonl") == rows


def test_environments_in_processes_of_their_own_are_played_in_waves_and_resume_bitwise(tmp_path):
    flags = {"env": "guess_number", "env_options": ["turns=3"], "env_workers": 2, "save_interval": 1, "log_rollouts": 6}
    folder = trained(KEEPS, tmp_path, **flags)
    rows, end = read_jsonl(folder / "rollouts.jsonl"), weights(last_checkpoint(folder))
    assert len(rows) == 6 + 3 and all("Guess my number" in row["prompt"] for row in rows)
    assert max(row["columns"]["episode"]["turns"] for row in rows) == 3
    shutil.rmtree(folder / "checkpoint-000002")
    trained(KEEPS, tmp_path, resume_from=str(folder), **flags)
    assert read_jsonl(folder / "rollouts.jsonl") == rows and weights(last_checkpoint(folder)) == end


@pytest.mark.parametrize("name", [KEEPS, REWRITES])
def test_episodes_one_by_one_are_those_of_lock_step_and_replay_from_their_record(name, pools, tmp_path):
    """Each has its own noise. The last bits depend on which share a call, and the recorded ids give them again."""
    known, rollout = (rollout_of(name, tmp_path / str(lockstep), lockstep=lockstep) for lockstep in (True, False))
    assert rollout.input_ids.equal(known.input_ids) and rollout.action_mask.equal(known.action_mask)
    assert rollout.columns == known.columns and rollout.turn.equal(known.turn)
    again = score_logprobs(Policy(model_of(name)), rollout, 1.0, 4)
    for other in (known.logprobs, again):
        torch.testing.assert_close(rollout.logprobs, other, atol=1e-5, rtol=0)


def shouting(prompts, completions, messages, episode, **columns):
    """A reward that sees the whole dialogue and what happened."""
    assert all(one[0]["role"] == "user" and one[-1]["role"] == "assistant" for one in messages)
    return [facts["tokens"] + len(one) for facts, one in zip(episode, messages)]


@pytest.mark.parametrize("tools, name", [({"tools": ["calculator"]}, "calculator"), ({"mcp": COMMAND}, "count")])
def test_tools_alone_are_scored_by_reward_functions(tools, name, tmp_path):
    given = {"policy": model_of(KEEPS), "tokenizer": copy.deepcopy(ZOO[KEEPS].tokenizer), "prompts": PROMPTS}
    args = agent_args(env=None, **tools, log_dir=str(tmp_path), max_steps=1, env_workers=1)
    folder = grpo.train(args, **given, reward=shouting)
    (row,) = metrics(folder)
    assert row["episodes/stop_answer_ratio"] == 1 and row["objective/score"] == row["reward/shouting"] > 2
    assert "reward/env" not in row and name in read_jsonl(folder / "rollouts.jsonl")[0]["prompt"]


def test_members_of_a_group_have_one_seed_of_the_environment_and_noise_of_their_own(pools, tmp_path, monkeypatch):
    drawn, noise = episode_sampler.turn_noise, []
    monkeypatch.setattr(episode_sampler, "turn_noise", lambda *given: noise.append(drawn(*given)) or noise[-1])
    rollout = rollout_of(KEEPS, tmp_path)
    num_turns = sum(row["episode"]["turns"] for row in rollout.columns)
    assert len(torch.cat(noise).unique(dim=0)) == num_turns > 6  # each has its own
    seeds = [values[0] for _, name, values in pools[0].log if name == "reset"][:6]
    assert len({*seeds[:3]}) == len({*seeds[3:]}) == 1 and seeds[0] != seeds[3]
    texts = [text for _, text in rollout.texts]
    assert len({*texts[:3]}) > 1
    assert rollout.group.tolist() == [0, 0, 0, 1, 1, 1] and rollout.episode is None


def test_held_out_episodes_have_the_same_seeds_and_noise_each_time(pools, tmp_path, monkeypatch):
    rollouts, sample = [], EpisodeSampler.sample

    def sample_both(self, *given):
        rollouts.append(self.sample_held_out(self.prompts))
        return sample(self, *given)

    monkeypatch.setattr(EpisodeSampler, "sample", sample_both)
    trained(KEEPS, tmp_path, max_steps=2, learning_rate=1e-12)
    first, second = rollouts
    assert first.input_ids.equal(second.input_ids) and first.columns == second.columns


def test_weights_are_packed_once_for_the_turns_of_a_rollout(pools, tmp_path, monkeypatch):
    packed, pack = [], decoder.pack_decoder
    monkeypatch.setattr(decoder, "pack_decoder", lambda *given: packed.append(pack(*given)) or packed[-1])
    trained(KEEPS, tmp_path, max_steps=2, max_new_tokens=cpu.LEAST_STEPS)
    assert len(packed) == (2 if has_fast_sums() else 0) and None not in packed


@pytest.mark.parametrize("name", [KEEPS, REWRITES])
def test_actions_are_what_was_sampled_with_the_log_probabilities_of_a_pass(name, pools, tmp_path):
    rollout = rollout_of(name, tmp_path)
    assert (rollout.episode is not None) == (name == REWRITES)
    sampled = sum(columns["episode"]["tokens"] for columns in rollout.select(rollout.ends()).columns)
    assert int(rollout.action_mask.sum()) == sampled and (rollout.logprobs != 0).eq(rollout.action_mask).all()
    assert torch.allclose(rollout.logprobs, rollout.ref_logprobs * rollout.action_mask, atol=1e-4)


@pytest.mark.parametrize("name", [KEEPS, REWRITES])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt"])
def test_micro_batches_and_packing_change_no_gradient(name, aggregation, pools, tmp_path):
    rollout = rollout_of(name, tmp_path)
    policy = Policy(model_of(name)).eval()
    enable_packing(policy)
    assert policy.packs
    found = []
    for size, packs in ((6, True), (6, False), (1, True), (2, False)):
        args = agent_args(aggregation=aggregation, micro_batch_size=size)
        run = RunOfOneStep(args, policy=policy)
        scores = Rewards([EnvScorer()], ("env",), torch.ones(1, dtype=torch.float64))(rollout)
        batch = grpo.estimate_advantages(args, rollout, scores)
        policy.packs = packs
        policy.zero_grad()
        grpo.update_minibatch(run, policy, batch, args.load_loss())
        policy.zero_grad()
        found.append(run.gradients["policy"])
    for other in found[1:]:
        assert_same_gradients(other, found[0], atol=2e-6)


def test_observations_have_their_cross_entropy_beside_the_loss(pools, tmp_path):
    """It adds the gradient of the mean of -log pi over observations, as computed in float64."""
    rollout = rollout_of(KEEPS, tmp_path)
    policy = Policy(model_of(KEEPS)).eval()
    enable_packing(policy)
    batch = grpo.estimate_advantages(agent_args(), rollout, only_env(rollout))
    batch.advantages[batch.group == 0] = 0.0  # rows without an advantage have observations, too
    batch.action_mask[1] = False  # and one that is left out has none
    found = []
    for weight, size in ((0.0, 6), (0.7, 6), (0.7, 1)):
        args = agent_args(observation_weight=weight, micro_batch_size=size, temperature=0.5)
        run = RunOfOneStep(args, policy=policy)
        told = grpo.update_minibatch(run, policy, batch, args.load_loss())
        found.append(copy.deepcopy(run.gradients["policy"]))
        policy.zero_grad()
    exact = copy.deepcopy(policy).double()
    losses = observation_losses(exact, batch, 0.5)
    assert len(losses) > 20 and told["policy/observation_loss"] == pytest.approx(losses.mean().item(), abs=1e-5)
    (0.7 * losses.mean()).backward()
    assert_same_gradients(found[1], found[2], atol=2e-6)
    for key, parameter in exact.named_parameters():
        torch.testing.assert_close((found[1][key] - found[0][key]).double(), parameter.grad, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", [KEEPS, REWRITES])
def test_a_turn_is_credited_with_what_follows_it(name, pools, tmp_path):
    """Members that have ended have a return of 0; std divides all turns by the largest deviation of one.

    A member without a score has no advantage and is in no baseline.
    """
    rollout = rollout_of(name, tmp_path)
    scores, missing = env_twice(rollout), rollout.last_rows() == rollout.last_rows()[0]
    scores.total[missing] = math.nan
    plain = grpo.estimate_advantages(agent_args(advantage="mean", credit="turn"), rollout, scores).advantages
    scaled = grpo.estimate_advantages(agent_args(credit="turn"), rollout, scores).advantages
    assert not plain[missing].any() and not scaled[missing].any()
    last = rollout.select(rollout.ends() & ~missing)
    facts = [columns["episode"] for columns in last.columns]
    assert len({(*group, one["turns"]) for group, one in zip(last.group[:, None].tolist(), facts)}) > 2
    for row in range(len(rollout)):
        for t, turn in enumerate(rollout.turn[row].tolist()):
            if rollout.action_mask[row, t] and not missing[row]:
                mates = [one for one, group in zip(facts, last.group.tolist()) if group == int(rollout.group[row])]
                going = [one for one in mates if turn < one["turns"]]
                to_go = [5 * one["score"] - 2 * sum(one["rewards"][:turn]) for one in going]
                own = rollout.columns[row]["episode"]
                expected = 5 * own["score"] - 2 * sum(own["rewards"][:turn]) - sum(to_go) / len(mates)
                assert float(plain[row, t]) == pytest.approx(expected, abs=1e-4)
                deviation = max(
                    torch.tensor(
                        [5 * one["score"] - 2 * sum(one["rewards"][:h]) if h < one["turns"] else 0.0 for one in mates]
                    ).std()
                    for h in range(max(one["turns"] for one in mates))
                )
                assert float(scaled[row, t]) == pytest.approx(expected / float(deviation + 1e-6), abs=1e-4)


def test_equal_scores_after_different_numbers_of_turns_have_bounded_advantages(pools, tmp_path):
    rollout = rollout_of(KEEPS, tmp_path)
    for columns in rollout.columns:  # all are right in the end
        columns["episode"]["rewards"] = [0.0] * (columns["episode"]["turns"] - 1) + [1.0]
    scores = only_env(rollout)
    scores.total.fill_(1.0)
    for name in ("std", "batch_std"):
        found = grpo.estimate_advantages(agent_args(credit="turn", advantage=name), rollout, scores).advantages
        assert 0 < float(found.abs().max()) < 3


def test_flags_of_episodes_without_episodes_are_refused():
    plain = {"env": None, "max_turns": 8, "reward_function": ["x:y"]}
    agent_args(**plain)
    for name, value in (("max_turns", 4), ("max_episode_tokens", 9), ("observation_weight", 0.1), ("lockstep", False)):
        with error_naming(ValueError, f"--{name} {value} is of episodes", "--env, --tools, --mcp or --agent"):
            agent_args(**plain | {name: value})


def test_episodes_that_are_given_no_reward_count_as_such(pools, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Game, "finish", lambda self, stop_reason: None)
    row = metrics(trained(KEEPS, tmp_path, max_steps=1))[0]
    assert row["episodes/no_reward_ratio"] == row["episodes/stop_fault_ratio"] == 1
    assert "6 of 6 episodes of step 1 have no reward" in (out := capsys.readouterr().out) and "it gave None" in out
    scored = trained(KEEPS, tmp_path / "scored", max_steps=1, reward_function=["helpers.rewards:length"])
    assert metrics(scored)[0]["episodes/no_reward_ratio"] == 0  # by another


def only_env(rollout):
    return Rewards([EnvScorer()], ("env",), torch.ones(1, dtype=torch.float64))(rollout)


def env_twice(rollout):
    """Scores by two rewards: of the rewards of turns the last one counts, whose weight is 2."""
    weights = torch.tensor([3.0, 2.0], dtype=torch.float64)
    return Rewards([EnvScorer(), EnvScorer()], ("outcome", "env"), weights)(rollout)


@pytest.mark.parametrize("name", [KEEPS, REWRITES])
@pytest.mark.parametrize("aggregation", ["token", "constant"])
def test_a_ratio_of_sequences_is_one_of_each_turn(name, aggregation, pools, tmp_path):
    """GSPO's mean log-ratio over a turn's tokens, clipped; `constant` divides by 4 turns of 5 tokens an episode."""
    rollout = rollout_of(name, tmp_path)
    args = agent_args(importance_sampling_level="sequence", aggregation=aggregation, clip_coeff=0.1)
    batch = grpo.estimate_advantages(args, rollout, only_env(rollout))
    policy = Policy(model_of(name)).eval()
    new = score_logprobs(policy, batch, 1.0, 64)
    batch.logprobs = new + 0.2 * torch.randn(new.shape, generator=torch.Generator().manual_seed(3)) * batch.action_mask
    total, clipped = 0.0, 0
    for row in range(len(batch)):
        turns = rollout.turn[row][batch.action_mask[row]].tolist()
        new_row, old_row, gains = (x[row][batch.action_mask[row]] for x in (new, batch.logprobs, batch.advantages))
        for turn in {*turns}:
            own = [t for t, other in enumerate(turns) if other == turn]
            ratio = math.exp(sum(float(new_row[t] - old_row[t]) for t in own) / len(own))
            clipped += len(own) * (not 0.9 <= ratio <= 1.1)
            for t in own:
                total -= min(ratio * float(gains[t]), min(max(ratio, 0.9), 1.1) * float(gains[t]))
    count = int(batch.action_mask.sum())
    run = RunOfOneStep(args, policy=policy)
    found = grpo.update_minibatch(run, policy, batch, args.load_loss())
    expected = total / (count if aggregation == "token" else 20 * int(batch.ends().sum()))
    assert found["policy/loss"] == pytest.approx(expected, abs=1e-5) and abs(expected) > 1e-3
    assert 0 < clipped < count


@pytest.mark.parametrize("name", [KEEPS, REWRITES])
@pytest.mark.parametrize("credit", ["episode", "turn"])
def test_without_a_baseline_an_action_gets_what_is_to_come_in_its_episode(name, credit, pools, tmp_path):
    rollout = rollout_of(name, tmp_path)
    rollout.ref_logprobs = rollout.logprobs - 0.3 * rollout.action_mask  # a KL of .3 at each token
    args = agent_args(advantage="none", credit=credit, init_kl_coeff=0.5)
    found = grpo.estimate_advantages(args, rollout, env_twice(rollout)).advantages
    for last in rollout.last_rows().unique().tolist():
        facts, to_go = rollout.columns[last]["episode"], 0.0
        rows = (rollout.last_rows() == last).nonzero()[:, 0].tolist()
        after = None  # the turn of the token behind
        for row in reversed(rows):
            for t in reversed(rollout.action_mask[row].nonzero()[:, 0].tolist()):
                turn = int(rollout.turn[row, t])
                if turn != after:
                    outcome = 5 * facts["score"] - 2 * sum(facts["rewards"][:-1]) * (credit == "turn")
                    to_go += outcome if after is None else 2 * facts["rewards"][turn] * (credit == "turn")
                to_go, after = to_go - 0.15, turn
                assert float(found[row, t]) == pytest.approx(to_go, abs=1e-3)


@pytest.mark.parametrize("name", [KEEPS, REWRITES])
def test_episodes_that_a_limit_cut_are_penalised_or_left_out_of_the_loss(name, pools, tmp_path):
    rollout = rollout_of(name, tmp_path, max_turns=1, rollout_size=3)
    rollout.truncated = torch.zeros(len(rollout), dtype=torch.bool)  # few of these replies end by themselves
    scores = only_env(rollout)
    cut = torch.tensor([columns["episode"]["stop_reason"] == "turns" for columns in rollout.columns])
    rollout.truncated = rollout.last_rows() == rollout.last_rows()[~cut][0]  # its last turn has no end
    cut |= rollout.truncated
    assert cut.any() and not cut.all()
    plain, filtered = (
        grpo.estimate_advantages(agent_args(overlong_filter=filters), rollout, scores) for filters in (False, True)
    )
    assert torch.equal(filtered.action_mask, plain.action_mask & ~cut[:, None])
    assert torch.equal(filtered.advantages, plain.advantages * ~cut[:, None])  # they stay in the baseline
    punished = grpo.penalize_length(agent_args(missing_eos_penalty=1.5), rollout, scores.total)
    assert torch.equal(punished, scores.total - 1.5 * cut)


@pytest.mark.parametrize("name", [KEEPS, REWRITES])
def test_groups_of_equal_scores_are_replaced_by_whole_episodes(name, pools, tmp_path, monkeypatch):
    letters, update, batches = Game.letters, grpo.update, []
    monkeypatch.setattr(Game, "letters", lambda self: letters(self) * (self.word != "tea"))
    monkeypatch.setattr(grpo, "update", lambda *given: batches.append(given[2]) or update(*given))
    rollout_of, sampled = EpisodeSampler._rollout, []
    rolled = lambda *given: sampled.append(rollout_of(*given)) or sampled[-1]
    monkeypatch.setattr(EpisodeSampler, "_rollout", rolled)
    folder = trained(name, tmp_path, rollout_size=3, resample_rounds=2, max_steps=1)
    (batch,), (row,) = batches, metrics(folder)
    assert row["sampling/prompts"] > 3
    num_sampled = sum(int(one.action_mask.sum()) for one in sampled)  # without observations
    assert row["sampling/wasted_tokens"] == num_sampled - batch.action_mask.sum()
    ends = batch.ends()
    assert batch.group[ends].bincount().tolist() == [3, 3, 3]
    assert torch.equal(batch.group, batch.group[batch.last_rows()])
    episodes = {int(row): batch.last_rows().eq(row).nonzero()[:, 0].tolist() for row in ends.nonzero()[:, 0]}
    assert sum(map(len, episodes.values())) == len(batch)
    assert all(rows == [*range(rows[0], rows[-1] + 1)] for rows in episodes.values())
    turns = [batch.turn[row][batch.action_mask[row]].unique().tolist() for row in range(len(batch))]
    for rows in episodes.values():
        played = [turn for row in rows for turn in turns[row]]
        assert played == [*range(len(played))]


def test_equal_outcomes_change_nothing(pools, tmp_path, monkeypatch):
    monkeypatch.setattr(Game, "letters", lambda self: 0.0)
    assert [row["policy/grad_norm"] for row in metrics(trained(REWRITES, tmp_path))] == [0, 0]


def test_an_episode_without_a_reward_is_in_no_baseline_and_many_are_warned_of(pools, tmp_path, monkeypatch, capsys):
    finish = Game.finish

    def failing(self, stop_reason):
        return finish(self, stop_reason) / (self.word != "tea")

    monkeypatch.setattr(Game, "finish", failing)
    folder = trained(KEEPS, tmp_path, rollout_size=3)
    first = metrics(folder)[0]
    assert first["episodes/no_reward_ratio"] == pytest.approx(1 / 3) == first["episodes/stop_fault_ratio"]
    assert first["objective/valid_ratio"] == pytest.approx(2 / 3)
    assert capsys.readouterr().out.count("3 of 9 episodes of step 1 have no reward") == 1


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"rollout_server": ["http://a:1"], "max_staleness": 1}, ["--max_staleness 1"]),
        ({"rollout_server": ["http://a:1"], "sampling_correction": "sequence_mask"}, ["--sampling_correction"]),
        ({"overlong_buffer": 2}, ["--overlong_buffer 2"]),
        ({"tools": ["x:y"]}, ["--tools", "--env"]),
        ({"mcp": "x"}, ["--mcp x"]),
    ],
)
def test_what_is_not_made_for_episodes_is_refused_by_name(given, facts):
    with error_naming(ValueError, "--env", *facts):
        agent_args(**given)


def test_an_environment_without_a_reward_needs_another_one(monkeypatch, tmp_path):
    monkeypatch.setattr(episode_sampler, "open_pool", lambda run: LocalPool(Game, gives_reward=False))
    with error_naming(UsageError, "--env helpers.episodes:Told gives no reward", "--reward_function"):
        trained(KEEPS, tmp_path)


def test_an_option_that_another_process_cannot_be_told_is_refused(tmp_path):
    with error_naming(UsageError, "--env_options sizes={1, 2}", "set"):
        trained(KEEPS, tmp_path, env_options=["sizes={1, 2}"])


def test_a_tokenizer_without_a_chat_template_is_refused(pools, tokenizer, tmp_path):
    model = tiny_model("llama", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    args = agent_args(log_dir=str(tmp_path), max_steps=1)
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    with error_naming(UsageError, "chat template"):
        grpo.train(args, policy=model, tokenizer=plain, prompts=["Say tea"])


# -------------------------------------------------------------------------------------------------------- enumeration
@pytest.mark.parametrize("keeps", [True, False], ids=["one row", "a row a turn"])
@pytest.mark.parametrize("credit", ["episode", "turn"])
@pytest.mark.parametrize(("advantage", "share"), [("rloo", 1.0), ("mean", 0.5)])
def test_the_expected_gradient_is_that_of_the_mean_reward(keeps, advantage, share, credit):
    """Over all pairs of all episodes, each as often as the policy plays it; `mean` has (K - 1) / K of it."""
    tokenizer = tiny_words(keeps)
    model = tiny_model("llama", vocab_size=len(WORDS), hidden_size=8, intermediate_size=8, num_attention_heads=2)
    policy = Policy(model.double()).eval()
    episodes = all_episodes(tokenizer)
    rows = [len(one.conversation.rows) for one in episodes if one.num_turns == 3]
    assert len(episodes) == 1 + 3 + 3 * 3 * 4 and min(rows) == (1 if keeps else 3)

    def logprob(one: Episode) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for turn in one.conversation.turns:
            ids = one.conversation.rows[turn.row].ids
            logits = model(input_ids=torch.tensor([ids[: turn.start]])).logits[0, -1]
            total = total + logits.log_softmax(-1)[ids[turn.start]]
        return total

    logprobs = torch.stack([logprob(one) for one in episodes])
    assert float(logprobs.detach().exp().sum()) == pytest.approx(1)
    mean = (logprobs.exp() * torch.tensor([one.score for one in episodes], dtype=torch.float64)).sum()
    mean.backward()
    expected = {name: -share * p.grad.clone() for name, p in policy.named_parameters()}

    pairs = [(i, j) for i in range(len(episodes)) for j in range(len(episodes))]
    sizes = {"num_generations": 2, "micro_batch_size": 512, "mini_batch_size": 512, "rollout_size": 999}
    args = agent_args(advantage=advantage, aggregation="sum", loss_type="reinforce", credit=credit, **sizes)
    played, turn, contexts = episode_batch([episodes[i] for pair in pairs for i in pair], 0)
    cut = Completions([], [], [False] * len(played), 0.0)
    rollout = make_rollout(played, contexts, cut, tokenizer, None, 1.0, 64)
    rollout = dataclasses.replace(rollout, group=played.episode // 2, num_groups=len(pairs), turn=turn)
    scores = Rewards([EnvScorer()], ("env",), torch.ones(1, dtype=torch.float64))(rollout)
    batch = grpo.estimate_advantages(args, rollout, scores)
    weights = torch.stack([len(pairs) * (logprobs[i] + logprobs[j]).exp() for i, j in pairs]).detach()  # (G,)
    batch.correction = weights[batch.group, None].expand(batch.action_mask.shape)
    run = RunOfOneStep(args, policy=policy)
    policy.zero_grad()
    grpo.update_minibatch(run, policy, batch, args.load_loss())
    assert_same_gradients(run.gradients["policy"], expected, atol=1e-6)
