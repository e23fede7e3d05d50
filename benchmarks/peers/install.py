"""A virtual environment for each peer, below `benchmarks/.venvs`: `python -m benchmarks.peers.install`."""

from __future__ import annotations

import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from lightrlhf.cli.errors import RunFailure, UsageError, one_line_errors
from lightrlhf.cli.fields import Args, flag
from lightrlhf.cli.parser import parse

HERE = Path(__file__).resolve().parent
VENVS = HERE.parent / ".venvs"
PEERS = ("trl", "trl-1.10", "vllm")
VLLM = HERE.parents[1] / "tests" / "real_vllm" / "setup.sh"  # of the tests that need one, too


@dataclass(frozen=True, kw_only=True)
class InstallArgs(Args):
    """Create a virtual environment for each peer."""

    only: list[str] = flag(list(PEERS), choices=PEERS)
    """Peers to install."""


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    for peer in parse(InstallArgs, argv).only:
        if peer == "vllm":
            if status := subprocess.run([VLLM, VENVS / peer, sys.executable]).returncode:
                raise RunFailure(f"{peer}: its setup failed with status {status}")
            continue
        requirements = HERE / f"requirements-{peer}.txt"
        if not requirements.is_file():
            raise UsageError(f"--only {peer} must be one of: {', '.join(PEERS)}")
        torch = next(line for line in requirements.read_text().splitlines() if line.startswith("torch=="))
        venv.create(VENVS / peer, with_pip=True)
        for what in ([torch], ["-r", str(requirements)]):  # torch first, so that its pinned build is taken
            done = subprocess.run([interpreter(peer), "-m", "pip", "install", "--quiet", *what])
            if done.returncode:
                raise RunFailure(f"{peer}: pip failed with status {done.returncode}")
        print(f"{peer}: {interpreter(peer)}")


def interpreter(peer: str) -> Path:
    """The Python of a peer's environment, installed or not."""
    return VENVS / peer / "bin" / "python"


if __name__ == "__main__":
    main()
