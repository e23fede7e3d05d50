"""Scores come from text or ids, rewards stand at the last action, and the KL coefficient moves as published."""

import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from helpers import rows_of, save_model
from helpers.errors import error_naming
from helpers.rollouts import EOS, rollout_of
from transformers import PreTrainedTokenizerFast

from datasets_prep.cafe.judge import gold
from datasets_prep.cafe.tokenizer import train_tokenizer
from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.cli.functions import load_function
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.tokens import encode_pair, encode_prompt, encode_response, pair_prompt
from lightrlhf.models.loading import load_scalar
from lightrlhf.rewards.encoding import Encoding, Sample, same_tokenizer
from lightrlhf.rewards.kl import AdaptiveKL, FixedKL, token_rewards
from lightrlhf.rewards.loading import STATISTICS, reward_statistics
from lightrlhf.rewards.scorers import (
    EnvScorer,
    FunctionScorer,
    ModelScorer,
    PairScorer,
    find_complete_group,
    score_rollout,
)


# --------------------------------------------------------------------------------------------------------- rewards
@pytest.mark.parametrize("pad_id", [0, EOS])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_rewards_are_kl_penalties_with_the_score_on_the_last_action(pad_id, estimator):
    """Ziegler et al. 2019, eq. 2, row by row: r_t = -beta KL_t, plus the score at the end."""
    rollout = rollout_of(rows_of(2, 4, 1), [[5, EOS], [6, 7, 8, EOS], [9, 10, 11]], pad_id)
    scores = torch.tensor([2.0, -1.0, 0.5])
    rewards = token_rewards(rollout, scores, 0.3, estimator)
    formula = {"k1": lambda r: r, "k2": lambda r: r * r / 2, "k3": lambda r: math.exp(-r) - 1 + r}[estimator]
    for row, (start, length) in enumerate([(2, 2), (4, 4), (1, 3)]):
        for t in range(rewards.shape[1]):
            is_action = start - 1 <= t < start - 1 + length
            kl = formula(float(rollout.logprobs[row, t] - rollout.ref_logprobs[row, t]))
            expected = -0.3 * kl if is_action else 0.0
            if t == start - 1 + length - 1:
                expected += float(scores[row])
                assert rollout.input_ids[row, t + 1] == (EOS if row < 2 else 11)  # the end itself, never padding
            assert float(rewards[row, t]) == pytest.approx(expected, abs=1e-5)


def test_an_episode_that_was_given_no_reward_has_a_missing_score():
    samples = [SimpleNamespace(columns={"episode": {"score": score}}) for score in (0.5, None, 0.0)]
    assert EnvScorer()([samples]) == [[0.5, None, 0.0]]


def test_a_row_without_actions_gets_no_reward():
    rollout = rollout_of(rows_of(2, 2), [[5, EOS], [6, EOS]])
    rollout.action_mask[1] = False
    rewards = token_rewards(rollout, torch.tensor([1.0, 9.0]), 0.1)
    assert (rewards[1] == 0).all() and rewards[0].any()


def test_the_score_goes_to_the_last_action_also_when_actions_have_gaps():
    rollout = rollout_of(rows_of(1), [[5, 6, 7, 8, 9]])
    rollout.action_mask = torch.tensor([[True, True, False, True, False]])
    assert token_rewards(rollout, torch.tensor([4.0]), 0.0).tolist() == [[0, 0, 0, 4, 0]]


def test_a_fixed_coefficient_stays():
    kl = FixedKL(0.1)
    kl.update(100.0, 10_000)
    assert kl.value == 0.1


def test_an_adaptive_coefficient_moves_by_the_clipped_error():
    """Ziegler et al. 2019, section 2.2: e = clip(KL / target - 1, -0.2, 0.2), beta *= 1 + K e."""
    kl = AdaptiveKL(0.1, target=6.0, horizon=10_000)
    kl.update(6.6, 500)  # e = 0.1
    assert kl.value == pytest.approx(0.1 * (1 + 0.1 * 500 / 10_000))
    before = kl.value
    kl.update(600.0, 500)  # clipped at 0.2
    assert kl.value == pytest.approx(before * (1 + 0.2 * 500 / 10_000))
    before = kl.value
    kl.update(-5.0, 500)  # clipped at -0.2
    assert kl.value == pytest.approx(before * (1 - 0.2 * 500 / 10_000))
    before = kl.value
    kl.update(6.0, 500)
    assert kl.value == before


# ---------------------------------------------------------------------------------------------------------- scores
def test_a_function_sees_texts_and_columns_of_all_rows(tokenizer):
    prompts = [encode_prompt(tokenizer, text) for text in ("Guest: a latte", "Guest: two muffins")]
    answers = [encode_response(tokenizer, text) for text in (" Of course.", " Ugh.")]
    seen = {}

    def reward(prompts, completions, **columns):
        seen.update(prompts=prompts, completions=completions, **columns)
        return [1, 2.5]

    rollout = rollout_of(
        prompts, answers, tokenizer.pad_token_id, columns=[{"answer": "4"}, {"other": 7}], tokenizer=tokenizer
    )
    assert score_rollout(FunctionScorer(reward), rollout).tolist() == [1.0, 2.5]
    assert seen == {
        "prompts": ["Guest: a latte", "Guest: two muffins"],
        "completions": [" Of course.", " Ugh."],
        "answer": ["4", None],
        "other": [None, 7],
    }


def test_a_function_that_returns_another_number_of_scores_is_refused(tokenizer):
    rollout = rollout_of(rows_of(2, 2), [[5, EOS], [6, EOS]], tokenizer=tokenizer)
    with error_naming(UsageError, "1 scores", "2 completions"):
        score_rollout(FunctionScorer(lambda prompts, completions, **columns: [1.0]), rollout)


def test_a_function_may_return_nan(tokenizer):
    rollout = rollout_of(rows_of(2), [[5, EOS]], tokenizer=tokenizer)
    for nothing in (math.nan, None):
        scorer = FunctionScorer(lambda *texts, nothing=nothing, **columns: [nothing])
        assert score_rollout(scorer, rollout).isnan().all()


def test_a_function_that_returns_no_number_is_refused(tokenizer):
    rollout = rollout_of(rows_of(2), [[5, EOS]], tokenizer=tokenizer)
    with error_naming(RunFailure, "reward function", "str 'good'"):
        score_rollout(FunctionScorer(lambda *texts, **columns: ["good"]), rollout)


def test_a_reward_model_scores_each_row_as_it_would_alone(base_model, tokenizer):
    model = load_scalar(str(base_model), ModelArgs(), tokenizer, seed=0).eval()
    prompts, answers = rows_of(3, 9, 1, 5), [[*row, EOS] for row in rows_of(6, 2, 4, 1)]
    scorer = ModelScorer(model, Encoding(tokenizer), batch_size=2)
    together = score_rollout(scorer, rollout_of(prompts, answers, tokenizer.pad_token_id, tokenizer=tokenizer))
    for i, (prompt, answer) in enumerate(zip(prompts, answers)):
        ids = torch.tensor([prompt + answer])
        assert float(together[i]) == pytest.approx(float(model(ids, ids >= 0)[0, -1]), abs=1e-5)


def test_a_reward_model_with_another_tokenizer_reads_the_text(tokenizer, tmp_path):
    """And a truncated answer gets no end token there either."""
    other = train_tokenizer(vocab_size=400, seed=1, num_texts=300)
    assert not same_tokenizer(other, tokenizer) and same_tokenizer(other, other)
    folder = save_model("llama", tmp_path, other)
    model = load_scalar(str(folder), ModelArgs(), other, seed=0).eval()
    texts = [("Guest: a latte\nBarista:", " Of course, a latte."), ("Guest: tea\nBarista:", " Ugh, fine, tea and")]
    prompts = [encode_prompt(tokenizer, prompt) for prompt, _ in texts]
    answers = [encode_response(tokenizer, answer) for _, answer in texts]
    answers[1] = answers[1][:-1]
    rollout = rollout_of(prompts, answers, tokenizer.pad_token_id, truncated=[False, True], tokenizer=tokenizer)
    scores = score_rollout(ModelScorer(model, Encoding(other), batch_size=8), rollout)
    for i, (prompt, answer) in enumerate(texts):
        ids = other(prompt)["input_ids"] + other(answer)["input_ids"] + [other.eos_token_id] * (i == 0)
        ids = torch.tensor([ids])
        assert float(scores[i]) == pytest.approx(float(model(ids, ids >= 0)[0, -1]), abs=1e-5)


def test_statistics_are_those_stored_else_those_that_change_nothing(tmp_path):
    assert reward_statistics(tmp_path) == (0.0, 1.0)
    (tmp_path / STATISTICS).write_text(json.dumps({"mean": 2.0, "std": 0.5}))
    assert reward_statistics(tmp_path) == (2.0, 0.5)
    (tmp_path / STATISTICS).write_text(json.dumps({"mean": 2.0, "std": 0.0}))
    assert reward_statistics(tmp_path)[1] > 0  # equal scores divide by nothing


def test_a_function_is_loaded_by_its_import_path():
    assert load_function("datasets_prep.cafe.judge:gold", "--reward_function") is gold


@pytest.mark.parametrize("text", ["a [SEP] b", "[SEP]", "[CLS] a [SEP]", "a <end>", "a [S[SEP]EP]"])
def test_an_encoder_reads_control_tokens_of_a_text_as_text(text):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "b"]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, [("[CLS]", 1), ("[SEP]", 2)])
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.add_tokens(["<end>"], special_tokens=False)  # a control token without a name
    end = tokenizer.convert_tokens_to_ids("<end>")
    for texts in ((text, "b"), ("b", text)):
        ids = encode_pair(tokenizer, *texts)["input_ids"]
        assert [i for i in ids if i in (1, 2, end)] == [1, 2, 2]
    assert encode_pair(tokenizer, "a", "b") == dict(tokenizer("a", "b"))


# ------------------------------------------------------------------------------------------------ comparing responses
class Comparing(torch.nn.Module):
    """Prefers the response whose first token is larger; a response that begins with 60 or more it cannot read."""

    def __init__(self, tokenizer) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(auto_map={})
        self.marks = [tokenizer(mark, add_special_tokens=False)["input_ids"] for mark in ("\n\n[A]", "\n\n[B]")]

    def forward(self, input_ids, attention_mask):
        firsts = [[after(row.tolist(), mark) for mark in self.marks] for row in input_ids]
        return SimpleNamespace(score=torch.tensor([math.nan if max(a, b) >= 60 else a - b for a, b in firsts]).float())


def after(row: list[int], mark: list[int]) -> int:
    return next(row[i + len(mark)] for i in range(len(row)) if row[i : i + len(mark)] == mark)


def compared(tokenizer, responses: list[list[int]], longest: int | None = None) -> list[float | None]:
    samples = [Sample("p", "r", False, [5, 6], ids, tokenizer=tokenizer) for ids in responses]
    return PairScorer(Comparing(tokenizer), Encoding(tokenizer, longest=longest), 3)([samples])[0]


def test_what_a_comparing_model_could_not_read_has_no_score(tokenizer):
    """Not one half, which would be a tie; the others are compared among themselves."""
    assert compared(tokenizer, [[50], [60]]) == [None, None]
    assert compared(tokenizer, [[50]]) == [None]
    kept = compared(tokenizer, [[50], [52]])
    assert kept[1] == pytest.approx(1 / (1 + math.exp(-2))) and sum(kept) == pytest.approx(1)
    assert compared(tokenizer, [[50], [60], [52], [61]]) == [kept[0], None, kept[1], None]
    long = [[50, *[7] * 20], [52], [51]]
    room = len(pair_prompt(tokenizer, [5, 6], [50], [52]))
    assert compared(tokenizer, long, room) == [None, *compared(tokenizer, [[52], [51]])]
    assert compared(tokenizer, long[:2], room) == [None, None]
    assert compared(tokenizer, long, room - 1) == [None] * 3


def test_responses_whose_comparisons_were_not_read_in_both_orders_never_count():
    """Every set of missing comparisons among three responses: those left were all compared, in both orders."""
    orders = [(a, b) for a in range(3) for b in range(3) if a != b]
    for gone in itertools.chain.from_iterable(itertools.combinations(orders, n) for n in range(7)):
        there = set(orders) - set(gone)
        kept = find_complete_group(there, [3, 2, 1])
        assert all((a, b) in there for a in kept for b in kept if a != b), gone
        assert (len(kept) >= 2) == any((a, b) in there and (b, a) in there for a, b in orders), gone
    assert find_complete_group(set(), []) == []
