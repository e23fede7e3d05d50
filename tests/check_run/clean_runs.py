"""Runs all programs without a fault and writes what `check_run` says: `python -m check_run.clean_runs SEED...`.

Each setting runs once a seed. A row of `clean_runs.jsonl` beside this file is a run: its setting, its seed, and the
checks that are right, and that are wrong.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from helpers import CAFE_SIZES
from helpers.agent_runs import KEEPS, PROMPTS, agent_args, model_of
from helpers.programs import main_of
from helpers.templates import ZOO
from helpers.tiny_runs import PROGRAMS, TinyRuns, experiment_of

from lightrlhf import PPOArgs, check_run, grpo, ppo
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.programs import PROGRAMS as KNOWN
from lightrlhf.storage.checkpoint import checkpoints

OUT = Path(__file__).with_name("clean_runs.jsonl")
LORA = "--finetune_mode lora --lora_rank 2"
PACKED = "--micro_batch_size 4 --num_generations 4 --mini_batch_size 8"
ONE = "--ppo_epochs 1 --rollout_size 6 --num_generations 4 --mini_batch_size 24"  # update a rollout
KL = "--init_kl_coeff 0.1"
SETTINGS = {
    "sft": ["", LORA, "--micro_batch_size 1 --precision bf16-mixed", "--use_targets False --finetune_mode last_layer"],
    "rm": ["", "--loss_type average"],
    "dpo": [
        "",
        "--loss_type ipo",
        "--loss_type simpo",
        "--loss_type exo_pair --beta 0.5",
        f"{LORA} --lora_dropout 0.1 --disable_dropout False",
    ]
    + [
        "--loss_type sigmoid --rpo_alpha 0.5 --label_smoothing 0.1 --micro_batch_size 1",
        "--max_length 24 --max_prompt_length 18",
    ],
    "kto": ["", "--loss_type bco --desirable_weight 1.5"],
    "ppo": ["", f"{LORA} --ppo_epochs 2", "--temperature 0.7 --kl_estimator k3", "--precision bf16-mixed"]
    + ["--disable_dropout False", "--termination_condition ppl --value_function unit", "--missing_eos_penalty 1"]
    + ["--termination_condition randomized --ngram 2", "--rollout_size 8 --mini_batch_size 4 --top_p 0.9"],
    "grpo": ["", f"{KL} --kl_placement reward --temperature 0.7", f"{KL} --kl_placement loss --loss_type cispo"]
    + [f"{PACKED} {LORA} {KL}", f"{KL} --disable_dropout False --ppo_epochs 1", "--advantage mean --loss_type sapo"]
    + ["--advantage rloo --aggregation sequence --temperature 1.5", "--advantage batch_std --aggregation constant"]
    + ["--advantage maxrl --aggregation prompt", "--advantage none --normalize_advantages True --loss_type reinforce"]
    + [f"--importance_sampling_level sequence --ppo_epochs 3 {PACKED} --mini_batch_size 4", "--precision bf16-mixed"]
    + [f"--overlong_buffer 2 --overlong_filter True {KL}", "--top_k 5 --top_p 0.9", "--resample_rounds 0 --min_p 0.05"]
    + [f"--normalize_each_reward True --advantage batch_std {PACKED}", "--entropy_coeff 0.01 --missing_eos_penalty 1"]
    + [f"{ONE} --max_new_tokens 12", f"{ONE} {KL} --kl_placement loss --aggregation sequence --advantage rloo"]
    + [f"{ONE} --aggregation sum --loss_type sapo --missing_eos_penalty 1", f"{ONE} {LORA} --aggregation constant"]
    + [f"--devices 2 --strategy ddp {KL}", "--reward_function helpers.rewards:every_other"],
    "distill": ["", "--objective position", "--objective position --beta 0.5", f"{LORA}"]
    + [
        "--estimator k1 --objective sequence",
        "--student_share 0.5 --objective position",
        "--num_generations 2 --precision bf16-mixed",
    ],
    "online_dpo": ["", "--training_step raft", "--choose_type max_random --num_generations 4"],
    "refuel": ["", "--loss_type dpo"],
    "iterative_refuel": [""],
    "online_refuel": ["", "--whiten_rewards True --temperature 0.6"],
    "reflect_rl": [
        "",
        "--trainer ppo --num_generations 1",
        "--use_critic True --num_generations 1 --init_kl_coeff 0.1",
    ],
}
GAME = {"env": "guess_number", "env_options": ["turns=3"], "max_turns": 4}
AGENTS = [
    GAME | {"advantage": "mean"},
    GAME | {"credit": "turn", "init_kl_coeff": 0.1, "temperature": 0.8},
    {"env": None, "tools": ["calculator"], "reward_function": ["helpers.rewards:length"]},
    GAME | {"program": "ppo", "termination_condition": "turn"},
    GAME | {"program": "ppo"},
]
PPO = {"mini_batch_size": 2, "micro_batch_size": 2, "actor_learning_rate": 1e-2, "critic_learning_rate": 1e-2}


def listed() -> list[tuple[str, str]]:
    """(program, setting) of all runs; a run of agents has its arguments as JSON."""
    plain = [(program, flags) for program, settings in SETTINGS.items() for flags in settings]
    resumed = [(program, "resumed") for program in ("ppo", "grpo", "distill")]
    return plain + resumed + [("agents", json.dumps(one)) for one in AGENTS]


def play(changes: dict, seed: int, folder: Path) -> Path:
    """The experiment dir of a run on episodes."""
    given = {"policy": model_of(KEEPS), "tokenizer": copy.deepcopy(ZOO[KEEPS].tokenizer), "prompts": 4 * PROMPTS}
    own = {"log_dir": str(folder), "max_steps": 2, "save_interval": 1, "seed": seed, "env_workers": 2} | changes
    if own.pop("program", "grpo") == "grpo":
        return grpo.train(agent_args(learning_rate=1e-2, **own), **given)
    args = vars(agent_args()) | PPO | own
    fields = {name: value for name, value in args.items() if name in PPOArgs.__dataclass_fields__}
    wanted = own.keys() | PPO.keys() | {"rollout_size", "max_new_tokens", "accelerator", "eval_interval"}
    return ppo.train(PPOArgs(**{name: fields[name] for name in wanted}), **given)


def run(made: TinyRuns, program: str, setting: str, seed: int, folder: Path) -> Path:
    """The experiment dir of a setting."""
    torch.manual_seed(seed)
    random.seed(seed)
    if program == "agents":
        return play(json.loads(setting), seed, folder)
    resumed, words = setting == "resumed", "" if setting == "resumed" else setting
    more = {"--seed": str(seed), "--log_rollouts": "100", "--disable_dropout": "True"}
    given = made.flags(program, folder)
    known = {name for name in more if f"--{name[2:]}" in given or name[2:] in fields(program)}
    flags = once([*given, *(word for name in known for word in (name, more[name])), *words.split()])
    if "--devices 2" in setting:
        command = [sys.executable, "-m", KNOWN[program].module, *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return experiment_of(folder)
    done = Path(main_of(program)(flags))
    if resumed:
        for later in checkpoints(done)[1:]:
            for file in sorted(later.rglob("*"), reverse=True):
                file.unlink()
            later.rmdir()
        main_of(program)(["--resume_from", str(done)])
    return done


def fields(program: str) -> set[str]:
    """Names of a program's flags."""
    return {*KNOWN[program].args_class().__dataclass_fields__}


def once(words: list[str]) -> list[str]:
    """Flags with their values, of each the last."""
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            found[name := word] = []
        found[name].append(word)
    return [word for part in found.values() for word in part]


def prepared(folder: Path) -> TinyRuns:
    """Data and models of the runs."""
    from datasets_prep.cafe.prepare_data import main as cafe
    from datasets_prep.cafe_talk.prepare_data import main as talk

    cafe(["--destination_dir", str(folder / "cafe" / "tiny"), *CAFE_SIZES])
    tokenizer = str(folder / "cafe" / "tiny" / "tokenizer")
    sizes = ["--num_dialogues", "40", "--num_held_out", "8", "--num_proc", "1"]
    talk(["--destination_dir", str(folder / "talk"), "--tokenizer_name", tokenizer, *sizes])
    return TinyRuns(folder / "made", folder / "cafe" / "tiny", folder / "talk", load_tokenizer(folder / "cafe/tiny"))


def row_of(made: TinyRuns, program: str, setting: str, seed: int, folder: Path) -> dict:
    """A row of the results."""
    with contextlib.redirect_stdout(io.StringIO()):
        verdicts = check_run.run(check_run.CheckRunArgs(run=str(run(made, program, setting, seed, folder))))
    says = {kind: [one.name for one in verdicts if one.says == kind] for kind in ("right", "cannot tell")}
    wrong = [f"{one.name}: {one.fault}: {one.evidence}" for one in verdicts if one.says == "wrong"]
    return {"program": program, "setting": setting, "seed": seed, "right": says["right"], "wrong": wrong}


def main() -> None:
    assert {*SETTINGS} == {*PROGRAMS}
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        made = prepared(Path(temporary))
        for seed in map(int, sys.argv[1:]):
            for number, (program, setting) in enumerate(listed()):
                rows.append(row_of(made, program, setting, seed, Path(temporary) / f"{seed}-{number}"))
                print(json.dumps(rows[-1]), flush=True)
    OUT.write_text("".join(json.dumps(row) + "\n" for row in rows))
    by_program = Counter(row["program"] for row in rows)
    print(f"{sum(bool(row['wrong']) for row in rows)} alarms in {len(rows)} clean runs: {dict(by_program)}")


if __name__ == "__main__":
    main()
