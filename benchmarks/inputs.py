"""Models and data of the comparisons: generated from fixed seeds and shared by both sides.

Models are Llamas with random weights. Token ids are random; speed depends on the lengths of texts, which are
log-normal, as real ones roughly are: most short, a few several times as long. Responses are sampled by the models
themselves. A model emits its end token with a chosen probability at each step (one hidden dimension is equal for all
tokens, and the end token's row of the head has a weight on it), so both sides get responses that all reach the limit,
or most of which stop early.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

PAD, EOS = 0, 1


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of a Llama."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 2048


SIZES = {
    "tiny": ModelSize(64, 172, 2, 4, 512),
    "4M": ModelSize(256, 688, 4, 4, 4096),
    "30M": ModelSize(512, 1408, 8, 8, 8192),
    "135M": ModelSize(576, 1536, 30, 9, 49152, num_key_value_heads=3),
    "150M": ModelSize(1024, 2816, 11, 16, 8192),
    "1B": ModelSize(2048, 5632, 22, 32, 32000, num_key_value_heads=4),
}


@dataclass(frozen=True)
class DataSize:
    """Rows of each kind of data and their lengths in tokens: median of the log-normal and maximum."""

    demonstrations: int
    pairs: int
    prompts: int
    median_text: int = 96
    longest_text: int = 384
    median_prompt: int = 24
    longest_prompt: int = 64
    spread: float = 0.7  # standard deviation of the logarithm


def write_models(folder: Path, size: ModelSize, mean_length: float | None) -> None:
    """Write `policy` and `reward` with their tokenizer into `folder`.

    mean_length: mean tokens of a response, end token included; None makes the end token practically impossible.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

    tokenizer = make_tokenizer(size.vocab_size)
    common = {name: value for name, value in vars(size).items() if value is not None}
    config = LlamaConfig(**common, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None, tie_word_embeddings=True)
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(config)
    set_end_probability(policy, 1 / mean_length if mean_length else 1e-9)
    config.num_labels = 1
    reward = AutoModelForSequenceClassification.from_config(config)
    for name, model in (("policy", policy), ("reward", reward)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


@torch.no_grad()
def set_end_probability(model: torch.nn.Module, probability: float) -> None:
    """Set the approximate probability of the end token at every step, independent of the text."""
    table = model.get_input_embeddings().weight  # (V, H), also the head
    table[:, 0] = 16 * float(table.std())
    for layer in model.model.layers:  # no layer adds to this dimension
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, len(table), (4, 16), generator=generator)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # (4, 16, H)
    others = (hidden @ table.T)[..., 2:].logsumexp(-1).mean()
    table[EOS] = 0.0
    table[EOS, 0] = (others + math.log(probability / (1 - probability))) / hidden[..., 0].mean()


def make_tokenizer(vocab_size: int):
    """One word per id, so that ids survive a round trip through text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": EOS, **{f"w{i}": i for i in range(2, vocab_size)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def even_words(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """The reward of GRPO: the share of words with an even number."""
    return [sum(word[-1] in "02468" for word in text.split()) / max(len(text.split()), 1) for text in completions]


def write_data(folder: Path, size: DataSize, vocab_size: int, prompt_lengths: list[int] | None = None) -> None:
    """Write `finetune`, `preference` and `prompts` splits with the tokenizer, in the format of data preparation.

    prompt_lengths: of the prompts to answer, instead of `size.prompts` drawn ones.
    """
    folder.mkdir(parents=True)
    make_tokenizer(vocab_size).save_pretrained(folder / "tokenizer")
    generator = torch.Generator().manual_seed(1)

    def ids(length: int) -> torch.Tensor:
        return torch.randint(2, vocab_size, (length,), generator=generator)

    def prompt() -> torch.Tensor:
        return ids(lengths(1, size.median_prompt, size.longest_prompt, size.spread, generator)[0])

    def response(count: int) -> list[torch.Tensor]:
        room = size.longest_text - size.longest_prompt
        median = size.median_text - size.median_prompt
        drawn = lengths(count, median, room, size.spread, generator)
        return [torch.cat([ids(length), torch.tensor([EOS])]) for length in drawn]

    finetune = []
    for answer in response(size.demonstrations):
        start = prompt()
        text = torch.cat([start, answer])
        finetune.append({"prompt_len": len(start), "input_ids": text, "targets": text.clone()})
    preference = []
    for chosen, rejected in zip(response(size.pairs), response(size.pairs)):
        start = prompt()
        sides = {"chosen_input_ids": torch.cat([start, chosen]), "rejected_input_ids": torch.cat([start, rejected])}
        preference.append({"prompt_len": len(start), **sides})
    prompts = [ids(length) for length in prompt_lengths] if prompt_lengths else [prompt() for _ in range(size.prompts)]
    prompts = [{"prompt_len": len(ids), "input_ids": ids, "columns": {}} for ids in prompts]
    for name, rows in (("finetune", finetune), ("preference", preference), ("prompts", prompts)):
        torch.save(rows, folder / f"{name}_train.pt")
        torch.save(rows[:2], folder / f"{name}_validation.pt")
    counts = {
        "tokens": sum(len(row["input_ids"]) for row in finetune),
        "pairs": len(preference),
        "prompts": len(prompts),
    }
    (folder / "counts.json").write_text(json.dumps(counts))


def lengths(count: int, median: float, longest: int, spread: float, generator: torch.Generator) -> list[int]:
    """Log-normal lengths, at least 4 tokens."""
    drawn = torch.exp(math.log(median) + spread * torch.randn(count, generator=generator))
    return drawn.clamp(4, longest).long().tolist()


def even_lengths(count: int, mean: int, spread: float = 0.7) -> list[int]:
    """Log-normal lengths of this mean, evenly through the distribution, so that a few have its shape."""
    places = (torch.arange(count) + 0.5) / count
    drawn = torch.exp(spread * torch.special.ndtri(places))
    return (drawn * mean / drawn.mean()).round().long().tolist()
