"""What to type after a run: commands with the run's own paths. Printed where the run's program was started by itself.

Left out: commands that need data or models which the run does not know.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from lightrlhf.storage.run_dir import locate, read_arg

WIDTH = 18  # of the description of a command


def print_next(program: str, directory: Path) -> None:
    """Print what to type next, unless the run was made from Python or by another program."""
    command = command_of(program)
    for number, (what, words) in enumerate(next_steps(program, str(directory)).items() if command else ()):
        print(f"{'' if number else 'next':<10} {what:<{WIDTH}}{command} {words}", flush=True)


def command_of(program: str) -> str:
    """How programs were called when this process was started as a program; empty where it was not."""
    main: Any = getattr(sys.modules["__main__"], "__spec__", None)
    is_command = Path(sys.argv[0]).name == "lightrlhf" or (main is not None and main.name == "lightrlhf.__main__")
    if is_command and len(sys.argv) > 1 and sys.argv[1].lower().replace("-", "_") == program:
        return "lightrlhf" if Path(sys.argv[0]).name == "lightrlhf" else "python -m lightrlhf"
    return "python -m lightrlhf" if main is not None and main.name == f"lightrlhf.{program}" else ""


def next_steps(program: str, directory: str) -> dict[str, str]:
    """Commands, without the first word, by what they do."""
    run, data = shlex.quote(directory), locate(directory, "data_dir")
    splits = {path.stem for path in Path(data).glob("*_*.pt")} if data else set()
    has_prompts = bool(splits & {"prompts_test", "finetune_test"})
    curves = {"draw its curves": f"plot {run}"}
    if program == "reflect_rl":
        return {"measure it": f"evaluate_env {run} --env {read_arg(directory, 'env')}", **curves}
    if program == "rm":
        flag = "sft_experiment_dir" if read_arg(directory, "sft_experiment_dir") else "model_name"
        start = f"--{flag} {shlex.quote(str(read_arg(directory, flag)))}"
        ppo = f"ppo --data_dir {shlex.quote(str(data))} {start} --rm_experiment_dir {run}"
        steps = {"train with it": ppo} if has_prompts else {}
        return steps | ({"measure it": f"evaluate {run}"} if "preference_test" in splits else {}) | curves
    steps = {"chat with it": f"demo {run}"}
    if program == "sft" and "preference_train" in splits:
        steps["train it on pairs"] = f"dpo --data_dir {shlex.quote(str(data))} --sft_experiment_dir {run}"
    if has_prompts:
        steps["measure it"] = f"evaluate {run}"
    return steps | curves | {"export it": f"export {run} --to merged"}
