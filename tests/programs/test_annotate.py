"""Annotation: every kind of scorer, the pairs that are chosen, and what is counted instead of dropped."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers import CPU, last_checkpoint, save_model
from helpers.errors import refused
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from lightrlhf.annotate import choose, main, penalize_lengths
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.splits import load_split
from lightrlhf.data.tokens import encode_prompt, encode_response, pair_prompt
from lightrlhf.dpo import main as dpo
from lightrlhf.evaluate import main as evaluate
from lightrlhf.generate import main as generate
from lightrlhf.models.loading import load_scalar
from lightrlhf.models.roles import last_token
from lightrlhf.ppo import main as ppo
from lightrlhf.rewards.loading import reward_statistics
from lightrlhf.rm import main as rm
from lightrlhf.storage.jsonl import read_jsonl, write_jsonl

DEVICE = ["--accelerator", "cpu"]
RESPONSES = [" Sure: a tea.", " No.", " Certainly, one small tea coming up.", " Tea tea tea."]


@pytest.fixture
def responses(tmp_path):
    """Two prompts with four responses each, as text only."""
    rows = [
        {"prompt": f"Guest: a tea, {name}!\n", "responses": RESPONSES, "worth": k} for k, name in enumerate("ab", 1)
    ]
    write_jsonl(tmp_path / "responses.jsonl", rows)
    return tmp_path / "responses.jsonl"


def annotated(responses, *flags) -> list[dict]:
    return read_jsonl(main(["--responses_file", str(responses), *DEVICE, *map(str, flags)]))


# ---------------------------------------------------------------------------------------------------------- scorers
def test_a_functions_rewards_are_added_and_the_columns_reach_it(responses):
    rows = annotated(responses, "--reward_function", "helpers.rewards:worth")
    assert [row["rewards"] for row in rows] == [[k * len(text) for text in RESPONSES] for k in (1, 2)]
    assert [row["responses"] for row in rows] == [RESPONSES] * 2


def test_a_reward_model_of_another_tokenizer_scores_the_text_in_its_own_tokens(responses, rm_dir, tokenizer, capsys):
    rows = annotated(responses, "--rm_experiment_dir", rm_dir, "--rollout_mini_batch_size", "3")
    raw = ["--rm_experiment_dir", rm_dir, "--normalize_rewards", "False"]  # whose differences are log-odds
    assert "normalize_rewards was None, now False" in refused(
        capsys, main, "--responses_file", responses, *DEVICE, *raw
    )
    logits = annotated(responses, *raw, "--output_file", responses.with_name("logits.jsonl"))
    model = load_scalar(rm_dir, ModelArgs(), tokenizer, 0).eval()
    mean, std = reward_statistics(last_checkpoint(rm_dir))
    for row, own in zip(rows, logits):
        for text, reward, logit in zip(row["responses"], row["rewards"], own["rewards"]):
            ids = torch.tensor([encode_prompt(tokenizer, row["prompt"]) + encode_response(tokenizer, text)])
            alone = last_token(model(ids, ids >= 0), ids >= 0).item()
            assert reward == pytest.approx((alone - mean) / std, abs=1e-5) and logit == pytest.approx(alone, abs=1e-5)


def test_messages_are_rendered_by_the_reward_models_template(tmp_path, rm_dir, tokenizer):
    chat = [{"role": "user", "content": "A tea, please."}]
    write_jsonl(tmp_path / "chat.jsonl", [{"prompt": chat, "responses": RESPONSES}])
    write_jsonl(tmp_path / "text.jsonl", [{"prompt": chat[0]["content"], "responses": RESPONSES}])
    (row,) = annotated(tmp_path / "chat.jsonl", "--rm_experiment_dir", rm_dir)
    (wrapped,) = annotated(tmp_path / "text.jsonl", "--rm_experiment_dir", rm_dir, "--rm_chat_template", "True")
    (plain,) = annotated(
        tmp_path / "text.jsonl", "--rm_experiment_dir", rm_dir, "--output_file", tmp_path / "plain.jsonl"
    )
    model = load_scalar(rm_dir, ModelArgs(), tokenizer, 0).eval()
    mean, std = reward_statistics(last_checkpoint(rm_dir))
    text = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": RESPONSES[0]}], tokenize=False)
    ids = torch.tensor([tokenizer(text.rstrip(), add_special_tokens=False)["input_ids"]])
    assert row["rewards"][0] == pytest.approx(
        (last_token(model(ids, ids >= 0), ids >= 0).item() - mean) / std, abs=1e-5
    )
    assert row["rewards"] == wrapped["rewards"] != plain["rewards"]


def test_sampled_ids_are_scored_as_they_are(tmp_path, rm_dir, tokenizer):
    """One token per character spells the same text in other ids than the tokenizer would choose."""
    text = "coffee, please"
    prompt = encode_prompt(tokenizer, "Guest: a tea!\n")
    odd = [tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in text.replace(" ", "")]
    odd.insert(7, tokenizer(" ", add_special_tokens=False)["input_ids"][0])
    assert odd != encode_response(tokenizer, text)[:-1]
    row = {"prompt": "Guest: a tea!\n", "prompt_ids": prompt, "responses": [text] * 2, "truncated": [False, True]}
    write_jsonl(tmp_path / "ids.jsonl", [row | {"response_ids": [[*odd, tokenizer.eos_token_id], odd]}])
    (row,) = annotated(tmp_path / "ids.jsonl", "--rm_experiment_dir", rm_dir)
    model = load_scalar(rm_dir, ModelArgs(), tokenizer, 0).eval()
    mean, std = reward_statistics(last_checkpoint(rm_dir))
    for ids, reward in zip(([*prompt, *odd, tokenizer.eos_token_id], [*prompt, *odd]), row["rewards"]):
        ids = torch.tensor([ids])
        assert reward == pytest.approx((last_token(model(ids, ids >= 0), ids >= 0).item() - mean) / std, abs=1e-5)


def test_a_plain_encoder_reads_prompt_and_response_as_two_texts(responses, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "tea", "a", "Sure", "No", "Guest", "."]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, [("[CLS]", 1), ("[SEP]", 2)])
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(words), num_labels=1, **sizes)).eval()
    model.save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    rows = annotated(responses, "--rm_experiment_dir", tmp_path / "bert", "--rollout_mini_batch_size", "3")
    for row in rows:
        for text, reward in zip(row["responses"], row["rewards"]):
            alone = model(**tokenizer(row["prompt"], text, return_tensors="pt")).logits.item()
            assert reward == pytest.approx(alone, abs=1e-5)


CUSTOM = """
from dataclasses import dataclass
import torch
from transformers import LlamaModel, LlamaPreTrainedModel
from transformers.utils import ModelOutput

@dataclass
class RatedOutput(ModelOutput):
    rewards: torch.FloatTensor = None
    score: torch.FloatTensor = None
    logits: torch.FloatTensor = None

class LlamaForRewardModelWithGating(LlamaPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.regression_layer = torch.nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        last = attention_mask.sum(1) - 1
        rewards = self.regression_layer(hidden[torch.arange(len(hidden)), last])
        return RatedOutput(rewards=rewards, score=rewards.softmax(-1).mul(rewards).sum(-1), logits=rewards)
"""


@pytest.fixture
def rated_model(tmp_path, tokenizer):
    """A folder of ArmoRM's shape: its own class in its own file, many ratings, one `score`."""
    folder = save_model("llama", tmp_path / "rated", tokenizer)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForRewardModelWithGating"], "num_labels": 5}
    config["auto_map"] = {"AutoModelForSequenceClassification": "modeling_custom.LlamaForRewardModelWithGating"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_custom.py").write_text(CUSTOM)
    weights = load_file(folder / "model.safetensors")
    weights["regression_layer.weight"] = torch.randn(5, config["hidden_size"])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_model_with_code_of_its_own_gives_its_score_when_it_is_trusted(responses, rated_model, tokenizer, capsys):
    with pytest.raises(SystemExit) as stopped:
        annotated(responses, "--rm_experiment_dir", rated_model)
    assert stopped.value.code == 2 and "allow it by --trust_remote_code True" in capsys.readouterr().err
    rows = annotated(responses, "--rm_experiment_dir", rated_model, "--trust_remote_code", "True")

    assert len({reward for row in rows for reward in row["rewards"]}) == 8
    model = AutoModelForSequenceClassification.from_pretrained(rated_model, trust_remote_code=True)
    assert type(model).__name__ == "LlamaForRewardModelWithGating" and not hasattr(model, "score")


@pytest.mark.slow
def test_a_pair_model_is_trained_evaluated_and_holds_tournaments(tmp_path, cafe_data, sft_dir, logs, responses, capsys):
    data = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), *CPU]
    steps = ["--max_steps", "2", "--lr_warmup_steps", "0", "--learning_rate", "1e-3"]
    pair_dir = rm([*data, "--sft_experiment_dir", sft_dir, "--loss_type", "pair", *steps])
    (result,) = evaluate(["--experiment_dir", pair_dir, "--split", "train", *DEVICE])
    assert 0 <= result["accuracy"] <= 1

    folder = last_checkpoint(pair_dir)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = annotated(responses, "--rm_experiment_dir", pair_dir)
    prompt = encode_prompt(tokenizer, rows[0]["prompt"])
    ids = [encode_response(tokenizer, text) for text in RESPONSES]

    def chance(a: int, b: int) -> float:
        return torch.sigmoid(model(torch.tensor([pair_prompt(tokenizer, prompt, ids[a], ids[b])])).logits).item()

    wins = [sum(chance(0, b) + 1 - chance(b, 0) for b in (1, 2, 3)) / 6]
    assert rows[0]["rewards"][0] == pytest.approx(wins[0], abs=1e-5)
    assert sum(rows[0]["rewards"]) == pytest.approx(2.0)
    assert "compares two responses and cannot score one" in refused(
        capsys, ppo, *data, "--sft_experiment_dir", sft_dir, "--rm_experiment_dir", pair_dir
    )


# ------------------------------------------------------------------------------------------------- what is not valid
def test_scores_that_are_none_are_marked_counted_and_never_chosen(responses, tmp_path, cafe_data, capsys):
    flags = ["--reward_function", "helpers.rewards:partly_invalid", "--choose_type", "max_min"]
    with pytest.raises(SystemExit):
        annotated(responses, *flags, "--output_dir", tmp_path / "pairs", "--data_dir", cafe_data)
    said = capsys.readouterr()
    assert "4 rewards, mean 1.000, 4 without a valid score" in said.out and "gives no pair: 2 tie" in said.err
    rows = read_jsonl(responses.with_suffix(".rewards.jsonl"))
    assert [row["rewards"] for row in rows] == [[None, None, 1.0, 1.0]] * 2


def test_a_response_that_no_server_gave_and_one_too_long_have_no_score(tmp_path, rm_dir):
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "tea", "responses": [None, "tea " * 400, "tea"]}])
    (row,) = annotated(tmp_path / "rows.jsonl", "--rm_experiment_dir", rm_dir)
    assert row["rewards"][:2] == [None, None] and isinstance(row["rewards"][2], float)


@pytest.mark.slow
def test_a_killed_run_resumes_scoring(responses, tmp_path, monkeypatch):
    monkeypatch.setattr("lightrlhf.annotate.CHUNK", 1)
    flags = ["--reward_function", "helpers.rewards:length"]
    annotated(responses, *flags)
    file = responses.with_suffix(".rewards.jsonl")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) * 3 // 4])
    annotated(responses, *flags)
    assert file.read_bytes() == whole


# ------------------------------------------------------------------------------------------------------------- pairs
SCORES = [0.5, 3.0, None, 1.0, 2.0]


@pytest.mark.parametrize("choose_type, pair", [("max_min", (1, 0)), ("max_max", (1, 4))])
def test_the_best_against_the_worst_or_the_second(choose_type, pair):
    assert choose(SCORES, choose_type, random.Random(0)) == pair


def test_max_random_is_the_best_against_truly_any_other_and_random_is_any_two():
    drawn = Counter(choose(SCORES, "max_random", random.Random(seed)) for seed in range(600))
    assert set(drawn) == {(1, 0), (1, 3), (1, 4)} and min(drawn.values()) > 150
    drawn = Counter(choose(SCORES, "random", random.Random(seed)) for seed in range(600))
    assert set(drawn) == {(1, 0), (1, 3), (1, 4), (3, 0), (4, 0), (4, 3)} and min(drawn.values()) > 60


def test_a_length_penalty_decides_the_pair_and_its_order():
    scores = penalize_lengths([1.0, 0.9, 0.5, None], [10, 2, 1, 5], 0.1)
    assert scores[:3] == pytest.approx([0.0, 0.7, 0.4]) and scores[3] is None
    assert choose(scores, "max_min_p", random.Random(0)) == (1, 0)


@pytest.mark.parametrize("scores", [[1.0, 1.0], [2.0, 2.0, 2.0]])
def test_a_tie_gives_no_pair(scores):
    assert {choose(scores, kind, random.Random(0)) for kind in ("max_min", "max_random", "random")} == {"tie"}
    assert choose([None, 1.0], "max_min", random.Random(0)) == "fewer than two valid scores"


def test_pairs_are_written_as_prepared_data_is(responses, tmp_path, cafe_data, tokenizer, capsys):
    folder, penalty = tmp_path / "pairs", 2.0
    flags = ["--reward_function", "helpers.rewards:length", "--choose_type", "max_min_p"]
    rows = annotated(responses, *flags, "--length_penalty", penalty, "--output_dir", folder, "--data_dir", cafe_data)
    (first, _), (theirs, *_) = load_split(folder, "preference", "train"), load_split(cafe_data, "preference", "train")
    assert first.keys() == theirs.keys() and first["chosen_input_ids"].dtype == theirs["chosen_input_ids"].dtype
    prompt = encode_prompt(tokenizer, rows[0]["prompt"])
    shortest, longest = " No.", " Certainly, one small tea coming up."
    assert first["prompt_len"] == len(prompt)
    assert first["chosen_input_ids"].tolist() == prompt + encode_response(tokenizer, shortest)
    assert first["rejected_input_ids"].tolist() == prompt + encode_response(tokenizer, longest)
    lengths = [len(encode_response(tokenizer, text)) for text in (shortest, longest)]
    better, worse = (len(t) / 10 - penalty * n for t, n in zip((shortest, longest), lengths))
    columns = {"worth": 1, "chosen_score": better, "rejected_score": worse, "margin": better - worse}
    assert first["columns"] == pytest.approx(columns) and better > worse
    assert "2 pairs, mean margin" in capsys.readouterr().out
    assert json.loads((folder / "report.json").read_text())["counts"] == {"pairs": 2}


@pytest.mark.slow
def test_dpo_trains_on_the_pairs_with_a_loss_that_reads_their_margins(tmp_path, cafe_data, sft_dir, logs):
    rows = tmp_path / "rows.jsonl"
    source = ["--data_dir", str(cafe_data), "--split", "train", "--num_prompts", "12", "--model_name", sft_dir]
    generate([*source, "--num_generations", "3", "--max_new_tokens", "6", "--output_file", str(rows), *DEVICE])
    flags = ["--reward_function", "helpers.rewards:length", "--choose_type", "max_random"]
    flags += ["--output_dir", tmp_path / "pairs", "--data_dir", cafe_data, "--validation_percentage", "0.3"]
    annotated(rows, *flags)
    assert Path(tmp_path, "pairs", "preference_validation.pt").is_file()
    learn = ["--max_steps", "1", "--loss_type", "rev_kl", "--rapo", "ra", "--log_dir", str(tmp_path), *CPU]
    dpo(["--data_dir", str(tmp_path / "pairs"), "--sft_experiment_dir", sft_dir, *learn])


@pytest.mark.parametrize(
    "wrong, message",
    [
        (["--responses_file", "none.jsonl"], "--responses_file none.jsonl does not exist"),
        (["--choose_type", "max_min", "--output_dir", "d"], "needs --data_dir or --tokenizer_name"),
        (["--reward_function", "f:g", "--reward_weights", "1", "2"], "--reward_weights 1.0 2.0: give 1, one for each"),
        (["--rm_experiment_dir", "none"], "--rm_experiment_dir none does not exist"),
        ([], "has no rewards yet; give --rm_experiment_dir or --reward_function"),
        (["--mini_batch_size", "8"], "--rollout_mini_batch_size"),
        (["--len_penalty", "1"], "--length_penalty"),
    ],
)
def test_bad_flags_are_one_line(wrong, message, responses, capsys):
    given = [] if "--responses_file" in wrong else ["--responses_file", str(responses)]
    assert message in refused(capsys, main, *given, *wrong, *DEVICE)


@pytest.mark.parametrize(
    "column, value",
    [
        ("prompt", [{"role": "user", "content": 3}]),
        ("responses", 3),
        ("responses", [["a"]]),
        ("truncated", [True, False, True]),
        ("response_ids", [[-1]]),
        ("prompt_ids", ["a"]),
        ("rewards", [float("nan")]),
    ],
)
def test_a_row_of_another_type_is_one_line_before_any_work(column, value, tmp_path, capsys):
    row = {"prompt": "a", "responses": ["b"], "truncated": [False], column: value}
    lines = [json.dumps(one) for one in ({"prompt": "a", "responses": ["b"]}, row)]  # `write_jsonl` writes no NaN
    (tmp_path / "r.jsonl").write_text("\n".join(lines) + "\n")
    line = refused(
        capsys, main, "--responses_file", tmp_path / "r.jsonl", "--reward_function", "helpers.rewards:constant", *DEVICE
    )
    assert f"r.jsonl: row 2 has under '{column}'" in line or "values under 'truncated'" in line
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]


def test_a_language_model_is_no_scorer(responses, base_model, capsys):
    with pytest.raises(SystemExit):
        annotated(responses, "--rm_experiment_dir", base_model)
    assert f"--rm_experiment_dir {base_model}" in capsys.readouterr().err
