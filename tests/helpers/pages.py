"""Commands in the documentation's pages."""

import importlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from helpers import ROOT
from helpers.programs import args_class
from lightrlhf.programs import PROGRAMS

PAGES = [ROOT / "README.md", *sorted((ROOT / "howto").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- parse only -->\n+)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGE_WITHIN = re.compile(r"^````markdown\n.*?^````$", re.MULTILINE | re.DOTALL)  # of a page that shows another
DOCUMENT = re.compile(r"^(?P<command>cat .*<<'END')\n(?P<given>.*?)^END\n", re.MULTILINE | re.DOTALL)


@dataclass
class Command:
    """One command of a page as words; `$NAME` is not yet replaced."""

    words: list[str]
    line: str
    parse_only: bool
    given: str = ""  # what a here-document says

    @property
    def module(self) -> str | None:
        return self.words[2] if self.words[:2] == ["python", "-m"] else None


def blocks(text: str, language: str) -> list[tuple[str, bool]]:
    """(content, whether it is marked `parse only`) of each fenced block of a language."""
    return [(body, bool(marked)) for marked, name, body in BLOCK.findall(PAGE_WITHIN.sub("", text)) if name == language]


def commands_of(script: str, parse_only: bool = False) -> list[Command]:
    """The commands of a shell script, with continuation lines joined, without comments and empty lines."""
    documents = [found["given"] for found in DOCUMENT.finditer(script)]
    lines = DOCUMENT.sub(r"\g<command>\n", script).replace("\\\n", " ").splitlines()
    lines = [line.strip().removeprefix("$ ") for line in lines]
    lines = [line for line in lines if line and line[0] != "#"]
    commands = [Command(shlex.split(line, comments=True), line, parse_only) for line in lines]
    for command, given in zip([one for one in commands if "<<END" in one.words], documents):
        command.given = given
    return commands


def programs() -> list[str]:
    """The modules of all programs, of data preparation too, by the names that `python -m` takes."""
    files = (ROOT / "datasets_prep").glob("*/prepare_data.py")
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    names += [f"lightrlhf.{name}" for name in PROGRAMS]
    return sorted([*names, "datasets_prep.train_tokenizer", "datasets_prep.text_envs.make_tasks"])


# programs that look at models before all else
OF_RUNS = ("evaluate", "evaluate_env", "evaluate_dialogues", "evaluate_episodes", "demo")


def parse_flags(module: str, flags: list[str], folder: Path) -> object:
    """Parse flags as the program does; every `--…_dir` and `--responses_file` is made in `folder`, without content."""
    from lightrlhf.cli.hub import is_gguf
    from lightrlhf.cli.parser import parse

    for flag, value in flags_with_values(flags):
        is_run = flag == "model_name" and module.rpartition(".")[2] in OF_RUNS
        if (is_run or flag.endswith("_dir")) and flag != "destination_dir" and not is_gguf(value):
            (folder / value).mkdir(parents=True, exist_ok=True)
            if (is_run or flag.endswith("experiment_dir")) and not any((folder / value).iterdir()):
                (folder / value / "config.json").write_text("{}")  # a model, for programs that look at what it is
            if flag == "data_dir" and not any((folder / value).glob("*.pt")):
                (folder / value / "prompts_train.pt").touch()
        if flag == "responses_file":
            (folder / value).parent.mkdir(parents=True, exist_ok=True)
            (folder / value).touch()
    module, flags = started(module, flags)
    return parse(args_class(module), flags)


def started(module: str, flags: list[str]) -> tuple[str, list[str]]:
    """The module of the program that a program starts for some flags, else its own, and the flags that it gets."""
    program = importlib.import_module(module)
    main, flags = program.program_for(flags) if hasattr(program, "program_for") else (None, flags)
    return main.__module__ if main else module, flags


def flags_with_values(flags: list[str]) -> list[tuple[str, str]]:
    """(name, value) of each flag, one pair per value."""
    pairs, name = [], ""
    for word in flags:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            pairs += [(name, value)] if equals else []
        else:
            pairs.append((name, word))
    return pairs
