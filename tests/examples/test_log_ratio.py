"""The log-ratio of two models, with prompts and tokens of their own."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from datasets_prep.cafe.pretrain_base import BASE_DIR
from datasets_prep.cafe.tokenizer import train_tokenizer
from examples.experiments.log_ratio import log_ratio
from examples.experiments.small_models import write_model
from lightrlhf.data.tokens import encode_text
from lightrlhf.models.tokenizer import load_tokenizer

TEXTS = [("Guest: tea\nBarista:", " Certainly! One tea."), ("Guest: two large teas, please.\nBarista:", " No")]


def rows_of(name: str, prompts: list[str]) -> list[tuple[list[int], list[int]]]:
    tokenizer = load_tokenizer(None, name)
    return [
        (encode_text(tokenizer, prompt), [*encode_text(tokenizer, response), tokenizer.eos_token_id])
        for prompt, (_, response) in zip(prompts, TEXTS)
    ]


def total(name: str, rows: list[tuple[list[int], list[int]]]) -> float:
    model, found = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64), 0.0
    for prompt, response in rows:
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        found += sum(float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(response))
    return found


@pytest.mark.slow
def test_each_model_reads_its_own_prompts_and_tokens(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    other = write_model(tmp_path / "other", 0, train_tokenizer(300, num_texts=200), sizes)
    plain, hinted = [prompt for prompt, _ in TEXTS], [f"A hint.\n{prompt}" for prompt, _ in TEXTS]
    ours, theirs = rows_of(str(BASE_DIR), plain), rows_of(other, hinted)
    assert len(theirs[0][1]) > len(ours[0][1])  # other tokens of the same text
    expected = (total(str(BASE_DIR), ours) - total(other, theirs)) / 2
    assert log_ratio((str(BASE_DIR), ours), (other, theirs)) == pytest.approx(expected, rel=1e-4)
    assert log_ratio((other, theirs), (other, theirs)) == 0
