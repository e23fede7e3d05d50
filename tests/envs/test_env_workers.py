"""The pool of environments: episodes in waves, seeds, hostile tools; each failure is counted while the pool goes on."""

import time
from contextlib import contextmanager

import pytest
from helpers.errors import error_naming
from helpers.hostile_envs import DEEDS

from lightrlhf.cli.errors import UsageError
from lightrlhf.envs.env_workers import SECRET, EnvPool, unanswered
from lightrlhf.envs.ways import EnvSpec
from lightrlhf.generation.episode_env import Answer, Fault

HOSTILE = "helpers.hostile_envs"
LIMIT = 2.0  # seconds


def spec_of(name):
    return EnvSpec(env=f"{HOSTILE}:{name}")


def call(name, number=0, **arguments):
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def say(*calls, text=""):
    return {"role": "assistant", "content": text, "tool_calls": list(calls)}


def only(pool):
    """The only result."""
    (one,) = pool.results()
    return one[1]


@contextmanager
def pool_of(spec, size=1, seconds=LIMIT):
    """Context manager: a pool whose processes end with the block."""
    pool = EnvPool(spec, size, seconds)
    try:
        yield pool
    finally:
        pool.close()


LATE = {"hang", "hang_deaf", "stop"}
GONE = {"exit", "sys_exit", "interrupt", "abort", "kill", "fork_and_hang", "close_everything", "unreadable_answer"}
FAILING = {"raise", "raise_without_text", "recurse", "memory", "cancelled", "exception", "huge_number"}
FAILING |= {"unsayable", "nested", "circle"}  # results that are not texts


@pytest.mark.attack
def test_a_hostile_tool_is_an_observation_and_the_episode_goes_on():
    wrong = {}
    with pool_of(EnvSpec(tools=(f"{HOSTILE}:hostile", f"{HOSTILE}:echo"))) as pool:
        assert [tool["function"]["name"] for tool in pool.tools] == ["hostile", "echo"]
        assert pool.is_stateless and not pool.gives_reward
        for number, deed in enumerate(DEEDS):
            pool.reset(number, 1, {})
            first = only(pool)
            pool.step(number, say(call("hostile", 0, deed=deed)))
            answer = only(pool)
            kind = "tool_timeouts" if deed in LATE else "tool_crashes" if deed in GONE else "tool_errors"
            failed = deed in LATE | GONE | FAILING
            counts = {"calls": 1} | ({"failed_calls": 1, kind: 1} if failed else {})
            assert isinstance(answer, Answer), (deed, answer)
            (message,) = answer.messages
            said = {"role": "tool", "name": "hostile", "tool_call_id": "c0", "content": message["content"]}
            told = message["content"].startswith("error: ") == failed and len(message["content"].encode()) <= 100_000
            pool.step(number, say(call("echo", 1, text="still here")))
            after = only(pool).messages[0]["content"]
            pool.finish(number, "turns")
            if (answer.counts, message, told, first, after, only(pool)) != (counts, said, True, [], "still here", None):
                wrong[deed] = answer, first, after
        assert not wrong and not pool.playing and len(pool.workers) == 1


def test_a_call_that_ends_an_environment_ends_its_episode_with_the_rewards_it_has():
    with pool_of(spec_of("Room")) as pool:
        for number, (deed, reason) in enumerate({"hang": "env_timeout", "exit": "env_crashed"}.items()):
            pool.reset(number, 1, {})
            only(pool)
            pool.step(number, say(call("touch", deed=deed), call("touch", 1, deed="soft")))
            answer = only(pool)
            kind = "tool_timeouts" if deed == "hang" else "tool_crashes"
            counts = {"calls": 2, "failed_calls": 2, kind: 2}
            assert answer == Answer(done=True, stop_reason=reason, counts=counts)
            with error_naming(ValueError, f"episode {number}"):
                pool.finish(number, reason)


FAULTS = [
    ({"start": "hang"}, None, "timeouts", "reset: it took more than 2 seconds"),
    ({"start": "exit"}, None, "crashes", "reset: its process ended"),
    ({"start": "raise"}, None, "errors", "reset: ZeroDivisionError: division by zero"),
    ({"start": "number"}, None, "errors", "reset: TypeError: reset returned a int"),
    ({"end": "hang"}, [], "timeouts", "finish: it took more than"),
    ({"end": "exit"}, [], "crashes", "finish: its process ended"),
    ({"end": "raise"}, [], "errors", "finish: ZeroDivisionError"),
    ({"end": "nan"}, [], "rewards", "finish: the reward is a float nan"),
    ({"end": "bytes"}, [], "rewards", "finish: the reward is a bytes"),
    ({"end": "control"}, [], "rewards", "finish: the reward is a str"),
    ({"end": "raise_without_text"}, [], "errors", "finish: "),
]


def test_a_fault_of_the_environment_is_no_reward_and_the_pool_goes_on():
    with pool_of(spec_of("Room")) as pool:
        for number, (row, first, kind, text) in enumerate(FAULTS):
            pool.reset(number, 1, row)
            result = only(pool)
            if first is not None:
                assert result[0]["role"] == "user"
                pool.finish(number, "turns")
                result = only(pool)
            assert isinstance(result, Fault) and result.kind == kind and result.text.startswith(text), (row, result)
        pool.reset(99, 1, {"end": "none"})
        only(pool)
        pool.finish(99, "done")
        assert only(pool) is None  # the environment says that it has no reward
        assert not pool.playing and len(pool.workers) == 1


def test_a_process_that_ended_between_two_calls_is_a_fault_and_between_episodes_is_replaced():
    with pool_of(spec_of("Room")) as pool:
        pool.reset(0, 1, {})
        only(pool)
        pool.workers[0].process.kill()
        pool.workers[0].process.wait()
        pool.step(0, say(call("touch", deed="soft")))
        assert only(pool) == Fault("crashes", "its process ended between two calls")
        pool.reset(1, 1, {})
        assert only(pool)[0]["role"] == "user"
        pool.finish(1, "done")
        assert only(pool) == 0.0
        pool.workers[0].process.kill()
        pool.workers[0].process.wait()
        pool.reset(2, 1, {})
        assert only(pool)[0]["role"] == "user"


def test_a_dropped_episode_frees_its_place():
    with pool_of(spec_of("Room")) as pool:
        for number in range(2):
            pool.reset(number, 1, {})
        assert [number for number, _ in pool.results()] == [0]
        pool.drop(0)
        assert [number for number, _ in pool.results()] == [1]


def test_a_process_that_cannot_start_ends_the_run_first_and_costs_an_episode_later(monkeypatch):
    text = f"--env {HOSTILE}:Fragile: KeyError: 'SERVER_STATE'"
    with pool_of(spec_of("Fragile"), 2) as pool:
        for number in range(3):
            pool.reset(number, 1, {})
            if number == 0:
                assert isinstance(only(pool), list)
                monkeypatch.setenv("SERVER_STATE", "gone")
        faults = dict(pool.results())
        assert {*faults} == {1, 2} and all(fault.text.startswith(text) for fault in faults.values())
        pool.finish(0, "done")
        assert only(pool) == 0.0
    with error_naming(UsageError, text), pool_of(spec_of("Fragile")):
        pass


def test_a_stateless_turn_without_a_call_is_answered_where_its_process_ended():
    (message,) = unanswered(say(), "crashes", "it ended").messages
    assert message == {"role": "user", "content": "error: it ended"}
    (message,) = unanswered({"role": "assistant", "content": "x"}, "crashes", "it ended").messages
    assert message["role"] == "user"


def test_episodes_of_stateless_tools_share_processes_of_which_one_may_end():
    with pool_of(EnvSpec(tools=(f"{HOSTILE}:hostile", f"{HOSTILE}:echo"))) as pool:
        for number in range(3):
            pool.reset(number, 1, {})
        assert [*pool.results()] == [(0, []), (1, []), (2, [])]
        pool.step(0, say(call("echo", text="a")))
        pool.step(1, say(call("hostile", deed="exit")))
        pool.step(2, say(call("echo", text="b")))
        answers = dict(pool.results())
        assert answers[1].counts["tool_crashes"] == 1 and not answers[1].done
        assert [answers[number].messages[0]["content"] for number in (0, 2)] == ["a", "b"]
        pool.step(1, say(call("echo", text="still here")))
        assert only(pool).messages[0]["content"] == "still here"
        for number in range(3):
            pool.finish(number, "turns")
        assert [*pool.results()] == [(0, None), (1, None), (2, None)] and not pool.seeds


@pytest.mark.parametrize("size", [1, 2])
def test_what_stateless_tools_draw_follows_from_the_episode_s_seed_and_turn(size):
    with pool_of(EnvSpec(tools=(f"{HOSTILE}:draw",)), size) as pool:
        drawn = {0: [], 1: [], 2: []}
        for number, seed in enumerate((5, 5, 77)):
            pool.reset(number, seed, {})
        assert len([*pool.results()]) == 3
        for numbers in ((0, 2), (1,), (2, 1, 0)):
            for number in numbers:
                pool.step(number, say(call("draw")))
            for number, answer in pool.results():
                drawn[number].append(answer.messages[0]["content"])
    assert drawn[0] == drawn[1] and len({*drawn[0], *drawn[2]}) == 4


def play_rooms(size):
    """First messages and rewards of seven episodes, two to a seed, and how many began at a time."""
    told, rewards, waves = {}, {}, []
    with pool_of(spec_of("Room"), size) as pool:
        assert pool.gives_reward and pool.has_outcome and not pool.is_stateless
        assert [tool["function"]["name"] for tool in pool.tools] == ["touch", "wait"]
        for number in range(7):
            pool.reset(number, number // 2, {"prompt": "any"})
        while len(rewards) < 7:
            results = [*pool.results()]
            waves.append(sum(isinstance(result, list) for _, result in results))
            for number, result in results:
                if isinstance(result, list):
                    told[number] = result[0]["content"]
                    pool.step(number, say(call("wait", 0, text="a"), call("touch", 1, deed="b")))
                elif isinstance(result, Answer):
                    assert [one["content"] for one in result.messages] == ["a", "b"]
                    pool.finish(number, "turns")
                else:
                    rewards[number] = result
        assert len(pool.workers) == size
    return told, rewards, [count for count in waves if count]


def test_episodes_play_in_waves_reseeded_and_alike_whichever_process_plays_them():
    told, rewards, waves = play_rooms(2)
    assert waves == [2, 2, 2, 1] and set(rewards.values()) == {1.0}
    assert told[0] == told[1] != told[2] == told[3] and len({*told.values()}) == 4
    assert play_rooms(1)[:2] == (told, rewards)


WRONG_TURNS = {
    "none": "rewards",
    "nan": "rewards",
    "text": "rewards",
    "list": "rewards",
    "infinite": "rewards",
    "wrong": "errors",
    "raise": "errors",
}


def test_a_turn_of_text_is_the_action_and_a_bad_reward_a_fault():
    with pool_of(spec_of("Gym")) as pool:
        assert pool.tools is None and not pool.has_outcome
        for number, (text, kind) in enumerate(WRONG_TURNS.items()):
            pool.reset(number, 5, {"options": {"a": 1}, "prompt": "x"})
            assert only(pool) == [{"role": "user", "content": "seed 5 options {'a': 1}"}]
            pool.step(number, say(text=f" {text} "))
            fault = only(pool)
            assert isinstance(fault, Fault) and (fault.kind, fault.text[:5]) == (kind, "step:"), (text, fault)
        pool.reset(50, 5, {})
        only(pool)
        pool.step(50, say(text="done"))
        answer = only(pool)
        assert (answer.messages[0]["content"], answer.reward, answer.done) == ("done", 0.5, True)
        pool.finish(50, "done")
        assert only(pool) == 0.0
        pool.reset(51, 5, {})
        only(pool)
        pool.step(51, say(text="exit"))
        assert only(pool).stop_reason == "env_crashed"


def test_answers_of_a_wrong_shape_are_faults():
    with pool_of(spec_of("Own")) as pool:
        for number, start in enumerate(["text", "no_role", "number"]):
            pool.reset(number, 1, {"start": start})
            assert only(pool).kind == "errors"
        for number, text in enumerate(["none", "tuple", "messages", "count"]):
            pool.reset(number, 1, {})
            assert only(pool) == []
            pool.step(number, say(text=text))
            fault = only(pool)
            assert isinstance(fault, Fault) and fault.kind == "errors", (text, fault)
        pool.reset(9, 1, {})
        only(pool)
        pool.step(9, say(text="fine"))
        assert only(pool).messages[0]["content"] == "go on"
        pool.finish(9, "turns")
        assert only(pool) == 0.25


def test_keys_of_servers_do_not_reach_the_processes(monkeypatch):
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "MY_SECRETS", "db_password"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    with pool_of(EnvSpec(tools=(f"{HOSTILE}:hostile",))) as pool:
        pool.reset(0, 1, {})
        only(pool)
        pool.step(0, say(call("hostile", deed="environment")))
        assert only(pool).messages[0]["content"] == '["TOKENIZERS_PARALLELISM"]'


def test_secrets_are_known_by_usual_names():
    secrets = "OPENAI_APIKEY PGPASSWORD MYSQL_PWD GITHUB_PAT DB_PASSWD SMTP_PASS AWS_SECRET_ACCESS_KEY"
    assert all(SECRET.search(name) for name in secrets.split())
    assert not any(SECRET.search(name) for name in "PWD OLDPWD PATH PYTHONPATH TOKENIZERS_PARALLELISM".split())


WRONG_SPECS = [
    (EnvSpec(), "--env, --tools, --mcp and --agent"),
    (EnvSpec(env="chess"), "--env chess is unknown; give guess_number"),
    (EnvSpec(env=f"{HOSTILE}:Nothing"), f"--env {HOSTILE}:Nothing cannot be imported"),
    (EnvSpec(env=f"{HOSTILE}:no_class"), "has no reset"),
    (EnvSpec(env=f"{HOSTILE}:Room", options={"size": 3}), "its options are: none"),
    (EnvSpec(tools=("calculators",)), "--tools calculators is not of the form"),
    (EnvSpec(tools=(f"{HOSTILE}:hang",)), f"--tools {HOSTILE}:hang: Docstring"),
    (EnvSpec(env="os:abort"), "--env os:abort: its process ended"),
]


@pytest.mark.parametrize("spec, words", WRONG_SPECS)
def test_what_cannot_be_made_is_one_line_that_names_the_flag(spec, words):
    with error_naming(UsageError, words), pool_of(spec):
        pass


@pytest.mark.slow
def test_results_are_taken_as_far_as_they_are_there(tmp_path):
    """What still runs is given by a later call, and an answer is not late for having waited to be read."""
    with pool_of(EnvSpec(tools=(f"{HOSTILE}:wait_for",)), size=2) as pool:
        for number in range(2):
            pool.reset(number, 1, {})
        assert {number for number, _ in pool.results()} == {0, 1}
        for number, path in enumerate((tmp_path / "file", "")):
            pool.step(number, say(call("wait_for", path=str(path))))
        assert [number for number, _ in pool.results(linger=0.0)] == [1]
        (tmp_path / "file").touch()
        pool.step(1, say(call("wait_for", path="")))
        assert {number for number, _ in pool.results(linger=9.0)} == {0, 1}
        pool.step(0, say(call("wait_for", path="")))
        time.sleep(1.1 * LIMIT)
        ((number, answer),) = pool.results(linger=0.0)
        assert number == 0 and answer.messages[0]["content"] == "waited" and not answer.done
