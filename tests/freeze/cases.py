"""Cases of the freeze: tiny runs as plain flags, in the names of this tree, and the tables that map them to the base.

A case is written once. Where the base has other flags or programs, tables say so, which are emptied when the
next piece of work begins, for it is compared with the commit before it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Step:
    """A call of a program. In flags `{in}` is the folder of the inputs, `{run}` the experiment dir below `logs`."""

    program: str
    flags: tuple[str, ...]
    kill: str = ""  # the process is killed before it changes a file whose path matches
    status: int = 0  # the exit status to expect
    ranks: int = 1
    printed: bool = False  # compare what it prints, without times
    variables: dict[str, str] = field(default_factory=dict)  # of the environment


@dataclass(frozen=True)
class Case:
    name: str
    steps: tuple[Step, ...]
    servers: int = 0
    served: str = "llama"  # the model that the servers begin with
    slow: bool = False


# ------------------------------------------------------------------------------------------- the base and this tree
FLAGS: list[tuple[str, str, str]] = []
"""Flags that the base has otherwise: (pattern of programs, words here, words in the base); "" for none."""
MOVED: dict[str, str] = {
    r".* resume\.pt extra reference .*": "",  # tensors instead of lists; the fingerprint is of the rows' digest
    r"out/manifest\.json .*": "",  # of generated episodes: times of files
}
"""Names in records that the base has otherwise: pattern to name here, "" for what is not compared; see `records.py`."""


def in_tree(step: Step, is_base: bool) -> Step:
    """A step in the names of a tree."""
    text = " ".join(step.flags)
    for programs, here, there in FLAGS:
        if is_base and re.fullmatch(programs, step.program):
            text = f" {text} ".replace(f" {here} ", f" {there} " if there else " ").strip()
    return replace(step, flags=tuple(text.split()))


# ------------------------------------------------------------------------------------------------------ tiny programs
CPU = "--accelerator cpu --devices 1"
START = "--model_name {in}/llama"
CAFE = "--data_dir {in}/cafe/tiny"
NAMED = "--experiment_name labelled"
BATCH = "--learning_rate 1e-2 --mini_batch_size 4 --micro_batch_size 2"
OFTEN = "--max_steps 6 --log_interval 1 --save_interval 2 --logger csv --keep_last 3"
SHORT = "--max_new_tokens 3"
PPO_RATES = "--actor_learning_rate 1e-2 --critic_learning_rate 1e-2 --adaptive_kl_coeff True"
PPO_SIZES = "--rollout_size 4 --mini_batch_size 4 --micro_batch_size 2"
GRPO_SIZES = "--num_generations 2 --rollout_size 3 --ppo_epochs 2 --mini_batch_size 4 --micro_batch_size 2"
VOWELS = "--reward_function freeze_functions:vowels"
WHOLE = "--reward_function freeze_functions:whole_vowels"
ECHO = "--user_function freeze_functions:echo"
UNSTEADY = "--disable_dropout False"
GUESS = "--data_dir {in}/talk --env guess_number --env_options turns=3 --env_workers 2"

TINY = {  # flags without those of evaluation
    "sft": f"{CAFE} {START} {OFTEN} {BATCH} {UNSTEADY}",
    "rm": f"{CAFE} {START} {OFTEN} {BATCH} {UNSTEADY}",
    "dpo": f"{CAFE} {START} {OFTEN} {BATCH} {UNSTEADY}",
    "kto": f"--data_dir {{in}}/labelled {START} {OFTEN} {BATCH} {UNSTEADY} --loss_type kto {NAMED}",
    "bco": f"--data_dir {{in}}/labelled {START} {OFTEN} {BATCH} {UNSTEADY} --loss_type bco {NAMED}",
    "refuel": f"--data_dir {{in}}/pairs {START} {OFTEN} {BATCH} {UNSTEADY}",
    "ppo": f"{CAFE} {START} {OFTEN} {PPO_RATES} {PPO_SIZES} {SHORT} {VOWELS} {UNSTEADY}",
    "grpo": f"{CAFE} {START} {OFTEN} --learning_rate 1e-2 {GRPO_SIZES} {SHORT} --resample_rounds 2 --init_kl_coeff 0.1 "
    f"{WHOLE} {UNSTEADY}",
    "reflect_rl": f"--env freeze_functions:Corridor --horizon 4 --model_name {{in}}/corridor {OFTEN} {UNSTEADY} "
    "--learning_rate 1e-2 --rollout_size 4 --num_envs 4 --num_generations 2 --micro_batch_size 4",
    "online_refuel": f"--data_dir {{in}}/talk {START} {OFTEN} {BATCH} {VOWELS} --rollout_size 4 {SHORT} {UNSTEADY}",
    "iterative_refuel": f"--data_dir {{in}}/talk {START} --save_interval 1 --logger csv {BATCH} {ECHO} {VOWELS} "
    "--iterations 2 --num_data 8 --num_turns 2 --max_new_tokens 4 --eta 2 --eval_dialogues 2",
    "online_dpo": f"{CAFE} {START} --save_interval 1 --logger csv {BATCH} --iterations 2 --prompts_per_iteration 6 "
    f"--num_generations 2 {SHORT} --eval_prompts 2 {VOWELS}",
}
SAMPLING = ("ppo", "grpo", "online_dpo", "online_refuel", "iterative_refuel", "reflect_rl")
ITERATED = ("online_dpo", "iterative_refuel")
WITH_SETS = ("sft", "rm", "dpo", "kto", "ppo", "grpo")
NO_EVALUATION = {
    "online_dpo": "",
    "online_refuel": "--eval_interval 0 --eval_dialogues 0",
    "iterative_refuel": "--eval_interval 0 --validation_percentage 0",
}
BEST = {  # an evaluation at every step or every other, the best kept; most stop before their last step
    "sft": "--keep_best max:val/loss",
    "rm": "--keep_best val/rewards/accuracies",
    "dpo": "--keep_best val/rewards/accuracies",
    "kto": "--keep_best max:val/loss",
    "bco": "--keep_best max:val/loss",
    "refuel": "--keep_best max:val/loss",
    "ppo": "--keep_best max:val/score",
    "grpo": "--keep_best max:val/score",
    "reflect_rl": "--keep_best max:val/success",
}
KILLED = r"checkpoint-000004"
KILLED_IN = {"online_dpo": r"iteration-0*2/.*checkpoint-", "iterative_refuel": r"iteration-0*2/.*checkpoint-"}


def step(program: str, *more: str, log: str = "{log}", **how: object) -> Step:
    """A tiny run; later flags count."""
    program, flags = ("kto", TINY["bco"]) if program == "bco" else (program, TINY[program])
    text = " ".join([flags, CPU, *more])
    if program in ITERATED:
        text = text.replace(UNSTEADY, "")
    return Step(program, once([*text.split(), "--log_dir", log]), **how)  # type: ignore[arg-type]


def once(words: Sequence[str]) -> tuple[str, ...]:
    """Flags with their values, of each the last."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word
            found.pop(name, None)
        found.setdefault(name, []).append(word)
    return tuple(word for values in found.values() for word in values)


def resume(program: str, log: str = "", **how: object) -> Step:
    program = "kto" if program == "bco" else program
    return Step(program, ("--resume_from", f"{{run{log}}}"), **how)  # type: ignore[arg-type]


def quiet(program: str) -> str:
    """Flags of a run without evaluations."""
    return NO_EVALUATION.get(program, "--eval_interval 0")


# -------------------------------------------------------------------------------------------------------------- cases
def evaluated() -> Iterator[Case]:
    """Evaluation, the best checkpoint and patience; and a run resumed after a kill between two evaluations."""
    for program in TINY:
        more = ""
        if program in BEST:
            more = f"{BEST[program]} --early_stop_patience 2 --eval_interval 1 --save_interval 3"
        elif program == "online_refuel":
            more = "--eval_interval 2 --eval_dialogues 3"
        elif program == "iterative_refuel":
            more = "--eval_interval 1 --validation_percentage 0.25 --keep_best max:val/loss --early_stop_patience 1"
        yield Case(f"{program}/best", (step(program, more),))
        if program != "bco":
            kill = KILLED_IN.get(program, KILLED)
            more = "--eval_interval 2" if program in BEST else quiet(program)
            killed = step(program, more, kill=kill, status=-9)
            yield Case(f"{program}/killed", (killed, resume(program)))


def dry() -> Iterator[Case]:
    for program in TINY:
        yield Case(f"{program}/dry", (step(program, "--dry_run True", quiet(program), printed=True),))


def adapters() -> Iterator[Case]:
    for program in TINY:
        if program != "bco":
            more = "--finetune_mode lora --lora_rank 2 --lora_dropout 0.1 --max_steps 3"
            if program in ITERATED:
                more = "--finetune_mode lora --lora_rank 2"
            yield Case(f"{program}/lora", (step(program, more, quiet(program)),))


def mixtures() -> Iterator[Case]:
    for program in WITH_SETS:
        if program != "kto":
            more = "--data_dir {in}/sets/one {in}/sets/two --data_weights 1 3 --eval_interval 3"
            more += " --resample_rounds 0" if program == "grpo" else ""
            yield Case(f"{program}/sets", (step(program, more),))


def variants() -> Iterator[Case]:
    """Branches of single programs."""
    for name, flags in {
        "sft/smoothed": "--label_smoothing 0.1 --use_targets False",
        "rm/pair": "--loss_type pair",
        "rm/per_sample": "--loss_type per_sample",
        "dpo/simpo": "--loss_type simpo --max_length 40",
        "dpo/ipo": "--loss_type ipo",
        "dpo/lengths": "--rpo_alpha 0.1 --length_alpha 0.01",
        "dpo/aot": "--loss_type aot",
        "refuel/dpo": "--loss_type dpo",
        "grpo/audit": "--audit_function freeze_functions:length --eval_interval 3 --log_rollouts 100",
        "grpo/two_rewards": "--reward_function freeze_functions:vowels freeze_functions:length --reward_weights 1 0.5 "
        "--normalize_each_reward True --missing_eos_penalty 0.5 --overlong_buffer 2 --resample_rounds 0",
        "grpo/sequence": "--importance_sampling_level sequence --aggregation prompt --kl_placement loss "
        "--advantage rloo --normalize_advantages True --dual_clip 3",
        "grpo/noisy": "--reward_function freeze_functions:noisy --resample_rounds 0 --advantage mean",
        "ppo/fixed": "--termination_condition fixed --ngram 2 --max_new_tokens 6 --ppo_epochs 2",
        "ppo/randomized": "--termination_condition randomized --max_new_tokens 8",
        "ppo/parsing": "--termination_condition parsing --parser python --max_new_tokens 8 --value_function position",
        "ppo/ppl": "--termination_condition ppl --max_new_tokens 6 --value_function first",
        "ppo/max_kl": "--max_kl 1e-4 --ppo_epochs 4 --entropy_coeff 0.01",
        "ppo/audit": "--audit_function freeze_functions:length --eval_interval 3 --missing_eos_penalty 1",
        "ppo/two_models": "--share_backbone False",
        "reflect_rl/critic": "--num_generations 1 --use_critic True --gae_lambd 0.9 --eval_interval 2",
        "reflect_rl/ppo": "--trainer ppo --init_kl_coeff 0.1 --ppo_epochs 2 --mini_batch_size 8",
        "reflect_rl/replay": "--replay_buffer_size 16 --num_generations 1",
        "reflect_rl/history": "--with_history True --max_new_tokens 3 --trainer ppo --mini_batch_size 8",
        "reflect_rl/reflector": "--reflect_experiment_dir {in}/corridor --reflect_do_sample True --reflect_prob 0.7 "
        "--reflect_max_new_tokens 4 --with_history True",
        "grpo/episodes": f"{GUESS} --resample_rounds 1 --log_rollouts 8 --eval_interval 3",
        "ppo/episodes": f"{GUESS} --log_rollouts 8 --eval_interval 3",
        "online_refuel/whiten": "--whiten_rewards True --ppo_epochs 2",
        "online_dpo/penalty": "--choose_type max_min_p --length_penalty 0.01 --reference moving",
        "online_dpo/raft": "--training_step raft",
    }.items():
        program = name.partition("/")[0]
        more = "" if program in ITERATED or "--eval_interval" in flags else quiet(program)
        yield Case(name, (step(program, flags, more),))
    scorer = step("rm", "--eval_interval 0 --max_steps 2", log="{log}-rm")
    for program in ("ppo", "grpo", "online_refuel"):
        flags = TINY[program].replace(VOWELS, "").replace(WHOLE, "")
        more = ["--rm_experiment_dir", "{run-rm}", "--log_dir", "{log}"]
        trained = Step(program, once([*f"{flags} {CPU} {quiet(program)}".split(), *more]))
        yield Case(f"{program}/scored", (scorer, trained))


def served() -> Iterator[Case]:
    """Runs whose responses a server samples: at the weights of the step, one behind, and killed between two steps."""
    one = "--rollout_server {server0} --rollout_mini_batch_size 32"
    for program in SAMPLING:
        more = "" if program in ITERATED else quiet(program)
        for staleness in (0, 1) if program in ("ppo", "grpo") else (0,):
            stale = f"--max_staleness {staleness} --eval_interval 3" if program in ("ppo", "grpo") else more
            model = "corridor" if program == "reflect_rl" else "llama"
            name = f"{program}/served-{staleness}"
            yield Case(name, (step(program, one, stale),), servers=1, served=model, slow=True)
    for program, staleness in (("grpo", 0), ("grpo", 1), ("ppo", 0), ("ppo", 1)):
        more = f"--max_staleness {staleness} --eval_interval 0 --save_interval 100"
        killer = "--reward_function freeze_functions:kills_a_server"
        variables = {"FREEZE_SERVER": "{pid0}", "FREEZE_CALL": "3", "LIGHTRLHF_SERVER_TIMEOUT": "0.5"}
        dies = step(program, one, more, killer, status=1, variables=variables)
        name = f"{program}/server_killed-{staleness}"
        yield Case(name, (dies, resume(program)), servers=1, slow=True)


def ranks() -> Iterator[Case]:
    for program in ("sft", "dpo", "ppo", "grpo"):
        for strategy in ("ddp", "fsdp"):
            more = f"--devices 2 --strategy {strategy} --max_steps 3 --eval_interval 2"
            more += " --mini_batch_size 2" if program in ("sft", "dpo") else ""
            more += " --audit_function freeze_functions:length" if program == "grpo" else ""
            yield Case(f"{program}/{strategy}", (step(program, more, ranks=2),), slow=True)


def tools() -> Iterator[Case]:
    """Programs that sample and evaluate."""
    generate = f"{START} {CAFE} --split train --num_prompts 7 --num_generations 2 --max_new_tokens 4"
    evaluate = (
        f"--experiment_dir {{run}} {{run-dpo}} {CAFE} --num_samples 6 --max_new_tokens 4 --rollout_mini_batch_size 4"
    )
    scorer = step("rm", "--eval_interval 0 --max_steps 2", log="{log}-rm")
    policy = step("sft", "--eval_interval 0 --max_steps 2")
    other = step("dpo", "--eval_interval 0 --max_steps 2", log="{log}-dpo")
    again = f"{START} --prompts_file {{work}}/out/one.jsonl --max_new_tokens 3 --do_sample False"
    best = "--rm_experiment_dir {run-rm} --prompts_from preference --ref_scores True --rollout_mini_batch_size 4"
    at = "--model_name {in}/llama --rollout_engine openai --base_url {server0}/v1"
    yield Case("generate/local", (tool("generate", generate, ONE), tool("generate", again, TWO)))
    yield Case("generate/scored", (scorer, tool("generate", f"{generate} {best}", ONE)))
    yield Case("generate/temperatures", (tool("generate", f"{generate} --num_generations 1 --temperatures 0 0.7"),))
    yield Case("generate/dry", (tool("generate", f"{generate} --dry_run True", ONE, printed=True),))
    ranks = f"{generate} --devices 2"
    yield Case("generate/ranks", (tool("generate", ranks, ONE, ranks=2),), slow=True)
    served = f"{generate} --rollout_server {{server0}}"
    yield Case("generate/served", (tool("generate", served, ONE),), servers=1, slow=True)
    yield Case("generate/openai", (tool("generate", f"{generate} {at}", ONE),), servers=1, slow=True)
    episodes = f"{START} {GUESS} --num_prompts 6 --num_generations 2 --max_new_tokens 4"
    yield Case("generate/episodes", (tool("generate", episodes),))
    rewards = f"{VOWELS} --num_generations 2 --pass_k 1 2 --pass_threshold 2 --rouge True"
    yield Case("evaluate/models", (policy, other, tool("evaluate", f"{evaluate} {rewards} --use_pretrained True")))
    models = "--experiment_dir {run-rm} --data_dir {in}/cafe/tiny --num_samples 6"
    yield Case("evaluate/reward_model", (scorer, tool("evaluate", models)))
    files = f"--responses_file {{work}}/out/one.jsonl {VOWELS}"
    yield Case("evaluate/responses", (tool("generate", generate, ONE), tool("evaluate", files)))
    yield Case("evaluate/dry", (policy, other, tool("evaluate", f"{evaluate} --dry_run True", printed=True)))
    dialogues = (
        "--experiment_dir {run} {run-other} --data_dir {in}/talk --num_samples 4 --num_turns 2 --max_new_tokens 4"
    )
    talk = [step("sft", f"--data_dir {{in}}/talk --max_steps {n} --eval_interval 0", log=log) for n, log in TALKS]
    by_turn = tool("evaluate_dialogues", f"{dialogues} {ECHO}")
    yield Case("evaluate_dialogues/two", (*talk, by_turn))
    agent = step("reflect_rl", "--eval_interval 0 --max_steps 2")
    played = "--env freeze_functions:Corridor --experiment_dir {run} --eval_reps 2 --num_envs 4"
    yield Case("evaluate_env/agent", (agent, tool("evaluate_env", played)))


ONE, TWO = "--output_file {work}/out/one.jsonl", "--output_file {work}/out/two.jsonl"
TALKS = ((1, "{log}"), (3, "{log}-other"))


def tool(program: str, *flags: str, **how: object) -> Step:
    words = " ".join([*flags, "--accelerator cpu"]).split()
    if program == "generate" and "--output_file" not in words:
        words += ["--output_dir", "{work}/out"]
    return Step(program, once(words), **how)  # type: ignore[arg-type]


CASES = [*evaluated(), *dry(), *adapters(), *mixtures(), *variants(), *served(), *ranks(), *tools()]
