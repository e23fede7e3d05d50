"""A virtual environment for each peer, below `benchmarks/.venvs`: `python -m benchmarks.peers.install`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
VENVS = HERE.parent / ".venvs"
PEERS = ("trl", "trl-1.10")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=PEERS, default=PEERS, help="which peers; all when not given")
    for peer in parser.parse_args().only:
        requirements = HERE / f"requirements-{peer}.txt"
        torch = next(line for line in requirements.read_text().splitlines() if line.startswith("torch=="))
        venv.create(VENVS / peer, with_pip=True)
        python = interpreter(peer)
        for what in ([torch], ["-r", str(requirements)]):
            done = subprocess.run([python, "-m", "pip", "install", "--quiet", *what])
            if done.returncode:
                sys.exit(f"{peer}: pip failed with status {done.returncode}")
        print(f"{peer}: {python}")


def interpreter(peer: str) -> Path:
    """The Python of a peer's environment, whether it is there or not."""
    return VENVS / peer / "bin" / "python"


if __name__ == "__main__":
    main()
