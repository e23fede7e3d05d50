"""The quickstart on a system without what only Unix has."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers import environment

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


@pytest.mark.slow
def test_the_quickstart_runs_without_locks_links_and_limits_of_unix(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "quickstart" / "quickstart.png").is_file()
    assert "latest is missing, this file system has no links" in done.stdout
    assert " minutes. Curves: " in done.stdout  # the peak of memory is not known
