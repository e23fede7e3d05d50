"""The command `lightrlhf`: programs as its words, titles, versions, completion, and what is missing."""

import re
import shutil
import subprocess
from importlib.util import find_spec

import pytest
from helpers import ROOT, environment, run_program

import lightrlhf
from lightrlhf import __main__ as command
from lightrlhf.cli.names import OTHER_PROGRAMS
from lightrlhf.programs import PROGRAMS


def test_every_program_of_the_folder_is_a_word_of_the_command(capsys):
    files = {path.stem for path in (ROOT / "lightrlhf").glob("[a-z]*.py")} - {"programs"} | {"demo"}
    assert set(PROGRAMS) == files
    command.main([])
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\w", shown, re.MULTILINE) for name in files)


def test_words_after_the_program_are_its_flags_and_dashes_are_underscores(capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["online-dpo", "--lr", "1"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith("unknown flag --lr; did you mean --learning_rate?\n")


@pytest.mark.parametrize(
    ("words", "pins"),
    [
        (["pp0"], "no program pp0; did you mean ppo?"),
        (["zebra"], "no program zebra; lightrlhf --help lists all"),
        (["gprO"], "no program gprO; did you mean grpo?"),
        (["chat"], "no program chat; use lightrlhf demo"),
        (["help", "Fine-Tune"], "no program Fine-Tune; use lightrlhf sft"),
        (["--dry_run"], "--dry_run must follow a program: lightrlhf PROGRAM --dry_run; lightrlhf --help lists all"),
        (["--completion", "fish"], "--completion fish is not one of bash, zsh, tcsh"),
    ],
)
def test_wrong_words_are_refused_in_a_line(words, pins, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(words)
    assert stop.value.code == 2 and capsys.readouterr().err == f"error: {pins}\n"


def test_other_names_of_programs_lead_to_programs():
    assert not OTHER_PROGRAMS.keys() & PROGRAMS.keys()
    for answer in OTHER_PROGRAMS.values():
        module = re.match(r"python -m (\S+)", answer)
        named = re.match(r"lightrlhf (\w+)", answer)
        assert (module and find_spec(module[1])) or (named and named[1] in {*PROGRAMS, "with"}), answer


def test_help_of_a_program_is_its_own(capsys):
    shown = []
    for words in (["help", "doctor"], ["doctor", "--help"]):
        with pytest.raises(SystemExit) as stop:
            command.main(words)
        assert stop.value.code == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "--seconds" in shown[0]


def test_the_command_is_what_its_programs_call_themselves():
    assert run_program("lightrlhf", "--version").stdout == f"lightrlhf {lightrlhf.__version__}\n"
    refused = run_program("lightrlhf", "sft", "--learning_rat", "1", check=False)
    assert refused.returncode == 2
    assert refused.stderr == "lightrlhf sft: error: unknown flag --learning_rat; did you mean --learning_rate?\n"


def test_every_program_has_an_args_class():
    for name, one in PROGRAMS.items():
        assert one.args_class().__name__ == one.args and one.args.lower() == f"{name.replace('_', '')}args"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_programs_and_flags(tmp_path):
    script = tmp_path / "completion.bash"
    script.write_text(command.completion("bash"))
    typed = (
        f"source {script}; COMP_WORDS=(lightrlhf ppo --clip_c); COMP_CWORD=2; _shtab_lightrlhf; echo ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(["bash", "-c", typed], env=environment(), capture_output=True, text=True)
    assert done.stdout.split() == ["--clip_coeff"], done.stderr


def test_titles_are_short_enough_for_a_terminal():
    for one in PROGRAMS.values():
        assert 0 < len(command.title_of(one)) < 90
