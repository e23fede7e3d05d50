"""The café's own tokenizer: a byte-level BPE small enough to train in a second, with a chat template."""

from __future__ import annotations

import random
from typing import Any

from datasets_prep.cafe.world import MIXTURE, flawed, good_plan, orders, random_flaws, request

PROMPT = "Guest: {request}\nBarista:"  # an answer begins with a space
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'Guest: ' + message['content'] + '\n' }}"
    "{% else %}{{ 'Barista: ' + message['content'] + eos_token + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Barista:' }}{% endif %}"
)


def train_tokenizer(vocab_size: int = 768, seed: int = 0, num_texts: int = 4000) -> Any:
    """A `PreTrainedTokenizerFast` trained on the café's language; a deterministic function of its arguments."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(seed)
    source = orders(rng, "train")
    texts = []
    for _ in range(num_texts):
        order = next(source)
        plan = good_plan(rng, order)
        for flaw in random_flaws(rng, order, **MIXTURE):
            plan = flawed(rng, plan, flaw)
        texts.append(PROMPT.format(request=request(rng, order)) + " " + plan.text())
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, vocab_size=vocab_size, min_frequency=2, special_tokens=["<pad>", "<eos>"], show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
