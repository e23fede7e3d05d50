"""The café's PPO policy as a teacher, the small student that starts from demonstrations, and how it is sampled."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from datasets_prep.cafe.pretrain_base import BASE_DIR
from examples.experiments.cafe_methods import COMMON, METHODS, RESPONSES, prepared
from examples.experiments.small_models import write_model
from examples.programs import logged, made
from lightrlhf import generate, sft
from lightrlhf.data.schema import IGNORE_INDEX
from lightrlhf.data.splits import save_split
from lightrlhf.data.types import Tokenizer
from lightrlhf.models.tokenizer import load_tokenizer, store_tokenizer
from lightrlhf.storage.jsonl import read_jsonl

READ_AT, SMOKE_READ_AT = (12, 24, 48), (1, 2)  # updates; the last is the end
READ_PROMPTS, SMOKE_PROMPTS = 128, 8  # that a checkpoint answers
TEACHER_RATE = 1e-3  # of PPO, as `critic_free_cafe` chose it
STUDENT = {  # a quarter of the teacher's parameters
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
STUDENT_SFT = {"epochs": 4, "learning_rate": 2e-3, "lr_warmup_steps": 20, "eval_interval": 0}
BATCHES = {"mini_batch_size": RESPONSES, "micro_batch_size": RESPONSES}
SCHEDULE = {name: COMMON[name] for name in ("accelerator", "logger", "lr_scheduler_type", "lr_warmup_steps")}
SAMPLING = SCHEDULE | BATCHES | {"max_new_tokens": 96, "rollout_mini_batch_size": RESPONSES}
EIGHT = {"num_generations": 8, "rollout_size": RESPONSES // 8}
ON_TEACHER = SCHEDULE | BATCHES | {"use_targets": True, "epochs": 9}  # SFT on its samples
MEASURES = {
    "gold": "gold score",
    "kl": "KL(student || teacher)",
    "kl_of_teacher": "KL(teacher || student)",
    "length": "tokens of a response",
}


def read_steps(smoke: bool) -> tuple[int, ...]:
    return SMOKE_READ_AT if smoke else READ_AT


def teacher_of(folder: Path, seed: int, smoke: bool) -> str:
    """The café's PPO policy of a seed, trained once."""
    own = folder / f"seed-{seed}"
    data, start, reward = prepared(own, seed, smoke)
    program, flags, rate = METHODS["PPO"]
    where = {"data_dir": data, "sft_experiment_dir": start, "rm_experiment_dir": reward, "seed": seed}
    where |= {"log_dir": own / "logs" / "teacher", "max_steps": read_steps(smoke)[-1], rate: TEACHER_RATE}
    log = own / "output.txt"
    return made(own / "teacher.txt", lambda: logged(log, program, **where, **COMMON, **flags, eval_interval=0))


def student_of(folder: Path, seed: int, smoke: bool) -> str:
    """The student that every arm of a seed starts from: SFT of random weights on the demonstrations, trained once."""
    own = folder / f"seed-{seed}"
    data, tokenizer = prepared(own, seed, smoke)[0], load_tokenizer(None, str(BASE_DIR))
    return trained_student(own, "student", data, tokenizer, seed, smoke)


def trained_student(own: Path, name: str, data: str, tokenizer: Tokenizer, seed: int, smoke: bool) -> str:
    """A student with any tokenizer: SFT of random weights on demonstrations in its tokens, trained once."""
    steps = {"max_steps": 1} if smoke else {}

    def train() -> str:
        model = write_model(own / name, seed, tokenizer, STUDENT)
        where = {"data_dir": data, "model_name": model, "seed": seed, "log_dir": own / "logs" / name}
        flags = {"accelerator": "cpu", "mini_batch_size": 32, "micro_batch_size": 32, "use_targets": True}
        return logged(own / "output.txt", sft, **where, **flags, **STUDENT_SFT, **steps)

    return made(own / f"{name}.txt", train)


def write_teacher_data(folder: Path, seed: int, smoke: bool) -> str:
    """Demonstrations by the teacher, one a prompt; returns their folder."""
    own = folder / f"seed-{seed}"
    data, output = prepared(own, seed, smoke)[0], own / "teacher.jsonl"
    flags = {"max_new_tokens": 96, "rollout_mini_batch_size": RESPONSES, "accelerator": "cpu", "seed": seed}
    where = {"model_name": teacher_of(folder, seed, smoke), "data_dir": data, "output_file": output}
    count = RESPONSES * read_steps(smoke)[-1]
    logged(own / "output.txt", generate, **where, **flags, num_prompts=count, split="train")
    said = [(row["prompt_ids"], row["response_ids"][0]) for row in read_jsonl(output)]
    return save_demonstrations(own / "data" / "teacher", load_tokenizer(data, None), said)


def save_demonstrations(folder: Path, tokenizer: Tokenizer, said: Iterable[tuple[list[int], list[int]]]) -> str:
    """Write prompts and responses as a split for `sft`, whose targets are the responses; returns its folder."""
    rows = []
    for prompt, response in said:
        targets = torch.tensor([IGNORE_INDEX] * len(prompt) + response)
        rows.append({"prompt_len": len(prompt), "input_ids": [*prompt, *response], "targets": targets})
    save_split(folder, "finetune", "train", rows)
    store_tokenizer(tokenizer, folder)
    return str(folder)
