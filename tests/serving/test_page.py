"""What howto/export.md tells to type is answered."""

import json
import re
import shlex
from types import SimpleNamespace

import pytest
from helpers import ROOT, save_model
from helpers.pages import blocks
from helpers.serving import serving

from lightrlhf.serving.app import App
from lightrlhf.serving.bodies import TextBody

PAGE = (ROOT / "howto" / "export.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    path = save_model("llama", tmp_path_factory.mktemp("served") / "model", tokenizer)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.slow
def test_the_requests_of_the_page_are_answered(folder):
    console, opened = (body for body, _ in blocks(PAGE, "console"))
    words = shlex.split(console.replace("\\\n", " ").removeprefix("$ "))
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8000/v1/chat/completions"] and words[3:6:2] == ["-H", "-d"]
    opening = shlex.split(opened.partition("\n")[0])
    assert opening[3] == "http://127.0.0.1:8000/sessions"
    with serving(folder) as (_, server):
        session = server.ask("/sessions", json.loads(opening[-1])).json()
        shown = json.loads(opened.partition("\n")[2].replace(", …", ""))
        assert session.keys() == shown.keys() and shown["settings"].items() <= session["settings"].items()
        answer = server.ask("/v1/chat/completions", json.loads(words[6]))
        assert answer.json()["choices"][0]["message"]["role"] == "assistant"


def test_the_table_has_every_route(monkeypatch):
    routes = []
    monkeypatch.setattr("lightrlhf.serving.app.Starlette", lambda routes, **_: routes)
    monkeypatch.setattr("lightrlhf.serving.app.KeyCheck", lambda app, *_: routes.extend(app))
    App(engine=SimpleNamespace(tokenizer=None), key="")
    table = PAGE.split("### Routes of our own engine")[1].split("\n- ")[0]
    assert {route.path.replace("{id}", "ID") for route in routes} == set(re.findall(r"[ `](/[\w/]+)", table))
    named = re.search(r"/v1/completions` \|(.*)\|", table)[1]
    assert set(re.findall(r"`(\w+)`", named)) <= {*TextBody.model_fields}
