"""The tables of pages are made from the rows that are kept; verdicts follow from intervals."""

import json
import re

import pytest
from helpers import ROOT
from helpers.errors import error_naming, refused

from examples.experiments import (
    agents,
    claims,
    critic_free_cafe,
    distilled_cafe,
    estimators,
    grpo_switches,
    hidden_map,
    hinted_reasoning,
    macro_actions,
    online_cafe,
    other_tokenizer,
    real_calculator,
    real_reasoning,
    records,
    reflect_rl,
    refuel,
    taxi_agents,
    unit_tests,
)
from examples.experiments.claim_list import SECTIONS, Claim, column, rollouts, success
from examples.experiments.page_tables import markdown, short
from examples.experiments.readings import compare, each, equal_kl
from examples.experiments.records import KEPT, kept_rows, settings_file
from lightrlhf.cli.errors import RunFailure

HIGHER = Claim(says="", measure="", experiment="task", arm="a", control="b", read=column("score"))


def rows_of(scores: dict[str, list[float]], **columns: str) -> list[dict]:
    """Rows of seeds from 1 on."""
    return [
        {"arm": arm, "seed": seed, "score": score} | columns
        for arm, own in scores.items()
        for seed, score in enumerate(own, start=1)
    ]


def test_the_pages_are_those_of_the_rows():
    made = claims.pages()
    assert made.keys() == {ROOT / "howto" / name for name in ("agents.md", "results.md")}
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: make claims"
        assert {*re.findall(r"<!-- (?:end of )?rows: (.*) -->", text)} <= claims.tables().keys()


def test_every_table_is_printed_also_those_of_no_page(capsys):
    claims.main(["--tables", "True"])
    printed = capsys.readouterr().out
    assert all(f"{name}\n\n" in printed for name in claims.tables())


def test_the_readme_says_how_many_claims_held():
    counts = {name: int(n) for name, n in re.findall(r"^\| ([a-z ]+) \| (\d+) \|$", claims.verdicts(), re.MULTILINE)}
    tested = sum(counts.values()) - counts[claims.HOPELESS]
    said = f"of {tested} claims [{counts['held']} held](howto/results.md)"
    assert said in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_a_page_follows_its_rows(monkeypatch, tmp_path):
    section = next(one for one in SECTIONS if one.title == "macro actions")
    text = claims.claim_table(section)
    for path in KEPT.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(records, "KEPT", tmp_path)
    assert claims.claim_table(section) == text
    (tmp_path / "macro_actions.jsonl.gz").unlink()
    assert "no rows yet" not in text and "no rows yet" in claims.claim_table(section)


@pytest.mark.parametrize(
    "n, low, matched, said",
    [
        (5, 0.1, None, "held"),
        (5, 0.0, None, "not held"),
        (5, -0.1, 0.2, "not held"),
        (5, 0.1, 0.1, "held"),
        (5, 0.1, -0.1, "only at the same lambda"),
        (2, 0.1, None, "fewer than three seeds"),
    ],
)
def test_a_verdict_follows_from_the_intervals(n, low, matched, said):
    matched = None if matched is None else (0.5, matched, 1.0)
    assert claims.verdict(claims.Finding(n, (0.5, low, 1.0), matched)) == said
    assert claims.verdict(None) == "no rows yet"


@pytest.mark.parametrize("high, said", [(-0.1, "the opposite held"), (0.0, "not held")])
def test_an_interval_below_zero_is_the_opposite(high, said):
    assert claims.verdict(claims.Finding(10, (-0.5, -1.0, high), None)) == said


def test_a_difference_is_read_on_the_seeds_that_all_arms_have():
    rows = rows_of({"a": [3.0, 5.0, 8.0], "b": [1.0, 2.0], "c": [4.0, 4.0, 4.0]})
    found = claims.find(HIGHER, rows)
    assert found.n == 2 and found.gap[0] == 2.5 and found.matched is None
    tried = [{"arm": arm, "seed": 0, "score": 99.0} for arm in "abc"]
    matched = Claim(**(vars(HIGHER) | {"matched": "c"}))
    of_three = claims.find(matched, [*rows, *tried])
    assert of_three.n == 2 and of_three.matched[0] == 0.0
    assert compare(rows, "a", "b", column("score"), less_is_better=True).gap[0] == -2.5
    elsewhere = Claim(**(vars(HIGHER) | {"where": {"task": "x"}}))
    assert (
        claims.find(elsewhere, rows) is None and claims.find(elsewhere, rows_of({"a": [1], "b": [0]}, task="x")).n == 1
    )


def test_what_was_not_reached_counts_as_the_limit():
    rows = [{"arm": arm, "seed": 1, "rollouts": time} for arm, time in (("a", 40), ("b", None))]
    assert compare(rows, "a", "b", rollouts, less_is_better=True).gap[0] == 20


def test_curves_and_iterations_are_read():
    curve = [{"kl": 0.0, "reward": 0.1}, {"kl": 2.0, "reward": 0.5}]
    rows = [
        {"arm": "a", "seed": 3, "curve": curve},
        {"arm": "b", "seed": 3, "curve": [curve[0], {"kl": 1.0, "reward": 0.2}]},
    ]
    assert equal_kl(rows) == {"a": {3: pytest.approx(0.3)}, "b": {3: pytest.approx(0.2)}}
    row = {"arm": "a", "seed": 1, "results": [{"iterations": 25, "success": 0.2}, {"iterations": 50, "success": 0.4}]}
    assert success(25)([row]) == {"a": {1: 0.2}} and success(75)([row]) == {"a": {1: 0.4}}
    assert each(lambda row: 7.0)([row]) == {"a": {1: 7.0}}


ARMS = {
    "macro_actions": macro_actions.ARMS,
    "refuel_two_slots": refuel.ARMS,
    "refuel_cafe": refuel.ARMS,
    "hidden_map": hidden_map.ARMS,
    "online_cafe": online_cafe.ARMS,
    "grpo_switches": grpo_switches.ARMS,
    "critic_free_cafe": critic_free_cafe.METHODS,
    "distilled_cafe": distilled_cafe.ARMS,
    "other_tokenizer": other_tokenizer.ARMS,
    "hinted_reasoning": hinted_reasoning.ARMS,
    "real_distillation": ("base", "GRPO", "distilled"),
    "agents": agents.ARMS,
    "real_calculator": real_calculator.ARMS,
    "taxi_agents": taxi_agents.ARMS,
    "estimators": [*estimators.CREDIT, *estimators.SEEDS],
    "real_reasoning": real_reasoning.ARMS,
    "unit_tests": unit_tests.ARMS,
} | {f"reflect_rl_{task}": reflect_rl.ARMS | reflect_rl.CONTROLS for task in reflect_rl.TASKS}


def test_every_claim_names_arms_of_its_experiment():
    for claim in (claim for section in SECTIONS for claim in section.claims):
        assert {claim.arm, claim.control, claim.matched or claim.arm} <= set(ARMS[claim.experiment]), claim


def test_every_row_that_is_kept_says_how_it_was_made():
    names = sorted(path.name.partition(".")[0] for path in KEPT.glob("*.jsonl.gz"))
    assert {"macro_actions", "critic_free_cafe", "grpo_switches"} <= {*names} <= {*ARMS, "real_dialogues"}
    for name in names:
        assert not json.loads(settings_file(name).read_text(encoding="utf-8")).get("smoke")
        rows = kept_rows(name)
        assert all({"seed", "arm", "seconds", "versions", "commit", "processor"} <= row.keys() for row in rows)
        keys = [
            json.dumps([row.get(key) for key in ("task", "setting", "arm", "seed", "learning_rate")]) for row in rows
        ]
        assert len(set(keys)) == len(keys)


def made(**columns) -> dict:
    row = {
        "seed": 1,
        "curve": [0.5] * 6,
        "processor": "one",
        "versions": {"torch": "2", "lightrlhf": "1"},
        "seconds": 9.0,
    }
    return row | columns


def test_a_run_made_again_is_compared_bit_by_bit_where_it_can_be():
    same = made(seconds=3.0, versions={"torch": "2", "lightrlhf": "3"})
    assert "bit for bit" in claims.compared(made(), same)
    with error_naming(RunFailure, "curve"):
        claims.compared(made(), made(curve=[0.5] * 5 + [0.5000001]))
    assert "other packages" in claims.compared(made(), made(processor="two", curve=[0.51] * 5 + [0.9]))
    with error_naming(RunFailure, "0.100"):
        claims.compared(made(), made(processor="two", curve=[0.6] * 6))


def test_a_table_of_a_page():
    assert markdown(("a", "b"), [("1", ""), ("", "")]) == "| a | b |\n|---|---|\n| 1 | |\n| | |\n"
    assert short("+0.125 [-0.500, 10.050]") == "+.125 [-.500, 10.050]"


def test_keeping_rows_needs_their_folder(capsys):
    assert "--keep and --output_dir go together" in refused(capsys, claims.main, "--keep", "macro_actions")
