"""The benchmark with fake workers; floors counted by hand; the files of `--profile`."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import ROOT, tiny_model
from helpers.errors import error_naming, refused
from helpers.flat import stored_rows
from helpers.programs import main_of
from helpers.tiny_runs import TRAINED, TinyRuns
from transformers import AutoModelForCausalLM

from benchmarks import episodes, growth, tables
from benchmarks import run as benchmark
from benchmarks.cases import Bench, Case, Side, all_cases
from benchmarks.inputs import EOS, SIZES, DataSize, even_lengths, even_words, write_data, write_models
from benchmarks.roofline import grpo_floor
from benchmarks.worker import count_tokens
from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.models.loading import load_policy
from lightrlhf.programs import TRAINING
from lightrlhf.training import roofline
from lightrlhf.training.roofline import (
    Ceilings,
    Shape,
    Work,
    backward,
    forward,
    generate,
    measure_ceilings,
    ppo_floors,
    shared_lengths,
    table,
    update_work,
)

# Its repetitions take `seconds`, it writes its name to `diary` in each, and it fails in repetition `dies`.
WORKER = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from worker import Gate, job
work = job()
if work.get("dies") == 0:
    sys.exit("no such model")
gate, done = Gate(work["steps"], {{"torch": "1"}}), 0
while True:
    gate(work.get("units", 0))
    done += 1
    print("a library's chatter")
    with open(work["diary"], "a") as diary:
        diary.write(work["name"])
    if done == work.get("dies"):
        raise SystemExit("out of cheese")
    time.sleep(work["seconds"])
"""


def side(folder: Path, name: str, seconds: float = 0.0, **more) -> Side:
    script = folder / "fake_worker.py"
    script.write_text(WORKER)
    job = {"name": name, "seconds": seconds, "steps": 1, "diary": str(folder / "diary"), **more}
    return Side(name, [sys.executable, str(script)], job)


def case(ours: Side, peers: list[Side], **more) -> Case:
    return Case(what="Nothing", unit="things", ours=[ours], peers=peers, **({"units": 6, "goal": 2} | more))


# --------------------------------------------------------------------------------------------------------- turns
@pytest.mark.slow
def test_both_sides_take_turns_and_the_fastest_setting_of_each_counts(tmp_path):
    names = {"a": 1.0, "b": 0.0, "s": 2.0, "f": 0.5}
    poor, good, slow, fast = (side(tmp_path, name, seconds) for name, seconds in names.items())
    compared = replace(case(poor, [slow, fast]), ours=[poor, good])
    result = benchmark.compare(compared, tmp_path, threads=1, repetitions=3)
    assert (tmp_path / "diary").read_text() == "aa" + "bb" + "ss" + "ff" + "bfbfbf"
    assert result["turns"] == 3
    assert (result["ours"]["label"], result["peer"]["label"]) == ("b", "f") and set(result["tried"]) == set(names)
    ratio = result["ratio"]
    assert ratio["min"] <= ratio["median"] <= ratio["max"] and ratio["median"] > 1
    assert result["ours"]["units"] == 6 and result["ours"]["peak_bytes"] > 2**20
    assert result["versions"]["peer"] == {"torch": "1"}


def test_a_device_that_cannot_hold_all_settings_tries_them_one_by_one(tmp_path):
    ours, slow, fast = (side(tmp_path, name, s) for name, s in (("o", 0.0), ("s", 1.0), ("f", 0.0)))
    broken = side(tmp_path, "x", dies=1)
    compared = case(ours, [slow, fast, broken], together=False)
    result = benchmark.compare(compared, tmp_path, threads=1, repetitions=1)
    assert (tmp_path / "diary").read_text() == "oo" + "ss" + "ff" + "x" + "oo" + "ff" + "of"
    assert result["peer"]["label"] == "f" and set(result["tried"]) == {"o", "s", "f"} and set(result["failed"]) == {"x"}
    only = benchmark.compare(case(ours, [broken], together=False), tmp_path, threads=1, repetitions=1)
    assert "out of cheese" in only["not_measured"]


def test_a_slow_case_takes_fewer_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "TURNS_SECONDS", 0)
    result = benchmark.compare(case(side(tmp_path, "o"), [side(tmp_path, "p")]), tmp_path, threads=1, repetitions=9)
    assert result["turns"] == benchmark.LEAST_TURNS


def test_a_repetition_is_so_many_steps_and_counts_what_they_did(tmp_path):
    ours, peer = side(tmp_path, "o", steps=3, units=5), side(tmp_path, "p", steps=2, units=1)
    result = benchmark.compare(case(ours, [peer], units=None), tmp_path, threads=1, repetitions=1)
    assert (tmp_path / "diary").read_text() == "oooooo" + "pppp" + "ooo" + "pp"
    assert (result["ours"]["units"], result["peer"]["units"]) == (15, 2)


def test_the_tokens_that_models_read_are_counted(monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setattr(torch.nn.Embedding, "forward", torch.nn.Embedding.forward)  # put back after the test
    gate, model = SimpleNamespace(tokens=0), tiny_model("llama")
    count_tokens(gate)
    model(torch.ones(2, 5, dtype=torch.int64))
    assert gate.tokens == 10


@pytest.mark.parametrize("dies", [0, 1, 2, 3])
def test_a_peer_that_dies_leaves_a_row_that_says_so(tmp_path, dies):
    peer = side(tmp_path, "p", dies=dies)
    result = benchmark.compare(case(side(tmp_path, "o"), [peer]), tmp_path, threads=1, repetitions=3)
    words = "no such model" if dies == 0 else "out of cheese"
    assert result["not_measured"] == f"p ended with status 1: {words}"
    shown = tables.row({"goal": 2, "what": "Nothing", "unit": "things", "less_is_better": False} | result)
    assert f"not measured ({result['not_measured']})" in shown


def test_one_setting_of_a_peer_may_die_or_be_missing_and_another_count(tmp_path):
    missing = Side("absent", [str(tmp_path / "nowhere" / "python")], {})
    peers = [missing, side(tmp_path, "p", dies=1), side(tmp_path, "q")]
    result = benchmark.compare(case(side(tmp_path, "o"), peers), tmp_path, threads=1, repetitions=1)
    assert result["peer"]["label"] == "q" and "not_measured" not in result
    assert set(result["failed"]) == {"absent", "p"} and "not installed" in result["failed"]["absent"]


def test_memory_is_that_of_each_process(tmp_path):
    fat = side(tmp_path, "fat")
    fat.command[1:1] = ["-c", f"hold = b'x' * 2**28; exec(open({fat.command[1]!r}).read())"]
    del fat.command[3]
    compared = case(side(tmp_path, "thin"), [fat], kind="memory", goal=0.5, less_is_better=True)
    result = benchmark.measure(compared, tmp_path, threads=1, repetitions=1)
    assert result["ratio"]["median"] < 0.5
    assert result["memory"]["peer"] > 2**28


def test_what_cannot_be_prepared_started_or_run_here_says_why(tmp_path):
    ours = side(tmp_path, "o")

    def prepare() -> None:
        subprocess.run(
            [sys.executable, "-c", "import sys; sys.exit('no reward model')"], check=True, capture_output=True
        )

    reasons = [
        benchmark.measure(made, tmp_path, threads=1, repetitions=1)["not_measured"]
        for made in (
            case(ours, [], prepare=prepare),
            case(Side("s", [sys.executable, "-c", "raise ValueError('x')"], {}), [], kind="start"),
            case(ours, [ours], unavailable="no such instructions"),
        )
    ]
    assert reasons == ["status 1: no reward model", "status 1: ValueError: x", "no such instructions"]


# --------------------------------------------------------------------------------------------------------- table
def row(ratio: float, **more) -> dict:
    facts = {"what": "w", "unit": "u", "goal": 2, "limit_goal": None, "less_is_better": False}
    return facts | {"ratio": {"median": ratio, "min": ratio, "max": ratio}} | more


def test_the_tables_have_ratios_and_no_goals_and_the_readme_some_rows(tmp_path, monkeypatch):
    results = {"machine": {"cpu": "C", "cores": 2, "threads": 2}, "repetitions": 3}
    start = row(0, what="Start", less_is_better=True, value={"median": 1.9, "min": 1.8, "max": 2.0})
    del start["ratio"]
    cases = {
        "rollout-skewed-30M": row(1.23),
        "sft-4M": row(9.87),
        **{name: row(2.1, what=name) for name in reversed(tables.SHORT)},
        "start": start,
    }
    for number, case in enumerate(cases.values()):
        case["date"] = f"2026-01-0{3 - number % 3}"
    (tmp_path / "cpu-avx2.json").write_text(json.dumps(results | {"cases": cases, "quick": False}))
    faster = {"grpo-skewed-4-4M": row(5.67, date="2026-02-01")}
    newer = results["machine"] | {"instructions": "avx512-bf16"}
    text = json.dumps(results | {"cases": faster, "quick": False, "machine": newer})
    (tmp_path / "cpu-avx512-bf16.json").write_text(text)
    page = tmp_path / "page.md"
    places = [f"<!-- benchmark {name} -->\nold\n<!-- end of benchmark {name} -->\n" for name in ("cpu", "cpu, short")]
    page.write_text(f"above\n{places[0]}between\n{places[1]}below\n")
    monkeypatch.setattr(tables, "PAGES", (page,))
    tables.insert("cpu", tmp_path)
    tables.insert("cpu", tmp_path)
    text = page.read_text()
    assert "2026-01-01 to 2026-01-03, up to" in text
    assert text.startswith("above\n") and text.endswith("below\n") and "old" not in text
    assert "goal" not in text and "met" not in text and "≥" not in text
    whole, short = text.split("between")
    assert "C with avx512-bf16, 2 of 2 cores" in whole and whole.index("**1.23**") < whole.index("**5.67**")
    assert "9.87" not in whole and "**1.90** u (1.80 to 2.00)" in tables.table(results | {"cases": cases})
    heading, _, *rows = [line for line in short.splitlines() if line.startswith("|")]
    assert heading.startswith("| work | beside | C, 2026-01-0") and heading.count("|") == 4
    assert rows == [f"| {name} |  | **2.10** |" for name in tables.SHORT]
    first, second, third = tables.SHORT  # a processor on which one row was measured
    parts = [{**results, "cases": {name: cases[name] for name in names}} for names in ([second], [first, second])]
    *_, both, one = tables.short_table(parts).splitlines()
    assert (both, one) == (f"| {second} |  | **2.10** | **2.10** |", f"| {first} |  |  | **2.10** |")
    (tmp_path / "cpu-avx2.json").write_text(json.dumps(results | {"cases": cases, "quick": True}))
    with error_naming(UsageError, "cpu-avx2.json", "--quick"):
        tables.insert("cpu", tmp_path)


def test_the_pages_have_the_tables_of_the_results():
    files = sorted(benchmark.RESULTS.glob("cpu*.json"))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    page = (ROOT / "howto/speed.md").read_text(encoding="utf-8")
    for file, result in zip(files, results, strict=True):
        assert tables.page_table(result) in page and file.stem == f"cpu-{result['machine']['instructions']}"
    short = tables.short_table(results)
    assert short in (ROOT / "README.md").read_text(encoding="utf-8") and len(short.splitlines()) == 2 + 3


def test_all_results_are_printed(capsys):
    tables.main()
    printed = capsys.readouterr().out
    assert "ppo-full" not in printed and "PPO iteration, 30M: 16 samples, all 64 tokens" in printed
    assert "| text | sft | 128 |" in printed and "| 4M | 32 | 1.23, 1.24 s | .85, .87 s |" in printed


def test_who_measures_is_told_which_goals_are_met():
    assert [tables.verdict(row(ratio)) for ratio in (2.1, 1.9)] == ["goal ≥ 2: met", "goal ≥ 2: missed"]
    assert tables.verdict(row(2.1, less_is_better=True)) == "goal ≤ 2: missed"
    assert tables.verdict(row(2.1) | {"ratio": {"median": 2.1, "min": 1.9, "max": 2.2}}) == "goal ≥ 2: missed"
    limits = row(2.1, goal=None, limit_goal=0.5, limit_share=0.4)
    assert tables.verdict(limits) == "of the limit ≥ 0.5: missed"
    assert tables.verdict(row(2.1, goal=None)) == ""


def test_memory_and_tokens_of_both_sides_stand_in_the_table():
    def sides(memory: int, **tokens: int) -> dict:
        made = {"goal": 2, "memory_goal": 0.7, "what": "w", "unit": "u", "less_is_better": False}
        for name, peak in (("ours", memory), ("peer", 100 * 2**20)):
            counted = {"tokens": tokens[name]} if name in tokens else {}
            made[name] = {"label": name, "per_second": {"median": 1.0}, "peak_bytes": peak, **counted}
        return made

    full = sides(70 * 2**20, ours=250, peer=1000)
    assert tables.row(full).endswith("| 70 MiB / 100 MiB = 0.70 | 250 / 1,000 = 0.25 |")
    assert tables.verdict(full) == "memory ≤ 0.7: met"
    more = sides(71 * 2**20)
    assert tables.row(more).endswith("| 71 MiB / 100 MiB = 0.71 |  |")
    assert tables.verdict(more) == "memory ≤ 0.7: missed"


@pytest.mark.slow
def test_every_case_can_be_made(tmp_path):
    builders = {
        suite: all_cases(Bench(tmp_path, suite, quick=True), "no such instructions") for suite in ("cpu", "gpu")
    }
    assert not list(tmp_path.iterdir())  # names alone write nothing
    made = {suite: {name: build() for name, build in cases.items()} for suite, cases in builders.items()}
    assert {"sft-tiny", "ppo-skewed-tiny", "rm-tiny-dialogues", "memory-tiny", "start"} <= set(made["cpu"])
    assert {"grpo-full-1-tiny", "grpo-skewed-16-tiny"} <= set(made["cpu"])
    assert {"sft-tiny", "ppo-full-tiny-bf16"} <= set(made["gpu"])
    goals = {name: one.limit_goal for name, one in made["gpu"].items() if one.limit_goal}
    ratios = {f"grpo-{lengths}-{ratio}-tiny" for lengths in ("full", "skewed") for ratio in (1, 4, 16)}
    iterations = {"ppo-full-tiny-bf16", "ppo-skewed-tiny-bf16"} | ratios
    assert {name for name, goal in goals.items() if goal == 0.5} == {"sft-tiny"} | iterations
    assert {name for name, goal in goals.items() if goal == 0.6} == {"rollout-equal-tiny-bf16", "vllm-equal-tiny-bf16"}
    assert goals["vllm-skewed-tiny-bf16"] == goals["vllm-samples-tiny-bf16"] == 0.4 and len(goals) == 13
    assert all(made["gpu"][name].floor for name in goals)
    beside = made["gpu"]["vllm-equal-tiny-bf16"]
    assert beside.floor["slots"] == beside.ours[0].job["slots"] == 64 and "rollout-samples-tiny-bf16" in made["cpu"]


def test_a_case_that_is_measured_anew_leaves_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "all_cases", lambda *_: dict.fromkeys(("first", "other"), lambda: case([], [])))
    monkeypatch.setattr(benchmark, "measure", lambda *_: {"not_measured": next(reasons)})
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    reasons = iter(["first", "second", "third", "fourth", "fifth"])
    quick = ["--suite", "cpu", "--quick", "True", "--output_dir", str(tmp_path)]

    def held() -> dict[str, str]:
        (file,) = tmp_path.glob("cpu-*.json")
        cases = json.loads(file.read_text())["cases"]
        return {name: found["not_measured"] for name, found in cases.items()}

    benchmark.main(quick)
    assert held() == {"first": "first", "other": "second"}
    benchmark.main([*quick, "--only", "first"])
    assert list(held().items()) == [("first", "third"), ("other", "second")]
    assert "--only another must be one of: first, other" in refused(capsys, benchmark.main, *quick, "--only", "another")
    assert held() == {"first": "third", "other": "second"}
    benchmark.main([*quick, "--only", "other", "--threads", "77"])  # another machine, as far as numbers go
    assert held() == {"other": "fourth"}
    benchmark.main([*quick, "--only", "first", "--threads", "77"])
    assert list(held().items()) == [("first", "fifth"), ("other", "fourth")]


def test_the_gpu_suite_says_when_there_is_none(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "not measured (no GPU)" in refused(capsys, benchmark.main, "--suite", "gpu", status=1)


# -------------------------------------------------------------------------------------------------------- inputs
def test_a_model_stops_as_often_as_it_is_told(tmp_path):
    write_models(tmp_path, SIZES["tiny"], mean_length=5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    with torch.no_grad():
        probability = model(torch.randint(2, 512, (8, 20))).logits.softmax(-1)[..., EOS]
    assert torch.allclose(probability.mean(), torch.tensor(0.2), atol=0.02) and probability.std() < 0.05


def test_data_is_the_same_each_time_and_its_lengths_are_skewed(tmp_path):
    for name in ("one", "two"):
        write_data(tmp_path / name, DataSize(200, 3, 3), 512)
    one, two = (stored_rows(tmp_path / name / "finetune_train.pt") for name in ("one", "two"))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, two))
    lengths = torch.tensor([len(row["input_ids"]) for row in one]).float()
    assert lengths.max() > 2.5 * lengths.median() and lengths.mean() > 1.1 * lengths.median()


def test_prompts_of_given_lengths_have_the_mean_and_are_skewed(tmp_path):
    lengths = even_lengths(8, 32)
    assert sum(lengths) == 8 * 32 and sorted(lengths)[4] < 32 and max(lengths) > 2 * 32
    write_data(tmp_path / "data", DataSize(2, 2, 0), 512, lengths)
    assert [row["prompt_len"] for row in stored_rows(tmp_path / "data" / "prompts_train.pt")] == lengths


def test_the_reward_differs_between_responses():
    assert even_words(["w2"] * 3, ["w2 w3 w4 w5", "w12", ""]) == [0.5, 1.0, 0.0]


# -------------------------------------------------------------------------------------------------------- floors
SHAPE = Shape(layers=2, matrices=100, head=30, query_width=8, key_value_width=4, trainable=130)


def test_the_shape_of_a_model():
    shape = Shape.of(tiny_model("llama", num_key_value_heads=2))  # width 32, 4 heads of 8, 48 within, vocabulary 61
    a_layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48
    assert (shape.layers, shape.matrices, shape.head) == (2, 2 * a_layer, 61 * 32)
    assert (shape.query_width, shape.key_value_width) == (32, 16)
    assert shape.trainable == 2 * (a_layer + 64) + 32 + 2 * 61 * 32
    assert Shape.of(tiny_model("llama", scalar=True)).head == 32
    assert Shape.of(tiny_model("gpt2")).matrices == 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128)


def test_a_gradient_that_reaches_the_last_layer_only_costs_less():
    model = tiny_model("llama")
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    shape = Shape.of(model)
    assert (shape.trainable_share, shape.passed_share) == (0.5, 0.5)
    model.requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.requires_grad_(True)  # the first of all: every layer is passed
    assert Shape.of(model).passed_share == 1.0


def test_adapters_cost_nothing_but_gradients_pass_through():
    plain = Shape.of(tiny_model("llama"))
    role = load_policy("tiny", ModelArgs(finetune_mode="lora", lora_rank=2), VocabularyOnly())
    shape = Shape.of(role.model, role)
    assert plain.trainable_share == plain.passed_share == 1.0
    assert shape.trainable_share == 0 and 0.9 < shape.passed_share < 1
    assert 0 < shape.trainable < shape.matrices / 20


class VocabularyOnly:
    """What a tiny model is made for."""

    pad_token_id, eos_token_id, bos_token_id = 0, 1, None
    chat_template, all_special_ids, added_tokens_decoder = None, [0, 1], {}

    def __len__(self) -> int:
        return 61


def test_work_counted_by_hand():
    # A text of 3 tokens: 2 * 100 * 3 for the matrices; keys seen 1 + 2 + 3 = 6, at 4 * 8 each in 2 layers; head twice.
    assert forward(SHAPE, [3], 2) == Work(600 + 2 * 4 * 8 * 6 + 2 * 30 * 2)
    assert backward(SHAPE, [3], 2) == Work(2 * forward(SHAPE, [3], 2).flops)
    upper_half = replace(SHAPE, passed_share=0.5, trainable_share=0.25)
    assert backward(upper_half, [3], 2) == Work(0.75 * forward(SHAPE, [3], 2).flops)
    # A prompt of 2 and 3 sampled tokens, of which the last is not read: passes over 4 tokens. Three steps move all 130
    # weights; the second reads 2 + 1 places from the cache, the third 2 + 2, each 2 layers of 4 keys and 4 values.
    one = generate(SHAPE, [2], [3], slots=4, bytes_per_number=4)
    assert one == Work(forward(SHAPE, [4], 3).flops, 4 * (3 * 130 + (3 + 4) * 16))
    # Six such rows in two slots take nine steps.
    assert generate(SHAPE, [2] * 6, [3] * 6, 2, 4).bytes == 4 * (9 * 130 + 6 * 7 * 16)


def test_floors_are_the_larger_of_both_limits_piece_by_piece():
    assert Ceilings(10, 100).seconds(Work(20, 50), Work(5, 100)) == 2 + 1
    compute_bound, memory_bound = Ceilings(1.0, 1e18), Ceilings(1e18, 1.0)
    assert compute_bound.seconds(*update_work(SHAPE, [3], 2)) == 3 * forward(SHAPE, [3], 2).flops
    twice, once = (compute_bound.seconds(*update_work(SHAPE, [5, 4], 2, shared)) for shared in ((), [3]))
    assert twice - once == 3 * forward(SHAPE, [3], 0).flops
    pair = {"chosen_input_ids": [5, 6, 7, 8], "rejected_input_ids": torch.tensor([5, 6, 9]), "prompt_len": 1}
    assert shared_lengths([pair]) == [2] and shared_lengths([{"input_ids": [5]}]) == []
    assert memory_bound.seconds(*update_work(SHAPE, [3], 2)) == pytest.approx(28 * 130)
    floors = ppo_floors(SHAPE, SHAPE, [2], [3], compute_bound, slots=1, ppo_epochs=2, reward_model=True)
    over = forward(SHAPE, [5], 3).flops
    assert floors == {
        "rollout": pytest.approx(forward(SHAPE, [4], 3).flops + over),
        "score": pytest.approx(2 * over),
        "update": pytest.approx(2 * 2 * 3 * over),
    }


def test_the_floor_of_grpo_counts_the_prompt_of_a_group_once():
    facts = {"samples": 3, "mean_length": 3, "bytes_per_number": 2}
    prompt = forward(SHAPE, [2, 2], 0).flops  # those of two of the three rows
    found = grpo_floor(SHAPE, [2], facts, Ceilings(1.0, 1e18))
    assert found == pytest.approx(forward(SHAPE, [4] * 3, 9).flops + 3 * forward(SHAPE, [5] * 3, 9).flops - 4 * prompt)
    moved = generate(SHAPE, [2] * 3, [3] * 3, slots=3, bytes_per_number=2).bytes
    assert grpo_floor(SHAPE, [2], facts, Ceilings(1e18, 1.0)) == pytest.approx(moved + 28 * 130)


def test_ceilings_are_measured():
    ceilings = measure_ceilings(torch.device("cpu"), torch.float32, megabytes=1)
    assert ceilings.flops > 1e8 and ceilings.bandwidth > 1e8


# ------------------------------------------------------------------------------------------------------- profile
@pytest.mark.slow
@pytest.mark.parametrize("program", TRAINED)
def test_profile_is_written(program, cafe_data, talk_data, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(roofline, "MATRIX_SIZES", ((256, 256, 256),))  # larger ones take seconds without AVX-512
    runs = TinyRuns(tmp_path / "runs", cafe_data, talk_data, tokenizer)
    experiment = Path(main_of(program)(runs.flags(program, tmp_path / "logs", "--profile", "True", steps=2)))
    written = json.loads((experiment / "profile.json").read_text())
    assert "update" in written["phases"]
    known = {name for name, phase in written["phases"].items() if phase["floor"]}
    other: set[str] = set() if TRAINING[program].data in ("prompts", "environment") else {"update"}
    assert known == ({"rollout", "score", "update"} if program == "ppo" else other)
    for name in known:
        phase = written["phases"][name]
        assert phase["ratio"] == pytest.approx(phase["seconds"] / phase["floor"]) and phase["ratio"] > 1
    shown = (experiment / "profile.md").read_text()
    assert shown == table(written["phases"], Ceilings(written["flops"], written["bandwidth"]))
    assert "| update |" in shown and ("| all |" in shown) == (program == "ppo")


def test_growth_is_beside_what_the_work_grows_by():
    """Twice the time for a quarter more work is 1.6; memory may grow with the length in rollouts, not in training."""
    one = {"seconds": 1.0, "floor": 0.5, "bytes": 100.0}
    rows = [one, {"seconds": 2.0, "floor": 0.625, "bytes": 200.0}, one, one]
    assert growth.growth("text", "sft", rows)[1] == pytest.approx((1.6, 2.0))
    assert growth.growth("text", "rollout", rows)[1] == pytest.approx((1.6, 0.5))
    assert growth.growth("samples", "rollout", rows)[1] == pytest.approx((1.6, 0.5))


def test_a_cell_has_texts_of_its_length_and_as_much_work_as_is_counted(tmp_path):
    cell = growth.Cell("dpo", text=64, vocabulary=512, tokens=256)
    growth.write_rows(tmp_path / "data", cell)
    pairs = stored_rows(tmp_path / "data" / "preference_train.pt")
    assert [len(row["chosen_input_ids"]) for row in pairs] == [64, 64] and len(pairs) == cell.rows
    assert shared_lengths(pairs) == [32, 32]
    shape = Shape(layers=1, matrices=100, head=10, query_width=4, key_value_width=4, trainable=110)
    ceilings = Ceilings(1.0, float("inf"))
    texts = forward(shape, [64] * 4, 4 * 32).flops - forward(shape, [32] * 2, 0).flops
    assert growth.floor(cell, shape, ceilings) == pytest.approx(3 * texts)
    rollout = growth.Cell("rollout", text=100, samples=3, prompts=2)
    sampled = generate(shape, [36] * 6, [64] * 6, 6, 4).flops - forward(shape, [36] * 4, 0).flops
    assert growth.floor(rollout, shape, ceilings) == pytest.approx(sampled)


@pytest.mark.slow
def test_the_benchmark_of_episodes_measures_equal_tokens_with_and_without_the_kept_cache(tmp_path):
    flags = ["--size", "tiny", "--num_episodes", "4", "--tokens", "16", "--repetitions", "1"]
    episodes.main([*flags, "--output_file", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["turns"], row["keeps_cache"]) for row in rows] == [
        (1, True),
        (4, True),
        (4, False),
        (8, True),
        (8, False),
    ]
    assert all(0 < row["share in tools"][0] < 1 < row["tokens/s"][0] for row in rows)
