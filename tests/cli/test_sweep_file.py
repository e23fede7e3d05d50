"""Files of sweeps: the combinations they stand for, and what is refused before anything is trained."""

import dataclasses
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.errors import error_naming

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.parser import parse
from lightrlhf.cli.sweep_file import LONGEST, Sweep, non_default_words, read_sweep
from lightrlhf.programs import TRAINING

HEAD = "program: sft\nflags: {model_name: tiny}\nseeds: [1, 2]\nmetric: val/loss\n"


def read(folder: Path, text: str) -> Sweep:
    path = folder / "sweep.yaml"
    path.write_text(text)
    return read_sweep(str(path))


def values(sweep: Sweep) -> list[tuple]:
    return [tuple(one.values.values()) for one in sweep.combinations]


# --------------------------------------------------------------------------------------------------------- combinations
def test_a_grid_has_every_combination_as_the_program_reads_it(tmp_path):
    sweep = read(tmp_path, HEAD + "grid: {learning_rate: [1e-4, 0.1], use_targets: [True, False]}\n")
    assert (sweep.program, sweep.metric, sweep.lower_is_better, sweep.seeds) == ("sft", "val/loss", True, [1, 2])
    assert values(sweep) == [(1e-4, True), (1e-4, False), (0.1, True), (0.1, False)]
    assert sweep.combinations[1].name == "learning_rate=0.0001+use_targets=False"
    assert sweep.combinations[1].args.seed == 1 and sweep.combinations[1].args.use_targets is False


def test_flags_of_a_config_file_hold_where_the_sweep_has_no_others(tmp_path):
    (tmp_path / "flags.yaml").write_text("model_name: tiny\nepochs: 3\nmax_steps: 7\n")
    head = HEAD.replace("{model_name: tiny}", f"{{epochs: 2, config: {tmp_path / 'flags.yaml'}}}")
    args = read(tmp_path, head + "grid: {max_steps: [5]}\n").combinations[0].args
    assert (args.model_name, args.epochs, args.max_steps) == ("tiny", 2, 5)


def test_an_alias_is_the_flag_it_stands_for(tmp_path):
    sweep = read(tmp_path, HEAD.replace("{model_name: tiny}", "{}") + "grid: {model_name_or_path: [a, b]}\n")
    assert [one.name for one in sweep.combinations] == ["model_name=a", "model_name=b"]
    with error_naming(UsageError, "model_name"):
        read(tmp_path, HEAD + "grid: {model_name_or_path: [a, b]}\n")


def test_names_of_folders_are_short_and_tell_values_apart(tmp_path):
    sweep = read(tmp_path, HEAD.replace("model_name: tiny", "") + "grid: {model_name: [a/b, a-b, a b]}\n")
    names = [one.name for one in sweep.combinations]
    assert names[1] == "model_name=a-b" and len(set(names)) == 3
    assert all(name.startswith("model_name=a-b") and "/" not in name for name in names)
    long = HEAD.replace("model_name: tiny", "") + f"grid: {{model_name: [{'x' * 300}, {'x' * 301}]}}\n"
    names = [one.name for one in read(tmp_path, long).combinations]
    assert len(set(names)) == 2 and all(len(name) < LONGEST + 10 for name in names)


def test_the_words_of_arguments_are_these_arguments_again(tmp_path):
    typed = ["--data_dir", "a,b", "c d", "--model_name=x=y", "--epochs", "2", "--lr_warmup_steps", "5"]
    typed += [
        "--learning_rate", "3e-5", "--activation_checkpointing", "--data_weights", "1", "2.5", "3",
        "--eval_iters=null",
    ]  # fmt: skip
    args = parse(TRAINING["sft"].args_class(), typed)
    assert parse(TRAINING["sft"].args_class(), non_default_words(args)) == args
    grpo = ["--model_name=tiny", "--reward_function", "a.b:c", "--stop_strings", "x, y", "\n", "--rollout_size=32"]
    args = parse(TRAINING["grpo"].args_class(), grpo)
    assert parse(TRAINING["grpo"].args_class(), non_default_words(args)) == args


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples" / "configs" / "sweeps").glob("*.yaml")), ids=lambda p: p.stem
)
def test_the_examples_are_valid(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    sweep = read_sweep(str(path))
    assert len(sweep.combinations) > 1 and len(sweep.seeds) > 1
    assert dataclasses.is_dataclass(sweep.combinations[0].args)


# ------------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("text", "pins"),
    [
        ("progam: sft\n", "unknown key progam; did you mean program?"),
        ("", "is not a mapping"),
        ("seeds: [1]\nmetric: val/loss\n", "program is missing; give it as in `program: sft`"),
        ("program: sft\nmetric: val/loss\nseeds: []\n", "seeds is missing"),
        ("program: sft\nseeds: [1]\n", "metric is missing"),
        (HEAD.replace("sft", "stf"), "program stf is not a training program; did you mean sft?"),
        (HEAD.replace("sft", "plot"), "program plot is not a training program; training programs: sft, rm"),
        (HEAD.replace("val/loss", "a/b"), "metric a/b: say which value is better, min:a/b or max:a/b"),
        (HEAD + "grid: {learning_rat: [1]}\n", "unknown flag --learning_rat; did you mean --learning_rate?"),
        (HEAD + "grid: {lr: [1]}\n", "unknown flag --lr; did you mean --learning_rate?"),
        (HEAD + "grid: {learning_rate: [fast]}\n", "--learning_rate fast is not a finite number"),
        (HEAD + "grid: {learning_rate: [-1]}\n", "--learning_rate -1.0 must be above 0"),
        (HEAD + "grid: {learning_rate: {a: 1}}\n", "grid: learning_rate {'a': 1} is not a list"),
        (HEAD + "grid: {learning_rate: [{a: 1}]}\n", "{'a': 1} is not a valid flag value"),
        (HEAD + "grid: {learning_rate: 0.1}\n", "grid: learning_rate 0.1 is not a list such as [0.1]"),
        (HEAD + "grid: {learning_rate: []}\n", "grid: learning_rate has no values"),
        (HEAD + "grid: {}\n", "grid is empty"),
        (HEAD + "grid: [1]\n", "grid [1] is not a mapping"),
        (HEAD + "grid: {learning_rate: [1e-4, 0.0001]}\n", "learning_rate=0.0001 is given twice"),
        (HEAD + "grid: {model_name: [a]}\n", "model_name is in both flags and grid"),
        (HEAD + "grid: {seed: [1, 2]}\n", "grid: seed cannot be set in a sweep file: give seeds"),
        (HEAD + "grid: {config: [a.yaml]}\n", "config cannot be in grid"),
        (HEAD + f"grid: {{learning_rate: [{', '.join(f'0.{n}1' for n in range(1, 1200))}]}}\n", "1,199 combinations"),
        (HEAD.replace("model_name: tiny", "output_dir: x"), "flags: output_dir cannot be set in a sweep file"),
        (HEAD.replace("model_name: tiny", "push_to_hub: x"), "flags: push_to_hub cannot be set in a sweep file"),
        (HEAD.replace("model_name: tiny", "help: true"), "flags: help cannot be set in a sweep file"),
        (HEAD.replace("[1, 2]", "3"), "seeds 3 is not a list such as [1, 2, 3]"),
        (HEAD.replace("[1, 2]", "[1, 1]"), "seeds: 1 is given twice"),
        (HEAD.replace("[1, 2]", "['1']"), "seeds: '1' is not a whole number"),
        (HEAD.replace("[1, 2]", "[1, 2.5]"), "seeds: 2.5 is not a whole number"),
        (HEAD.replace("[1, 2]", "[1, -2]"), "--seed -2 must lie in"),
        (HEAD + "sample: {learning_rate: [1]}\n", "unknown key sample"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_names_it(text, pins, tmp_path):
    with pytest.raises(UsageError) as problem:
        read(tmp_path, text)
    told = str(problem.value)
    assert told.startswith(f"--sweep_file {tmp_path}/sweep.yaml") and "\n" not in told
    assert pins in told


def test_a_file_that_is_missing_is_one_line(tmp_path):
    with error_naming(UsageError, "--sweep_file", "none.yaml"):
        read_sweep(str(tmp_path / "none.yaml"))
