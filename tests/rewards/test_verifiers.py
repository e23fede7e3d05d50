"""Verifiers pay right answers in any common form, and nothing else; what cannot be judged is not scored."""

import json
import math

import pytest
from helpers.errors import error_naming

from lightrlhf.rewards import verifiers
from lightrlhf.rewards.encoding import Sample
from lightrlhf.rewards.scorers import FunctionScorer
from lightrlhf.rewards.verifiers import (
    column_pattern,
    exact_answer,
    final_answer,
    last_number,
    matches,
    math_answer,
    numeric_answer,
    reasoning_gym,
    tagged_or_last,
    think_and_answer,
)

MATH = "lightrlhf.rewards.verifiers:math_answer"


def score(function, completion, **columns):
    (value,) = function(["p"], [completion], **{name: [value] for name, value in columns.items()})
    return value


@pytest.mark.parametrize(
    "completion, answer",
    [
        ("The answer is 42.", "42."),
        ("No.\nThe answer is: 42\n\n", "42"),
        ("answer: 3 or answer: 4", "4"),
        ("2 + 2\n#### 4", "4"),
        ("<answer>7</answer>, no, <answer> 8\n</answer> bye", "8"),
        (r"so \boxed{\frac{1}{2}}." + "\nDone", r"\frac{1}{2}"),
        (r"<answer>\boxed{3}</answer>\boxed{4}", "3"),
        (r"\boxed{never closed", r"\boxed{never closed"),
        ("7\n8", "8"),
        ("", ""),
    ],
)
def test_the_final_answer_of_a_response(completion, answer):
    assert final_answer(completion) == answer
    assert final_answer([{"role": "assistant", "content": completion}]) == answer


@pytest.mark.parametrize(
    "text, number",
    [
        ("5-3", 3.0),
        ("x = -1,234.5", -1234.5),
        ("1e-3", 1e-3),
        ("3.", 3.0),
        (".5", 0.5),
        ("\u22127", -7.0),
        ("12,34", 34.0),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number and last_number("none") is None


def test_exact_and_numeric_answers():
    assert score(exact_answer, "The answer is  to be.", answer="to  be") == 1.0
    assert score(exact_answer, "1 2 3 4", answer="4") == 0.0
    assert score(exact_answer, "x", answer=None) is None
    assert score(numeric_answer, "It is 1,000.0 grams", solution="1000") == 1.0
    assert score(numeric_answer, "18", ground_truth="9 + 9\n#### 18") == 1.0
    assert score(numeric_answer, "none", answer=18) == 0.0
    assert score(numeric_answer, "1.01", answer=1.0) == 0.0
    assert score(numeric_answer, "1.01", answer=1.0, tolerance=0.1) == 1.0
    assert math.isnan(score(numeric_answer, "1", answer="many")) and score(numeric_answer, "1", answer=None) is None
    with error_naming(ValueError, "ground_truth, answer, solution"):
        score(exact_answer, "x", question="y")


def test_formats_are_regular_expressions():
    assert score(think_and_answer, "<think>a\nb</think>\n<answer>c</answer>") == 1.0
    for wrong in ("<answer>c</answer>", "<think>a</think><answer>b</answer><answer>c</answer>", "", "<think></think>"):
        assert score(think_and_answer, wrong) == 0.0
    assert score(matches(r"\d+"), "12") == 1.0 and score(matches(r"\d+"), "12 ") == 0.0
    assert score(column_pattern, "ab", pattern="a.") == 1.0 and score(column_pattern, "ab", pattern=None) is None


def test_mathematics():
    pytest.importorskip("math_verify")
    for completion, answer, value in (
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        ("The answer is x^2 + 2x + 1", "$(x+1)^2$", 1.0),
        ("1/2", r"so \boxed{0.5}", 1.0),
        ("1, 2, 3", "3", 0.0),
        ("no idea", "3", 0.0),
        ("", "3", 0.0),
    ):
        assert score(math_answer, completion, answer=answer) == value, completion
    assert math.isnan(score(math_answer, "3", answer="")) and score(math_answer, "3", answer=None) is None


def test_mathematics_that_hangs_is_killed_in_a_process_of_its_own():
    """A power tower, for which the alarm of math-verify would answer False, and off the main thread hang."""
    pytest.importorskip("math_verify")
    assert math_answer.timeout == verifiers.SECONDS
    scorer = FunctionScorer(math_answer, MATH, timeout=4.0, path=MATH)
    given = [Sample("p", text, columns={"answer": "2"}) for text in ("2", r"\boxed{9^{9^{9^{9}}} - 1}", "2", "3")]
    values = scorer.score(given)
    assert [values[i] for i in (0, 2, 3)] == [1.0, 1.0, 0.0] and math.isnan(values[1])
    assert scorer.failures["timeouts"] + scorer.failures["crashes"] + scorer.failures["errors"] == 1


def test_scorers_of_reasoning_gym(capsys):
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("chain_sum", size=1, seed=1)[0]
    columns = {"task": "chain_sum", "entry": json.dumps(entry)}
    right = entry["answer"]
    assert score(reasoning_gym, f"<answer> {right}</answer> I am sure", **columns) == 1.0
    assert score(reasoning_gym, f"1 2 3\n{right}\n\n", **columns) == 1.0
    assert score(reasoning_gym, f"{right}\nor not", **columns) == 0.0
    assert tagged_or_last("") == "" and score(reasoning_gym, "", **columns) == 0.0
    broken = {"task": "prime_factorization", "entry": json.dumps(gym.create_dataset("prime_factorization", size=1)[0])}
    assert math.isnan(score(reasoning_gym, "I do not know", **broken))
    assert "the scorer of prime_factorization raised ValueError" in capsys.readouterr().err
    assert score(reasoning_gym, "1", task=None, entry=None) is None  # a row of another set
    with pytest.raises(ValueError, match="no_such_task"):
        score(reasoning_gym, "1", task="no_such_task", entry="{}")
