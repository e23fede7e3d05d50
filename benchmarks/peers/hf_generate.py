"""Hugging Face `generate` as a worker: consecutive batches of prompts of similar length."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.worker import Gate, count_tokens, job, versions


def main() -> None:
    work = job()
    gate = Gate(work["steps"], versions("torch", "transformers"))
    count_tokens(gate)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    dtype = torch.bfloat16 if work["bf16"] else torch.float32
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=dtype).eval().to(work["device"])
    rows = torch.load(f"{work['data']}/prompts_train.pt", weights_only=True)
    prompts = sorted((row["input_ids"].tolist() for row in rows), key=len)
    sampled = 0
    while True:
        gate(sampled)
        sampled = generate(model, tokenizer, prompts, work)


@torch.no_grad()
def generate(model: Any, tokenizer: Any, prompts: list[list[int]], work: dict[str, Any]) -> int:
    """Sample `samples` responses to each prompt; returns the number of tokens, ends included."""
    sampled, size = 0, max(work["slots"] // work["samples"], 1)
    for start in range(0, len(prompts), size):
        batch = tokenizer.pad({"input_ids": prompts[start : start + size]}, padding_side="left", return_tensors="pt")
        texts = model.generate(
            **batch.to(work["device"]),
            do_sample=True,
            top_k=0,
            max_new_tokens=work["max_new_tokens"],
            num_return_sequences=work["samples"],
            cache_implementation=work["cache"],
        )
        responses = texts[:, batch["input_ids"].shape[1] :]
        ended = (responses == tokenizer.eos_token_id).long()
        after_end = ended.cumsum(1) - ended > 0
        sampled += int((~after_end).sum())
    return sampled


if __name__ == "__main__":
    main()
