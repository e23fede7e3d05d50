"""The page: what it does without a browser, eight people at once, and the real thing in headless Chromium."""

from __future__ import annotations

import pytest
from helpers import CPU

pytest.importorskip("gradio", reason="needs pip install 'lightrlhf[demo]'")

from lightrlhf.common import desk as desks
from lightrlhf.common.args import UsageError, parse
from lightrlhf.common.desk import Desk, asked, bubbles, filled, prompt_of
from lightrlhf.common.scoring import as_text
from lightrlhf.common.votes import read_votes
from lightrlhf.demo import DemoArgs

SFT, PPO = "rlhf-supervised-finetuning step 2", "rlhf-ppo step 1"
SLIDERS = (16, True, 1.0, 0, 1.0)


@pytest.fixture(scope="module")
def ppo_dir(cafe_data, sft_dir, rm_dir, logs):
    from lightrlhf.ppo import main

    flags = ["--max_steps", "1", "--rollout_size", "4", "--rollout_mini_batch_size", "4", "--mini_batch_size", "4"]
    flags += ["--micro_batch_size", "4", "--max_new_tokens", "16", "--temperature", "0.9", "--ngram", "3"]
    flags += ["--eval_interval", "1", "--eval_iters", "1", "--actor_learning_rate", "1e-2", "--lr_warmup_steps", "0"]
    models = ["--sft_experiment_dir", sft_dir, "--rm_experiment_dir", rm_dir]
    return main(["--data_dir", str(cafe_data), "--log_dir", str(logs), *models, *CPU, *flags])


@pytest.fixture
def desk(sft_dir, ppo_dir, tmp_path) -> Desk:
    return open_desk(sft_dir, ppo_dir, "--votes_file", str(tmp_path / "votes.jsonl"))


def open_desk(*words: str) -> Desk:
    flags = ["--max_new_tokens", "16", "--accelerator", "cpu", "--experiment_dir"]
    return Desk.open(parse(DemoArgs, [*flags, *words]))


def say(desk: Desk, text: str, turns: list = (), label: str = PPO, seed: int = 5, sliders: tuple = SLIDERS) -> list:
    turns = [*turns, asked(text, prompt_of(list(turns), "dialogue", text, "", "", ""))]
    *_, turns = desk.reply(turns, label, seed, *sliders)
    return turns


# -------------------------------------------------------------------------------------------------------------- chat
def test_an_answer_grows_and_has_reward_kl_and_length(desk):
    turns = [asked("A tea, please.", prompt_of([], "dialogue", "A tea, please.", "", "", ""))]
    grown = list(desk.reply(turns, PPO, 5, *SLIDERS))
    texts = [state[-1]["answer"].text for state in grown]
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:]))
    judged = desk.judged(grown[-1], 1.0)
    assert "reward " in judged[-1]["told"] and "KL " in judged[-1]["told"] and "tokens" in judged[-1]["told"]
    assert bubbles(judged)[1]["content"].endswith(f"[{judged[-1]['told']}]")
    shown = desk.tokens(judged, "as trained")
    assert shown.count('class="token"') == len(judged[-1]["answer"].ids)
    assert "segment 1" in shown and shown != desk.tokens(judged, "5")


def test_a_second_turn_reads_the_whole_dialogue_and_regenerating_says_something_else(desk):
    first = say(desk, "A tea, please.")
    second = say(desk, "And a scone.", first)
    roles = [message["role"] for message in second[-1]["answer"].prompt]
    assert roles == ["user", "assistant", "user"]
    assert second[-1]["answer"].prompt[1]["content"] == first[-1]["content"]
    assert say(desk, "A tea, please.")[-1]["answer"].ids == first[-1]["answer"].ids  # the same seed
    (*_, again) = desk.reply(second, PPO, 5, *SLIDERS)
    assert len(again) == 4 and again[-1]["answer"].ids != second[-1]["answer"].ids


def test_settings_restored_from_an_experiment(desk):
    assert desk.settings_of(PPO) == [16, True, 0.9, 0, 1.0]
    with pytest.raises(UsageError, match="this training did not sample"):
        desk.settings_of(SFT)
    with pytest.raises(ValueError, match="--top_p 2.0 must lie in"):
        desk.settings(16, True, 1.0, 0, 2.0)


def test_what_is_typed_becomes_the_prompt_of_its_form():
    assert prompt_of([], "as written", " x", "", "", "") == " x"
    post = prompt_of([], "summary", "", "r/cooking", " Bread ", "It is flat.")
    assert post == "SUBREDDIT: r/cooking\nTITLE: Bread\nPOST: It is flat.\nTL;DR:"
    assert filled(post) == ([], "summary", "", "cooking", "Bread", "It is flat.")
    assert filled("x y") == ([], "as written", "x y", "", "", "")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    turns, form, text, *_ = filled(talk)
    assert (form, text) == ("dialogue", "c") and prompt_of(turns, form, text, "", "", "") == talk
    for form in desks.FORMS:
        with pytest.raises(UsageError, match="is empty"):
            prompt_of([], form, "  ", "", "", " ")


def test_the_form_and_the_example_are_those_of_the_data(desk):
    assert desk.form(PPO) == "dialogue"
    assert as_text(desk.example(PPO)) == "Could I get a large oat latte and two muffins, please?"
    assert len(desk.prompts(PPO)) == 12


# ------------------------------------------------------------------------------------------------------ side by side
def test_side_by_side_ends_with_a_table(desk):
    names = desk.shelf.newest()
    assert names == ["pretrained llama", SFT, PPO]
    *growing, (texts, table) = desk.beside(names, "Guest: A tea.\nBarista:", 3, *SLIDERS)
    assert growing[-1] == [texts, []] and len(texts) == 3
    assert [row[0] for row in table] == names
    assert [row[2] == "–" for row in table] == [True, False, False]
    assert all(row[1] != "–" and row[4] in ("cut", "ended") for row in table)
    for wrong in (names[:1], names * 2):
        with pytest.raises(UsageError, match="choose 2 to 4 models"):
            list(desk.beside(wrong, "x", 3, *SLIDERS))


# ----------------------------------------------------------------------------------------------------- compare blind
def test_pairs_are_blind_the_same_for_all_and_voted_on_once(desk):
    shared = open_desk(*desk.args.experiment_dir, "--overlap", "1", "--votes_file", str(desk.votes_file))
    order = set()
    for number in range(6):
        pair = shared.next_pair(SFT, PPO, "ada")
        other = shared.next_pair(PPO, SFT, f"grace {number}")
        if number == 0:
            assert pair["pair"] == other["pair"] and sorted(pair["responses"]) == sorted(other["responses"])
        order.add(tuple(pair["models"]))
        assert shared.vote(pair, "A", "short") and not shared.vote(pair, "B", "")
    assert len(order) == 2  # now one, now the other is shown first
    votes = read_votes(shared.votes_file)
    assert len({vote["pair"] for vote in votes}) == 6 == len(votes)
    table, line = shared.counted()
    assert table[0][2:4] == [6, 6] and "Votes in" in line
    with pytest.raises(UsageError, match="no pair to judge"):
        shared.vote(None, "A", "")


def test_what_a_rater_must_say_first(desk):
    for one, other, rater, says in ((SFT, PPO, " ", "your name"), (SFT, SFT, "ada", "two different models")):
        with pytest.raises(UsageError, match=says):
            desk.next_pair(one, other, rater)
    for _ in range(12):
        desk.vote(desk.next_pair(SFT, PPO, "ada"), "skip", "")
    with pytest.raises(UsageError, match="judged every pair"):
        desk.next_pair(SFT, PPO, "ada")


# -------------------------------------------------------------------------------------------------------------- runs
def test_runs_have_curves_samples_and_a_card(desk):
    assert list(desk.runs()) == ["rlhf-supervised-finetuning", "rlhf-ppo", "rlhf-reward-modelling"]
    rows = desk.metrics(["rlhf-ppo", "rlhf-reward-modelling"])
    assert "objective/kl" in rows["rlhf-ppo"][0] and rows["rlhf-reward-modelling"]
    samples = desk.samples("rlhf-ppo")
    assert samples and samples[0][0] == 1 and samples[0][1].startswith("Guest:")
    assert desk.card("rlhf-ppo").startswith("# rlhf-ppo") and desk.card(None) == "" and desk.samples(None) == []
