"""The quickstart: what it prints about its results, and a system without what only Unix has."""

import subprocess
import sys

import pytest
from helpers import environment
from helpers.errors import refused

from lightrlhf.quickstart import explain, main

WITHOUT = """
import os, select, sys
import datasets, lightning, peft, torch, torch.utils.tensorboard  # which know other systems by their names
from transformers import LlamaForCausalLM, LlamaForSequenceClassification
sys.modules |= {"fcntl": None, "resource": None}  # an import of them fails, as on Windows
del select.poll, os.sysconf, os.sched_getaffinity, os.killpg, os.pread, os.pwrite
def symlink(*_, **__): raise OSError(22, "a privilege is missing")
os.symlink = symlink
from lightrlhf.quickstart import main
main(["--smoke"])
"""


@pytest.mark.parametrize(("gold", "low", "wins"), [(0.9, 0.7, True), (0.6, 0.7, False), (0.9, 0.5, False)])
def test_the_table_names_the_rows_of_each_column_and_what_ppo_did(gold, low, wins, capsys):
    parts = {"correct": 0.5, "polite": 0.5, "short": 0.25}
    base, sft = (parts | {"gold": score} for score in (0.65, 0.62))
    ppo = parts | {"gold": gold, "win_rate": 0.75, "win_rate_interval": (low, 0.8)}
    explain([base, sft, ppo], {"accuracy": 0.9}, parts | {"score": 0.55})
    first, second, scores, *_ = lines = capsys.readouterr().out.strip("\n").splitlines()
    assert first.split("  ")[-1].strip() == "held-out orders" and first.index("training") < second.index("base")
    assert second.split() == ["demonstrations", "base", "SFT", "PPO"]
    assert scores.split() == ["gold", "score", "0.550", "0.650", "0.620", f"{gold:.3f}"]
    assert any(line.startswith("PPO beat SFT") for line in lines) == wins


@pytest.mark.parametrize("flags", [["--output_dir", "file"], ["--seed", "-1"], ["--accelerator", "tpu7"]], ids=" ".join)
def test_what_cannot_be_meant_is_refused_before_any_stage(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert " ".join(flags) in refused(capsys, main, *flags) and len([*tmp_path.iterdir()]) == 1


@pytest.mark.thorough
def test_the_quickstart_runs_without_locks_links_and_limits_of_unix(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "quickstart" / "quickstart.png").is_file()
    assert "latest is missing, this file system has no links" in done.stdout
    assert " minutes. Curves: " in done.stdout  # the peak of memory is not known
