"""Flags: flat, typed, documented, refused in one line, and each of them read by its program."""

import ast
import dataclasses
import json
import os
import subprocess
import sys

import pytest
import yaml
from helpers import ROOT, environment, run_program
from helpers.errors import refused
from helpers.programs import args_classes, read_fields

from lightrlhf import export
from lightrlhf.cli.errors import RunFailure, UsageError, one_line_errors
from lightrlhf.cli.fields import Args, flag
from lightrlhf.cli.groups import DecodingArgs, ModelArgs, TrainArgs
from lightrlhf.cli.lists import pairs, paths, texts
from lightrlhf.cli.parser import parse, to_dict
from lightrlhf.ppo import PPOArgs
from lightrlhf.rm import RMArgs
from lightrlhf.sft import SFTArgs

PROGRAMS = {"sft": SFTArgs, "rm": RMArgs, "ppo": PPOArgs}
# Names that SheepRL's users know, by program.
SHARED = (
    "data_dir model_name epochs lr_warmup_steps micro_batch_size mini_batch_size save_interval eval_interval eval_iters"
)
SHARED += (
    " disable_dropout finetune_mode seed log_dir log_interval gradient_clip_val weight_decay optimizer experiment_name"
)
SHEEPRL = {
    "sft": f"{SHARED} learning_rate use_targets label_smoothing",
    "rm": f"{SHARED} learning_rate loss_type sft_experiment_dir",
    "ppo": f"""{SHARED} rollout_size rollout_mini_batch_size ppo_epochs sft_experiment_dir rm_experiment_dir
        actor_learning_rate critic_learning_rate init_kl_coeff adaptive_kl_coeff target_kl_coeff clip_coeff vf_coeff
        gae_gamma gae_lambd normalize_rewards normalize_advantages clip_rewards reward_clip_value max_new_tokens
        temperature top_k top_p""",
}


def good(program: str, data) -> list[str]:
    flags = ["--data_dir", str(data), "--model_name", "tiny"]
    return flags + (["--reward_function", "a:b"] if program == "ppo" else [])


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_names_of_sheeprl_are_kept(program):
    fields = {field.name for field in dataclasses.fields(PROGRAMS[program])}
    assert set(SHEEPRL[program].split()) <= fields


@pytest.mark.parametrize("args_class", [TrainArgs, ModelArgs, DecodingArgs, *PROGRAMS.values()])
def test_every_field_has_a_sentence_of_help(args_class):
    for owner in args_class.__mro__[:-1]:
        tree = next(
            node
            for node in ast.walk(ast.parse(source_of(owner)))
            if isinstance(node, ast.ClassDef) and node.name == owner.__name__
        )
        for node, behind in zip(tree.body, tree.body[1:]):
            if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
                assert isinstance(behind, ast.Expr) and behind.value.value.strip().endswith("."), node.target.id


def source_of(owner: type) -> str:
    return (ROOT / (owner.__module__.replace(".", "/") + ".py")).read_text()


@pytest.mark.parametrize("program", args_classes())
def test_every_field_is_read_by_its_program(program):
    """A field that is only checked has no effect."""
    fields = {field.name for field in dataclasses.fields(args_classes()[program])}
    if program == "lightrlhf.estimate":
        fields -= {"disable_dropout"}  # a run's flags, which change no memory
    assert fields <= read_fields(program), fields - read_fields(program)


def test_values_come_from_flags_a_config_file_or_defaults(cafe_data, tmp_path):
    config = tmp_path / "args.yaml"
    config.write_text("learning_rate: 0.5\nepochs: 3\nuse_targets: true\n")
    args = parse(SFTArgs, [*good("sft", cafe_data), "--config", str(config), "--epochs=7"])
    assert (args.learning_rate, args.epochs, args.use_targets, args.seed) == (0.5, 7, True, 42)
    assert parse(SFTArgs, good("sft", cafe_data)).use_targets is True


@pytest.mark.parametrize(
    "stored, typed, steps, ratio",
    [
        ("{}", [], None, 0.03),
        ("{}", ["--lr_warmup_steps", "5"], 5, None),
        ("{}", ["--lr_warmup_steps", "0"], 0, None),
        ("{}", ["--lr_warmup_steps", "5", "--lr_warmup_ratio", "0.1"], 5, None),
        ("lr_warmup_steps: 7", [], 7, None),
        ("lr_warmup_steps: 7", ["--lr_warmup_ratio", "0.1"], None, 0.1),
        ("lr_warmup_ratio: 0.2", ["--lr_warmup_steps", "5"], 5, None),
        ("{lr_warmup_steps: 7, lr_warmup_ratio: 0.03}", [], 7, None),  # as --print_config writes it
        ("{lr_warmup_steps: null, lr_warmup_ratio: 0.2}", [], None, 0.2),
        ("{program: sft, lr_warmup_steps: 100, lr_warmup_ratio: null}", [], 100, None),
    ],
)
def test_warm_up_steps_win_over_a_ratio_and_what_is_typed_over_a_file(stored, typed, steps, ratio, cafe_data, tmp_path):
    (tmp_path / "flags.yaml").write_text(stored)
    args = parse(SFTArgs, ["--config", str(tmp_path / "flags.yaml"), *good("sft", cafe_data), *typed])
    assert (args.lr_warmup_steps, args.lr_warmup_ratio) == (steps, ratio)


def test_booleans_and_none_are_written_as_words(cafe_data):
    args = parse(
        SFTArgs,
        [*good("sft", cafe_data), "--use_targets=True", "--activation_checkpointing", "False", "--max_steps=null"],
    )
    assert (args.use_targets, args.activation_checkpointing, args.max_steps) == (True, False, None)


def test_what_must_be_given_is_told_with_its_choices(capsys):
    told = refused(capsys, export.main)
    assert "--model_name and --to must be given; --to is one of merged, " in told and told.endswith(", ollama")


def test_the_alias_of_model_name_is_accepted(cafe_data):
    for words in (["--model_name_or_path", "tiny"], ["--model_name_or_path=tiny"]):
        assert parse(SFTArgs, ["--data_dir", str(cafe_data), *words]).model_name == "tiny"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListArgs(Args):
    """Lists of each kind."""

    seeds: list[int] | None = None
    """Whole numbers."""
    only: list[str] = flag([])
    """Names."""
    options: list[str] = flag([], split=pairs)
    """name=value."""
    folders: list[str] = flag([], split=paths)
    """Paths."""
    texts: list[str] = flag([], split=texts)
    """Texts."""


LISTS = [  # flag, its words, its items
    ("only", ["a", "b"], ["a", "b"]),
    ("only", ["a,b"], ["a", "b"]),
    ("only", ["a,", "b"], ["a", "b"]),
    ("only", ["a, b,"], ["a", "b"]),
    ("only", ["[a,b]"], ["a", "b"]),
    ("only", ["[a,", "'b']"], ["a", "b"]),
    ("only", ['["a, b", "c"]'], ["a, b", "c"]),
    ("only", ["[]"], []),
    ("only", [""], [""]),
    ("folders", ["", "b"], ["", "b"]),
    ("options", ['[name="x y", b=2]'], ['name="x y"', "b=2"]),
    ("texts", ["[", "]"], ["[", "]"]),
    ("seeds", ["1", "2"], [1, 2]),
    ("seeds", ["1,2"], [1, 2]),
    ("seeds", ["[1, 2]"], [1, 2]),
    ("options", ["a=1,b=(2,3)", "c=x,y"], ["a=1", "b=(2,3)", "c=x,y"]),
    ("options", ["[a=1, b=[2,3]]"], ["a=1", "b=[2,3]"]),
    ("folders", ["a,b", "c"], ["a", "b", "c"]),
    ("folders", ["one, two", "[c]"], ["one, two", "[c]"]),
    ("folders", ["[one, two]"], ["one, two"]),
    ("texts", ["Yes, sir.", "[END]"], ["Yes, sir.", "[END]"]),
    ("texts", ["[1]"], ["[1]"]),
    ("texts", ['["Yes, sir.", "]"]'], ["Yes, sir.", "]"]),
]


@pytest.mark.parametrize("flag, words, items", LISTS, ids=lambda value: " ".join(map(str, value)))
def test_items_of_a_list_come_as_words_with_commas_or_in_brackets(flag, words, items, tmp_path, monkeypatch):
    (tmp_path / "one, two").mkdir()  # what exists is not split
    monkeypatch.chdir(tmp_path)
    assert getattr(parse(ListArgs, [f"--{flag}", *words]), flag) == items
    if len(words) == 1:
        assert getattr(parse(ListArgs, [f"--{flag}={words[0]}"]), flag) == items


@pytest.mark.parametrize(
    "typed, stored",
    [
        ("--seed=010", "seed: 010"),
        ("--seed=1_000", "seed: 1_000"),
        ("--seed=1:30", "seed: 1:30"),
        ("--seed=0x10", "seed: 0x10"),
        ("--seed=4294967296", "seed: -1"),
        ("--learning_rate=.nan", "learning_rate: .inf"),
        (f"--learning_rate={'9' * 30}", f"learning_rate: {'9' * 30}"),
        ("--config=none.yaml", "seed: 1\nseed: 2"),
        ("--config=.", "seed: &s 1\nepochs: *s"),
    ],
)
def test_a_number_or_file_that_can_be_read_in_two_ways_is_refused(typed, stored, tmp_path, capsys):
    (tmp_path / "flags.yaml").write_text(stored)
    for words in ([typed], ["--config", str(tmp_path / "flags.yaml")]):
        with pytest.raises(SystemExit) as stopped:
            parse(SFTArgs, words)
        line = capsys.readouterr().err
        assert stopped.value.code == 2 and line.count("\n") == 1
        assert typed.partition("=")[0] in line or "flags.yaml" in line or stored.partition(":")[0] in line


def test_an_item_of_another_type_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(ListArgs, ["--seeds", "1,x"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert (
        error.endswith(": error: --seeds [1, 'x'] has an item that is not a whole number\n") and error.count("\n") == 1
    )


def test_a_text_where_a_config_file_needs_a_list_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "args.yaml").write_text("only: a,b\n")
    with pytest.raises(SystemExit):
        parse(ListArgs, ["--config", str(tmp_path / "args.yaml")])
    assert capsys.readouterr().err.endswith(": error: --only a,b is not a list such as [a,b]\n")
    (tmp_path / "args.yaml").write_text("only: [a, b]\n")
    assert parse(ListArgs, ["--config", str(tmp_path / "args.yaml")]).only == ["a", "b"]


def test_args_cannot_be_changed(cafe_data):
    args = parse(SFTArgs, good("sft", cafe_data))
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.seed = 1


def test_abbreviations_are_no_flags(cafe_data, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(SFTArgs, [*good("sft", cafe_data), "--learning_rat=1"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.strip().endswith("unknown flag --learning_rat; did you mean --learning_rate?")


@pytest.mark.parametrize("program", PROGRAMS)
def test_stored_arguments_give_the_same_arguments_again(program, cafe_data, tmp_path):
    args = parse(PROGRAMS[program], [*good(program, cafe_data), "--seed", "9", "--gradient_clip_val", "0.5"])
    (tmp_path / "args.json").write_text(json.dumps({**to_dict(args), "program": program, "versions": {}}))
    again = parse(PROGRAMS[program], ["--resume_from", str(tmp_path)])
    assert dataclasses.replace(again, resume_from=None) == args
    longer = parse(PROGRAMS[program], [f"--resume_from={tmp_path}", "--max_steps", "9"])
    assert longer.max_steps == 9 and longer.seed == 9
    config = tmp_path / "more.yaml"
    config.write_text(f"resume_from: {tmp_path}\nmax_steps: 8\n")
    by_file = parse(PROGRAMS[program], ["--config", str(config)])
    assert by_file.max_steps == 8 and by_file.seed == 9 and by_file.resume_from == str(tmp_path)


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_names_every_flag_and_print_config_is_yaml(program, cafe_data, capsys):
    names = [field.name for field in dataclasses.fields(PROGRAMS[program])]
    with pytest.raises(SystemExit) as stopped:
        parse(PROGRAMS[program], ["--help_all"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and all(f"--{name}" in text for name in names)
    assert "Dropout on the input of the adapters" in text
    with pytest.raises(SystemExit) as stopped:
        parse(PROGRAMS[program], [*good(program, cafe_data), "--print_config"])
    assert stopped.value.code == 0
    assert set(names) <= yaml.safe_load(capsys.readouterr().out).keys()


def test_a_usage_error_becomes_one_line_and_status_two_a_failure_status_one(capsys):
    for problem, status in ((UsageError("--a 1 is bad"), 2), (RunFailure("it broke"), 1)):

        @one_line_errors
        def main(argv=None, problem=problem):
            raise problem

        with pytest.raises(SystemExit) as stopped:
            main([])
        assert stopped.value.code == status
        assert capsys.readouterr().err == f"error: {problem}\n"


def test_an_interrupt_ends_with_130(capsys):
    @one_line_errors
    def main(argv=None):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 130 and "Traceback" not in capsys.readouterr().err


PRINTS = """
import sys
from lightrlhf.cli.errors import one_line_errors

@one_line_errors
def main(argv=None):
    {}

main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "body",
    [
        "print('a line')",  # which is written at the end
        "for i in range(100): print(i, flush=True)",
        "from lightrlhf.storage.results import print_table; print_table('t', ['a'], [['b']])",
        "print('the help'); sys.exit(0)",
    ],
)
def test_a_reader_that_is_gone_ends_a_program_without_a_word(body, unbuffered):
    given = environment() | {"PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-c", PRINTS.format(body)]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=given, check=False)
    os.close(write)
    assert done.returncode == 141 and done.stderr == ""


def test_the_closed_pipe_of_another_is_not_hidden(capfd):
    @one_line_errors
    def main(argv=None):
        raise BrokenPipeError("of a server")

    with pytest.raises(BrokenPipeError):
        main([])


def test_a_program_of_its_own_refuses_in_one_line_too():
    done = run_program("lightrlhf.sft", "--learning_rat=1", check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "python -m lightrlhf.sft: error: unknown flag --learning_rat; did you mean --learning_rate?\n"


@pytest.mark.parametrize(
    ("words", "value"), [(["--use_targets"], True), (["--use_targets", "--seed", "3"], True), (["--no"], None)]
)
def test_a_boolean_without_a_value_is_true(cafe_data, words, value):
    if value is None:
        with pytest.raises(SystemExit):
            parse(SFTArgs, [*good("sft", cafe_data), *words])
    else:
        assert parse(SFTArgs, [*good("sft", cafe_data), *words]).use_targets is value


@pytest.mark.parametrize(
    ("program", "typo", "meant"),
    [
        ("sft", "lr", "learning_rate"),
        ("ppo", "lr", "actor_learning_rate and --critic_learning_rate"),
        ("ppo", "num_generations", "rollout_size"),
        ("ppo", "reward-function", "reward_function"),
        ("sft", "model", "model_name"),
        ("sft", "per_device_train_batch_size", "micro_batch_size"),
    ],
)
def test_an_unknown_flag_names_its_neighbour(program, typo, meant, cafe_data, capsys):
    with pytest.raises(SystemExit):
        parse(PROGRAMS[program], [*good(program, cafe_data), f"--{typo}=1"])
    assert capsys.readouterr().err.strip().endswith(f"unknown flag --{typo}; did you mean --{meant}?")


@pytest.mark.parametrize(
    ("program", "flag", "named"),
    [
        ("sft", "termination_condition", ["it is a flag of ppo"]),
        ("sft", "kl_coeff", ["--init_kl_coeff", "ppo", "grpo"]),  # nothing like it here, but there
        ("rm", "critic_learning_rate", ["it is a flag of ppo", "--learning_rate"]),
        ("sft", "no_such_flag", ["--help_all"]),
    ],
)
def test_a_flag_of_another_program_names_the_programs_that_have_it(program, flag, named, cafe_data, capsys):
    with pytest.raises(SystemExit):
        parse(PROGRAMS[program], [*good(program, cafe_data), f"--{flag}=1"])
    line = capsys.readouterr().err
    assert not [text for text in (f"--{flag}", *named) if text not in line]
