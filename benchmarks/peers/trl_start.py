"""TRL's `SFTTrainer` from a file of chats to its second step, in its own environment: notes when it got where."""

from __future__ import annotations

import json
import sys
import time

work, marks = json.loads(sys.argv[1]), {}


def main() -> None:
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Noted(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            marks.setdefault("first_step", time.time())

    data = load_dataset("json", data_files=work["file"], split="train", cache_dir=work["cache"])
    args = SFTConfig(
        output_dir=work["output_dir"],
        max_length=1024,
        max_steps=2,
        per_device_train_batch_size=work["batch"],
        dataset_num_proc=2,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer, callbacks=[Noted()])
    marks["trainer"] = time.time()
    trainer.train()
    with open(sys.argv[2], "w") as file:
        json.dump(marks, file)


if __name__ == "__main__":
    main()
