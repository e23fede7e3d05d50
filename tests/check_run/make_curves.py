"""Make `curves.jsonl`: what `check_run --follow True` reads of twenty short runs, each with the end that it was given.

    python tests/check_run/make_curves.py

Settings were written before the runs. A run is a model of width 16 that learns to say vowels in some tokens; minutes
of one core in all.
"""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

from helpers import CAFE_SIZES, reseal
from helpers.programs import main_of
from helpers.tiny_runs import TinyRuns

from lightrlhf.checks.curves import read_curves
from lightrlhf.models.tokenizer import load_tokenizer

FILE = Path(__file__).with_name("curves.jsonl")
STEPS = 32
COMMON = ["--save_interval=1000", "--log_rollouts=0", "--disable_dropout=True", "--keep_last=1"]
NEVER_ENDS = ["--reward_function=helpers.rewards:vowels", "--max_new_tokens=2", "--ppo_epochs=1"]
RL = [*NEVER_ENDS, "--max_new_tokens=6", "--stop_strings=e"]
LEARNS = ["--learning_rate=1e-2"]
LORA = ["--finetune_mode=lora", "--lora_rank=4"]
HERE = "check_run.make_curves"
RUNS = {  # name: (the end, program, flags)
    "grpo": ("", "grpo", [*RL, *LEARNS]),
    "grpo, another seed": ("", "grpo", [*RL, *LEARNS, "--seed=1"]),
    "grpo, leave one out": ("", "grpo", [*RL, *LEARNS, "--advantage=rloo", "--temperature=0.9"]),
    "grpo, four members": ("", "grpo", [*RL, *LEARNS, "--num_generations=4", "--mini_batch_size=12"]),
    "grpo, adapters": ("", "grpo", [*RL, *LEARNS, *LORA]),
    "ppo": ("", "ppo", RL),
    "ppo, another seed": ("", "ppo", [*RL, "--seed=1"]),
    "dpo": ("", "dpo", LEARNS),
    "dpo, adapters": ("", "dpo", [*LEARNS, *LORA]),
    "sft": ("", "sft", LEARNS),
    "constant reward": ("all groups equal", "grpo", [*RL, *LEARNS, f"--reward_function={HERE}:constant"]),
    "constant reward, another seed": (
        "all groups equal",
        "grpo",
        [*RL, *LEARNS, "--seed=1", f"--reward_function={HERE}:constant"],
    ),
    "two tokens": ("everything truncated", "grpo", [*NEVER_ENDS, *LEARNS]),
    "two tokens, ppo": ("everything truncated", "ppo", NEVER_ENDS),
    "adapters that stay": ("learning rate too low for LoRA", "grpo", [*RL, *LORA, "--learning_rate=1e-8"]),
    "adapters that stay, another seed": (
        "learning rate too low for LoRA",
        "grpo",
        [*RL, *LORA, "--learning_rate=1e-8", "--seed=1"],
    ),
    "pairs that stay": ("the policy does not move", "dpo", ["--learning_rate=1e-9"]),
    "all stays": ("the policy does not move", "grpo", [*RL, "--learning_rate=1e-9"]),
    "hacked": ("reward up and audit down", "grpo", [*RL, *LEARNS, f"--audit_function={HERE}:consonants"]),
    "hacked, another seed": (
        "reward up and audit down",
        "grpo",
        [*RL, *LEARNS, f"--audit_function={HERE}:consonants", "--seed=1"],
    ),
}


def constant(prompts, completions, **columns):
    return [0.5] * len(completions)


def consonants(prompts, completions, **columns):
    """Falls where vowels are rewarded."""
    return [-sum(letter in "aeiou" for letter in text) for text in completions]


def main() -> None:
    """Make the file anew."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    with tempfile.TemporaryDirectory() as temporary, FILE.open("w", encoding="utf-8") as file:
        folder = Path(temporary)
        made = data_of(folder)
        for name, (end, program, flags) in RUNS.items():
            place = folder / "logs" / name.replace(" ", "_").replace(",", "").replace("'", "")
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                run = main_of(program)(made.flags(program, place, *flags, *known(program), steps=STEPS))
            curves = {key: [float(f"{one:.4g}") for one in values] for key, values in read_curves(str(run)).items()}
            file.write(json.dumps({"name": name, "end": end, "curves": curves}) + "\n")
            file.flush()


def known(program: str) -> list[str]:
    """Of the common flags those that a program has."""
    return [flag for flag in COMMON if "rollouts" not in flag or program in ("grpo", "ppo")]


def data_of(folder: Path) -> TinyRuns:
    """The café's data, and models."""
    from datasets_prep.cafe.prepare_data import main as prepare
    from datasets_prep.cafe_talk.prepare_data import main as prepare_talk

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        prepare(["--destination_dir", str(folder / "cafe" / "tiny"), *CAFE_SIZES])
        tokenizer = load_tokenizer(folder / "cafe" / "tiny")
        talk = folder / "talk"
        tokenizer.save_pretrained(talk / "tokenizer")
        reseal(talk)
        flags = ["--tokenizer_name", str(talk / "tokenizer"), "--num_dialogues", "8", "--num_held_out", "2"]
        prepare_talk(["--destination_dir", str(talk / "data"), *flags, "--num_proc", "1"])
        return TinyRuns(folder / "runs", folder / "cafe" / "tiny", talk / "data", tokenizer)


if __name__ == "__main__":
    main()
