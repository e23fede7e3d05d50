"""The tab Rollouts without a browser: the index of a file, views and their addresses, and what is shown of them."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import ROOT, environment
from helpers.rollout_files import hacked_run, logged_row, write_rows
from helpers.templates import ZOO

from lightrlhf.demo import rollout_file, rollouts_html
from lightrlhf.demo.rollout_file import NUMBERS, RolloutFile
from lightrlhf.demo.rollouts import View, audit_disagrees, compare, curves, select, steps_of
from lightrlhf.demo.rollouts_html import Run, page
from lightrlhf.demo.rollouts_tab import name_tokens

RUN = Run("run", "grpo", lambda ids: [f"<{i}>" for i in ids])


def opened(folder: Path, *rows: dict) -> RolloutFile:
    write_rows(folder / "rollouts.jsonl", rows)
    return RolloutFile(folder / "rollouts.jsonl")


def shown(file: RolloutFile, run: Run = RUN, **query: object) -> str:
    """The HTML of a view."""
    return shown_as(file, run, query)


def shown_as(file: RolloutFile, run: Run, query: dict[str, object]) -> str:
    return page(file.refresh(), View.from_query({name: str(value) for name, value in query.items()}), run)


def numbers_of(html: str) -> list[int]:
    """The samples on a page, in order."""
    return [int(number) for number in re.findall(r'aria-label="Sample (\d+)"', html)]


# ---------------------------------------------------------------------------------------------------------- the index
def test_a_trace_is_a_sample_for_each_row_beside_what_the_template_writes_now(tmp_path):
    rows = [
        {"ids": [7, 8, 9], "mask": [0, 1, 1], "began": "first", "rendering": [["a b", "a b"], ["<c>", "c"], ["", "d"]]},
        {"ids": [7, 5], "mask": [0, 1], "began": "edited", "why": "turn 0", "rendering": None},
        {"ids": [7], "mask": [1], "rendering": [["x", "x"]]},
    ]
    turns = [{"row": 0, "stop_reason": "stop", "version": "v1"}, {"row": 0, "stop_reason": "length", "version": "v2"}]
    trace = {"id": "5f", "settings": {}, "rows": rows, "turns": turns, "counts": {}}
    file = opened(tmp_path, logged_row(step=0, response="r"), trace, {"rows": [1], "turns": []}, {"rows": 1})
    assert len(file.refresh()) == 4 and file.samples.row(2)["response_ids"] == [7, 5] and list(file.samples.bad) == [4]
    assert file.samples.row(1)["response"] == "a b<c>" and file.samples.find("<c>").tolist() == [0, 1, 0, 0]
    alone = shown(file, sample=1)
    assert "session 5f" in alone and "stop by v1, length by v2" in alone and "in 2 places" in alone
    assert "a b<del>&lt;c&gt;</del><ins>c</ins><ins>d</ins>" in alone
    assert "turn 0" in shown(file, sample=2) and "template" not in shown(file, sample=2)
    assert "nowhere" in shown(file, sample=3)


def test_a_file_that_grows_is_read_on_and_one_that_is_replaced_anew(tmp_path):
    file = opened(tmp_path, *(logged_row(step=1, response=f"r{i}", group=i) for i in range(3)))
    assert len(file.refresh()) == 3 and file.samples.is_read
    with file.path.open("a") as growing:
        growing.write(json.dumps(logged_row(step=2, response="new"))[:30])
    assert len(file.refresh()) == 3 and "not complete yet" in shown(file)
    write_rows(file.path, [logged_row(step=1, response=f"r{i}", group=i) for i in range(3)])  # another inode
    with file.path.open("a") as growing:
        growing.write(json.dumps(logged_row(step=2, response="new")) + "\n")
    assert len(file.refresh()) == 4 and file.samples.row(3)["response"] == "new"
    before = file.samples
    write_rows(file.path, [logged_row(step=1, response="resumed")])
    assert len(file.refresh()) == 1 and file.samples.row(0)["response"] == "resumed"
    assert before.row(2)["response"] == "r2"  # of a view that is being drawn
    file.path.write_text(json.dumps(logged_row(step=7, response="rewritten in place")) + "\n" * 500)
    assert file.refresh().table["step"].tolist() == [7]
    file.path.unlink()
    assert file.refresh() is None


def test_chunks_and_lines_longer_than_one_give_the_same_index(tmp_path, monkeypatch):
    rows = [logged_row(step=i // 2 + 1, group=i % 2, response="x" * 50 * i, log_ratio=[i, -2]) for i in range(7)]
    file = opened(tmp_path, *rows)
    whole = file.refresh()
    monkeypatch.setattr(rollout_file, "CHUNK", 300)
    parts = RolloutFile(file.path).refresh()
    assert len(parts) == 7 and set(NUMBERS) <= set(whole.table)
    pd.testing.assert_frame_equal(whole.table, parts.table)
    assert [parts.row(i)["response"] for i in range(7)] == [row["response"] for row in rows]
    slow = RolloutFile(file.path)
    assert not slow.refresh(seconds=0).is_read and "of the file is read so far" in shown_now(slow)


def shown_now(file: RolloutFile) -> str:
    return page(file.samples, View(), RUN)


def test_numbers_are_those_of_the_tokens_that_the_policy_sampled(tmp_path):
    row = logged_row(response_ids=[4, 5, 6], mask=[1, 0, 1], log_ratio=[1, 50, -3], advantages=[2, 50, None], audit=0.5)
    samples = opened(tmp_path, row, logged_row(log_ratio=None, score=None, rewards={"late": 2})).refresh()
    first = samples.table.iloc[0]
    assert (first["kl"], first["length"], first["advantage"], first["deepest advantage"]) == (-2, 2, 2, 2)
    assert first["audit"] == 0.5 and math.isnan(first["deepest value"])
    assert math.isnan(samples.table["kl"][1]) and math.isnan(samples.table["score"][1])
    assert math.isnan(samples.table["reward late"][0]) and samples.table["reward late"][1] == 2


BAD = {
    "not json": "is not JSON",
    "[1]": "is not a JSON object",
    "{}": "is not a sample",
    '{"step": "1", "prompt": "a", "response": "b"}': "is not a sample",
    "[" * 100_000: "is not JSON",
    '"\\ud800"': "is not a JSON object",
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:10])
def test_a_bad_line_is_named_in_place_and_the_others_are_shown(line, tmp_path):
    file = opened(tmp_path, logged_row(response="before"))
    with file.path.open("a") as growing:
        growing.write(line + "\n\n" + json.dumps(logged_row(response="after")) + "\n")
    html = shown(file, Run("run", "grpo", None))
    assert f"rollouts.jsonl line 2 {BAD[line]}" in html and "before" in html and "after" in html


def test_rows_of_older_versions_and_with_foreign_values_are_shown(tmp_path):
    old = {"step": 3, "prompt": "p", "response": "an old answer"}
    odd = old | {"group": "x", "mask": "no", "log_ratio": [1], "rewards": [], "score": "high", "columns": 4}
    odd |= {"response_ids": {"a": 1}, "audit": {}, "version": [], "truncated": "perhaps", "advantages": {"b": 2}}
    huge = old | {
        "response_ids": [1, "a", None],
        "log_ratio": [10**400, "x", 1e308],
        "score": 10**400,
        "rewards": {"n": {}},
    }
    file = opened(tmp_path, old, odd, huge, logged_row(step=3, log_ratio=[1e308, 1e308]))
    for query in ({}, {"step": "all"}, {"sample": 2}, {"against": 3}, {"sort": "KL"}, {"colour": "value"}):
        assert "an old answer" in shown(file, Run("run", "ppo", None), **query)


def test_search_is_without_case_and_in_quotes_of_whole_words(tmp_path):
    texts = ["Um, tea", "NUMBER", "um", "drum kit", "Straße um", "é um!", "a\0b", "tümum"]
    samples = opened(tmp_path, *(logged_row(prompt="asked", response=text) for text in texts)).refresh()
    assert np.flatnonzero(samples.find("um")).tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert np.flatnonzero(samples.find('"UM"')).tolist() == [0, 2, 4, 5]
    assert np.flatnonzero(samples.find("STRASSE")).tolist() == [4]
    assert samples.find("asked").all() and not samples.find("umno").any()
    assert np.flatnonzero(samples.find("a\0b")).tolist() == [6] and not samples.find('"(um"').any()
    assert not samples.find("tea number").any()  # across two texts


@pytest.mark.slow
def test_only_the_index_is_in_memory_and_torch_is_not(tmp_path):
    write_rows(tmp_path / "rollouts.jsonl", [logged_row(step=i) for i in range(30)])
    code = (
        "import sys\nfrom pathlib import Path\nfrom lightrlhf.demo.rollout_file import RolloutFile\n"
        "from lightrlhf.demo.rollouts import View\nfrom lightrlhf.demo.rollouts_html import Run, page\n"
        f"file = RolloutFile(Path({str(tmp_path)!r}) / 'rollouts.jsonl')\n"
        "html = page(file.refresh(), View(), Run('r', 'ppo', None))\n"
        "assert 'Step 29' in html and not {'torch', 'transformers', 'gradio'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), cwd=ROOT)


# -------------------------------------------------------------------------------------------------------------- views
def test_a_view_and_its_address_are_each_others_inverse():
    view = View("a run", 3, False, 1, "00ff", "KL", "lowest first", "value", 'q & "x"', 2, 7)
    for one in (view, View(), View(run="é", all_steps=True)):
        assert View.from_query(dict(re_parsed(one.query()))) == one
    wild = {"step": "-1", "against": "x", "sort": "'", "order": "", "colour": "red", "page": "0", "sample": "1e9"}
    assert View.from_query(wild) == View()
    assert len(View.from_query({"q": "x" * 1000}).q) == 200


def re_parsed(query: str) -> list[tuple[str, str]]:
    from urllib.parse import parse_qsl

    return parse_qsl(query)


def test_groups_are_in_the_order_of_their_best_samples_and_missing_values_last(tmp_path):
    scores = {0: [1, 9], 1: [None, 5], 2: [7, 7]}
    rows = [logged_row(step=2, group=group, score=score) for group, both in scores.items() for score in both]
    file = opened(tmp_path, logged_row(step=1), *rows)
    assert numbers_of(shown(file)) == [2, 1, 5, 6, 4, 3]
    assert numbers_of(shown(file, order="lowest first")) == [1, 2, 4, 3, 5, 6]
    assert numbers_of(shown(file, sort="order of the file")) == [1, 2, 3, 4, 5, 6]
    assert numbers_of(shown(file, step=1)) == [0] and numbers_of(shown(file, step="all")) == [2, 1, 5, 6, 4, 3, 0]


@pytest.mark.parametrize("sort, field", [("length", "response_ids"), ("KL", "log_ratio"), ("advantage", "advantages")])
def test_samples_are_sorted_by_what_is_asked(sort, field, tmp_path):
    values = {"response_ids": [[1], [1, 2, 3], [1, 2]], "log_ratio": [[1, 0], [3, 1], [1, 1]]}
    values["advantages"] = [[1, -1], [2, 2], [1, 0]]
    rows = [logged_row(**({"response_ids": [5, 6]} | {field: value})) for value in values[field]]
    assert numbers_of(shown(opened(tmp_path, *rows), sort=sort)) == [1, 2, 0]


def test_the_same_prompt_through_training_has_the_steps_at_which_it_was_logged(tmp_path):
    rows = [logged_row(step=step, prompt=f"p{step % 3}", response=f"at {step}") for step in range(1, 10)]
    file = opened(tmp_path, *rows)
    (address,) = re.findall(r'href="\?([^"]*prompt=[^"]*)"', shown(file))
    view = View.from_query(dict(re_parsed(address.replace("&amp;", "&"))))
    assert steps_of(file.samples, view) == [3, 6, 9] and view.step == 9
    html = page(file.samples, view.change(step=5), Run("run", "ppo", None))
    assert "at 6" in html and "one prompt at 3 steps" in html
    assert "was not logged in this run" in shown(file, prompt="0123456789")


def test_pages_have_twenty_groups_each(tmp_path):
    file = opened(tmp_path, *(logged_row(group=group, score=-group) for group in range(45)))
    first, last = shown(file), shown(file, page=9)
    assert numbers_of(first) == [*range(20)] and numbers_of(last) == [*range(40, 45)]
    assert "groups 41 to 45 of 45" in last and "previous page" in last and "next page" not in last


def test_large_groups_and_long_responses_are_cut_and_open_alone(tmp_path):
    rows = [logged_row(group=i // 40, response_ids=[7] * 300, score=-i) for i in range(800)]
    file = opened(tmp_path, *rows)
    html = shown(file)
    assert len(numbers_of(html)) == 80 and "40 samples, the first 4 shown" in html and "all 300 tokens" in html
    assert html.count("&lt;7&gt;") == 80 * 50 and len(html) < 400_000
    assert shown(file, sample=5).count("&lt;7&gt;") == 300 and "not in the file" in shown(file, sample=800)


def test_two_steps_differ_in_means_and_words(tmp_path):
    file = RolloutFile(hacked_run(tmp_path) / "rollouts.jsonl")
    samples = file.refresh()
    view = View(step=12, against=1)
    found = compare(samples, select(samples, view).view, steps_of(samples, view))
    means = {name: (before, after) for name, before, after in found.means}
    assert means["score"][1] > means["score"][0] and means["audit"][1] < means["audit"][0]
    assert found.words[0][0] == "um" and found.words[0][2] > 0.8 > 0.2 > found.words[0][1]
    assert found.num_prompts == 4 and [len(side) for side in found.prompts[0]] == [4, 4]
    html = shown(file, step=12, against=1)
    assert "step 12" in html and "&quot;um&quot;" not in html.split("<table>")[1] and "q=%22um%22" in html
    assert 30 < audit_disagrees(samples).sum() < len(samples) / 2
    lines = curves(samples, select(samples, View(q='"um"')))
    assert lines["share with the text"].iloc[-1] > 0.8 and lines["score"].index[0] == 1


# ---------------------------------------------------------------------------------------------------------------- html
def test_texts_of_a_run_are_escaped(tmp_path):
    evil = '"><script>alert(1)</script><td>'
    row = logged_row(prompt=evil, response=evil, rewards={evil: 1, "b": 2}, columns={evil: evil})
    file = opened(tmp_path, row, logged_row(step=2, prompt=evil, response="a"))
    run = Run(evil, evil, lambda ids: [evil] * len(ids), evil)
    for query in ({"step": 1}, {"sample": 0}, {"against": 1}, {"q": evil, "step": "all"}):
        html = shown(file, run, **query)
        assert "&lt;script" in html and "<script" not in html and evil not in html


def test_halves_of_characters_are_replaced(tmp_path):
    file = opened(tmp_path)
    lines = [json.dumps(logged_row(step) | {"prompt": "a \ud800", "response": "b \ud800 c"}) for step in (1, 2)]
    file.path.write_text("\n".join(lines) + "\n")
    run = Run("run", "grpo", None)
    for query in ({}, {"against": 1}, {"q": "b \ud800", "run": "\ud800"}, {"sample": 0}):
        assert "b ? c" in shown_as(file, run, query).encode().decode()


def test_turns_masks_and_observations_are_apart(tmp_path):
    row = logged_row(response_ids=[1, 2, 3, 4, 5], mask=[1, 0, 0, 1, 1], log_ratio=[3, 0, 0, -1.5, 0])
    file = opened(tmp_path, row)
    html = shown(file, Run("run", "reflect_rl", RUN.pieces))
    assert html.index("action 1") < html.index("observation") < html.index("action 2") and "3 tokens of 5" in html
    observed = re.search(r'<div class="shown">(.*?)</div>', html)[1]
    assert "&lt;2&gt;&lt;3&gt;" in observed and "token" not in observed.replace("tokens", "")
    assert 'class="token more" title="log-ratio 3" style="--strength:0.60"' in html
    assert 'class="token less" title="log-ratio -1.5" style="--strength:0.30"' in html
    html = shown(file, Run("run", "online_refuel", RUN.pieces))
    assert "turn 1, trained" in html and "turn 2, sampled after it" in html and "<b>user</b>" in html


def test_badges_have_rewards_audit_weights_and_truncation(tmp_path):
    row = logged_row(score=2, rewards={"a": 1, "b": None}, audit=0.0, version=4, truncated=True)
    html = shown(opened(tmp_path, row, logged_row(score=1, audit=1), logged_row(score=None)))
    for text in (
        "<span>a</span> 1",
        "<span>b</span> –",
        "audit disagrees",
        "weights of step 4",
        "truncated",
        "not scored",
    ):
        assert text in html, text
    assert html.count("audit disagrees") == 1


def test_what_a_run_does_not_log_is_said(tmp_path):
    file = opened(tmp_path, logged_row(log_ratio=None))
    assert "logs no log-ratios" in shown(file) and "no sample fits" in shown(file, q="zebra")
    assert "no tokenizer; texts are shown without" in shown(file, Run("run", "grpo", None, "no tokenizer"))
    assert "no samples yet" in shown(opened(tmp_path))


def test_reading_leaves_no_trace(tmp_path):
    file = opened(tmp_path, logged_row())
    os.chmod(file.path, 0o444)
    before = file.path.stat()
    shown(file)
    assert file.path.stat().st_mtime_ns == before.st_mtime_ns and [*tmp_path.iterdir()] == [file.path]


# ----------------------------------------------------------------------------------------------------------- episodes
def episode(**changes) -> dict:
    """A row of an episode of two turns, with three tokens of an observation between them."""
    facts = {"stop_reason": "answer", "turns": 2, "rows": 1, "tokens": 4, "rewards": [0.5, 0.25], "score": 0.75}
    facts |= {"calls": [["add", "<b>"], []], "fault": None, "counts": {"calls": 2, "failed_calls": 1}}
    ids, mask = [10, 11, 20, 21, 22, 12, 13], [1, 1, 0, 0, 0, 1, 1]
    return logged_row(response_ids=ids, mask=mask, columns={"episode": facts | changes})


def text_of(html: str) -> str:
    return re.sub(r"<[^>]*>", "", re.sub(r"<li>", " ", html))


def test_an_episode_shows_calls_observations_rewards_by_turn_and_its_end(tmp_path):
    html = shown(opened(tmp_path, episode()))
    text = text_of(html)
    assert "turn 1 · calls add, &lt;b&gt; · reward 0.5 &lt;10&gt;&lt;11&gt;" in text and "turn 2 · reward 0.25 " in text
    assert re.search(r'<div class="shown"><b>observation</b> &lt;20&gt;&lt;21&gt;&lt;22&gt;</div>', html)
    for badge in ("turns 2", "calls 2, 1 failed", "stopped by answer"):
        assert badge in text
    assert "failed:" not in text and "rewards by turn" not in text


def test_a_fault_and_one_row_of_several_are_said(tmp_path):
    html = shown(opened(tmp_path, episode(fault="timeouts", stop_reason="fault", rows=3)))
    text = text_of(html)
    assert "the environment failed: timeouts" in text and 'class="problem"' in html
    assert "rewards by turn 0.5, 0.25" in text and "one of 3 rows" in text and "turn 1 &lt;10" in text


@pytest.mark.parametrize("wrong", [None, 3, {"turns": "x", "rewards": 5, "calls": [7], "counts": [], "rows": None}])
def test_facts_of_another_form_break_no_page(wrong, tmp_path):
    row = episode()
    row["columns"]["episode"] = wrong
    assert numbers_of(shown(opened(tmp_path, row))) == [0]


def test_text_behind_a_special_token_is_kept():
    tokenizer = ZOO["qwen25"].tokenizer
    ids = tokenizer("<|im_start|>user\nten<|im_end|>\n<|im_start|>a", add_special_tokens=False)["input_ids"]
    assert "".join(name_tokens(tokenizer, ids)) == "<|im_start|>user\nten<|im_end|>\n<|im_start|>a"


def test_a_click_hides_no_few_characters_of_a_prompt():
    assert "<details>" not in rollouts_html.prompt_as_html("a" * (rollouts_html.LONGEST_PROMPT + 4))
    long = rollouts_html.prompt_as_html("a" * 3 * rollouts_html.LONGEST_PROMPT)
    assert f"{2 * rollouts_html.LONGEST_PROMPT:,} characters before" in long
