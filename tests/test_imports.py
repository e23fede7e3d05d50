"""Who may import whom, and which libraries are imported only when needed."""

import ast
import functools
import re
import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest
from helpers import ROOT, environment

import lightrlhf
from lightrlhf.programs import PROGRAMS

FLOORS = [  # from the ground up: a room imports only rooms below its own floor
    {"cli", "maths"},
    {"storage"},
    {"data"},
    {"cpu", "gguf"},
    {"models"},
    {"training"},
    {"rewards"},
    {"generation"},
    {"envs", "teachers"},
    {"checks", "demo", "evaluation", "serving"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
TABLE = {"lightrlhf", "lightrlhf.programs"}  # the version, and the table of programs
FOR_DATA = {"cli", "data", "envs", "gguf", "storage"}  # rooms that data preparation may use, and these files
FOR_DATA_FILES = {"lightrlhf.demo.votes", "lightrlhf.demo.summaries"}
FILES = sorted(path for folder in ("lightrlhf", "datasets_prep") for path in (ROOT / folder).rglob("*.py"))


def module_name(path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imported(path, nested: bool = True) -> frozenset[str]:
    """The modules of this project that a file imports; without `nested` only at its top."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree) if nested else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            paths = {name: ROOT / name.replace(".", "/") for name in names}
            modules = {
                n for n, one in paths.items() if one.with_suffix(".py").is_file() or (one / "__init__.py").is_file()
            }
            found |= modules or {node.module}
    return frozenset(name for name in found if name.split(".")[0] in ("lightrlhf", "datasets_prep", "examples"))


def room(name: str) -> str | None:
    """The room of a module; None for a program."""
    part = name.split(".")[1] if "." in name else ""
    return part if part in FLOOR else None


IN_ROOMS = [path for path in FILES if room(module_name(path))]


def test_each_folder_is_a_room_with_a_floor():
    assert {path.parent.name for path in (ROOT / "lightrlhf").glob("*/__init__.py")} == set(FLOOR)


@pytest.mark.parametrize("path", IN_ROOMS, ids=module_name)
def test_a_room_imports_only_rooms_below_it(path):
    own = room(module_name(path))
    others = {room(name) for name in imported(path) - TABLE} - {own}
    assert None not in others, "a room imports no program"
    assert all(FLOOR[other] < FLOOR[own] for other in others), others


def test_the_cpu_s_kernels_are_known_by_the_names_of_their_room():
    outside = [path for path in FILES if room(module_name(path)) != "cpu"]
    assert not {name for path in outside for name in imported(path) if name.startswith("lightrlhf.cpu.")}


@pytest.mark.parametrize("program", [one for one in PROGRAMS.values() if one.name != "demo"], ids=lambda one: one.name)
def test_a_program_imports_rooms_and_the_programs_that_it_uses(program):
    """Data preparation is only imported by the quickstart, see below."""
    names = imported(ROOT / "lightrlhf" / f"{program.name}.py") - TABLE
    others = {name.removeprefix("lightrlhf.") for name in names if room(name) is None}
    assert {name for name in others if not name.startswith("datasets_prep.")} == {*program.uses}


@pytest.mark.parametrize("path", [p for p in FILES if "datasets_prep" in p.parts], ids=module_name)
def test_data_preparation_imports_the_command_line_data_and_storage_only(path):
    """But for `pretrain_base.py`, which trains a model, and `text_envs`, which makes one and asks servers."""
    rooms = set(FOR_DATA)
    if path.stem == "pretrain_base":
        rooms.add("models")
    if path.parent.name == "text_envs":
        rooms |= {"models", "generation"}
    found = {name for name in imported(path) if name.startswith("lightrlhf")} - FOR_DATA_FILES
    assert {room(name) for name in found} <= rooms


def test_only_two_programs_of_the_library_import_data_preparation():
    programs = {"lightrlhf.quickstart", "lightrlhf.check_data"}
    for path in FILES:
        if "lightrlhf" == path.relative_to(ROOT).parts[0] and module_name(path) not in programs:
            assert not {name for name in imported(path) if name.startswith("datasets_prep")}, path


CONTROLS = {  # of experiments whose start or control is another's, as it is
    "real_calculator": "examples.experiments.agents",
    "taxi_agents": "examples.experiments.reflect_rl",
}


def test_no_example_imports_another():
    files = sorted((ROOT / "examples").rglob("*.py"))
    programs = {module_name(path) for path in files if '__name__ == "__main__"' in path.read_text()}
    assert {"examples.real", "examples.experiments.refuel"} <= programs
    for path in files:
        assert imported(path) & programs <= {CONTROLS.get(path.stem)}, path


def test_no_two_files_import_each_other_in_a_circle():
    edges = {module_name(path): imported(path) for path in FILES}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above, name])
        if name not in done:
            for other in edges.get(name, ()):
                visit(other, (*above, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_no_test_file_is_imported_or_named_by_another():
    """Shared code is in tests/helpers; an import path such as `helpers.rewards:length` works from all folders."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    tests = {path.stem for path in files if path.stem.startswith("test_")} | {"conftest"}
    for path in files:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        names |= {text.partition(":")[0] for text in texts if re.fullmatch(r"[\w.]+:\w+", text)}
        assert not {name for name in names if tests & {*name.split(".")}}, path


FILES_OF_PROGRAMS = [name for name in PROGRAMS if name != "demo"]


OPTIONAL = {"gymnasium", "gradio", "textblob", "bitsandbytes", "stanza", "benepar"}  # extras of programs
OPTIONAL |= {
    "alfworld",
    "textworld",
    "starlette",
    "uvicorn",
    "pydantic",
    "math-verify",
    "reasoning-gym",
    "gguf",
    "wandb",
}
OPTIONAL |= {"flash-attn", "markupsafe", "pandas", "pydantic", "pydantic-core"}
OF_ALFWORLD = {"fast_downward": "alfworld"}


@pytest.mark.parametrize("folder", ["lightrlhf", "datasets_prep", "examples", "tests"])
def test_what_is_imported_is_declared(folder):
    """Each package that a file of the folder imports is a requirement of setup.py, not only one of another package."""
    extras, core = (
        {name.lower().replace("_", "-") for name in re.findall(r'"([A-Za-z][\w.-]*)(?:\[[\w,]+\])?>=', part)}
        for part in (ROOT / "setup.py").read_text().split("install_requires")
    )
    assert OPTIONAL <= extras
    distributions = packages_distributions()
    ours = {path.stem for path in (ROOT / "tests").rglob("*.py")}
    ours |= {"lightrlhf", "datasets_prep", "examples", "benchmarks", "tests", "helpers"}
    ours |= {"llama_cpp", "lm_eval", "alpaca_eval", "fastchat", "rewardbench"}  # of interpreters of their own
    ours |= {"mcp", "openenv", "skyrl_gym", "smolagents", "textarena", "trl", "verifiers"}
    missing = {}
    for path in (ROOT / folder).rglob("*.py"):
        allowed = core | (extras if folder == "tests" or path.name.startswith("test_") else OPTIONAL)
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        for name in {name.partition(".")[0] for name in names} - ours - set(sys.stdlib_module_names):
            found = distributions.get(name) or [OF_ALFWORLD.get(name, name)]
            if not {package.lower().replace("_", "-") for package in found} & allowed:
                missing[name] = str(path)
    assert not missing


OF_OTHERS = {"jinja2", "sentencepiece"}  # which setup.py says transformers imports


def test_what_is_required_is_imported():
    text = (ROOT / "setup.py").read_text().split("install_requires")[1]
    required = {name.lower().replace("_", "-") for name in re.findall(r'"([A-Za-z][\w.-]*)(?:\[[\w,]+\])?>=', text)}
    names = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            names |= {node.module} if isinstance(node, ast.ImportFrom) else set()
    distributions = packages_distributions()
    found = {one for name in names for one in distributions.get(name.partition(".")[0], [])}
    assert required - {name.lower().replace("_", "-") for name in found} == OF_OTHERS


HEAVY = ["lightning", "transformers", "peft", "bitsandbytes", "datasets", "gradio", "matplotlib", "torchmetrics"]
HEAVY += ["gymnasium", "accelerate", "tokenizers", "huggingface_hub", "safetensors", "httpx2", "sympy", "PIL"]


def test_importing_the_programs_and_their_help_loads_no_heavy_library_and_prints_nothing_else():
    code = f"""
import contextlib, importlib, io, sys
def check(name):
    found = [heavy for heavy in {HEAVY} if heavy in sys.modules]
    assert not found, (name, found)
for name in ("lightrlhf.envs", "lightrlhf.envs.prompts"):
    importlib.import_module(name)
    check(name)
for name in {[one.module for one in PROGRAMS.values()]}:
    main = importlib.import_module(name).main
    check(name)
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main(["--help"])
    assert "usage: " in shown.getvalue(), name
    check(name + " --help")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""


def test_importing_the_library_is_quick():
    """Its exports are lazy: `import lightrlhf` imports none of the libraries, not even torch."""
    code = """
import sys
import lightrlhf
heavy = {"torch", "lightning", "transformers", "datasets", "numpy", "jsonargparse"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", getattr(lightrlhf, "__all__", []))
def test_each_name_that_the_library_exports_resolves(name):
    assert getattr(lightrlhf, name) is not None and name in dir(lightrlhf)


def test_a_name_that_the_library_does_not_export_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        lightrlhf.no_such_name  # noqa: B018


@pytest.mark.slow
def test_importing_the_programs_leaves_seeds_and_threads_alone():
    code = f"""
import torch
torch.manual_seed(5); torch.set_num_threads(1)
before = torch.get_rng_state()
import importlib
for name in {FILES_OF_PROGRAMS}:
    importlib.import_module("lightrlhf." + name)
assert torch.equal(before, torch.get_rng_state()) and torch.get_num_threads() == 1
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), check=True)


ENCODING = {"apply_chat_template", "batch_encode_plus", "encode_plus", "tokenize", "prepare_for_model"}
ENCODING |= {"encode", "encode_batch", "encode_batch_fast", "__call__"}


def test_texts_reach_tokenizers_through_data_tokens_alone():
    """Else a text could spell a control token. A file that gives a tokenizer a text as it is says why it may."""
    for path in FILES:
        text, is_raw = path.read_text(encoding="utf-8"), False
        for node in ast.walk(ast.parse(text)):
            called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            owner = ast.unparse(node.value) if isinstance(node, ast.Attribute) and node.attr in ENCODING else ""
            is_raw |= called in ("tokenizer", "render_jinja_template") or owner.endswith(("tokenizer", "backend"))
        assert is_raw == ("# Raw text: " in text), path


def test_a_function_says_in_its_types_which_flags_and_tokenizers_it_reads():
    untyped = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) == 3:
                is_untyped = ast.unparse(node.args[0]).endswith("args")
            elif isinstance(node, ast.arg | ast.AnnAssign):
                name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
                is_untyped = name.endswith("tokenizer") and ast.unparse(node.annotation or node) == "Any"
            else:
                continue
            untyped += [f"{module_name(path)}:{node.lineno}"] * is_untyped
    assert not untyped, "a default for a flag, or a tokenizer of any type"
