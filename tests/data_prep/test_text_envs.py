"""Demonstrations and reflections from text environments: the five datasets, resuming, a model that comments."""

import dataclasses
import json
import shutil
import sys

import pytest
from helpers.errors import error_naming, refused

pytest.importorskip("gymnasium", reason="needs pip install -e '.[envs]'")

from transformers import AutoModelForCausalLM, AutoTokenizer

from datasets_prep.text_envs import prepare_data
from datasets_prep.text_envs.prepare_data import SETS, TextEnvArgs, rows_of, take
from datasets_prep.text_envs.reflections import request
from datasets_prep.text_envs.walks import Walker
from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.data.splits import SPLITS, load_split
from lightrlhf.envs import make_env, prompts
from lightrlhf.evaluate_env import COMMAND_TOKENS, acting_args
from lightrlhf.models.tokenizer import load_tokenizer

SIZES = ["--num_samples", "60", "--num_held_out", "20", "--num_proc", "1"]
CORRIDOR = '''
import gymnasium

from lightrlhf.envs import information


class Corridor(gymnasium.Env):
    """Find the door with a number; the commands depend on the position."""

    actions, levels, instructions = None, ["near", "far"], "Doors have numbers."

    def __init__(self, length: int = 4, is_mute: bool = False, lies: bool = False, wings: int = 0):
        self.length, self.is_mute, self.lies, self.wings = length, is_mute, lies, wings

    def starts(self, split, level=None):
        doors = {"train": range(2, 5), "validation": range(5, 7), "test": range(7, 9)}[split]
        return [{"door": door, "level": door % 2} for door in doors if level in (None, door % 2)]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.door, self.at, self.history = options["door"], 0, []
        self.weather = self.np_random.integers(100)
        return self.state()

    def state(self):
        commands = [f"wing {n}" for n in range(self.wings)] + ["forward"]
        commands += ["back"] * (self.at > 0) + [f"open {self.at}"]
        info = information(None, commands, task=f"Open door {self.door}.", history=self.history)
        return f"You stand at door {self.at}, it is {self.weather} degrees.", info

    def step(self, action):
        self.at += {"forward": 1, "back": -1}.get(action, 0)
        self.history.append((action, "A door." if action == "forward" else ""))
        text, info = self.state()
        return text, -1.0, action.startswith("open"), len(self.history) > 12, info

    def expert(self):
        if self.lies:
            return "fly"
        return f"open {self.at}" if self.at == self.door else "forward" if self.at < self.door else "back"

    def reflection(self, action=None):
        if action and (self.is_mute or action == self.expert()):
            return ""
        return f"Not {action}, but {self.expert()}." if action else f"Now {self.expert()}."
'''


@pytest.fixture(scope="module")
def taxi_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "dangerous_taxi"
    prepare_data.main(["--destination_dir", str(folder), *SIZES])
    return folder


@pytest.fixture
def corridor(tmp_path, monkeypatch):
    (tmp_path / "doors.py").write_text(CORRIDOR)  # not corridor.py, which other tests import
    monkeypatch.syspath_prepend(tmp_path)
    yield "doors:Corridor"
    sys.modules.pop("doors", None)


@pytest.fixture
def server(serve):
    return serve()


def taxi_args(folder="unused", **changes) -> TextEnvArgs:
    return TextEnvArgs(destination_dir=str(folder), **({"num_samples": 60, "num_held_out": 20} | changes))


def all_examples(args, path):
    env = make_env(args.env)
    return {(s, k): take(args, env, path, s, k) for s in SPLITS for k in ("positive", "negative")}


# ----------------------------------------------------------------------------------------------------------- datasets
def decoded(folder, split="train"):
    """(prompt, completion, whether it has an end token) of each row of a dataset."""
    tokenizer = load_tokenizer(folder)
    for row in load_split(folder, "finetune", split):
        assert row["targets"][: row["prompt_len"]].eq(-100).all()
        ids = row["input_ids"].tolist()
        completion = tokenizer.decode(ids[row["prompt_len"] : -1], clean_up_tokenization_spaces=False)
        yield tokenizer.decode(ids[: row["prompt_len"]]), completion, ids[-1] == tokenizer.eos_token_id


def test_the_five_datasets_have_equal_sizes_and_one_prompt_format(taxi_data):
    assert {p.name for p in taxi_data.iterdir()} == {*SETS, "base", "walks.jsonl", "walks.args.json"}
    for name in SETS:
        for split, size in (("train", 60), ("validation", 20), ("test", 20)):
            rows = list(decoded(taxi_data / name, split))
            assert len(rows) == size and all(ends for *_, ends in rows)
            ending = prompts.ANALYZE if "reflection" in name else prompts.ACTION
            assert all(prompt.endswith(f"{ending}\n") for prompt, *_ in rows)
            assert all((prompts.ANALYZE in prompt) == (name != "sft") for prompt, *_ in rows)
            assert all((prompts.CHOOSE in prompt) == ("reflection" not in name) for prompt, *_ in rows)
            negatives = [prompt + answer for prompt, answer, _ in rows if "Not " in prompt + answer]
            assert len(negatives) == (0 if name in ("sft", *SETS[3:]) else size // 2)


def test_targets_are_the_correction_or_the_executed_command(taxi_data):
    env = make_env("dangerous_taxi")
    followed = []
    for prompt, label, _ in decoded(taxi_data / "sft_policy"):
        action = env.actions[int(label)]
        if "Instead:" in prompt:
            assert f"Instead: {action}." in prompt
        else:
            followed.append(f"Next: {action}." in prompt)
    assert 0 < sum(followed) < len(followed)  # nine of ten commands are random


@pytest.mark.parametrize("change", [{"targets": "oracle"}, {"noise": 0.0}])
def test_positive_examples_of_the_oracle_alone(change, tmp_path):
    args = taxi_args(**change)
    for row in rows_of(args, "sft_policy_positive", all_examples(args, tmp_path / "walks.jsonl")):
        action = make_env("dangerous_taxi").actions[int(row["completion"])]
        assert f"Next: {action}." in row["prompt"]


def test_noise_and_negative_percentage_are_shares(tmp_path):
    args = taxi_args(num_samples=2000, negative_percentage=0.25, noise=0.5)
    examples = {
        ("train", k): take(args, make_env(args.env), tmp_path / "w", "train", k) for k in ("positive", "negative")
    }
    agreed = [example.action == example.expert for example in examples["train", "positive"]]
    assert abs(sum(agreed) / len(agreed) - (0.5 + 0.5 / 6)) < 0.05
    assert len(examples["train", "negative"]) == 500
    assert all(example.action != example.expert for example in examples["train", "negative"])
    rows = list(rows_of(args, "sft_policy", examples))
    assert len(rows) == 2000 and sum("Instead" in row["prompt"] for row in rows) == 500


def test_walks_begin_at_starts_of_their_own_split_and_level(taxi_data):
    env = make_env("dangerous_taxi")
    for split in SPLITS:
        walker = Walker(env, 1, split, 0.9, expert_start=False)
        for level in range(3):
            grids = {env.reset(options=start)[0] for start in env.starts(split, level)}
            assert {walker.walk("positive", 3 * n + level)[0].text for n in range(20)} <= grids


def test_late_states_occur_only_after_a_start_by_the_oracle():
    env = make_env("dangerous_taxi")
    steps = {}
    for lead in (True, False):
        walker = Walker(env, 1, "train", 0.9, lead, level=2)
        steps[lead] = [len(e.history) for n in range(200) for e in walker.walk("positive", n)]
    assert max(steps[False]) < max(steps[True]) and sum(s > 8 for s in steps[True]) > 50


def test_the_base_model_is_small_and_reproducible(taxi_data, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(taxi_data / "base")
    tokenizer = AutoTokenizer.from_pretrained(taxi_data / "base")
    assert 50_000 < model.num_parameters() < 150_000 and len(tokenizer) <= 512
    assert len(prompts.label_ids(tokenizer, prompts.choices(62))) == 62
    prepare_data.main(["--destination_dir", str(tmp_path), *SIZES])
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "base" / name).read_bytes() == (taxi_data / "base" / name).read_bytes()
    for name in SETS:
        hashes = [json.loads((f / name / "report.json").read_text())["files"] for f in (tmp_path, taxi_data)]
        assert hashes[0] == hashes[1]


def test_tokens_of_whole_lines_make_prompts_short(taxi_data, tmp_path):
    prepare_data.main(["--destination_dir", str(tmp_path), "--tokens_span", "words", *SIZES])
    for name in SETS:
        reports = [json.loads((folder / name / "report.json").read_text()) for folder in (taxi_data, tmp_path)]
        lines, words = (report["files"]["finetune_test"]["prompt_length"]["median"] for report in reports)
        assert 2 * lines < words
        assert list(decoded(taxi_data / name)) == list(decoded(tmp_path / name))


@pytest.mark.slow
def test_with_a_tokenizer_of_your_own_no_base_is_written(taxi_data, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    prepare_data.main(["--destination_dir", str(tmp_path), "--tokenizer_name", str(tmp_path / "tokenizer"), *SIZES])
    assert not (tmp_path / "base").exists()
    assert load_tokenizer(tmp_path / "sft").get_vocab() == tokenizer.get_vocab()


# ----------------------------------------------------------------------------------------------------------- resuming
@pytest.mark.slow
def test_walks_resume_after_a_kill_and_grow_without_changing(tmp_path):
    args = taxi_args()
    complete = all_examples(args, tmp_path / "complete.jsonl")
    for share in (0.3, 0.7):
        torn = tmp_path / f"{share}.jsonl"
        content = (tmp_path / "complete.jsonl").read_bytes()
        torn.write_bytes(content[: int(share * len(content))])  # ends within a line
        shutil.copy(tmp_path / "complete.args.json", torn.with_suffix(".args.json"))
        assert all_examples(args, torn) == complete
        assert torn.read_bytes() == content
    more = all_examples(dataclasses.replace(args, num_samples=90), tmp_path / "complete.jsonl")
    assert more["train", "positive"][:60] == complete["train", "positive"] and len(more["train", "positive"]) == 90
    with error_naming(UsageError, "noise", "0.9", "0.5"):
        all_examples(dataclasses.replace(args, noise=0.5), tmp_path / "complete.jsonl")


# -------------------------------------------------------------------------------------------------------------- model
def test_a_model_writes_the_reflections_and_no_state_is_requested_twice(server, tmp_path):
    folder, shared = tmp_path / "data", tmp_path / "shared.jsonl"
    model = ["--base_url", server.url, "--reflection_model", "m", "--reflections_file", str(shared)]
    flags = ["--destination_dir", str(folder), *model, *SIZES]
    prepare_data.main(flags)
    requests = {prompt: times for prompt, times in server.asked.items() if prompt != "/health"}
    assert set(requests.values()) == {1} and 50 < len(requests) < 150  # of 150 examples, some are the same state
    assert all("right move is: " in prompt for prompt in requests)
    answers = [answer for _, answer, _ in decoded(folder / "sft_reflection")]
    assert all(answer.endswith("!") and "Possible moves" in answer for answer in answers)

    lines = shared.read_bytes().splitlines(keepends=True)
    shared.write_bytes(b"".join(lines[:-5]) + lines[-5][:30])  # killed while the fifth last reply was written
    prepare_data.main(["--destination_dir", str(tmp_path / "other"), *model, *SIZES, "--targets", "oracle"])
    now = {prompt: times for prompt, times in server.asked.items() if prompt != "/health"}
    assert now.keys() == requests.keys() and sum(now.values()) == sum(requests.values()) + 5


def test_examples_that_the_model_refuses_are_dropped_and_counted(server, tmp_path, capsys):
    args = taxi_args()
    example = next(iter(all_examples(args, tmp_path / "walks.jsonl")["train", "positive"]))
    body = request(example, False, make_env("dangerous_taxi").instructions, 50, 0.0)
    server.script[body["messages"][-1]["content"]] = [lambda h: h.send(400, {"error": {"message": "no"}})]
    flags = ["--base_url", server.url, "--reflection_model", "m"]
    prepare_data.main(["--destination_dir", str(tmp_path / "data"), *flags, *SIZES])
    report = json.loads((tmp_path / "data" / "sft_policy" / "report.json").read_text())
    assert report["dropped"][0]["reason"] == "no_reflection"
    assert report["files"]["finetune_train"]["rows"] == 60 - report["dropped"][0]["rows"]


# ----------------------------------------------------------------------------------------------------------- your own
def test_an_environment_of_your_own_with_history_and_shuffled_labels(corridor, tmp_path):
    flags = ["--env", corridor, "--env_options", "length=6", "--with_history", "True", "--shuffle_action", "True"]
    prepare_data.main(["--destination_dir", str(tmp_path / "data"), *flags, *SIZES])
    positions = set()
    for prompt, label, _ in decoded(tmp_path / "data" / "sft_policy"):
        assert prompt.startswith("Open door ")
        assert prompt.count("> ") == int(prompt.count("> forward") + prompt.count("> back"))
        commands = dict(line.split(". ") for line in prompt.partition("# Choose:\n")[2].splitlines()[:-1])
        correction = prompt.partition(", but ")[2].partition(".\n")[0]
        assert not correction or commands[label] == correction
        positions.add(label)
    assert len(positions) > 20
    doors = {
        split: {prompt.split(".")[0] for prompt, *_ in decoded(tmp_path / "data" / "sft", split)} for split in SPLITS
    }
    assert not doors["train"] & doors["test"] and not doors["train"] & doors["validation"]


def test_commands_written_out_are_targets_and_no_labels_are_shown(corridor, tmp_path):
    flags = ["--env", corridor, "--written", "True", "--targets", "oracle"]
    prepare_data.main(["--destination_dir", str(tmp_path / "data"), *flags, *SIZES])
    for prompt, command, _ in decoded(tmp_path / "data" / "sft"):
        lines = prompt.partition("# Choose:\n")[2].splitlines()[:-1]
        assert f"- {command}" in lines and all(line.startswith("- ") for line in lines)
    experiment = tmp_path / "experiment"
    experiment.mkdir()
    (experiment / "args.json").write_text(json.dumps({"data_dir": str(tmp_path / "data" / "sft")}))
    assert acting_args(str(experiment), {}).max_new_tokens == COMMAND_TOKENS
    assert acting_args(str(experiment), {"max_new_tokens": 5}).max_new_tokens == 5


def test_action_comments_name_the_executed_command(corridor, tmp_path):
    flags = ["--env", corridor, "--comments", "action", "--noise", "1", "--negative_percentage", "0"]
    prepare_data.main(["--destination_dir", str(tmp_path), *SIZES, *flags])
    commands = set()
    for prompt, label, _ in decoded(tmp_path / "sft_policy"):
        command = prompt.partition(f"{prompts.ANALYZE}\nNext: ")[2].partition(".\n")[0]
        assert f"\n{label}. {command}\n" in prompt
        commands.add(command.split()[0])
    assert commands == {"forward", "back", "open"}  # at random, independent of the oracle


def test_random_parts_of_an_environment_follow_from_the_seed(corridor):
    walkers = [Walker(make_env(corridor), seed, "train", 0.5, expert_start=True) for seed in (1, 1, 2)]
    walks = [[walker.walk("positive", number) for number in order] for walker, order in zip(walkers, ([0, 1],) * 3)]
    assert walks[0] == walks[1] != walks[2]
    assert walkers[1].walk("positive", 0) == walks[0][0]  # independent of earlier walks


def test_labels_of_several_characters_are_tokens_of_the_trained_tokenizer(corridor, tmp_path):
    flags = ["--env", corridor, "--env_options", "wings=70", "--noise", "0", "--negative_percentage", "0"]
    prepare_data.main(["--destination_dir", str(tmp_path / "data"), *flags, *SIZES])
    labels = {label for _, label, _ in decoded(tmp_path / "data" / "sft")}
    assert labels == {prompts.CHOICES[70], prompts.CHOICES[72]} == {"18", "20"}  # forward and open, back between them
    rows = load_split(tmp_path / "data" / "sft", "finetune", "train")
    assert {len(row["targets"]) - row["prompt_len"] for row in rows} == {2}
    with pytest.raises(SystemExit) as stopped:
        prepare_data.main(["--destination_dir", str(tmp_path / "more"), *flags[:3], "wings=251", *flags[4:], *SIZES])
    assert stopped.value.code == 1


def test_an_environment_without_reasons_or_with_a_lying_oracle_is_refused(corridor, tmp_path):
    for option, fact in (("is_mute", "--negative_percentage 0"), ("lies", "'fly'")):
        args = taxi_args(tmp_path / option, env=corridor)
        env = make_env(corridor, **{option: True})
        with error_naming(RunFailure, fact):
            take(args, env, tmp_path / option, "train", "negative")


@pytest.mark.parametrize(
    "flags, line",
    [
        (["--base_url", "http://localhost:1/v1"], "--reflection_model"),
        (["--comments", "action"], "--comments action"),
        (["--hidden_size", "65"], "--hidden_size 65"),
        (["--stage", "prompts"], "--stage prompts: text environments have the stage finetune alone"),
        (["--env", "taxi"], "--env taxi"),
        (["--env_options", "horizon"], "--env_options horizon"),
        (["--env_options", "speed=3"], "its options are: horizon"),
        (["--level", "3"], "--level 3 must be from 0 to 2"),
    ],
)
def test_bad_arguments_are_one_line(flags, line, tmp_path, capsys):
    assert line in refused(capsys, prepare_data.main, "--destination_dir", tmp_path / "data", *flags)
    assert not (tmp_path / "data").exists()
