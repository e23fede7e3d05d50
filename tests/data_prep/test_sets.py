"""Each set's raw schema, in small files written here, and every bad row its reader may meet."""

import copy
import json
import math
import os
from pathlib import Path

import pytest
from helpers.data import collected, collected_file, every, gpt2_like, write_lines
from helpers.errors import error_naming

from datasets_prep.apps import prepare_data as apps
from datasets_prep.generic import prepare_data as generic
from datasets_prep.gsm8k import prepare_data as gsm8k
from datasets_prep.gsm8k.reward import exact_answer, final_number
from datasets_prep.helpful_harmless import prepare_data as helpful_harmless
from datasets_prep.prompts import prepare_data as prompts
from datasets_prep.summarization import prepare_data as summarization
from datasets_prep.turns import BadRow
from datasets_prep.ultrainteract import prepare_data as ultrainteract
from datasets_prep.webgpt import prepare_data as webgpt

USER, ASSISTANT = "user", "assistant"


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


HH = {
    "chosen": "\n\nHuman: Is rain wet?\n\nAssistant: Yes.\n\nHuman: Why?\n\nAssistant: It is water.",
    "rejected": "\n\nHuman: Is rain wet?\n\nAssistant: Yes.\n\nHuman: Why?\n\nAssistant: No idea.",
}
DAHOAS = {
    "prompt": "\n\nHuman: Is rain wet?\n\nAssistant:",
    "response": " Yes, rain is wet.",
    "chosen": " Yes, rain is wet.",
    "rejected": " No.",
}
TRL_HH = {
    "prompt": "Is rain wet?",
    "chosen": [message(USER, "Is rain wet?"), message(ASSISTANT, "Yes.")],
    "rejected": [message(USER, "Is rain wet?"), message(ASSISTANT, "No.")],
}
TLDR = {
    "prompt": "SUBREDDIT: r/pets\nTITLE: My cat\nPOST: My cat sleeps all day.",
    "chosen": "TL;DR: The cat sleeps.",
    "rejected": "TL;DR: A dog barks.",
}
FEEDBACK = {
    "info": {"id": "t3", "post": "My cat sleeps all day.", "title": "My cat", "subreddit": "pets", "site": None,
             "article": None},
    "summaries": [{"text": " A dog barks.", "policy": "a", "note": "-"}, {"text": " The cat sleeps.", "policy": "b",
                                                                        "note": "-"}],
    "choice": 1, "worker": "w", "batch": "b", "split": "train", "extra": {"confidence": 3},
}  # fmt: skip
WEBGPT = {
    "question": {"dataset": "eli5", "id": "1", "full_text": "Why is the sky blue?"},
    "quotes_0": {"title": ["a"], "extract": ["b"]}, "quotes_1": {"title": ["a"], "extract": ["b"]},
    "answer_0": "Because of dust.", "answer_1": "Air scatters blue light [1] (the short waves) most [2, 3].",
    "tokens_0": {}, "tokens_1": {}, "score_0": -0.5, "score_1": 0.5,
}  # fmt: skip
APPS = {
    "problem_id": 1, "question": "Print the number plus one.",
    "solutions": json.dumps(["print(int(input()) + 1)", "print 'two'", "n = int(input())\nprint(n + 1)"]),
    "input_output": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]}),
    "difficulty": "introductory", "url": "x", "starter_code": "",
}  # fmt: skip
ULTRA = {
    "task": "Math", "dataset": "gsm8k", "id": "1", "parent_id": "0", "chosen": "It is 4.", "rejected": "It is 5.",
    "trajectory": [{"from": "user", "value": "2 + 2?"}, {"from": "assistant", "value": "5."},
                   {"from": "user", "value": "Are you sure?"}],
}  # fmt: skip
CONTEXT = {"context_messages": [message(USER, "Tell me a tale.")], "context": "x"}
SFT = {"conversations": [message(USER, "Hello"), message(ASSISTANT, "Hi there."), message(USER, "Bye"), message(ASSISTANT, "See you.")]}  # fmt: skip # noqa: E501
GSM = {"question": "Tom has 48 clips and sells half. How many?", "answer": "He sells 48/2=<<48/2=24>>24.\n#### 24"}
TRL_PAIR = {"prompt": "Is rain wet?", "chosen": " Yes, it is.", "rejected": " No, it is not.", "topic": "rain"}

SETS = {
    "helpful_harmless": (helpful_harmless, helpful_harmless.HelpfulHarmlessArgs, HH),
    "dahoas": (helpful_harmless, helpful_harmless.HelpfulHarmlessArgs, DAHOAS),
    "trl_hh": (helpful_harmless, helpful_harmless.HelpfulHarmlessArgs, TRL_HH),
    "summarization": (summarization, summarization.SummarizationArgs, TLDR),
    "feedback": (summarization, summarization.SummarizationArgs, FEEDBACK),
    "webgpt": (webgpt, webgpt.WebGPTArgs, WEBGPT),
    "apps": (apps, apps.AppsArgs, APPS),
    "ultrainteract": (ultrainteract, ultrainteract.UltraInteractArgs, ULTRA),
    "prompts": (prompts, prompts.PromptsArgs, CONTEXT),
    "sft": (prompts, prompts.PromptsArgs, SFT),
    "gsm8k": (gsm8k, gsm8k.Gsm8kArgs, GSM),
    "generic": (generic, generic.GenericArgs, TRL_PAIR),
}


def of(name: str, tmp_path: Path, rows: list | None = None, **flags):
    """(examples, dropped) of a file with the set's row (or `rows`), every stage sharing all prompts."""
    module, args_class, good = SETS[name]
    return collected_file(module, args_class, write_lines(tmp_path / f"{name}.jsonl", rows or [good]), **{"split": None, **flags})  # fmt: skip # noqa: E501


def text(ids) -> str:
    return gpt2_like().decode(ids.tolist())


def shown(examples: dict, stage: str) -> list[tuple[str, ...]]:
    """(prompt, response, …) of each row of a stage."""
    return [
        (text(e.ids[0][: e.prompt_len]), *(text(ids[e.prompt_len :]).removesuffix("<|endoftext|>") for ids in e.ids))
        for e in every(examples, stage)
    ]


# ---------------------------------------------------------------------------------------------------------- good rows
STAGES = {
    "helpful_harmless": "finetune preference prompts dialogue", "dahoas": "finetune preference prompts dialogue",
    "trl_hh": "finetune preference prompts dialogue", "summarization": "finetune preference prompts",
    "feedback": "finetune preference prompts", "webgpt": "finetune preference prompts", "apps": "finetune prompts",
    "ultrainteract": "dialogue", "prompts": "prompts", "sft": "finetune prompts", "gsm8k": "finetune prompts",
    "generic": "finetune preference prompts",
}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_each_set_writes_its_stages(tmp_path, name):
    examples, dropped = of(name, tmp_path)
    assert set(examples) == set(STAGES[name].split()) and not dropped


def test_helpful_harmless_in_each_published_form(tmp_path):
    start = "\n\nHuman: Is rain wet?\n\nAssistant:"
    (row,) = shown(of("helpful_harmless", tmp_path)[0], "preference")
    assert row == (f"{start} Yes.<|endoftext|>\n\nHuman: Why?\n\nAssistant:", " It is water.", " No idea.")
    assert shown(of("dahoas", tmp_path)[0], "preference") == [(start, " Yes, rain is wet.", " No.")]
    assert shown(of("trl_hh", tmp_path)[0], "preference") == [(start, " Yes.", " No.")]


def test_summarization_in_both_published_forms(tmp_path):
    prompt = "SUBREDDIT: r/pets\nTITLE: My cat\nPOST: My cat sleeps all day.\nTL;DR:"
    for name in ("summarization", "feedback"):
        examples, _ = of(name, tmp_path)
        assert shown(examples, "preference") == [(prompt, " The cat sleeps.", " A dog barks.")]
        (row,) = every(examples, "prompts")
        assert row.extra["title"] == "My cat" and row.extra["subreddit"].removeprefix("r/") == "pets"
    assert summarization.to_row(FEEDBACK | {"split": "valid1"})["split"] == "validation"
    article = summarization.to_row(FEEDBACK | {"info": {"title": "News", "article": "It rained."}})
    assert article["prompt"] == "TITLE: News\nARTICLE: It rained.\nTL;DR:"


def test_webgpt_prefers_the_higher_score_and_strips_citations_only(tmp_path):
    (row,) = shown(of("webgpt", tmp_path)[0], "preference")
    assert row[1:] == (" Air scatters blue light (the short waves) most.", " Because of dust.")


def test_of_a_tie_of_webgpt_only_the_pair_leaves(tmp_path):
    question = {"full_text": "Why is the sea salty?"}
    examples, dropped = of("webgpt", tmp_path, [WEBGPT, WEBGPT | {"score_0": 0.5, "question": question}])
    assert [(row.reason, row.stage) for row in dropped] == [("tie", "preference")]
    assert len(every(examples, "preference")) == 1 and len(every(examples, "prompts")) == 2
    tied = [row for row in shown(examples, "finetune") if "sea" in row[0]]
    assert [answer for _, answer in tied] == [" Because of dust."]
    _, (dropped,) = of("webgpt", tmp_path, [WEBGPT | {"score_0": math.nan}])
    assert dropped.reason == "score_is_nan"


def test_apps_learns_from_python_3_and_keeps_the_tests(tmp_path):
    examples, _ = of("apps", tmp_path)
    ((prompt, solution),) = shown(examples, "finetune")
    assert solution == "print(int(input()) + 1)\n" and "Standard Input" in prompt
    (row,) = every(examples, "prompts")
    assert json.loads(row.extra["tests"]) == {"inputs": ["1\n"], "outputs": ["2\n"]}
    called = APPS | {"input_output": json.dumps({"inputs": [[1]], "outputs": [[2]], "fn_name": "f"}), "solutions": ""}
    called |= {"starter_code": "def f(n):\n"}
    examples, _ = of("apps", tmp_path, [called])
    assert set(examples) == {"prompts"} and "def f(n):\nUse Call-Based" in text(every(examples, "prompts")[0].ids[0])


def test_ultrainteract_limits_depend_on_the_number_of_turns(tmp_path):
    (row,) = every(of("ultrainteract", tmp_path)[0], "dialogue")
    assert [turn["role"] for turn in row.extra] == [USER, ASSISTANT] * 2 and row.extra[-1]["content"] == "It is 4."
    long = {"trajectory": [{"from": "user", "value": "7 " * 430}]}
    longer = {"trajectory": [*long["trajectory"], {"from": "assistant", "value": "5."}, ULTRA["trajectory"][2]]}
    rows = [ULTRA | long, ULTRA | longer]  # 860 tokens: one turn may have 1024, a dialogue of two 768
    assert [row.reason for row in of("ultrainteract", tmp_path, rows)[1]] == ["prompt_too_long"]


def test_gsm8k(tmp_path):
    examples, _ = of("gsm8k", tmp_path)
    assert shown(examples, "finetune")[0][1] == " He sells 48/2=24.\n#### 24"
    assert every(examples, "prompts")[0].extra == {"answer": "24"}


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"prompt": "a b", "completion": " c d"}, ("a b", " c d")),
        ({"prompt": "a b", "completion": [message(ASSISTANT, "c d")]}, ("\n\nHuman: a b\n\nAssistant:", " c d")),
        ({"prompt": [message(USER, "a")], "completion": "yes"}, ("\n\nHuman: a\n\nAssistant:", " yes")),
        ({"prompt": "a", "chosen": " good", "rejected": " bad"}, ("a", " good", " bad")),
        ({"chosen": "Is it wet? Yes it is.", "rejected": "Is it wet? No."}, ("Is it wet?", " Yes it is.", " No.")),
        (
            {"chosen": TRL_HH["chosen"], "rejected": TRL_HH["rejected"]},
            ("\n\nHuman: Is rain wet?\n\nAssistant:", " Yes.", " No."),
        ),
        (
            {
                "prompt": [message(USER, "a")],
                "chosen": [message(ASSISTANT, "yes")],
                "rejected": [message(ASSISTANT, "no")],
            },
            ("\n\nHuman: a\n\nAssistant:", " yes", " no"),
        ),
    ],
)
def test_generic_takes_every_trl_form(tmp_path, row, expected):
    examples, dropped = of("generic", tmp_path, [row | {"n": 1, "when": None}])
    assert not dropped
    stage = "preference" if "chosen" in row else "finetune"
    assert shown(examples, stage) == [expected]
    assert every(examples, "prompts")[0].extra == {"n": 1, "when": None}


# ----------------------------------------------------------------------------------------------------------- bad rows
WRONG = {
    "missing": None, "null": None, "number": 7, "fraction": 0.5, "truth": True, "list": [], "list of numbers": [1, 2],
    "object": {}, "nested object": {"a": {"b": "c"}}, "list of lists": [[["a"]]], "list of nulls": [None],
    "empty": "", "spaces": "  \n ", "lone surrogate": "\ud800 half a character", "a megabyte": "word " * 200_000,
    "end token": "text <|endoftext|> more", "control characters": "\x00",
    "messages without content": [{"role": "user"}], "messages of null": [message(USER, None)],
    "unknown role": [message("narrator", "x")], "answer first": [message(ASSISTANT, "x"), message(USER, "y")],
    "two users": [message(USER, "a"), message(USER, "b")], "messages of numbers": [message(USER, 5)],
}  # fmt: skip
READ = {
    "helpful_harmless": ["chosen", "rejected"], "dahoas": ["prompt", "chosen", "rejected"],
    "trl_hh": ["chosen", "rejected"], "summarization": ["prompt", "chosen", "rejected"],
    "feedback": ["info", "summaries", "choice"],
    "webgpt": ["question", "answer_0", "answer_1", "score_0", "score_1"], "apps": ["question", "input_output"],
    "ultrainteract": ["trajectory", "chosen"], "prompts": ["context_messages"], "sft": ["conversations"],
    "gsm8k": ["question", "answer"], "generic": ["prompt", "chosen", "rejected"],
}  # fmt: skip
# Wrong only elsewhere: a score may be any number, and a pair without a prompt has it in both its sides.
FINE = {("webgpt", f"score_{side}", kind) for side in (0, 1) for kind in ("number", "fraction", "truth")}
FINE |= {("feedback", "choice", "truth"), ("generic", "prompt", "missing"), ("generic", "prompt", "null")}
# In messages an end token is text, and the template decides on the order of roles.
FINE |= {("webgpt", f"answer_{side}", "end token") for side in (0, 1)} | {("gsm8k", "question", "end token")}
FINE |= {("gsm8k", "answer", "end token")}
FINE |= {
    (*column, kind)
    for column in (("prompts", "context_messages"), ("sft", "conversations"))
    for kind in ("answer first", "two users")
}
CONTROL = {"control characters"}  # unusual, but text


@pytest.mark.parametrize("name", SETS)
def test_no_bad_row_is_trained_on_and_none_stops_the_run(tmp_path, name):
    good = SETS[name][2]
    rows, bad = [good], {}
    for column in READ[name]:
        for kind, value in WRONG.items():
            if (name, column, kind) in FINE or kind in CONTROL:
                continue
            row = copy.deepcopy(good) | {column: value}
            if kind == "missing":
                del row[column]
            rows.append(row)
            bad[len(rows)] = f"{column}: {kind}"
    assert len(bad) >= 20
    flags = {"remove_same_inputs": False, "max_length": 500, "max_prompt_length": 400}
    examples, dropped = of(name, tmp_path, rows, **flags)
    where = {int(row.source.rpartition(":")[2]): row.reason for row in dropped}
    missed = {what for line, what in bad.items() if line not in where}
    used = {e.place.source.rpartition(":")[2] for stage in examples for e in every(examples, stage)}
    assert "1" in used, "the good row is gone"
    cut = {f"{column}: a megabyte" for column in READ[name]}  # a long response is cut, a long prompt dropped
    assert missed <= cut, missed
    assert all(reason and "\n" not in reason and len(reason) < 250 for reason in where.values())


@pytest.mark.parametrize(
    "text", ["", "hello", "Human: a\n\nAssistant: b", "\n\nHuman: a", "\n\nAssistant: a", "\n\nHuman:\n\nAssistant:",
             "\n\nHuman: a\n\nHuman: b", "x\n\nHuman: a\n\nAssistant: b"],
)  # fmt: skip
def test_broken_dialogues_are_bad_rows(text):
    with pytest.raises(BadRow):
        row = helpful_harmless.to_row({"chosen": text, "rejected": text})
        examples, dropped = collected([row])
        raise BadRow(dropped[0].reason) if dropped else AssertionError(examples)


def test_pairs_that_answer_different_prompts_are_bad_rows():
    with pytest.raises(BadRow, match="prompts_differ"):
        helpful_harmless.to_row(HH | {"rejected": HH["rejected"].replace("wet", "dry")})
    with error_naming(BadRow, "prompts"):
        generic.to_row({"chosen": TRL_HH["chosen"], "rejected": [message(USER, "?"), message(ASSISTANT, "No.")]})


@pytest.mark.parametrize("tests", ["", "[]", "{}", '{"inputs": []}', '{"inputs": [1], "outputs": []}', "{", "9" * 5000])
def test_problems_without_tests_are_bad_rows(tests):
    with pytest.raises(BadRow):
        apps.to_row(APPS | {"input_output": tests})


# ------------------------------------------------------------------------------------------------------- gsm8k reward
@pytest.mark.parametrize(
    "completion, right, score",
    [
        ("so #### 24", "24", 1.0), ("#### 24.0", "24", 1.0), ("#### 1,024", "1024", 1.0), ("####$24.", "24", 1.0),
        ("#### -3", "-3", 1.0), ("#### 24 clips", "24", 1.0), ("#### 3\n#### 24", "24", 1.0),
        ("24", "24", 0.0), ("#### 25", "24", 0.0), ("#### 24\n#### 25", "24", 0.0), ("#### ", "24", 0.0),
        ("#### 24 25", "24", 1.0), ("#### 2424", "24", 0.0), ("#### 1e9999", "24", 0.0),
        ("#### __import__('os')", "24", 0.0),
        ("", "24", 0.0), ("#### 24", "", math.nan), ("#### 24", "none", math.nan), ("#### " + "9" * 99999, "24", 0.0),
        ("#### ²⁴", "24", 0.0), ("#### 1,02", "102", 0.0),
    ],
)  # fmt: skip
def test_exact_answer(completion, right, score):
    (found,) = exact_answer([""], [completion], answer=[right], difficulty=[None])
    assert found == score or (math.isnan(found) and math.isnan(score))


def test_final_number_of_no_mark():
    assert final_number("24") is None


# ----------------------------------------------------------------------------------------------------------- real data
REAL = Path(os.environ.get("LIGHTRLHF_REAL_DATA", "/nonexistent"))


def real(name: str) -> Path:
    file = REAL / name
    if not file.is_file():
        pytest.skip(f"set LIGHTRLHF_REAL_DATA to a folder with {name}")
    return file


def test_real_helpful_harmless():
    file = real("hh_harmless_1500.jsonl.gz")
    examples, dropped = collected_file(
        helpful_harmless, helpful_harmless.HelpfulHarmlessArgs, file, max_prompt_length=999
    )
    sources = {e.place.source for stage in examples for e in every(examples, stage)} | {row.source for row in dropped}
    assert len(sources) == 1500  # each row is used, or dropped for a reason
    assert sum(row.stage is None for row in dropped) < 15


def test_real_gsm8k():
    file = real("gsm8k_train_2000.jsonl.gz")
    examples, dropped = collected_file(gsm8k, gsm8k.Gsm8kArgs, file, max_prompt_length=999, max_length=2000)
    assert not dropped and len(every(examples, "finetune")) + len(every(examples, "prompts")) == 2000
    answers = [json.loads(line) for line in __import__("gzip").open(file, "rt")][:200]
    completions, columns = [row["answer"] for row in answers], [row["answer"].split("####")[1] for row in answers]
    assert exact_answer([""] * 200, completions, answer=columns) == [1.0] * 200
