"""The command `lightrlhf`: programs as its words, titles, versions, completion, and what is missing."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from helpers import ROOT, environment, run_program

import lightrlhf
from lightrlhf import __main__ as command
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
        (["zebra"], "no program zebra; --help lists all"),
        (["--completion", "fish"], "--completion fish is not one of bash, zsh, tcsh"),
    ],
)
def test_wrong_words_are_refused_in_a_line(words, pins, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(words)
    assert stop.value.code == 2 and capsys.readouterr().err == f"error: {pins}\n"


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
