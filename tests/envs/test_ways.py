"""The kinds of environments by what an object has, and the environments that this library brings."""

import random

import pytest
from helpers.errors import error_naming

from datasets_prep.apps.python_tool import python
from lightrlhf.cli.errors import UsageError
from lightrlhf.envs.games import GuessNumber, Sums, calculator
from lightrlhf.envs.search import NUM_TOWNS, Search, documents, search
from lightrlhf.envs.tool_env import ToolEnv
from lightrlhf.envs.ways import TOOLS, EnvSpec, GymEnv, MethodsEnv, adapted, load_tool


def say(text="", **calls):
    made = [{"id": "c", "function": {"name": name, "arguments": given}} for name, given in calls.items()]
    return {"role": "assistant", "content": text, "tool_calls": made}


class Documented:
    """As TRL's documentation writes an environment."""

    def reset(self, **kwargs) -> str | None:
        self.counter = kwargs["begin"]
        return None

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter

    def _hidden(self):
        raise AssertionError


def test_a_class_of_trl_is_played_as_it_is():
    env = adapted(Documented(), "--env x:Documented")
    assert isinstance(env, MethodsEnv) and not env.gives_reward and not env.is_stateless
    assert [tool["function"]["name"] for tool in env.tools] == ["increment"]
    assert env.reset(1, {"begin": 5, "prompt": "a"}) == []
    assert env.step(say(increment={"step": 2})).messages[0]["content"] == "7" and env.finish("turns") is None


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def reset(self, *, seed=None):
        return self.name, {}

    def step(self, text):
        return text, 0.0, True, False, {}


def test_an_option_may_be_called_name():
    env = EnvSpec(env=f"{__name__}:Named", options={"name": "tea"}).make()
    assert env.reset(1, {}) == [{"role": "user", "content": "tea"}]


def test_a_text_environment_of_the_library_shows_task_and_commands():
    env = EnvSpec(env="dangerous_taxi", options={"horizon": 5}).make()
    assert isinstance(env, GymEnv) and env.tools is None
    (first,) = env.reset(3, {"prompt": "ignored"})
    assert first["role"] == "user" and "\nCommands:\n" in first["content"]
    assert first["content"].startswith(env.env.instructions)
    commands = first["content"].split("Commands:\n")[1].splitlines()
    assert commands == env.env.reset(seed=3)[1]["admissible"]
    assert env.step(say(env.env.expert())).counts["failed_calls"] == 0
    answer = env.step(say("fly away"))
    assert answer.counts == {"calls": 1, "failed_calls": 1} and answer.reward < 0 and env.finish("turns") == 0.0


def test_what_is_no_environment_is_said():
    with error_naming(UsageError, "--env x", "neither step(text) nor public methods"):
        adapted(type("Empty", (), {"reset": lambda self: None})(), "--env x")


def test_each_tool_has_a_schema():
    env = ToolEnv([load_tool(name) for name in TOOLS])
    assert [tool["function"]["name"] for tool in env.tools] == [*TOOLS]
    assert env.step(say(calculator={"expression": "2*3"})).messages[0]["content"] == "6"


@pytest.mark.parametrize("text, value", {"2+3*4": "14", "-(7//2)%5": "2", "2**-1": "0.5", "1.5*2": "3.0"}.items())
def test_the_calculator_computes(text, value):
    assert calculator(text) == value


@pytest.mark.parametrize("text", ["9**9**9", "(-2)**.5", "__import__('os')", "1/0", "x", "True", "1+" * 600 + "1", "("])
def test_the_calculator_refuses_what_is_no_sum(text):
    with pytest.raises((ValueError, ArithmeticError)):
        calculator(text)


def test_sums_are_drawn_by_the_seed_and_judged_by_the_calculator():
    env = EnvSpec(env="sums").make()
    random.seed(4)
    (first,) = env.reset(4, {})
    random.seed(4)
    assert env.reset(4, {}) == [first]
    value = env.step(say(calculator={"expression": env.env.expression})).messages[0]["content"]
    assert env.finish("turns") == 0.0
    env.step(say(answer={"number": f" {value} "}))
    assert env.finish("done") == 1.0
    assert env.reset(4, {"expression": "2 + 2"})[0]["content"].startswith("What is 2 + 2?")
    with pytest.raises(ValueError, match="digits=0"):
        Sums(digits=0)


def test_a_number_is_guessed_by_bisection():
    for seed in range(20):
        env = GuessNumber(highest=15, turns=4)
        text, _ = env.reset(seed=seed)
        low, high, done, reward = 1, 15, False, 0.0
        assert "from 1 to 15" in text
        while not done:
            guess = (low + high) // 2
            text, reward, done, _, _ = env.step(f"I say {guess}.")
            low, high = (guess + 1, high) if text == "higher" else (low, guess - 1)
        assert reward == 1.0
    env.reset(seed=1, options={"number": 3})
    assert [env.step(word)[0] for word in ("none", "2", "9")] == ["say a number", "higher", "lower"]
    assert env.step("9")[2:4] == (True, False)  # a lost game is over, not cut


def test_a_question_of_the_small_world_is_answered_by_two_searches():
    env = EnvSpec(env="search").make()
    for seed in range(30):
        random.seed(seed)
        question = env.reset(seed, {})[0]["content"]
        person = question.removesuffix(" lives?").split()[-1]
        town = search(person)[0].rstrip(".").split()[-1]
        assert env.env.expected in search(town)[0] and env.env.expected not in search(person)[0]
        env.step(say(answer={"text": f"{env.env.expected.upper()}."}))
        assert env.finish("done") == 1.0
    assert Search().search("qqqq") == "nothing found" and len(documents()) == 120 and NUM_TOWNS == 40


def test_python_runs_in_the_sandbox():
    assert python("print(6 * 7)") == "42\n"
    assert python("1/0").endswith('File "program", line 1, in <module>\nZeroDivisionError: division by zero\n')
    assert "SyntaxError" in python("def f(:") and python("x = 1") == "(it printed nothing)"
    assert "Error: [Errno" in python("open('/etc/passwd')")
    assert python("print('a' * 10**6)").startswith("error: it ended too early")


def test_what_a_text_environment_cuts_is_truncated_unless_it_ended():
    class Cut:
        def reset(self, *, seed=None):
            return "go", {}

        def step(self, text):
            return "more", 0.5, text == "end", True, {}

    env = adapted(Cut(), "--env x:Cut")
    env.reset(1, {})
    answers = [env.step(say(text)) for text in ("on", "end")]
    assert [(one.done, one.stop_reason) for one in answers] == [(True, "truncated"), (True, "done")]
