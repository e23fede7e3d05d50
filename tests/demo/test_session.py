"""The demo's backend: dialogues, prompts, answers side by side, pairs and votes."""

from pathlib import Path

import pytest
from helpers import last_checkpoint, save_model
from helpers.data import chatml_like
from helpers.demo_page import PPO, SFT, SLIDERS, open_backend, say
from helpers.errors import error_naming

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.parser import parse
from lightrlhf.demo.args import DemoArgs
from lightrlhf.demo.dialogue import (
    FORMS,
    edit_turn,
    end_stream,
    prompt_of,
    prompt_values,
    split_system,
    user_turn,
    with_system,
)
from lightrlhf.demo.session import STARTERS, DemoBackend, check_system
from lightrlhf.demo.votes import read_votes
from lightrlhf.rewards.functions import as_text


# -------------------------------------------------------------------------------------------------------------- chat
def test_an_answer_grows_and_has_reward_kl_and_length(backend):
    turns = [user_turn("A tea, please.", prompt_of([], "dialogue", "A tea, please.", "", "", ""))]
    waiting, *grown = backend.reply(turns, PPO, "", 5, *SLIDERS)
    assert waiting[-1]["pending"] == f"Loading {PPO} …"
    (again, *_) = backend.reply(turns, PPO, "", 5, *SLIDERS)
    assert again[-1]["pending"] == "Answering …"
    texts = [state[-1]["answer"].text for state in grown]
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:]))
    scored = backend.score_last(end_stream(grown[-1]), 1.0)
    assert [name for name, _ in scored[-1]["scores"]] == ["reward", "KL", ""]
    assert scored[-1]["content"] == grown[-1][-1]["answer"].text.strip()  # what is copied has no scores in it
    shown = backend.with_tokens(scored, 1, "as trained")
    assert shown[1]["tokens"].count('class="token ') == len(scored[-1]["answer"].ids)
    assert "segment 1" in shown[1]["tokens"] != backend.with_tokens(scored, 1, "5")[1]["tokens"]
    assert "tokens" not in backend.with_tokens(shown, 1, "5")[1]


def test_an_answer_that_fails_leaves_the_dialogue_as_it_was(backend):
    turns = say(backend, "A tea, please.")
    stream = backend.reply(turns, PPO, "", 5, 16, True, 1.0, 0, 7.0)
    assert "pending" in next(stream)[-1] and next(stream) is turns
    with pytest.raises(ValueError, match="--top_p 7.0"):
        next(stream)


def test_a_second_turn_gets_the_whole_dialogue_and_regenerating_samples_anew(backend):
    first = say(backend, "A tea, please.")
    second = say(backend, "And a scone.", first)
    roles = [message["role"] for message in second[-1]["answer"].prompt]
    assert roles == ["user", "assistant", "user"]
    assert second[-1]["answer"].prompt[1]["content"] == first[-1]["content"]
    assert say(backend, "A tea, please.")[-1]["answer"].ids == first[-1]["answer"].ids  # the same seed
    (*_, again) = backend.reply(second, PPO, "", 5, *SLIDERS)
    assert len(again) == 4 and again[-1]["answer"].ids != second[-1]["answer"].ids


def test_an_edited_message_drops_what_followed_it(backend):
    first = say(backend, "A tea, please.")
    second = say(backend, "And a scone.", first)
    turns = edit_turn(second, 2, "And a muffin.")
    assert [turn["content"] for turn in turns] == [*(turn["content"] for turn in first), "And a muffin."]
    assert turns[-1]["prompt"] == [*second[2]["prompt"][:-1], {"role": "user", "content": "And a muffin."}]
    assert edit_turn([user_turn("x", "x")], 0, "y")[0]["prompt"] == "y"
    for index, text in ((1, "x"), (2, " "), (9, "x"), (True, "x")):
        with pytest.raises(UsageError):
            edit_turn(second, index, text)


def test_a_system_prompt_needs_a_template_that_has_one(backend):
    turns = [user_turn("A tea, please.", prompt_of([], "dialogue", "A tea, please.", "", "", ""))]
    with error_naming(UsageError, "system"):  # the café's would write it as the barista's words
        list(backend.reply(turns, PPO, "Be kind.", 5, *SLIDERS))
    talk = turns[0]["prompt"]
    system = {"role": "system", "content": "Be kind."}
    assert (
        with_system(talk, "Be kind.") == [system, *talk] == with_system([{**system, "content": "x"}, *talk], "Be kind.")
    )
    assert with_system(talk, " ") is talk and with_system("as written", "Be kind.") == "as written"
    assert split_system(prompt_values([system, *talk, *talk])[0]) == (
        "Be kind.",
        [user_turn(talk[0]["content"], [system, *talk])],
    )
    check_system(chatml_like(), [system, *talk], "chatml")


def test_suggestions_are_prompts_of_the_data_else_starters(backend, base_model):
    first, *others = backend.suggestions(PPO)
    assert as_text(first) == "Could I get a large oat latte and two muffins, please?" and len(others) == 3
    alone = DemoBackend.open(parse(DemoArgs, ["--model_name", str(base_model), "--accelerator", "cpu"]))
    assert [prompt[0]["content"] for prompt in alone.suggestions(base_model.name)] == list(STARTERS)


def test_votes_on_a_checkpoint_are_kept_beside_it(sft_dir):
    assert open_backend(str(last_checkpoint(sft_dir))).votes_file == Path(sft_dir) / "votes.jsonl"


def test_a_model_without_a_run_is_served_alone(base_model, tmp_path, tokenizer):
    folder = save_model("llama", tmp_path / "alone", tokenizer)
    tokenizer.save_pretrained(folder)
    backend = DemoBackend.open(parse(DemoArgs, ["--model_name", str(folder), "--accelerator", "cpu"]))
    (label,) = backend.cache.labels()
    assert backend.runs() == {} and backend.votes_file.name == "votes.jsonl"
    assert say(backend, "A tea.", label=label)[-1]["answer"].ids
    with error_naming(UsageError, "--model_name"):
        DemoBackend.open(parse(DemoArgs, []))
    with error_naming(UsageError, "--model_name", "none"):
        DemoBackend.open(parse(DemoArgs, ["--model_name", str(tmp_path / "none"), "--accelerator", "cpu"]))


def test_settings_of_an_experiment(backend):
    assert backend.stored_settings(PPO) == [16, True, 0.9, 0, 1.0]
    with error_naming(UsageError, "generation settings"):
        backend.stored_settings(SFT)
    with pytest.raises(ValueError, match="--top_p 2.0"):
        backend.settings(16, True, 1.0, 0, 2.0)


def test_each_form_makes_its_prompt_and_is_recovered_from_it():
    assert prompt_of([], "as written", " x", "", "", "") == " x"
    post = prompt_of([], "summary", "", "r/cooking", " Bread ", "It is flat.")
    assert post == "SUBREDDIT: r/cooking\nTITLE: Bread\nPOST: It is flat.\nTL;DR:"
    assert prompt_values(post) == ([], "summary", "", "cooking", "Bread", "It is flat.")
    assert prompt_values("x y") == ([], "as written", "x y", "", "", "")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    turns, form, text, *_ = prompt_values(talk)
    assert (form, text) == ("dialogue", "c") and prompt_of(turns, form, text, "", "", "") == talk
    for form in FORMS:
        with error_naming(UsageError, "empty"):
            prompt_of([], form, "  ", "", "", " ")


def test_the_form_and_the_example_are_those_of_the_data(backend):
    assert backend.form(PPO) == "dialogue"
    assert as_text(backend.example(PPO)) == "Could I get a large oat latte and two muffins, please?"
    assert len(backend.prompts(PPO, "test")) == 12 and backend.test_prompt(PPO)[0]["role"] == "user"


# ------------------------------------------------------------------------------------------------------ side by side
def test_side_by_side_ends_with_scores(backend):
    names = backend.cache.newest()
    assert names == ["pretrained llama", SFT, PPO]
    waiting, *growing, (texts, scores) = backend.side_by_side(names, "Guest: A tea.\nBarista:", "", 3, *SLIDERS)
    assert waiting == ([""] * 3, []) and growing[-1] == (texts, []) and len(texts) == 3
    names_of = [[name for name, _ in row] for row in scores]
    assert names_of == [["reward", ""], ["reward", "KL", ""], ["reward", "KL", ""]]
    for wrong in (names[:1], names * 2):
        with error_naming(UsageError, "2 to 4"):
            list(backend.side_by_side(wrong, "x", "", 3, *SLIDERS))


# ----------------------------------------------------------------------------------------------------- compare blind
def test_raters_see_the_same_pairs_in_random_order_and_vote_once(backend):
    shared = open_backend(*backend.args.model_name, "--overlap", "1", "--votes_file", str(backend.votes_file))
    order = set()
    for number in range(6):
        pair = shared.next_pair(SFT, PPO, "ada")
        other = shared.next_pair(PPO, SFT, f"grace {number}")
        if number == 0:
            assert pair["pair"] == other["pair"] and sorted(pair["responses"]) == sorted(other["responses"])
        order.add(tuple(pair["models"]))
        assert shared.vote(pair, "A", "short") and not shared.vote(pair, "B", "")
    assert len(order) == 2  # either model may be shown first
    votes = read_votes(shared.votes_file)
    assert len({vote["pair"] for vote in votes}) == 6 == len(votes)
    table, line = shared.vote_table()
    assert table[0][2:4] == [6, 6] and line.startswith("6 votes in")
    with error_naming(UsageError, "pair"):
        shared.vote(None, "A", "")
    shared.withdraw(pair)
    assert len(read_votes(shared.votes_file)) == 5 and shared.vote(pair, "B", "")
    for none in (None, {**pair, "rater": "nobody"}):
        with error_naming(UsageError, "undo"):
            shared.withdraw(none)


def test_a_pair_needs_a_rater_and_two_models_and_pairs_run_out(backend):
    for one, other, rater, fact in ((SFT, PPO, " ", "name"), (SFT, SFT, "ada", "two")):
        with error_naming(UsageError, fact):
            backend.next_pair(one, other, rater)
    backend = open_backend(*backend.args.model_name, "--split", "test", "--votes_file", str(backend.votes_file))
    for _ in range(12):
        backend.vote(backend.next_pair(SFT, PPO, "ada"), "skip", "")
    with error_naming(UsageError, "pair"):
        backend.next_pair(SFT, PPO, "ada")


def test_runs_are_the_experiments_and_the_reward_model(backend):
    assert list(backend.runs()) == ["rlhf-supervised-finetuning", "rlhf-ppo", "rlhf-reward-modelling"]
