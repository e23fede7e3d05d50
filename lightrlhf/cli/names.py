"""Names that other libraries have for flags and programs, and our answers: the contract of howto/migrating.md.

The libraries are SheepRL, MA-RLHF, RLHFlow's online RLHF, REFUEL and Reflect-RL, and the usual trainers: Hugging
Face's, TRL and verl. A name is answered where it is typed and the program has no such flag, by the first of its
answers whose flags the program has. An answer is a text that names flags as `--flag`, and fits every program if it
names a program or no flag.
"""

from __future__ import annotations

import re
from collections.abc import Container

ALIASES = {  # accepted in place of ours
    "--model_name_or_path": "--model_name",
    "--tokenizer": "--tokenizer_name",
    "--experiment_dir": "--model_name",  # a run is named as any model is; not where a new run is made
}
PACKED = "texts are packed wherever that makes a pass cheaper"
READ = "head and size are read from the model"
STAGES = '--stages, such as --stages "pickup/1; pickup; dropoff+full"'
FILES = "the stages of a run exchange files in its experiment dir"
UNUSED = "it had no effect or no use"
GROUPS = "--rollout_size, prompts of a rollout, --mini_batch_size, rows of an update, and --micro_batch_size, of a pass"
ANSWERS: dict[str, tuple[str, ...]] = {
    # the usual trainers
    "lr": ("--learning_rate", "--actor_learning_rate and --critic_learning_rate"),
    "batch_size": ("--mini_batch_size", "--rollout_mini_batch_size"),
    "train_batch_size": ("--mini_batch_size",),
    "per_device_train_batch_size": ("--micro_batch_size",),
    "per_device_eval_batch_size": ("--rollout_mini_batch_size",),
    "gradient_accumulation_steps": ("--mini_batch_size, a multiple of --micro_batch_size",),
    "num_train_epochs": ("--epochs",),
    "n_epochs": ("--epochs",),
    "group_size": ("--num_generations",),
    "num_generations": ("--rollout_size",),  # where a prompt has one response: how many are sampled before an update
    "n": ("--num_generations",),
    "max_completion_length": ("--max_new_tokens",),
    "max_tokens": ("--max_new_tokens",),
    "beta": ("--init_kl_coeff",),
    "kl_coef": ("--init_kl_coeff", "--beta", "use lightrlhf.online_refuel, with --init_kl_coeff"),
    "cliprange": ("--clip_coeff",),
    "max_grad_norm": ("--gradient_clip_val",),
    "checkpoint": ("--resume_from, to go on with a run, or --model_name, to start from a model", "--model_name"),
    "experiment_dir": (
        "--output_dir or --log_dir for a new run; a run to start from is given by --sft_experiment_dir",
        "--output_dir or --log_dir for a new run; a model to start from is given by --model_name",
    ),
    "reward_model_path": ("--rm_experiment_dir",),
    "bf16": ("--precision bf16-mixed",),
    "packing": (PACKED,),
    "gradient_checkpointing": ("--activation_checkpointing",),
    "ckpt_path": ("--log_dir",),
    "save_steps": ("--save_interval",),
    "save_total_limit": ("--keep_last",),
    "logging_steps": ("--log_interval",),
    "lora_r": ("--lora_rank",),
    # TRL
    "num_iterations": ("--ppo_epochs",),
    "steps_per_generation": (GROUPS,),
    "generation_batch_size": (GROUPS,),
    "use_bias_correction_kl": ("the KL's gradient is correct on samples of an earlier policy too",),
    "epsilon": ("--clip_coeff",),
    "epsilon_high": ("--clip_coeff_high",),
    "delta": ("--dual_clip",),
    "scale_rewards": ("--advantage",),
    "mask_truncated_completions": ("--overlong_filter",),
    "multi_objective_aggregation": ("--normalize_each_reward",),
    "use_vllm": ("--rollout_server",),
    "vllm_mode": ("--rollout_server",),
    "vllm_importance_sampling_correction": ("--sampling_correction",),
    "log_completions": ("--log_rollouts",),
    # SheepRL
    "num_workers": ("splits fit in memory and are collated in the training process",),
    **dict.fromkeys(("embedding_dim_name", "transformer_name", "casual", "freeze_transformer"), (READ,)),
    "use_cache": ("only generation uses a KV cache",),
    "low_cpu_mem_usage": ("transformers limits the memory of loading itself",),
    "do_sample": ("responses are samples of the policy; lower --temperature instead",),
    **dict.fromkeys(("num_beams", "num_return_sequences"), ("beams are not samples of the policy",)),
    "ignore_index": ("it is always -100",),
    # MA-RLHF
    "parser_cutoff": ("--parsing_cutoff, one less: here a constituent of exactly that length is one macro action",),
    **dict.fromkeys(("model_name_a", "model_name_b"), ("--responses_file A B",)),
    **dict.fromkeys(("output", "proj_path"), ("--output_file",)),
    "dataset": ("--task", "--data_dir"),
    "gpu": ("the environment variable CUDA_VISIBLE_DEVICES chooses the GPU",),
    "data_path": ("--responses_file", "--data_dir"),
    "save_path": ("--sample, whose rows are written next to each file", "--output_file"),
    "sk": ("the key is read from the environment",),
    # RLHFlow's online RLHF
    "ports": ("--base_url, whose addresses have the ports",),
    "dataset_name_or_path": ("--responses_file", "--data_dir or --prompts_file", "--data_dir"),
    "K": ("--num_generations",),
    **dict.fromkeys(("my_world_size", "local_index"), ("--devices, or torchrun on several machines",)),
    **dict.fromkeys(("train_dir", "eval_dir"), ("--data_dir, which has all splits",)),
    "run_name": ("--experiment_name",),
    "margin_scale": ("scale the margins of the data instead",),
    "len_penalty": ("--length_penalty",),
    # REFUEL
    "task.temperature": ("--temperature",),
    "task.total_length": ("--total_length",),
    **dict.fromkeys(("rebel.eta", "refuel.eta"), ("--eta",)),
    "eps": ("--optimizer_eps",),
    "warmup_ratio": ("--lr_warmup_ratio",),
    "total_episodes": ("--max_steps, which times --mini_batch_size are the episodes",),
    "base_model": ("--sft_experiment_dir or --model_name", "--model_name"),
    "print_sample_output_freq": ("samples are written at each evaluation",),
    **dict.fromkeys(("task.query_dataset", "output_repo", "input_repo"), (FILES,)),
    "task.cluster": ("log-probabilities are stored with a hash of what they depend on",),
    "reward_model": ("--rm_experiment_dir or --reward_function", "--rm_experiment_dir"),
    "reward.kl_coef": ("--init_kl_coeff", "use lightrlhf.online_refuel, with --init_kl_coeff"),
    "task.penalty_reward_value": ("--penalty_reward_value", "use lightrlhf.online_refuel, which has it"),
    "task.response_length": ("--max_new_tokens",),
    "reward.whiten_rewards": ("--whiten_rewards", "use lightrlhf.online_refuel, which has it"),
    **dict.fromkeys(("num_layers_unfrozen", "task.num_layers_unfrozen"), ("--finetune_mode last_layer",)),
    "noptepochs": ("--ppo_epochs", "use lightrlhf.online_refuel, with --ppo_epochs"),
    "offload": ("no frozen model is in memory while this program trains",),
    "track": ("--logger wandb",),
    "wandb_project_name": ("--logger wandb and --wandb_project",),
    "run_eval": ("--eval_interval and --eval_dialogues", "--eval_interval"),
    # Reflect-RL
    **dict.fromkeys(("depth_curriculum", "merge_first_two", "merge_after_first_k", "first_step"), (STAGES,)),
    "taxi_curriculum": (STAGES,),
    "curriculum_index": ("--levels, by name",),
    "ppo_clip_coef": ("--clip_coeff",),
    "ppo_update_iter": ("--ppo_epochs",),
    "entropy_coef": ("--entropy_coeff",),
    "runs": ("--num_samples",),
    "scenario": ("--env",),
    "load_dir": ("--sft_experiment_dir", "--model_name"),
    "reflect_load_dir": ("--reflect_experiment_dir",),
    "use_8bit": ("--load_in_8bit",),
    "use_4bit": ("--load_in_4bit",),
    **dict.fromkeys(("task_file", "repo_dir", "discretize_actions"), ("--env_options, as name=value",)),
    **dict.fromkeys(("sandbox_dir", "disable_alfworld"), ("environments read the tree in place",)),
    **dict.fromkeys(("map_size", "random_map", "is_slippery", "few_data", "easy"), (UNUSED,)),
}

PREPARE = "python -m datasets_prep.generic.prepare_data for a file of yours; howto/datasets.md lists data sets"
OTHER_PROGRAMS = {  # what else a program is called
    **dict.fromkeys(("prepare", "prepare_data", "data", "dataset", "datasets", "tokenize", "preprocess"), PREPARE),
    **dict.fromkeys(("chat", "talk", "ui", "web", "webui", "gui", "interact"), "lightrlhf demo"),
    **dict.fromkeys(
        ("train", "run", "fit", "rlhf"), "lightrlhf with the name of an algorithm, such as sft, ppo or dpo"
    ),
    **dict.fromkeys(("finetune", "fine_tune", "ft", "supervised", "pretrain"), "lightrlhf sft"),
    **dict.fromkeys(("reward", "reward_model", "reward_modeling", "reward_modelling"), "lightrlhf rm"),
    **dict.fromkeys(("eval", "test", "benchmark", "score"), "lightrlhf evaluate"),
    **dict.fromkeys(("infer", "inference", "predict", "sample", "complete"), "lightrlhf generate"),
    **dict.fromkeys(("merge", "convert", "gguf", "ollama", "quantize"), "lightrlhf export"),
    **dict.fromkeys(("api", "server", "vllm_serve"), "lightrlhf serve"),
    **dict.fromkeys(("curves", "graph", "metrics"), "lightrlhf plot"),
    **dict.fromkeys(("env", "info", "check", "gpu"), "lightrlhf doctor"),
    **dict.fromkeys(("memory", "vram"), "lightrlhf estimate"),
    **dict.fromkeys(("label", "rank"), "lightrlhf annotate"),
    **dict.fromkeys(
        ("rloo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce"), "lightrlhf grpo, howto/algorithms/grpo.md"
    ),
    **dict.fromkeys(("ipo", "orpo", "simpo", "cpo"), "lightrlhf dpo --loss_type, howto/algorithms/dpo.md"),
    "bco": "lightrlhf kto --loss_type bco",
    "raft": "lightrlhf online_dpo --training_step raft",
}

VALUES = {
    "--loss_type kto": "use lightrlhf.kto --loss_type kto",
    "--loss_type bco": "use lightrlhf.kto --loss_type bco",
}


def expand_alias(flag: str, flags: Container[str]) -> str:
    """Our name, `--name`, of a flag in a program with these flags."""
    ours = ALIASES.get(flag, flag)
    is_new = flag == "--experiment_dir" and "log_dir" in flags
    return flag if flag[2:] in flags or ours[2:] not in flags or is_new else ours


def not_one_of(name: str, value: object, choices: str) -> str:
    """The error for an invalid choice; a value that another program accepts gets its answer."""
    other = VALUES.get(f"--{name} {value}")
    return f"--{name} {value} is not one of {choices}" + (f"; {other}" if other else "")


def answer(name: str, flags: set[str]) -> str:
    """The answer to another library's flag name in a program with these flags; "" if unknown."""
    answers = ANSWERS.get(name.replace("-", "_"), ())
    fits = (text for text in answers if "lightrlhf." in text or flags.issuperset(flags_in(text)))
    return next(fits, "")


def flags_in(text: str) -> list[str]:
    """The flags that an answer names."""
    return re.findall(r"--(\w+)", text)
