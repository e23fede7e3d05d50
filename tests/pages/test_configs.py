"""Settings of others: every file is one that `--config` reads, and holds the numbers of its table."""

from pathlib import Path

import pytest
import torch
import yaml
from helpers import ROOT
from helpers.pages import args_class

from lightrlhf.cli.parser import parse
from lightrlhf.grpo import GRPOArgs
from lightrlhf.maths.groups import ADVANTAGES, group_advantages, group_moments
from lightrlhf.maths.policy_losses import token_weights

CONFIGS = sorted((ROOT / "examples" / "configs" / "ma_rlhf").rglob("*.yaml"))
BATCHES = {  # of the table, over all devices
    "gemma-2b": {"sft": 512, "sft_webgpt": 64, "rm": 64, "rm_webgpt": 32, "ppo": 256},
    "gemma-7b": {"sft": 128, "sft_webgpt": 128, "rm": 128, "rm_hh": 64, "rm_webgpt": 32, "ppo": 256, "ppo_webgpt": 256},
    "gemma-2-27b": {"sft": 128, "rm": 128, "ppo": 256},
    "codegemma-2b": {"sft": 16, "ppo": 16},
    "codegemma-7b": {"sft": 32, "ppo": 16},
}
CRITIC_FREE = {  # updates per rollout; slopes of the loss by the log-probability, of advantage 1, at these ratios
    "grpo": (1, {1.19: -1.19, 1.21: 0}),
    "dr_grpo": (1, {1.19: -1.19, 1.21: 0}),
    "dapo": (16, {1.27: -1.27, 1.29: 0}),
    "rloo": (1, {0.1: -1, 9.0: -1}),
    "gspo": (4, {1.00035: -1.00035, 1.0005: 0}),
    "cispo": (2, {0.01: -0.01, 4.9: -4.9, 6.0: -5}),
    "reinforce_pp": (8, {1.19: -1.19, 1.21: 0}),
}
SCORES, GROUP = torch.tensor([0.0, 2.0, 4.0, 1.0, 1.0, 4.0]), torch.tensor([0, 0, 0, 1, 1, 1])
BASELINES = {  # advantages of the scores above: first group of mean 2 and deviation 2, second of 2 and the root of 3
    "grpo": [-1, 0, 1, -(3**-0.5), -(3**-0.5), 2 * 3**-0.5],
    "dapo": [-1, 0, 1, -(3**-0.5), -(3**-0.5), 2 * 3**-0.5],
    "gspo": [-1, 0, 1, -(3**-0.5), -(3**-0.5), 2 * 3**-0.5],
    "dr_grpo": [-2, 0, 2, -1, -1, 2],
    "rloo": [-3, 0, 3, -1.5, -1.5, 3],
    "cispo": [value * (14 / 5) ** -0.5 for value in (-2, 0, 2, -1, -1, 2)],
    "reinforce_pp": [0, 2, 4, 1, 1, 4],
}
WEIGHTS = {  # of the tokens of responses of 1, 3 and 4 tokens, the last two of one prompt, at most 128 tokens
    "grpo": [1 / 3, 1 / 9, 1 / 12],
    "gspo": [1 / 3, 1 / 9, 1 / 12],
    "dr_grpo": [1 / 3 / 128] * 3,
    "dapo": [1 / 8] * 3,
    "reinforce_pp": [1 / 8] * 3,
    "rloo": [1 / 3] * 3,
    "cispo": [1 / 2, 1 / 14, 1 / 14],
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_config_is_read_and_flags_behind_it_win(path: Path, tmp_path):
    program = path.stem.partition("_")[0]
    flags = ["--config", str(path), "--data_dir", str(tmp_path), "--epochs", "7"]
    if program != "sft":
        flags += ["--sft_experiment_dir", str(tmp_path)]
    if program == "ppo" and "code" not in path.parent.name:
        flags += ["--rm_experiment_dir", str(tmp_path)]
    args = parse(args_class(f"lightrlhf.{program}"), flags)
    assert args.epochs == 7
    assert args.mini_batch_size * args.devices == BATCHES[path.parent.name][path.stem]
    if program == "ppo":
        assert args.rollout_size == args.mini_batch_size and args.ngram in (5, 10)


def test_no_model_and_stage_of_the_table_is_missing():
    assert {(path.parent.name, path.stem) for path in CONFIGS} == {(m, s) for m, row in BATCHES.items() for s in row}


def critic_free(name: str, tmp_path: Path) -> GRPOArgs:
    path = ROOT / "examples" / "configs" / "grpo" / f"{name}.yaml"
    given = ["--data_dir", "d", "--sft_experiment_dir", str(tmp_path), "--rm_experiment_dir", str(tmp_path)]
    return parse(GRPOArgs, ["--config", str(path), *given])


@pytest.mark.parametrize("name", CRITIC_FREE)
def test_a_relative_of_grpo_is_what_its_file_says(name, tmp_path):
    args = critic_free(name, tmp_path)
    stored = yaml.safe_load((ROOT / "examples" / "configs" / "grpo" / f"{name}.yaml").read_text())
    assert stored == {key: getattr(args, key) for key in stored}
    updates, slopes = CRITIC_FREE[name]
    assert args.rollout_size * args.num_generations == updates * args.mini_batch_size
    loss, action = args.load_loss(), torch.ones(1, 1, dtype=torch.bool)
    for ratio, slope in slopes.items():
        logprob = torch.tensor([[-0.7]], dtype=torch.float64, requires_grad=True)
        old = logprob.detach() - torch.tensor(ratio, dtype=torch.float64).log()
        loss(logprob, logprob - old, torch.ones(1, 1, dtype=torch.float64), action).sum().backward()
        assert float(logprob.grad) == pytest.approx(slope, abs=1e-9), ratio
    found = group_advantages(SCORES, group_moments(SCORES, GROUP, 2), ADVANTAGES[args.advantage])
    assert found.tolist() == pytest.approx(BASELINES[name], abs=1e-5)
    mask = torch.arange(4) < torch.tensor([[1], [3], [4]])
    weights = token_weights(mask, torch.tensor([0, 1, 1]), 2, args.aggregation, 128)
    assert weights[:, 0].tolist() == pytest.approx(WEIGHTS[name])


def test_the_relatives_differ_from_each_other_where_their_tables_do(tmp_path):
    has_kl = {name for name in CRITIC_FREE if critic_free(name, tmp_path).init_kl_coeff}
    assert has_kl == {"grpo", "rloo", "reinforce_pp"}
    assert {name for name in has_kl if critic_free(name, tmp_path).kl_placement == "loss"} == {"grpo"}
    assert {n for n in CRITIC_FREE if critic_free(n, tmp_path).importance_sampling_level == "sequence"} == {"gspo"}
    assert {n for n in CRITIC_FREE if critic_free(n, tmp_path).normalize_advantages} == {"reinforce_pp"}
    dapo = critic_free("dapo", tmp_path)
    assert dapo.resample_rounds and dapo.overlong_buffer * 5 == dapo.max_new_tokens


def test_the_page_of_the_relatives_has_a_row_for_each_file():
    folder = ROOT / "examples" / "configs" / "grpo"
    page = (folder / "README.md").read_text()
    assert {path.stem for path in folder.glob("*.yaml")} == CRITIC_FREE.keys()
    assert all(f"| `{name}.yaml` |" in page for name in CRITIC_FREE)
