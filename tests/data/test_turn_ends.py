"""The token that ends an assistant turn, read off the chat template."""

import copy
from types import SimpleNamespace

import pytest
from helpers.data import CHATML_TEMPLATE, LLAMA2_TEMPLATE, LLAMA3_TEMPLATE, sentencepiece_like
from helpers.ends import EOS, GEMMA, PHI3, tokenizer_of
from helpers.templates import ZOO

from datasets_prep.common import PLAIN_TEMPLATE, complete
from lightrlhf.cli.errors import UsageError
from lightrlhf.data.tokens import decode, encode_prompt, encode_response
from lightrlhf.data.turn_ends import turn_end, turn_ends, without_end
from lightrlhf.generation.dialogues import user_turn_ids
from lightrlhf.models.tokenizer import end_ids
from lightrlhf.rewards.encoding import Encoding, Sample

TAGS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
OPEN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n\n' }}{% endfor %}"
PICKY = "{% if messages | length < 9 %}{{ raise_exception('nine messages, please') }}{% endif %}"
MISSING = "{{ messages[0].parts.text + '' }}"
DEAF = "{{ bos_token }}{% for m in messages %}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    "template, end",
    [
        (CHATML_TEMPLATE, "<|im_end|>"),
        (LLAMA3_TEMPLATE, "<|eot_id|>"),
        (GEMMA, "<end_of_turn>"),
        (PHI3, "<|end|>"),
        (TAGS, "<|im_end|>"),
        (PLAIN_TEMPLATE, EOS),
    ],
)
def test_the_template_says_what_ends_a_turn(template, end):
    marks = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|end|>")
    tokenizer = tokenizer_of(template, *marks)
    assert turn_end(tokenizer) == tokenizer.convert_tokens_to_ids(end)


def test_sentencepiece_in_the_shape_of_llama_2_and_mistral(tmp_path):
    tokenizer = complete(sentencepiece_like(tmp_path), None)
    assert turn_end(tokenizer) == tokenizer.eos_token_id
    tokenizer.chat_template = LLAMA2_TEMPLATE
    assert turn_end(tokenizer) == tokenizer.eos_token_id


def test_an_added_token_that_is_not_special_ends_a_turn():
    tokenizer = tokenizer_of(CHATML_TEMPLATE, added=("<|im_end|>",))
    assert turn_end(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_an_added_run_of_newlines_does_not_end_a_turn():
    tokenizer = tokenizer_of(OPEN, added=("\n\n",))
    assert turn_end(tokenizer) is None
    tokenizer.chat_template = OPEN + "{{ eos_token }}"
    assert turn_end(tokenizer) == tokenizer.eos_token_id


@pytest.mark.parametrize("template", [None, "", OPEN, PICKY, MISSING, DEAF])
def test_no_end_without_a_template_that_writes_one(template):
    assert turn_end(tokenizer_of(template, "<|im_end|>")) is None


def test_a_marker_that_is_plain_text_ends_no_turn():
    assert turn_end(tokenizer_of(CHATML_TEMPLATE)) is None


def test_a_changed_template_or_end_token_is_read_again():
    tokenizer = tokenizer_of(CHATML_TEMPLATE, "<|im_end|>", "<|eot_id|>")
    other = copy.deepcopy(tokenizer)
    assert turn_end(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.chat_template = PLAIN_TEMPLATE
    assert turn_end(tokenizer) == tokenizer.eos_token_id
    tokenizer.eos_token = "<|eot_id|>"
    assert turn_end(tokenizer) == tokenizer.convert_tokens_to_ids("<|eot_id|>")
    assert turn_end(other) == other.convert_tokens_to_ids("<|im_end|>")


# ------------------------------------------------------------------------------- several tokens, and calls' own
ASKED = [{"role": "user", "content": "a latte"}]
CALL = {"type": "function", "function": {"name": "pour", "arguments": {"cup": "latte"}}}
TOOLS = [{"type": "function", "function": {"name": "pour", "parameters": {"type": "object", "properties": {}}}}]


def model_with(*ends: int) -> SimpleNamespace:
    """A model of which only the generation config is read."""
    return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[*ends]))


@pytest.mark.parametrize(
    "kind, words, calls",
    [
        ("parts", "<|end_of_turn|>", []),
        ("two_ends", "<|endoftext|>", []),
        ("last_eos", "<|end|>", []),
        ("channels", "<|return|>", ["<|call|>"]),
        ("llama31_tools", "<|eot_id|>", ["<|eom_id|>"]),
        ("call_and_header", "<|eot|>", ["<|eom|>"]),
        ("call_awaits", "<end_of_turn>", ["<start_response>"]),
        ("tagged_lines", "<|im_end|>", []),
    ],
)
def test_the_last_token_of_a_turn_ends_it(kind, words, calls):
    tokenizer = ZOO[kind].tokenizer
    assert tokenizer.convert_ids_to_tokens(turn_ends(tokenizer)) == [words, *calls]


@pytest.mark.parametrize("kind", ZOO)
def test_sampling_stops_where_a_trained_turn_ends_and_the_dialogue_goes_on_from_there(kind):
    tokenizer = ZOO[kind].tokenizer
    ends = end_ids(tokenizer, model_with(*turn_ends(tokenizer)))
    answers = ["here it is", {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    for answer, tools in zip(answers, (None, TOOLS)):
        try:
            ids = encode_response(tokenizer, answer, ASKED, tools)
        except UsageError:
            continue
        stop = next(place for place, index in enumerate(ids, start=1) if index in ends)
        assert not decode(tokenizer, ids[stop:]).strip()
        assert tools or decode(tokenizer, without_end(tokenizer, ids)).strip() == decode(tokenizer, ids[:stop]).strip()
    messages = [*ASKED, {"role": "assistant", "content": "here it is"}, {"role": "user", "content": "and?"}]
    if kind in ("parts", "unnamed_parts", "two_ends", "last_eos", "call_and_header", "call_awaits", "tagged_lines"):
        ids = encode_response(tokenizer, "here it is", ASKED)
        sampled = ids[: next(place for place, index in enumerate(ids, start=1) if index in ends)]
        whole = [*encode_prompt(tokenizer, ASKED), *sampled, *user_turn_ids(tokenizer, "and?")]
        assert whole == encode_prompt(tokenizer, messages)


def test_the_first_of_two_tokens_ends_no_response():
    tokenizer = ZOO["parts"].tokenizer
    first, last, other = tokenizer.convert_tokens_to_ids(["<|end_response|>", "<|end_of_turn|>", "<|turn|>"])
    assert end_ids(tokenizer, model_with(first, other)) == [last, other]


@pytest.mark.parametrize("kind", ["parts", "unnamed_parts", "two_ends", "tagged_lines", "chatml"])
def test_a_truncated_response_is_scored_without_any_token_of_its_end(kind):
    tokenizer = ZOO[kind].tokenizer
    _, whole = Encoding(tokenizer).prompt_and_response(Sample(ASKED, "here it is"))
    _, cut = Encoding(tokenizer).prompt_and_response(Sample(ASKED, "here it is", truncated=True))
    assert whole[: len(cut)] == cut and tokenizer.decode(cut).endswith("here it is")
    assert decode(tokenizer, whole).strip().endswith("here it is")
