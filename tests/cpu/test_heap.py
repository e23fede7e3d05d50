"""Memory that is freed and asked for again is not mapped anew."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT

FAULTS = """
import resource, sys
import torch
if sys.argv[1] == "kept":
    from lightrlhf.cpu.heap import keep_freed_memory

    keep_freed_memory()
def work():
    tensors = [torch.ones(size << 18) for size in 12 * [16]]  # MiB
for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_freed_memory_is_used_again():
    faults = {}
    for how in ("returned", "kept"):
        command = [sys.executable, "-c", FAULTS, how]
        always = {"MALLOC_MMAP_THRESHOLD_": "131072"} if how == "returned" else {}  # by chance glibc keeps some, too
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **always}, check=True, capture_output=True, text=True
        )
        faults[how] = int(done.stdout)
    assert 3 * faults["kept"] < faults["returned"]  # a system under pressure takes some of it back


@pytest.mark.parametrize(
    "setting",
    [
        "MALLOC_TRIM_THRESHOLD_=65536",
        "MALLOC_MMAP_THRESHOLD_=65536",
        "GLIBC_TUNABLES=glibc.malloc.trim_threshold=65536",
    ],
)
def test_thresholds_of_the_environment_are_kept(setting, monkeypatch):
    from lightrlhf.cpu import heap

    monkeypatch.setenv(*setting.split("=", 1))
    monkeypatch.setattr(heap.ctypes, "CDLL", None)
    heap.keep_freed_memory()


def test_another_system_is_left_alone(monkeypatch):
    from lightrlhf.cpu import heap

    monkeypatch.setattr(heap.sys, "platform", "darwin")
    monkeypatch.setattr(heap.ctypes, "CDLL", None)
    heap.keep_freed_memory()
