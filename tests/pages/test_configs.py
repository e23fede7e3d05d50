"""Settings of others: every file is one that `--config` reads, and holds the numbers of its table."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import ROOT
from helpers.pages import args_class

from lightrlhf.cli.parser import parse

CONFIGS = sorted((ROOT / "examples" / "configs" / "ma_rlhf").rglob("*.yaml"))
BATCHES = {  # of the table, over all devices
    "gemma-2b": {"sft": 512, "sft_webgpt": 64, "rm": 64, "rm_webgpt": 32, "ppo": 256},
    "gemma-7b": {"sft": 128, "sft_webgpt": 128, "rm": 128, "rm_hh": 64, "rm_webgpt": 32, "ppo": 256, "ppo_webgpt": 256},
    "gemma-2-27b": {"sft": 128, "rm": 128, "ppo": 256},
    "codegemma-2b": {"sft": 16, "ppo": 16},
    "codegemma-7b": {"sft": 32, "ppo": 16},
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
