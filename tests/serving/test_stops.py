"""Streamed answers are the whole ones, character for character, however a stop text is split over tokens."""

import json

import pytest
from helpers import save_model
from helpers.data import sentencepiece_like
from starlette.testclient import TestClient

from lightrlhf.cli.groups import ModelArgs
from lightrlhf.generation.response_texts import begun
from lightrlhf.models.loading import load_policy
from lightrlhf.serving.app import App
from lightrlhf.serving.engine import Engine

KEY = "key of the tests"
STOPS = {
    "several tokens": ["abc"],
    "one begins another": ["ab", "abc"],
    "one ends another": ["bc", "abc"],
    "begins with itself": ["aab"],
    "a character of two tokens": ["é"],
    "such a character at its end": ["bé"],
    "mostly begins and does not end": ["abcabcabc"],
    "longer than the answer": ["a" * 50, "ba"],
}


@pytest.fixture(scope="module", params=["bytes", "sentencepiece"])
def served(request, tmp_path_factory, tokenizer):
    """A client of a model with this tokenizer, and the tokens of a, b, c and of the two bytes of é."""
    folder = tmp_path_factory.mktemp("served")
    own = tokenizer if request.param == "bytes" else sentencepiece_like(folder / "tokenizer")
    save_model("llama", folder / "model", own)
    policy = load_policy(str(folder / "model"), ModelArgs(), own).eval()
    names = ["a", "b", "c", *(["Ã", "©"] if request.param == "bytes" else ["<0xC3>", "<0xA9>"])]
    ids = own.convert_tokens_to_ids(names)
    assert own.decode(ids) == "abcé"
    app = App(Engine(policy, own, "model", "model", num_slots=4), KEY).asgi
    with TestClient(app, headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client, ids, own


def parts(client, body: dict) -> list[dict]:
    """The choices of a stream."""
    lines = client.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")
    rows = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return [row["choices"][0] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"include_stop_str_in_output": True}, {"skip_special_tokens": False}], ids=str)
@pytest.mark.parametrize("stops", STOPS.values(), ids=STOPS.keys())
def test_a_stream_shows_the_whole_text_once(served, stops, more):
    client, allowed, tokenizer = served
    allowed = allowed + [tokenizer.eos_token_id] * bool(more.get("skip_special_tokens") is False)
    body = {"prompt": [5, 6], "max_tokens": 14, "n": 12, "seed": 3, "temperature": 20.0, "stop": stops, "logprobs": 0}
    body |= {"allowed_token_ids": allowed, "ignore_eos": True, **more}
    whole = client.post("/v1/completions", json=body).json()["choices"]
    streamed = parts(client, body)
    for choice in whole:
        own = [part for part in streamed if part["index"] == choice["index"]]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        offsets = [offset for part in own for offset in part["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]
        if "\ufffd" not in choice["text"]:  # which SentencePiece writes for whole characters, too, beside a broken one
            assert "".join(part["text"] for part in own) == choice["text"]
    assert any(len(choice["text"]) > 4 for choice in whole)


def test_only_what_may_become_a_stop_text_is_held_back():
    assert begun("xab", ["abc"]) == 2 and begun("xab", ["b"]) == 0 and begun("xa", ["aab", "ba"]) == 1
    assert begun("", ["a"]) == 0 and begun("aa", ["aaab"]) == 2 and begun("ab", []) == 0
