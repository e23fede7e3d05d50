"""Held-out splits of a few rows, with answers that a tiny model gives to half of the prompts."""

import json
from pathlib import Path
from typing import Any

from helpers import save_model
from lightrlhf import evaluate
from lightrlhf.cli.groups import DecodingArgs, ModelArgs
from lightrlhf.data.rows import load_rows
from lightrlhf.data.splits import save_split
from lightrlhf.data.tokens import decode
from lightrlhf.evaluation.answers import respond
from lightrlhf.models.loading import load_policy
from lightrlhf.models.tokenizer import store_tokenizer

REQUESTS = ("a large oat latte", "two muffins", "a flat bread", "48 clips", "bread and 24 clips", "May I have tea")
REJECTED = (" No.", " Her 48 clips in May, so she sold 24 of them to you and to two others of us altogether.")
MAX_NEW_TOKENS = 8


def save_held_out(folder: Path, tokenizer: Any) -> tuple[Path, Path]:
    """(data dir, model folder): all stages of a test split, as messages where the tokenizer has a template."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    data, model = folder / "data", save_model("llama", folder / "model", tokenizer)
    tokenizer.save_pretrained(model)
    store_tokenizer(tokenizer, data)

    def prompt(request: str) -> Any:
        text = f"Could I get {request}, please?"
        return [{"role": "user", "content": text}] if tokenizer.chat_template else f"Human: {text} Assistant:"

    pairs = [
        {
            "prompt": prompt(r),
            "chosen": f" Of course! {r}.",
            "rejected": REJECTED[i % 2],
            "group": ["rude", "long"][i % 2],
        }
        for i, r in enumerate(REQUESTS)
    ]
    demonstrations = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs]
    prompts = load_rows("prompts", "train", "", [{"prompt": row["prompt"]} for row in pairs], tokenizer).to_list()
    policy = load_policy(str(model), ModelArgs(), tokenizer).eval()
    greedy = DecodingArgs(do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    rollout = respond(greedy, policy, policy, prompts, tokenizer, 0, len(prompts))
    for number, (row, ids) in enumerate(zip(prompts, rollout.response_ids())):
        row["columns"] = {"answer": decode(tokenizer, ids) if number % 2 else "tea"}
    for stage, rows in (("finetune", demonstrations), ("preference", pairs)):
        save_split(data, stage, "test", load_rows(stage, "train", "", rows, tokenizer))
    save_split(data, "prompts", "test", prompts)
    return data, model


def write_for(harness: str, folder: Path, data: Path | None, model: Any, *flags: object) -> tuple[dict[str, Any], Path]:
    """(results, folder of the files) of `lightrlhf.evaluate --harness`."""
    target = folder / harness
    given = ["--experiment_dir", model, "--harness", harness, "--harness_dir", target, "--accelerator", "cpu"]
    given += ["--max_new_tokens", MAX_NEW_TOKENS, *(["--data_dir", data] if data else []), *flags]
    (row,) = evaluate.main([str(flag) for flag in given])
    return row, target


def command_of(printed: str) -> str:
    """The command that `lightrlhf.evaluate --harness` printed."""
    (command,) = [line.removeprefix("run: ") for line in printed.splitlines() if line.startswith("run: ")]
    return command


def save_lines(path: Path, *rows: dict[str, Any]) -> Path:
    """A JSONL file of questions."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
