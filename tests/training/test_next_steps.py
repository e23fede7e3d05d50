"""What to type after a run: commands that exist, with the run's own paths, where its program was started by itself."""

import shlex
import sys
from pathlib import Path

from helpers.tiny_runs import experiment_of

from lightrlhf import sft
from lightrlhf.cli.parser import parse
from lightrlhf.programs import PROGRAMS
from lightrlhf.training.next_steps import command_of, next_steps


def programs_of(program: str, directory: str) -> dict[str, list[str]]:
    """The words of each command, by its program, whose flags they are."""
    found = {}
    for command in next_steps(program, directory).values():
        name, *words = shlex.split(command)
        parse(PROGRAMS[name].args_class(), words)
        found[name] = words
    return found


def test_each_program_leads_to_its_next_ones(sft_dir, rm_dir, cafe_data):
    after = programs_of("sft", sft_dir)
    assert after.keys() == {"demo", "dpo", "evaluate", "plot", "export"} and all(
        sft_dir in words for words in after.values()
    )
    after = programs_of("rm", rm_dir)
    assert after.keys() == {"ppo", "evaluate", "plot"} and {str(cafe_data), sft_dir, rm_dir} <= {*after["ppo"]}


def test_they_are_printed_for_a_program_that_was_started_alone(runs, tmp_path, monkeypatch, capsys):
    sft.main(runs.flags("sft", tmp_path / "python", steps=1))  # in this process, which is no program of ours
    assert "next " not in capsys.readouterr().out and command_of("sft") == ""
    monkeypatch.setattr(sys, "argv", ["/bin/lightrlhf", "sft"])
    assert command_of("sft") == "lightrlhf" and command_of("rm") == ""
    sft.main(runs.flags("sft", tmp_path / "command", steps=1))
    assert f"lightrlhf demo {experiment_of(Path(tmp_path, 'command'))}" in capsys.readouterr().out
