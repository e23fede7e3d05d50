"""The café: what a good answer is, what each flaw breaks, and what the splits promise."""

import json
import random
from collections import Counter

import pytest
import torch
from helpers import CAFE_SIZES, CPU
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets_prep.cafe.judge import gold, judge_answer
from datasets_prep.cafe.prepare_data import CafeArgs, main, rows
from datasets_prep.cafe.pretrain_base import BASE_DIR
from datasets_prep.cafe.pretrain_base import main as pretrain
from datasets_prep.cafe.tokenizer import train_tokenizer
from datasets_prep.cafe.world import (
    CONTENT_FLAWS,
    MANNER_FLAWS,
    corrupted,
    flawed,
    good_plan,
    order_text,
    orders,
    parse_items,
    possible_flaws,
    random_order,
    replaced_words,
    request,
    split_of,
)
from lightrlhf.data.splits import load_split
from lightrlhf.data.tokens import decode
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.sft import main as sft

SEEDS = st.integers(0, 10**9)


# --------------------------------------------------------------------------------------------- the world and its judge
@given(SEEDS)
def test_an_order_can_be_read_back_from_its_text(seed):
    rng = random.Random(seed)
    order = random_order(rng)
    assert parse_items(order_text(order)) == list(order)
    assert parse_items(request(rng, order)) == list(order)


@given(SEEDS)
def test_a_good_answer_has_a_gold_score_of_one(seed):
    rng = random.Random(seed)
    order = random_order(rng)
    assert judge_answer(request(rng, order), " " + good_plan(rng, order).text()) == (1.0, 1.0, 1.0, 1.0)


@settings(max_examples=200)
@given(SEEDS)
def test_each_flaw_breaks_its_own_part_and_no_other(seed):
    rng = random.Random(seed)
    order = random_order(rng)
    ask, plan = request(rng, order), good_plan(rng, order)
    for flaw in possible_flaws(order):
        found = judge_answer(ask, flawed(rng, plan, flaw).text())
        broken = {name for name in ("correct", "polite", "short") if not getattr(found, name)}
        expected = {"rude": "polite", "rambling": "short"}.get(flaw, "correct")
        # a courtesy that stands in the frame goes with it, and nothing else does
        assert broken == {expected}, (flaw, plan.text())


@given(SEEDS)
def test_replaced_words_are_those_that_were_not_ordered(seed):
    rng = random.Random(seed)
    order = random_order(rng)
    plan = corrupted(rng, good_plan(rng, order))
    spans = replaced_words(order, plan)
    assert bool(spans) == (plan.order != order)
    for start, end in spans:
        word = plan.text().lower()[start:end]
        assert word and " " not in word


ASK = "Guest: Could I get a large oat latte and two muffins, please?\nBarista:"


@pytest.mark.parametrize(
    "answer, parts",
    [
        (" Of course, a large oat latte and two muffins, coming right up.", (1, 1, 1)),
        (" Of course, two muffins and a large oat latte.", (1, 1, 1)),  # any order of the items
        (" A large oat latte and two muffins.", (1, 0, 1)),
        (" Of course, a large oat latte.", (0, 1, 1)),
        (" Of course, a large oat latte and three muffins.", (0, 1, 1)),
        (" Of course, a small oat latte and two muffins.", (0, 1, 1)),
        (" Of course, a large latte and two muffins.", (0, 1, 1)),
        (" Of course, a large oat latte and two scones.", (0, 1, 1)),
        (" Of course, a large oat latte, two muffins and a bagel.", (0, 1, 1)),
        (" Of course, a large oat latte and two muffins and two muffins.", (0, 1, 1)),  # said twice
        (" Ugh, of course, a large oat latte and two muffins.", (1, 0, 1)),  # an insult is not made up for
        (
            " Thank you! Thank you! Thank you! Thank you! Thank you! Thank you! a large oat latte and two muffins",
            (1, 1, 0),
        ),
        (" Of course!", (0, 1, 1)),
        ("", (0, 0, 0)),
    ],
)
def test_the_judge_by_examples(answer, parts):
    found = judge_answer(ASK, answer)
    assert (found.correct, found.polite, found.short) == parts
    assert found.score == pytest.approx(0.5 * parts[0] + 0.25 * parts[1] + 0.25 * parts[2])


def test_gold_gives_a_row_for_each_answer():
    found = gold([ASK, ASK], [" Of course, a large oat latte and two muffins.", " Next!"])
    assert [row["score"] for row in found] == [1.0, 0.25]
    assert found[0].keys() == {"score", "correct", "polite", "short"}


# ------------------------------------------------------------------------------------------------------- the splits
@pytest.fixture(scope="module")
def many():
    """Rows as text, enough for shares."""
    sizes = {"num_finetune": 1500, "num_preference": 1500, "num_prompts": 500}
    found = rows(CafeArgs(**sizes, num_held_out=100, num_held_out_pairs=100))
    grouped: dict[tuple[str, str], list[dict]] = {}
    for row in found:
        grouped.setdefault((row["stage"], row["split"]), []).append(row)
    return grouped


def test_the_splits_have_the_sizes_asked_for(many):
    assert {key: len(found) for key, found in many.items()} == {
        (stage, split): size if split == "train" else 100
        for stage, size in (("finetune", 1500), ("preference", 1500), ("prompts", 500))
        for split in ("train", "validation", "test")
    }


def test_no_order_of_a_held_out_split_occurs_in_training_whatever_the_seed(many):
    sizes = {"num_finetune": 300, "num_preference": 300, "num_prompts": 300}
    other = list(rows(CafeArgs(seed=7, **sizes, num_held_out=100, num_held_out_pairs=100)))
    found: dict[str, set] = {"train": set(), "validation": set(), "test": set()}
    for row in [row for group in many.values() for row in group] + other:
        found[row["split"]].add(tuple(sorted(map(repr, parse_items(row["prompt"])))))
    assert not found["train"] & found["test"]
    assert not found["train"] & found["validation"]
    assert not found["validation"] & found["test"]


def test_no_order_is_asked_twice_within_a_stage(many):
    for group in many.values():
        keys = [tuple(sorted(map(repr, parse_items(row["prompt"])))) for row in group]
        assert len(set(keys)) == len(keys)


def test_about_ninety_in_a_hundred_orders_are_for_training():
    rng = random.Random(0)
    counts = Counter(split_of(random_order(rng)) for _ in range(3000))
    assert 0.85 < counts["train"] / 3000 < 0.95 and counts["test"] > 60 and counts["validation"] > 60
    assert all(split_of(order) == "test" for order, _ in zip(orders(rng, "test"), range(20)))


def test_demonstrations_are_mediocre_on_purpose(many):
    found = [judge_answer(row["prompt"], row["completion"]) for row in many["finetune", "train"]]
    means = {
        name: sum(getattr(g, name) for g in found) / len(found) for name in ("score", "correct", "polite", "short")
    }
    assert 0.55 < means["score"] < 0.75 and means["correct"] > 0.4
    assert 0.6 < means["polite"] < 0.8 and 0.6 < means["short"] < 0.8


def test_many_flawed_answers_differ_from_the_order_by_a_single_item(many):
    flawed_answers = [
        row for row in many["finetune", "train"] if judge_answer(row["prompt"], row["completion"]).score < 1
    ]
    single = 0
    for row in flawed_answers:
        asked, said = (Counter(map(repr, parse_items(row[key]))) for key in ("prompt", "completion"))
        missing, extra = asked - said, said - asked
        single += 0 < max(missing.total(), extra.total()) <= 1
    assert single / len(flawed_answers) >= 0.4


def test_held_out_pairs_are_labelled_right_and_training_pairs_with_some_noise(many):
    for (stage, split), group in many.items():
        if stage != "preference":
            continue
        wrong = 0
        for row in group:
            chosen, rejected = (judge_answer(row["prompt"], row[side]).score for side in ("chosen", "rejected"))
            assert chosen != rejected
            wrong += chosen < rejected
            assert row["columns"]["swapped"] == (chosen < rejected)
        assert 0.03 < wrong / len(group) < 0.07 if split == "train" else wrong == 0


def test_every_flaw_occurs_among_the_pairs(many):
    flaws = {row["columns"]["group"] for row in many["preference", "test"]}
    assert flaws == {*CONTENT_FLAWS, *MANNER_FLAWS, "mixed"}


def test_a_seed_gives_the_same_rows_and_another_seed_others():
    sizes = {"num_finetune": 20, "num_preference": 20, "num_prompts": 20, "num_held_out": 5, "num_held_out_pairs": 5}
    assert list(rows(CafeArgs(**sizes))) == list(rows(CafeArgs(**sizes)))
    assert list(rows(CafeArgs(**sizes))) != list(rows(CafeArgs(seed=1, **sizes)))


# --------------------------------------------------------------------------------------------------------- the files
def test_the_folder_holds_exactly_what_is_promised(cafe_data):
    names = {f"{stage}_{split}.pt" for stage in ("finetune", "preference", "prompts") for split in SPLITS}
    names |= {"args.json", "example_prompt.pt", "report.json", "report.md", "lengths.png", "manifest.json", "tokenizer"}
    assert {path.name for path in cafe_data.iterdir()} == names
    assert json.loads((cafe_data / "args.json").read_text())["judge"] == "datasets_prep.cafe.judge:gold"
    example = torch.load(cafe_data / "example_prompt.pt", weights_only=True)
    tokenizer = load_tokenizer(cafe_data)
    assert decode(tokenizer, example["input_ids"]) == example["prompt"]


SPLITS = ("train", "validation", "test")


def test_the_ids_say_the_texts(cafe_data, tokenizer):
    """A demonstration is its prompt and, with a space before it, an answer that ends; nothing is lost or cut."""
    for row in load_split(cafe_data, "finetune", "train"):
        ids, start = row["input_ids"].tolist(), row["prompt_len"]
        prompt, answer = decode(tokenizer, ids[:start]), decode(tokenizer, ids[start:])
        assert prompt.startswith("Guest: ") and prompt.endswith("\nBarista:")
        assert answer.startswith(" ") and ids[-1] == tokenizer.eos_token_id
        assert row["targets"].tolist() == [-100] * start + ids[start:]


def test_preparing_again_gives_the_same_files(cafe_data, tmp_path):
    main(["--destination_dir", str(tmp_path / "again"), *CAFE_SIZES])
    for stage in ("finetune", "preference", "prompts"):
        for split in SPLITS:
            one, other = (load_split(folder, stage, split) for folder in (cafe_data, tmp_path / "again"))
            assert repr(one.to_list()) == repr(other.to_list())


def test_the_tokenizer_is_the_same_every_time_and_knows_every_text():
    one, other = (train_tokenizer(vocab_size=400, num_texts=200) for _ in range(2))
    assert one.get_vocab() == other.get_vocab()
    text = "Guest: Ünïcode ☕ too?\nBarista: 好的"
    assert one.decode(one(text)["input_ids"], clean_up_tokenization_spaces=False) == text
    assert one.pad_token_id != one.eos_token_id


def test_the_base_model_that_ships_is_small():
    assert sum(path.stat().st_size for path in BASE_DIR.iterdir()) < 4 * 2**20


@pytest.mark.slow
def test_pretraining_writes_a_model_that_can_be_fine_tuned_on_data_of_its_tokenizer(tmp_path):
    base, data = str(tmp_path / "base"), str(tmp_path / "data")
    pretrain(["--destination_dir", base, "--num_steps", "2", "--batch_size", "4"])
    main(["--destination_dir", data, "--tokenizer_name", base, *CAFE_SIZES])
    sft(["--data_dir", data, "--model_name", base, "--log_dir", str(tmp_path), "--max_steps", "1", *CPU])
