"""Dialogues: tokens stay as they were sampled, turns batch together, and whoever speaks as the user says its part."""

import copy
import json
from http.server import ThreadingHTTPServer

import pytest
import torch
from helpers import save_model, tiny_policy
from helpers.errors import error_naming
from helpers.servers import Handler, answering

from datasets_prep.cafe_talk.prepare_data import main as prepare
from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.cli.groups import DecodingArgs
from lightrlhf.data.tokens import encode_prompt
from lightrlhf.generation.dialogues import (
    Dialogue,
    as_row,
    from_row,
    load_dialogues,
    roll_out,
    score_turns,
    user_turn_ids,
)
from lightrlhf.generation.users import ScriptedUser, UserArgs, instruction, load_user, question_of, recorded_user

ARGS = DecodingArgs(max_new_tokens=7, temperature=0.9)


@pytest.fixture
def policy(tokenizer):
    return tiny_policy("llama", vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1)


def openings(tokenizer, count: int = 4) -> list[Dialogue]:
    found = []
    for index in range(count):
        messages = [{"role": "user", "content": f"A latte for {'me ' * index}please."}]
        found.append(
            Dialogue(index, messages, encode_prompt(tokenizer, messages), columns={"user_turns": ["", "And?"]})
        )
    return found


def shout(dialogues, seeds, **columns):
    return [f"{messages[-1]['content'].upper()[:9]} {seed % 5}!" for messages, seed in zip(dialogues, seeds)]


def stops_at_two(dialogues, seeds, **columns):
    return ["More?" if len(messages) < 3 else None for messages in dialogues]


def rolled(policy, tokenizer, dialogues, num_turns=3, user=None, seed=5, slots=8, args=ARGS):
    return roll_out(policy, tokenizer, dialogues, num_turns, user or ScriptedUser(shout, "shout"), args, seed, slots)


def test_tokens_in_are_the_tokens_out(policy, tokenizer):
    """Each turn begins where the template ends; what was sampled is neither tokenised again nor given an end token."""
    for dialogue in rolled(policy, tokenizer, openings(tokenizer)):
        assert dialogue.num_turns == 3 and [m["role"] for m in dialogue.messages] == ["user", "assistant"] * 3
        place = 0
        for turn, (start, end) in enumerate(dialogue.turn_spans):
            said = dialogue.messages[2 * turn]["content"]
            between = user_turn_ids(tokenizer, said) if turn else encode_prompt(tokenizer, dialogue.messages[:1])
            assert dialogue.input_ids[place:start] == between
            reply = dialogue.turn_ids(turn)
            assert (reply[-1] != tokenizer.eos_token_id) == dialogue.truncated[turn]
            assert len(reply) == 7 if dialogue.truncated[turn] else len(reply) <= 7
            assert (
                tokenizer.decode(reply, skip_special_tokens=True).strip() == dialogue.messages[2 * turn + 1]["content"]
            )
            place = end
        assert place == len(dialogue.input_ids)


def test_a_rolled_dialogue_reads_as_prepared_data_does(tokenizer, tmp_path):
    """The ids of whole turns are those that data preparation gives the same messages."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    flags = ["--tokenizer_name", str(tmp_path / "tokenizer"), "--num_dialogues", "6", "--num_held_out", "2"]
    prepare(["--destination_dir", str(tmp_path / "data"), *flags, "--num_proc", "1"])
    for known in load_dialogues(str(tmp_path / "data"), "train"):
        dialogue = known.before(0)
        assert dialogue.input_ids == encode_prompt(tokenizer, dialogue.messages)
        for turn in range(known.num_turns):
            dialogue = dialogue.with_reply(known.turn_ids(turn), known.messages[2 * turn + 1]["content"], False)
            if turn + 1 < known.num_turns:
                text = recorded_user([dialogue], 0)[0] if turn else known.messages[2]["content"]
                dialogue = dialogue.with_user_message(user_turn_ids(tokenizer, text), text)
        assert dialogue == known
        assert known.columns["order"][0] in ("latte", "cappuccino", "mocha", "flat white", "hot chocolate")


def test_what_is_said_does_not_depend_on_company_or_on_the_turn_it_starts_from(policy, tokenizer):
    whole = rolled(policy, tokenizer, openings(tokenizer))
    alone = [rolled(policy, tokenizer, [row], slots=1)[0] for row in openings(tokenizer)]
    assert whole == alone
    apart = [row.before(turn) for row, turn in zip(whole, (2, 0, 1, 2))]  # at different turns in one batch
    assert rolled(policy, tokenizer, apart) == whole
    lengths = rolled(policy, tokenizer, apart, num_turns=[3, 1, 2, 3])
    assert [row.num_turns for row in lengths] == [3, 1, 2, 3]
    assert rolled(policy, tokenizer, apart, seed=6) != whole
    seeds = [row.turn_seed(5) for row in (whole[0], whole[1], whole[0].before(1), whole[0].before(2))]
    assert len({*seeds}) == 4  # by dialogue and by turn
    renumbered = [Dialogue(**{**vars(row), "index": 9}) for row in openings(tokenizer)[:1]]
    assert rolled(policy, tokenizer, renumbered)[0].input_ids != whole[0].input_ids


def test_a_user_with_nothing_to_say_ends_a_dialogue_and_so_does_a_model_without_room(policy, tokenizer):
    ended = rolled(policy, tokenizer, openings(tokenizer), user=ScriptedUser(stops_at_two, "stops"))
    assert [row.num_turns for row in ended] == [2] * 4 and not any(row.full for row in ended)
    recorded = rolled(policy, tokenizer, openings(tokenizer), user=recorded_user)
    assert [row.num_turns for row in recorded] == [2] * 4 and recorded[0].messages[2]["content"] == "And?"
    small = tiny_policy("llama", vocab_size=len(tokenizer), max_position_embeddings=50)
    full = rolled(small, tokenizer, openings(tokenizer), num_turns=5)
    assert all(row.full and 0 < row.num_turns < 5 and row.turn_spans[-1][1] <= 50 for row in full)


def test_a_line_keeps_a_dialogue_whole(policy, tokenizer):
    for row in rolled(policy, tokenizer, openings(tokenizer)):
        assert from_row(json.loads(json.dumps(as_row(row))), row.index, row.columns) == row


def test_a_scorer_sees_each_prefix_with_its_own_ids(policy, tokenizer):
    seen = []

    def scorer(groups):
        seen.extend(sample for group in groups for sample in group)
        return [[float(len(sample.prompt)) if len(sample.prompt) > 1 else None] for group in groups for sample in group]

    rows = rolled(policy, tokenizer, openings(tokenizer, 2))
    assert score_turns(scorer, rows) == [[None, 3.0, 5.0]] * 2
    assert seen[1].response_ids == rows[0].turn_ids(1) and seen[1].prompt_ids == rows[0].before(1).input_ids
    assert seen[5].columns["messages"] == rows[1].messages and seen[5].truncated == rows[1].truncated[2]


def test_a_template_that_rewrites_turns_is_refused(tokenizer):
    rewriting = copy.deepcopy(tokenizer)
    rewriting.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with error_naming(UsageError, "earlier turns"):
        user_turn_ids(rewriting, "hello")


# ------------------------------------------------------------------------------------------------------------ users
def test_what_a_language_model_says_as_the_user_is_parsed():
    assert question_of("Justification: why not.\nQuestion: And milk?") == "And milk?"
    assert question_of("Question: one? No.\nQuestion: two?") == "two?"
    assert question_of("  just this ") == "just this" and question_of("Question: ") is None
    asked = instruction([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}])
    assert "### user: hi\n\n### assistant: yes?" in asked and "Question:" in asked


def test_a_local_model_speaks_as_the_user(policy, tokenizer, tmp_path):
    folder = save_model("llama", tmp_path / "user", tokenizer, max_position_embeddings=512)
    tokenizer.save_pretrained(folder)
    user = load_user(UserArgs(user_model=str(folder), user_max_new_tokens=9), torch.device("cpu"), 4)
    one, two = (rolled(policy, tokenizer, openings(tokenizer), user=user, seed=seed) for seed in (5, 5))
    assert one == two and all(row.num_turns == 3 or row.messages[-1]["role"] == "assistant" for row in one)
    assert rolled(policy, tokenizer, openings(tokenizer), user=user, seed=6) != one
    user.policy.model.config.max_position_embeddings = 200  # the instruction alone is longer
    assert [row.num_turns for row in rolled(policy, tokenizer, openings(tokenizer), user=user)] == [1] * 4


@pytest.fixture
def server():
    """An OpenAI-compatible server on localhost that asks by number, and refuses a dialogue about a samovar."""
    asked: list[dict] = []

    class Asks(Handler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            if "samovar" in body["messages"][0]["content"]:
                return self.send(400, {"error": {"message": "no samovar"}})
            text = f"Justification: none.\nQuestion: number {body['seed'] % 9}?"
            self.send(200, {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})

    with answering(ThreadingHTTPServer(("127.0.0.1", 0), Asks)) as url:
        yield url, asked


def test_a_served_model_speaks_as_the_user(policy, tokenizer, server):
    url, asked = server
    args = UserArgs(user_model="guest", base_url=[url], user_temperature=0.5)
    user = load_user(args, torch.device("cpu"), 4)
    rows = rolled(policy, tokenizer, openings(tokenizer), user=user)
    assert {row.messages[2]["content"][:7] for row in rows} == {"number "}
    assert rolled(policy, tokenizer, openings(tokenizer), user=user) == rows
    assert asked[0]["model"] == "guest" and asked[0]["temperature"] == 0.5
    tea = [Dialogue(0, [{"role": "user", "content": "samovar"}], encode_prompt(tokenizer, "samovar"))]
    with error_naming(RunFailure, "status 400", "no samovar"):
        rolled(policy, tokenizer, tea, user=user)


def test_a_scripted_user_that_fails_is_named(policy, tokenizer):
    def fails(dialogues, seeds, **columns):
        raise KeyError("order")

    for function, fact in (
        (fails, "KeyError"),
        (lambda *_, **__: ["one"], 4),
        (lambda *_, **__: "four", 4),
        (lambda *_, **__: dict.fromkeys("abcd"), 4),
    ):
        with error_naming(RunFailure, "the guest", fact):
            rolled(policy, tokenizer, openings(tokenizer), user=ScriptedUser(function, "the guest"))
