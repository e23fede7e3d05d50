"""Episodes on two ranks: they learn what one rank learns, and neither deadlocks."""

import copy
import os
from pathlib import Path

import pytest
import torch
from helpers import last_checkpoint, metrics
from helpers.agent_runs import KEEPS, PROMPTS, REWRITES, SIZES, Game, model_of
from helpers.episodes import LocalPool
from helpers.killed import forked, pair, wait_for_pair
from helpers.templates import ZOO
from safetensors.torch import load_file

from lightrlhf import GRPOArgs, PPOArgs, grpo, ppo
from lightrlhf.cli.patience import RANK
from lightrlhf.envs import episode_sampler

TOLERANCE = 2e-6  # of weights, after steps of a learning rate of 1e-2; ranks add up in another order


class Faulty(Game):
    """A fault of about one episode in four, by what was said."""

    def finish(self, stop_reason):
        return super().finish(stop_reason) / bool(sum(map(ord, "".join(self.said))) % 4)


class Lopsided(Game):
    """On the second rank alone all episodes fail, or end with their first turn."""

    fails = True

    def reset(self, seed, row):
        seen = super().reset(seed, row)
        if os.environ["LOCAL_RANK"] == "1":
            self.num_turns = 0 if self.fails else 1
            1 / self.num_turns
        return seen


class Early(Lopsided):
    fails = False


@pytest.fixture
def pools(monkeypatch):
    """The kind of environment of runs, which are played in the rank's process."""
    kind = [Faulty]
    monkeypatch.setattr(episode_sampler, "open_pool", lambda run: LocalPool(kind[0], size=4))
    monkeypatch.setenv(RANK, "60")
    return kind


def call(program: str, name: str, folder: Path, ranks: int, **more):
    """A run of two steps, with 6 and 3 prompts: the 9 episodes of the second step split into 5 and 4 on two ranks.

    PPO plays one from each of 3 prompts, 2 and 1 of two ranks, which make as many passes, or more of several rows.
    """
    sizes = SIZES | {"env": "helpers.episodes:Told", "rollout_size": 6 // ranks, "max_steps": 2, "log_dir": str(folder)}
    sizes |= {"devices": ranks, "strategy": "ddp", "micro_batch_size": 1, "optimizer_eps": 1e-2, "ppo_epochs": 2}
    sizes["observation_weight"] = 0.5
    given = {"policy": model_of(name), "tokenizer": copy.deepcopy(ZOO[name].tokenizer), "prompts": 3 * PROMPTS}
    if program == "ppo":
        sizes |= {"actor_learning_rate": 1e-2, "critic_learning_rate": 1e-2, "mini_batch_size": 4 // ranks}
        del sizes["num_generations"]
        return lambda: ppo.train(PPOArgs(**sizes | {"rollout_size": 4 // ranks} | more), **given | {"prompts": PROMPTS})
    sizes |= {"learning_rate": 1e-2, "resample_rounds": 1, "init_kl_coeff": 0.1, "mini_batch_size": 18 // ranks}
    return lambda: grpo.train(GRPOArgs(**sizes | more), **given)


def on_two_ranks(folder: Path, *given, **more) -> Path:
    """The experiment of a run on two ranks."""
    output = folder.with_suffix(".txt")
    assert wait_for_pair(pair([call(*given, folder, 2, **more)] * 2, output)) == [0, 0], output.read_text()[-3000:]
    return experiment(folder)


def experiment(folder: Path) -> Path:
    (args,) = folder.rglob("args.json")
    return args.parent


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next(last_checkpoint(run).glob("*model.safetensors")))


@pytest.mark.parametrize(
    ("program", "name"),
    [
        pytest.param("ppo", REWRITES, marks=pytest.mark.slow),
        *[
            pytest.param(*one, marks=pytest.mark.thorough)
            for one in (("ppo", KEEPS), ("grpo", KEEPS), ("grpo", REWRITES))
        ],
    ],
)
def test_two_ranks_learn_as_one_does(program, name, pools, tmp_path):
    """With faults, groups on both ranks and others in their place, rows that differ in number, turns that do."""
    assert forked(call(program, name, tmp_path / "one", 1), tmp_path / "one.txt") == 0
    one, two = experiment(tmp_path / "one"), on_two_ranks(tmp_path / "two", program, name)
    rows = metrics(one)
    assert len(rows) == 2 and any(row["objective/valid_ratio"] < 1 for row in rows), rows
    for row, other in zip(rows, metrics(two), strict=True):
        assert other == pytest.approx(row, abs=2e-5, rel=1e-4), row["step"]
    for key, value in weights_of(one).items():
        torch.testing.assert_close(weights_of(two)[key], value, atol=TOLERANCE, rtol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("program", ["grpo", "ppo"])
@pytest.mark.parametrize(("kind", "strategy"), [(Lopsided, "ddp"), (Lopsided, "fsdp"), (Early, "fsdp")])
def test_a_rank_whose_episodes_fail_or_end_early_does_not_stop_the_other(kind, strategy, program, pools, tmp_path):
    pools[0] = kind
    rows = metrics(on_two_ranks(tmp_path / "two", program, REWRITES, strategy=strategy))
    assert len(rows) == 2
