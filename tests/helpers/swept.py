"""A training program for tests of sweeps: it writes the files of a run of two steps, and trains nothing.

`python swept.py --output_dir DIR flags…` or `--resume_from DIR`. Folders whose names hold $SWEPT_FAILS fail. After
the first step those with $SWEPT_ENDS get SIGTERM, and those with $SWEPT_WAITS wait until the file $SWEPT_GATE exists.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from lightrlhf.storage.locks import lock_folder

PATIENCE = 300  # seconds


def losses(learning_rate: float, seed: int) -> list[float]:
    """Validation losses of the two steps, the second one higher."""
    return [learning_rate * 1000 + seed / 10, learning_rate * 1000 + seed / 10 + 0.05]


def train(words: list[str]) -> None:
    if words[0] == "--resume_from":
        folder = Path(words[1])
        flags = json.loads((folder / "args.json").read_text())
    else:
        folder = Path(words[-1])
        flags = dict(word.removeprefix("--").split("=", 1) for word in words[:-2])
        numbers = {name: float(flags[name]) for name in ("learning_rate",)} | {"seed": int(flags["seed"])}
        flags |= numbers | {"program": "sft", "output_dir": str(folder), "max_steps": int(flags["max_steps"])}
    with lock_folder(folder):
        (folder / "args.json").write_text(json.dumps(flags))
        done = len(list(folder.glob("checkpoint-*")))
        for step, loss in list(enumerate(losses(flags["learning_rate"], flags["seed"]), start=1))[done:]:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "val/loss": loss, "time/update": 1.0}) + "\n")
            if is_named(folder, "SWEPT_FAILS"):
                sys.exit("error: no luck today")
            (folder / f"checkpoint-00000{step}").mkdir()
            if is_named(folder, "SWEPT_ENDS") and step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            started = time.monotonic()
            while is_named(folder, "SWEPT_WAITS") and not Path(os.environ["SWEPT_GATE"]).exists():
                time.sleep(0.05)
                assert time.monotonic() < started + PATIENCE


def is_named(folder: Path, variable: str) -> bool:
    return os.environ.get(variable, "nothing") in str(folder)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        train(sys.argv[1:])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
