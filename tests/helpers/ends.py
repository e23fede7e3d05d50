"""Tokenizers whose turns end with other tokens than their texts, and a model that samples each of them."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from helpers import save_model
from helpers.data import CHATML_TEMPLATE, byte_level

EOS = "<|endoftext|>"
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) "
    "+ '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)


def tokenizer_of(template: str | None, *special: str, added: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with these control tokens; `added`: tokens that are not control tokens."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level([EOS, *special]), bos_token=EOS, eos_token=EOS, additional_special_tokens=[*special]
    )
    tokenizer.add_tokens([*added])
    tokenizer.chat_template = template
    return tokenizer


def chatty_base(folder: Path) -> Path:
    """A base model that ends a text with `<|endoftext|>`, `<|im_end|>` or `<|stop|>`, each one often.

    Its tokenizer ends a text with the first and a turn with the second; only its generation config knows the third.
    """
    tokenizer = tokenizer_of(CHATML_TEMPLATE, "<|im_start|>", "<|im_end|>", "<|stop|>")
    save_model("llama", folder, tokenizer, max_position_embeddings=512)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ends = tokenizer.convert_tokens_to_ids([EOS, "<|im_end|>", "<|stop|>"])
    starts = torch.arange(100, 400)[:, None]
    said = model.generate(starts, do_sample=False, max_new_tokens=30, eos_token_id=[], pad_token_id=0)
    common = said[:, 1:].flatten().bincount().topk(3).indices
    with torch.no_grad():  # each end is likelier than a token that is often the likeliest
        model.lm_head.weight[ends] = 2 * model.lm_head.weight[common]
    model.generation_config.eos_token_id = [ends[0], ends[2]]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
