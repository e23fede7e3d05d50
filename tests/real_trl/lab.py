"""Tiny real runs of TRL's trainers, in their own environment: `lab.py OUT JOBS`, JOBS a file of JSON lines.

A job is {"name", "kind": sft, dpo or grpo, "setting", "seed", "fault"}; its steps are written to OUT/name. Models and
tokenizers are made on the spot; nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import string
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from lightrlhf.checks.trl import record

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = "red blue green one two three cat dog fox sun moon star tea milk rye".split()


def tokenizer_of(end: str = "</s>", adds_start: bool = False, template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer of letters, so few that an end token is drawn now and then."""
    letters = [*string.ascii_lowercase, *string.digits, *"?'.,", "\u0120", "\u010a"]  # and a space, and a line break
    made = Tokenizer(models.BPE({one: i for i, one in enumerate([*SPECIAL, *letters])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    if adds_start:
        made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    options = {"bos_token": "<s>", "eos_token": end, "pad_token": "<pad>", "chat_template": template}
    options["model_input_names"] = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=made, **options)


def model_of(tokenizer: Any, tied: bool = False, dropout: float = 0.0, layers: int = 2) -> LlamaForCausalLM:
    """A Llama of 20,000 weights."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
        initializer_range=0.15,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=tokenizer.eos_token_id,
        **sizes,
    )
    config._attn_implementation = "eager" if dropout else "sdpa"
    return LlamaForCausalLM(config)


def text(rng: random.Random, least: int = 1, most: int = 4) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


def data_of(form: str, count: int, seed: int) -> Dataset:
    """Rows of a form: text, prompt (and completion), chat, messages, pair, chat_pair, question, chat_question."""
    rng, rows = random.Random(seed), []
    for number in range(count):
        asked, said, other = f"{number} {text(rng)}? ", text(rng), text(rng) + " no"
        user, answer = [{"role": "user", "content": asked.strip()}], [{"role": "assistant", "content": said}]
        worse = [{"role": "assistant", "content": other}]
        rows.append(
            {
                "text": {"text": asked + said},
                "prompt": {"prompt": asked, "completion": said},
                "chat": {"prompt": user, "completion": answer},
                "messages": {"messages": user + answer + [{"role": "user", "content": "more"}] + worse},
                "pair": {"prompt": asked, "chosen": said, "rejected": other},
                "chat_pair": {"prompt": user, "chosen": answer, "rejected": worse},
                "question": {"prompt": asked},
                "chat_question": {"prompt": user},
            }[form]
        )
    return Dataset.from_list(rows)


def reward_of_vowels(completions: list[Any], **_: Any) -> list[float]:
    """Share of vowels, and a little of length."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [sum(c in "aeiou" for c in one) + 0.01 * len(one) for one in texts]


def reward_of_spaces(completions: list[Any], **_: Any) -> list[float | None]:
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [None if len(one) % 7 == 0 else float(one.count(" ")) for one in texts]


BASE: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "report_to": "none",
    "use_cpu": True,
    "save_strategy": "no",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "bf16": False,
    "logging_strategy": "no",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "sft/prompt": {"form": "prompt", "max_length": 64},
    "sft/chat": {"form": "messages", "assistant_only_loss": True, "end": "<|im_end|>", "max_length": 96},
    "sft/text-packed": {"form": "text", "packing": True, "max_length": 96, "warmup_steps": 1, "tied": True},
    "sft/lora": {"form": "chat", "end": "<|im_end|>", "lora": True, "max_length": 96},
    "dpo/pair": {"form": "pair", "max_length": 64, "adds_start": True},
    "dpo/chat-ipo": {"form": "chat_pair", "end": "<|im_end|>", "loss_type": ["ipo"], "max_length": 96},
    "dpo/lora": {"form": "chat_pair", "end": "<|im_end|>", "lora": True, "max_length": 96},
    "dpo/precomputed": {"form": "pair", "precompute_ref_log_probs": True, "max_length": 64},
    "grpo/dapo": {"form": "question"},
    "grpo/kl": {"form": "chat_question", "end": "<|im_end|>", "beta": 0.05, "loss_type": "grpo", "num_iterations": 2},
    "grpo/warm": {"form": "question", "temperature": 0.8, "scale_rewards": "batch", "loss_type": "bnpo", "two": True},
    "grpo/lora": {"form": "chat_question", "end": "<|im_end|>", "lora": True, "beta": 0.05, "loss_type": "dr_grpo"},
}
OURS = (
    "form",
    "end",
    "lora",
    "tied",
    "adds_start",
    "two",
    "dropout",
    "count",
    "template",
)  # settings that are not TRL's


def trainer_of(kind: str, setting: dict[str, Any], seed: int, out: str) -> Any:
    """A trainer of a kind with its settings."""
    set_seed(seed)
    tokenizer = tokenizer_of(
        setting.get("end", "</s>"), setting.get("adds_start", False), setting.get("template", TEMPLATE)
    )
    start = Path(out) / "start"  # references are loaded from a folder
    model_of(tokenizer, setting.get("tied", False), setting.get("dropout", 0.0)).save_pretrained(start)
    model = LlamaForCausalLM.from_pretrained(start)
    data = data_of(setting["form"], setting.get("count", 40), seed)
    options = BASE | {"output_dir": out, "seed": seed} | {k: v for k, v in setting.items() if k not in OURS}
    more: dict[str, Any] = {}
    if setting.get("lora"):
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        options["learning_rate"] = 1e-2
    if kind == "sft":
        return SFTTrainer(model, SFTConfig(**options), train_dataset=data, processing_class=tokenizer, **more)
    if kind == "dpo":
        return DPOTrainer(model, args=DPOConfig(**options), train_dataset=data, processing_class=tokenizer, **more)
    options = {"num_generations": 4, "max_completion_length": 16, "per_device_train_batch_size": 8} | options
    options["per_device_train_batch_size"] = 8
    functions = [reward_of_vowels, reward_of_spaces] if setting.get("two") else [reward_of_vowels]
    args = GRPOConfig(**options)
    return GRPOTrainer(model, reward_funcs=functions, args=args, train_dataset=data, processing_class=tokenizer, **more)


def state_of(trainer: Any) -> str:
    """A hash of the weights and the random state."""
    found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for one in trainer.model.parameters():
        found.update(one.detach().numpy().tobytes())
    return found.hexdigest()


def run(job: dict[str, Any], out: Path) -> str:
    """Train and record one job, or with `unrecorded` train alone; returns a hash of its end."""
    setting = SETTINGS[job["setting"]] | job.get("options", {})
    kind, plant = job["setting"].split("/")[0], None
    if job.get("fault"):
        import plants

        plant = plants.PLANTS[job["fault"]]
        setting = setting | plant.options
        with plant.around():
            trainer = trainer_of(kind, setting, job["seed"], str(out / "trainer"))
            plant.before(trainer)
            record(trainer, out / job["name"], most=job.get("most", 3))
            plant.after(trainer)
            trainer.train()
        return state_of(trainer)
    trainer = trainer_of(kind, setting, job["seed"], str(out / "trainer"))
    if not job.get("unrecorded"):
        record(trainer, out / job["name"], most=job.get("most", 3))
    trainer.train()
    return state_of(trainer)


def main() -> None:
    out, jobs = Path(sys.argv[1]), [json.loads(one) for one in Path(sys.argv[2]).read_text().splitlines() if one]
    torch.set_num_threads(1)
    for job in jobs:
        try:
            print(json.dumps({"name": job["name"], "end": run(job, out)}), flush=True)
        except Exception:
            print(json.dumps({"name": job["name"], "error": traceback.format_exc()[-3000:]}), flush=True)


if __name__ == "__main__":
    main()
