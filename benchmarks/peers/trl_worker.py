"""TRL's trainers as workers, in their own environment: `trainer.train()` with a gate between its steps.

Started as a file, since this project is not installed there. Gradient checkpointing, evaluation, saving and reporting
are off; the dataset is already tokenised.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from worker import Gate, count_tokens, job, versions

work = job()


def load(kind: str, name: str) -> Any:
    import transformers

    model = getattr(transformers, f"AutoModelFor{kind}")
    options = {"num_labels": 1} if kind == "SequenceClassification" else {}
    return model.from_pretrained(f"{work['models']}/{name}", dtype=torch.float32, **options)


def rows(name: str) -> list[dict[str, Any]]:
    """A split as plain lists."""
    found = torch.load(f"{work['data']}/{name}_train.pt", weights_only=True)
    return [{key: v.tolist() if isinstance(v, torch.Tensor) else v for key, v in row.items()} for row in found]


def settings(**more: Any) -> dict[str, Any]:
    """Settings of all trainers."""
    return {
        "output_dir": work["output_dir"],
        "per_device_train_batch_size": work["batch"],
        "gradient_accumulation_steps": work.get("accumulation", 1),
        "learning_rate": work["learning_rate"],
        "num_train_epochs": 100_000,
        "gradient_checkpointing": False,
        "bf16": work["bf16"],
        "use_cpu": not work["cuda"],
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "lr_scheduler_type": "constant",
        **more,
        **work.get("options", {}),
    }


def gated() -> tuple[Any, Gate]:
    """A callback that calls a gate before the first step and after each one, and the gate."""
    from transformers import TrainerCallback

    gate = Gate(
        work["steps"],
        versions("torch", "transformers", "trl"),
        torch.cuda.max_memory_allocated if work["cuda"] else None,
    )
    count_tokens(gate)

    class Gated(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            gate()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            gate()

    return Gated(), gate


def sft(callback: Any, gate: Gate, tokenizer: Any, dataset: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    data = dataset.from_list([{"input_ids": row["input_ids"]} for row in rows("finetune")])
    args = SFTConfig(**settings(max_length=None))
    trainer = SFTTrainer(load("CausalLM", "policy"), args, train_dataset=data, processing_class=tokenizer)
    trainer.add_callback(callback)
    if args.packing:  # fewer, longer rows: a repetition is one pass through the data here too
        gate.steps = max(len(trainer.train_dataset) // args.per_device_train_batch_size, 1)
    return trainer


def reward(callback: Any, gate: Gate, tokenizer: Any, dataset: Any) -> Any:
    from trl import RewardConfig, RewardTrainer

    data = [
        {side: row[f"{side[:-4]}_input_ids"] for side in ("chosen_ids", "rejected_ids")} for row in rows("preference")
    ]
    args = RewardConfig(**settings(max_length=None))
    model = load("SequenceClassification", "policy")
    return RewardTrainer(
        model, args, train_dataset=dataset.from_list(data), processing_class=tokenizer, callbacks=[callback]
    )


def dpo(callback: Any, gate: Gate, tokenizer: Any, dataset: Any) -> Any:
    """DPOTrainer accepts text only; every id is one word, so it gets the same ids."""
    from trl import DPOConfig, DPOTrainer

    pairs = rows("preference")
    data = [
        {
            "prompt": tokenizer.decode(row["chosen_input_ids"][: row["prompt_len"]]) + " ",
            **{
                side: tokenizer.decode(row[f"{side}_input_ids"][row["prompt_len"] :]) for side in ("chosen", "rejected")
            },
        }
        for row in pairs
    ]
    args = DPOConfig(**settings(max_length=None, precompute_ref_log_probs=True))
    trainer = DPOTrainer(
        load("CausalLM", "policy"),
        args=args,
        train_dataset=dataset.from_list(data),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    read = [row["prompt_ids"] + row["chosen_ids"] for row in trainer.train_dataset]
    assert read == [row["chosen_input_ids"] for row in pairs], "the text was tokenised differently"
    return trainer


def grpo(callback: Any, gate: Gate, tokenizer: Any, dataset: Any) -> Any:
    """One update for each rollout, the defaults otherwise; their length and the reward function are ours."""
    from inputs import even_words
    from trl import GRPOConfig, GRPOTrainer

    prompts = [row["input_ids"] for row in rows("prompts")]
    texts = [tokenizer.decode(ids) for ids in prompts]
    assert tokenizer(texts)["input_ids"] == prompts, "the text is tokenised differently"
    args = GRPOConfig(**settings(num_generations=work["samples"], max_completion_length=work["max_new_tokens"]))
    assert (args.beta, args.loss_type, args.scale_rewards, args.temperature) == (0, "dapo", "group", 1)
    return GRPOTrainer(
        load("CausalLM", "policy"),
        reward_funcs=even_words,
        args=args,
        train_dataset=dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=tokenizer,
        callbacks=[callback],
    )


def distill(callback: Any, gate: Gate, tokenizer: Any, dataset: Any) -> Any:
    """The defaults: a response to each prompt, the reverse KL, one update for each rollout."""
    from trl import DistillationConfig, DistillationTrainer

    prompts = [row["input_ids"] for row in rows("prompts")]
    texts = [tokenizer.decode(ids) for ids in prompts]
    assert tokenizer(texts)["input_ids"] == prompts, "the text is tokenised differently"
    args = DistillationConfig(**settings(max_completion_length=work["max_new_tokens"]))
    assert (args.beta, args.temperature, args.top_p) == (1, 1, 1)
    return DistillationTrainer(
        load("CausalLM", "policy"),
        load("CausalLM", "teacher/policy"),
        args=args,
        train_dataset=dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=tokenizer,
        callbacks=[callback],
    )


def ppo(callback: Any, gate: Gate, tokenizer: Any, dataset: Any) -> Any:
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    data = dataset.from_list([{"input_ids": row["input_ids"]} for row in rows("prompts")])
    args = PPOConfig(
        **settings(
            response_length=work["max_new_tokens"],
            temperature=1.0,
            num_ppo_epochs=1,
            num_mini_batches=work["mini_batches"],
            num_sample_generations=0,
            stop_token="eos",
            total_episodes=10_000_000,
        )
    )
    return PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=load("CausalLM", "policy"),
        ref_model=load("CausalLM", "policy"),
        reward_model=load("SequenceClassification", "reward"),
        value_model=load("SequenceClassification", "reward"),
        train_dataset=data,
        callbacks=[callback],
    )


def main() -> None:
    callback, gate = gated()
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(f"{work['models']}/policy")
    trainers = {"sft": sft, "reward": reward, "dpo": dpo, "grpo": grpo, "distill": distill, "ppo": ppo}
    trainers[work["kind"]](callback, gate, tokenizer, Dataset).train()


if __name__ == "__main__":
    main()
