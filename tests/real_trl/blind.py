"""The faults of `tests/check_run/blind.txt` in TRL 1.16, by changed lines of its source: `blind.py OUT NUMBER [clean]`.

They were chosen before the first check was written, by somebody who wrote none, and planted when all checks stood.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lab
import torch
from trl.trainer import dpo_trainer, grpo_trainer, sft_trainer

from lightrlhf.checks.trl import record


class Change(NamedTuple):
    """A line of a method, and what stands there instead."""

    owner: str  # class
    method: str
    line: str
    instead: str


SFT, COLLATOR = ("SFTTrainer", "DataCollatorForLanguageModeling")
PAIRS, GROUPS = ("DPOTrainer", "_compute_loss"), ("GRPOTrainer", "_generate_and_score_completions")
SAMPLES = ("GRPOTrainer", "_generate_single_turn")
START = "prompt_len = common_prefix_length(prompt_ids, prompt_completion_ids)"
LABELS = '[example.get("labels", example["input_ids"]) for example in examples]'
COUNT = "num_tokens = outputs.label_mask.sum()"
K3 = "torch.exp({0} - {1}) - ({0} - {1}) - 1"
CHANGES: dict[int, tuple[str, Change]] = {
    1: ("sft/prompt", Change(SFT, "_prepare_dataset", START, START + " + 1")),
    2: (
        "sft/prompt",
        Change(
            COLLATOR,
            "torch_call",
            f"labels = {LABELS}",
            f"labels = [[-100 if i == 2 else i for i in row] for row in {LABELS}]",
        ),
    ),
    4: (
        "sft/prompt",
        Change(
            SFT,
            "compute_loss",
            f"{COUNT} if num_items_in_batch is None else num_items_in_batch",
            f"{COUNT} * self.current_gradient_accumulation_steps",
        ),
    ),
    8: (
        "dpo/pair",
        Change(
            *PAIRS, "delta_score = chosen_scores - rejected_scores", "delta_score = rejected_scores - chosen_scores"
        ),
    ),
    9: ("dpo/pair", Change(*PAIRS, "masked_fill(completion_mask == 0", 'masked_fill(inputs["attention_mask"] == 0')),
    10: (
        "grpo/dapo",
        Change(
            *GROUPS,
            "std_rewards = nanstd(rewards.view(-1, num_generations), dim=1)",
            "std_rewards = nanstd(rewards).expand(len(rewards) // num_generations)",
        ),
    ),
    11: (
        "grpo/dapo",
        Change(*GROUPS, "mean_grouped_rewards = ", "rewards = rewards.roll(1); mean_grouped_rewards = "),
    ),
    13: (
        "grpo/dapo",
        Change(*SAMPLES, "(sequence_indices <= eos_idx.unsqueeze(1))", "torch.ones_like(sequence_indices)"),
    ),
    14: (
        "grpo/kl",
        Change(
            "GRPOTrainer",
            "_compute_loss",
            K3.format("ref_per_token_logps", "per_token_logps"),
            K3.format("per_token_logps", "ref_per_token_logps"),
        ),
    ),
    15: ("grpo/kl", Change("GRPOTrainer", "_compute_loss", "-torch.min(per_token", "-torch.max(per_token")),
    16: (
        "grpo/dapo",
        Change(
            *SAMPLES,
            "return completion_ids, logprobs",
            "return [completion_ids[i - i % num_generations] for i in range(len(completion_ids))], logprobs",
        ),
    ),
    17: ("grpo/dapo", Change(*GROUPS, "rewards[unscorable_mask] = torch.nan", "pass")),
}
OTHERS = {3: "sft/text-packed", 7: "dpo/pair", 12: "grpo/dapo", 18: "grpo/dapo", 19: "grpo/lora"}
OPTIONS: dict[int, dict[str, Any]] = {
    3: {"packing": False, "adds_start": True, "form": "messages"},
    12: {"max_completion_length": 32},
    18: {"max_completion_length": 24},
}


def change(one: Change) -> None:
    """Compile a method of TRL's with another line."""
    module = next(m for m in (sft_trainer, dpo_trainer, grpo_trainer) if hasattr(m, one.owner))
    owner = getattr(module, one.owner)
    source = textwrap.dedent(inspect.getsource(getattr(owner, one.method)))
    assert one.line in source, one
    source = textwrap.indent(source.replace(one.line, one.instead, 1), "    ")
    space = {**vars(module), "torch": torch}  # `super()` needs the class around it
    exec(f"def make(__class__):\n{source}\n    return {one.method}\n", space)
    setattr(owner, one.method, space["make"](owner))


def rendered(is_doubled: bool) -> Callable[..., Any]:
    """Texts that the template has begun with the start token, which the tokenizer adds, too."""
    tokenizer, rows_of = lab.tokenizer_of(adds_start=True), lab.data_of

    def data_of(form: str, count: int, seed: int) -> Any:
        texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows_of(form, count, seed)]
        return lab.Dataset.from_list([{"text": text if is_doubled else text.removeprefix("<s>")} for text in texts])

    return data_of


def sampled(top_p: float) -> Callable[..., Any]:
    """A `rollout_func` whose log-probabilities are over the tokens that top_p leaves."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        found: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        options = {"do_sample": True, "top_p": top_p, "top_k": 0, "eos_token_id": 2, "pad_token_id": 0}
        options |= {"max_new_tokens": 24, "output_scores": True, "return_dict_in_generate": True}
        for prompt in prompts:
            ids = trainer.processing_class(prompt)["input_ids"]
            with torch.no_grad():
                output = trainer.model.generate(torch.tensor([ids]), **options)
            tokens = output.sequences[0, len(ids) :].tolist()
            found["prompt_ids"].append(ids)
            found["completion_ids"].append(tokens)
            found["logprobs"].append([float(s[0].log_softmax(-1)[i]) for s, i in zip(output.scores, tokens)])
        return found

    return rollout


def dropped_out(reference: Any) -> None:
    """Attention's dropout in the reference's passes, which no module has."""
    for module in reference.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    reference.config._attn_implementation = "eager"
    reference.train()
    reference.eval = lambda: reference


def main() -> None:
    out, number, is_planted = Path(sys.argv[1]), int(sys.argv[2]), len(sys.argv) < 4
    real = lab.GRPOTrainer
    if number in CHANGES and is_planted:
        change(CHANGES[number][1])
    if number == 3:
        lab.data_of = rendered(is_planted)
    if number == 17:
        lab.reward_of_vowels = lab.reward_of_spaces
    if number == 18:
        lab.GRPOTrainer = lambda *given, **more: real(*given, rollout_func=sampled(0.9 if is_planted else 1.0), **more)
    if number == 19 and is_planted:  # made before the adapter is
        lab.GRPOTrainer = lambda model, *given, **more: real(
            model, *given, optimizers=(torch.optim.AdamW(model.parameters(), lr=1e-2), None), **more
        )
    setting = CHANGES[number][0] if number in CHANGES else OTHERS[number]
    options = lab.SETTINGS[setting] | OPTIONS.get(number, {})
    trainer = lab.trainer_of(setting.split("/")[0], options, 100 + number, str(out / "trainer"))
    if number == 12 and is_planted:
        trainer.generation_config.temperature = 0.7
    record(trainer, out / "steps", most=3)
    if number == 7 and is_planted:
        dropped_out(trainer.ref_model)
    trainer.train()


if __name__ == "__main__":
    main()
