"""Batches and token ids: action masks, padding, packing, batching by length, splits."""

import copy

import pytest
import torch
from helpers.errors import error_naming
from helpers.rollouts import rollout_of
from hypothesis import given
from hypothesis import strategies as st

from lightrlhf.cli.errors import UsageError
from lightrlhf.data import batch as data_batch
from lightrlhf.data.batch import (
    INFERENCE_TOKENS,
    Batch,
    Rollout,
    epoch_order,
    finetune_batch,
    inference_batch_size,
    inference_batches,
    joined,
    micro_batches,
    mismatched_rows,
    mix_seed,
    preference_batch,
    response_batch,
    unpaired_batch,
)
from lightrlhf.data.splits import IGNORE_INDEX, check_vocabulary, load_prompts, load_split
from lightrlhf.data.tokens import decode, encode_prompt, encode_response

EOS = 1


def finetune_row(prompt: list[int], response: list[int]) -> dict:
    targets = [IGNORE_INDEX] * len(prompt) + response
    return {"prompt_len": len(prompt), "input_ids": torch.tensor(prompt + response), "targets": torch.tensor(targets)}


def trained(batch: Batch, row: int) -> list[int]:
    """Token ids of a row that the loss counts."""
    return batch.input_ids[row, 1:][batch.action_mask[row]].tolist()


# --------------------------------------------------------------------------------------------------- action masks
@pytest.mark.parametrize("pad_id", [0, EOS])
def test_a_demonstration_trains_its_response_and_exactly_one_eos(pad_id):
    rows = [finetune_row([5, 6, 7], [8, 9, EOS]), finetune_row([5], [8, EOS]), finetune_row([5, 6], [7, 8, 9, 10])]
    batch = finetune_batch(rows, pad_id, use_targets=True)
    assert [trained(batch, i) for i in range(3)] == [[8, 9, EOS], [8, EOS], [7, 8, 9, 10]]  # the last was cut: no eos


@pytest.mark.parametrize("pad_id", [0, EOS])
def test_without_use_targets_the_whole_text_counts_but_never_padding(pad_id):
    rows = [finetune_row([5, 6, 7], [8, 9, EOS]), finetune_row([5], [8, EOS])]
    batch = finetune_batch(rows, pad_id, use_targets=False)
    assert [trained(batch, i) for i in range(2)] == [[6, 7, 8, 9, EOS], [8, EOS]]


@pytest.mark.parametrize("pad_id", [0, EOS])
def test_a_pair_puts_the_chosen_rows_first_and_counts_responses_only(pad_id):
    rows = [
        {"prompt_len": 2, "chosen_input_ids": [5, 6, 7, EOS], "rejected_input_ids": [5, 6, 8, 9, 10, EOS]},
        {"prompt_len": 1, "chosen_input_ids": [5, 7, EOS], "rejected_input_ids": [5, EOS]},
    ]
    batch = preference_batch(rows, pad_id)
    assert [trained(batch, i) for i in range(4)] == [[7, EOS], [7, EOS], [8, 9, 10, EOS], [EOS]]
    assert batch.attention_mask.sum(1).tolist() == [4, 3, 6, 2]
    assert batch.group.tolist() == [0, 1, 0, 1]  # without which prefixes are never shared


@pytest.mark.parametrize("pad_id", [0, EOS])
def test_a_sampled_response_trains_its_tokens_and_a_truncated_one_no_eos(pad_id):
    batch = response_batch([[5, 6], [7], [8, 9, 10]], [[11, EOS], [11, 12, 13], [EOS]], pad_id)
    assert [trained(batch, i) for i in range(3)] == [[11, EOS], [11, 12, 13], [EOS]]
    assert batch.num_actions == 6


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_every_cafe_answer_trains_exactly_one_eos_and_no_prompt_token(cafe_data, tokenizer, pad_is_eos):
    eos = tokenizer.eos_token_id
    pad_id = eos if pad_is_eos else tokenizer.pad_token_id
    rows = load_split(cafe_data, "finetune", "train")
    batch = finetune_batch(rows, pad_id, use_targets=True)
    for i, row in enumerate(rows):
        ids = row["input_ids"].tolist()
        assert trained(batch, i) == ids[row["prompt_len"] :]
        assert trained(batch, i).count(eos) == 1 and trained(batch, i)[-1] == eos
    pairs = load_split(cafe_data, "preference", "train")
    batch = preference_batch(pairs, pad_id)
    for i in range(len(batch)):
        assert trained(batch, i).count(eos) == 1 and trained(batch, i)[-1] == eos


# ------------------------------------------------------------------------------------------------------- encoding
def tokenizer_with_bos(tokenizer):
    """A tokenizer that begins every text with a BOS of its own, as Llama's does."""
    from tokenizers.processors import TemplateProcessing

    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"bos_token": "<s>"})
    special = [("<s>", other.bos_token_id)]
    other.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
    return other


def test_a_prompt_has_one_bos_where_the_tokenizer_adds_one(tokenizer):
    with_bos = tokenizer_with_bos(tokenizer)
    for text in ("Guest: a latte", "<s>Guest: a latte"):
        ids = encode_prompt(with_bos, text)
        assert ids.count(with_bos.bos_token_id) == 1 and ids[0] == with_bos.bos_token_id
    assert with_bos.bos_token_id not in encode_response(with_bos, " Of course.")
    assert None not in encode_prompt(tokenizer, "Guest: a latte")


def test_a_chat_template_that_writes_a_bos_gets_no_second_one(tokenizer):
    with_bos = tokenizer_with_bos(tokenizer)
    with_bos.chat_template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    ids = encode_prompt(with_bos, [{"role": "user", "content": "a latte"}])
    assert ids.count(with_bos.bos_token_id) == 1


def test_a_response_ends_with_exactly_one_eos(tokenizer):
    for text in (" Of course.", " Of course.<eos>"):
        ids = encode_response(tokenizer, text)
        assert ids.count(tokenizer.eos_token_id) == 1 and ids[-1] == tokenizer.eos_token_id


def test_decoding_gives_back_the_text_with_its_spaces(tokenizer):
    text = " Of course ,  two  muffins . Isn 't it ?"
    assert decode(tokenizer, encode_response(tokenizer, text)) == text


# --------------------------------------------------------------------------------------------- selecting
def test_select_cuts_to_the_longest_of_the_rows():
    batch = response_batch([[5, 6], [7], [8, 9, 10]], [[11, EOS], [11], [12, 13, 14, EOS]], 0)
    part = batch.select(torch.tensor([1, 0]))
    assert part.input_ids.tolist() == [[7, 11, 0, 0], [5, 6, 11, EOS]]
    assert part.action_mask.shape == (2, 3)
    assert [trained(part, i) for i in range(2)] == [[11], [11, EOS]]


def test_select_keeps_what_belongs_to_each_row():
    batch = response_batch([[5], [6, 7]], [[8, EOS], [9, 10, 11, EOS]], 0)
    numbers = torch.arange(10.0).view(2, 5)
    rollout = Rollout(
        **{name: getattr(batch, name) for name in ("input_ids", "attention_mask", "action_mask")},
        prompt_len=torch.tensor([1, 2]),
        truncated=torch.tensor([False, True]),
        logprobs=numbers,
        ref_logprobs=-numbers,
    )
    part = rollout.select(torch.tensor([0]))
    assert part.input_ids.tolist() == [[5, 8, EOS]] and part.logprobs.tolist() == [[0.0, 1.0]]
    assert part.prompt_len.tolist() == [1] and part.truncated.tolist() == [False]
    assert rollout.response_ids() == [[8, EOS], [9, 10, 11, EOS]]
    assert rollout.prompt_ids() == [[5], [6, 7]]


def test_texts_are_decoded_once_and_go_with_their_rows(monkeypatch):
    decoded = []
    monkeypatch.setattr(data_batch, "decode", lambda tokenizer, ids: decoded.append(ids) or str(ids))
    one = rollout_of([[5], [6, 7]], [[8, EOS], [9]], tokenizer=object())
    assert one.texts == [("[5]", "[8, 1]"), ("[6, 7]", "[9]")] == one.texts
    other = rollout_of([[4]], [[3, EOS]], tokenizer=one.tokenizer)
    assert other.texts == [("[4]", "[3, 1]")] and len(decoded) == 6
    assert joined([one.select(torch.tensor([1])), other]).texts == [one.texts[1], *other.texts]
    assert len(decoded) == 6


def test_a_selection_keeps_the_groups_of_its_rows():
    batch = response_batch([[5], [5], [6]], [[8], [9], [7]], 0)
    batch.group = torch.tensor([3, 3, 7])
    assert batch.select(torch.tensor([2, 0])).group.tolist() == [7, 3]
    rollout = batch.extend(Rollout, prompt_len=None, truncated=None, logprobs=None, ref_logprobs=None)
    assert rollout.select(slice(0, 2)).group.tolist() == [3, 3]


@pytest.mark.parametrize("size, expected", [(4, [[0, 2, 4], [5, 1, 3], [6, 7, 8]]), (1, 9), (16, 1)])
def test_micro_batches_keep_groups_together_and_cut_those_that_do_not_fit(size, expected):
    lengths = [1, 3, 2, 4, 1, 2, 5, 6, 7]
    batch = response_batch([[5]] * 9, [[8] * n for n in lengths], 0)
    batch.group = torch.tensor([0, 1, 0, 1, 0, 1, 2, 2, 2])
    micros = [rows.tolist() for rows in batch.by_group(size)]
    assert sorted(i for rows in micros for i in rows) == [*range(9)] and max(map(len, micros)) <= size
    if isinstance(expected, int):
        assert len(micros) == expected
    else:
        assert [sorted(rows) for rows in micros] == [sorted(rows) for rows in expected]


def test_a_group_is_cut_into_even_parts_of_similar_length_and_a_batch_without_rows_is_one_micro_batch():
    batch = response_batch([[5]] * 5, [[8] * n for n in (9, 1, 8, 2, 3)], 0)
    assert [rows.tolist() for rows in batch.by_group(3)] == [rows.tolist() for rows in batch.by_length(3)]
    batch.group = torch.zeros(5, dtype=torch.int64)
    assert [sorted(rows.tolist()) for rows in batch.by_group(4)] == [[1, 3], [0, 2, 4]]
    assert [rows.tolist() for rows in batch.select(slice(0)).by_group(3)] == [[]]


def test_extend_copies_shared_fields_and_adds_the_given_ones():
    batch = response_batch([[5], [6, 7]], [[8, EOS], [9, 10, 11, EOS]], 0)
    zeros = torch.zeros(2, 5)
    new = {"prompt_len": torch.tensor([1, 2]), "truncated": torch.zeros(2) > 0, "logprobs": zeros}
    rollout = batch.extend(Rollout, **new, ref_logprobs=zeros, columns=[{"n": 1}, {"n": 2}])
    assert type(rollout) is Rollout and rollout.input_ids is batch.input_ids and rollout.logprobs is zeros
    assert rollout.columns == [{"n": 1}, {"n": 2}] and rollout.response_ids() == [[8, EOS], [9, 10, 11, EOS]]
    again = rollout.extend(Batch, action_mask=~batch.action_mask)
    assert type(again) is Batch and torch.equal(again.action_mask, ~batch.action_mask)


def test_prompt_and_response_ids_are_right_when_pad_is_eos():
    batch = response_batch([[5], [6, EOS]], [[8, EOS], [9, EOS, 11, EOS]], EOS)
    zeros = torch.zeros(2, 5)
    rollout = Rollout(
        **{name: getattr(batch, name) for name in ("input_ids", "attention_mask", "action_mask")},
        prompt_len=torch.tensor([1, 2]),
        truncated=torch.tensor([False, False]),
        logprobs=zeros,
        ref_logprobs=zeros,
    )
    assert rollout.response_ids() == [[8, EOS], [9, EOS, 11, EOS]]
    assert rollout.lengths().tolist() == [2, 4]


def test_rows_of_one_token_still_make_a_batch():
    batch = response_batch([[5]], [[]], 0)
    assert batch.input_ids.shape == (1, 2) and batch.num_actions == 0
    wider = response_batch([[5], [5, 6, 7]], [[], [8]], 0)
    assert wider.select(torch.tensor([0])).input_ids.shape == (1, 2)


# ------------------------------------------------------------------------------------------------------- batching
def test_keys_have_seeds_of_their_own():
    keys = [(a, b) for a in range(40) for b in range(40)]
    assert len({mix_seed(*key) for key in keys} | {mix_seed(*key, start=7) for key in keys}) == 2 * len(keys)
    assert all(0 <= mix_seed(*key) < 2**63 for key in [(2**40, 2**62), (0,), ()])


@given(st.integers(1, 300), st.integers(0, 5), st.integers(0, 5))
def test_an_epoch_visits_every_row_once_in_an_order_of_its_own(num_rows, seed, epoch):
    order = epoch_order(num_rows, seed, epoch).tolist()
    assert sorted(order) == list(range(num_rows))
    assert order == epoch_order(num_rows, seed, epoch).tolist()
    if num_rows > 20:
        others = [epoch_order(num_rows, seed, epoch + 1).tolist(), epoch_order(num_rows, seed + 1, epoch).tolist()]
        assert order != others[0] != others[1]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.integers(1, 7))
def test_micro_batches_hold_every_row_once_and_never_more_than_asked(lengths, size):
    rows = [{"input_ids": [0] * n, "number": i} for i, n in enumerate(lengths)]
    groups = list(micro_batches(rows, size))
    assert sorted(row["number"] for group in groups for row in group) == list(range(len(rows)))
    assert max(map(len, groups)) <= size
    assert len(groups) == -(-len(rows) // size)


@given(st.lists(st.integers(0, 2 * INFERENCE_TOKENS["cpu"]), max_size=40), st.integers(1, 9))
def test_inference_batches_hold_every_row_once_within_the_token_budget(lengths, max_rows):
    passes = [rows.tolist() for rows in inference_batches(torch.tensor(lengths, dtype=torch.int64), max_rows)]
    order = [row for rows in passes for row in rows]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[row] for row in order] == sorted(lengths, reverse=True)
    for rows in passes:
        assert len(rows) == 1 or len(rows) * lengths[rows[0]] <= INFERENCE_TOKENS["cpu"]
        assert len(rows) <= max_rows


ROWS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=6)


@given(ROWS, st.integers(1, 6))
def test_every_response_token_is_one_action_also_of_selected_rows(rows, count):
    """Ids tell row and place."""
    prompts = [[100 * i + t for t in range(p)] for i, (p, _) in enumerate(rows, start=1)]
    responses = [[100 * i + 50 + t for t in range(r)] for i, (_, r) in enumerate(rows, start=1)]
    batch = response_batch(prompts, responses, 0)
    for part in (batch, batch.select(torch.arange(min(count, len(rows))))):
        for i in range(len(part)):
            assert part.input_ids[i][part.attention_mask[i]].tolist() == prompts[i] + responses[i]
            assert trained(part, i) == responses[i]


def test_the_token_budget_holds_on_a_cpu_only():
    assert inference_batch_size(5000, 64, torch.device("cuda")) == 64
    assert inference_batch_size(5000, 64, torch.device("cpu")) == 1


# --------------------------------------------------------------------------------------------------------- splits
def test_prompts_come_from_their_own_split_else_from_the_demonstrations(cafe_data, tmp_path):
    own = load_prompts(cafe_data, "train")
    assert len(own) == 40 and all(len(row["input_ids"]) == row["prompt_len"] for row in own)
    (tmp_path / "finetune_train.pt").write_bytes((cafe_data / "finetune_train.pt").read_bytes())
    borrowed = load_prompts(tmp_path, "train")
    assert len(borrowed) == 60
    full = load_split(cafe_data, "finetune", "train")
    for row, prompt in zip(full, borrowed):
        assert prompt["input_ids"].tolist() == row["input_ids"][: row["prompt_len"]].tolist()


def test_a_vocabulary_that_just_fits_is_accepted():
    check_vocabulary([{"input_ids": [1, 2, 60]}, {"chosen_input_ids": [], "rejected_input_ids": [3]}], 61, "data")


def test_a_foreign_ignore_index_is_refused(tmp_path):
    row = {"prompt_len": 1, "input_ids": [5, 6, 7], "targets": [-1, 6, 7]}
    torch.save([row], tmp_path / "finetune_train.pt")
    with error_naming(UsageError, "targets[0] = -1"):
        load_split(tmp_path, "finetune", "train")


# -------------------------------------------------------------------------------------------------- labelled responses
def labelled(prompt: list[int], response: list[int]) -> dict:
    return {"prompt_len": len(prompt), "input_ids": torch.tensor(prompt + response), "label": True, "columns": {}}


def test_labelled_responses_train_on_their_response_tokens():
    batch = unpaired_batch([labelled([5, 6], [7, EOS]), labelled([5], [8, 9, 4, EOS])], EOS)
    assert [trained(batch, row) for row in (0, 1)] == [[7, EOS], [8, 9, 4, EOS]]
    assert batch.group is None and len(unpaired_batch([], EOS)) == 0


def mismatched(rows: list[dict], others: tuple = (), width: int = 99) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in mismatched_rows(rows, others, width)]


def test_a_prompt_gets_the_next_response_to_another_prompt():
    rows = [labelled([5], [11]), labelled([5], [12]), labelled([6], [13, 14]), labelled([7], [15])]
    assert mismatched(rows) == [[5, 13, 14], [5, 13, 14], [6, 15], [7, 11]]
    assert [row["prompt_len"] for row in mismatched_rows(rows, [], 99)] == [1] * 4
    assert mismatched(rows, width=2) == [[5, 13], [5, 13], [6, 15], [7, 11]]


def test_a_batch_of_one_prompt_borrows_a_response():
    others = [labelled([5], [11]), labelled([6], [13])]
    assert mismatched([labelled([5], [12])], others) == [[5, 13]]
    assert mismatched([labelled([5], [12]), labelled([5], [14])], others) == [[5, 13], [5, 13]]
    with error_naming(ValueError, "prompts"):
        mismatched([labelled([5], [12])], others[:1])
