"""A package that is not installed is one line: an optional one names its extra, a required one how to install it."""

import importlib
import re
import subprocess
import sys

import pytest
from helpers import ROOT, environment
from helpers.errors import error_naming

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.functions import check_found, load_function
from lightrlhf.cli.packages import EXTRAS

PPO = ["--data_dir", ".", "--model_name", "tiny", "--rm_experiment_dir", "."]
FRESH = ["--destination_dir", "out", "--tokenizer_name", str(ROOT / "datasets_prep/cafe/base")]
WANTED = {  # package: the program and the flags that ask for it
    "gymnasium": ("lightrlhf.evaluate_env", ["--env", "dangerous_taxi"]),
    "gradio": ("lightrlhf.demo.page", ["--model_name", "tiny"]),
    "textblob": ("lightrlhf.ppo", [*PPO, "--parser", "textblob", "--termination_condition", "parsing"]),
    "benepar": ("lightrlhf.ppo", [*PPO, "--parser", "benepar", "--termination_condition", "parsing"]),
    "stanza": ("lightrlhf.ppo", [*PPO, "--parser", "stanza", "--termination_condition", "parsing"]),
    "bitsandbytes": ("lightrlhf.ppo", [*PPO, "--optimizer", "AdamW8bit"]),
    "wandb": ("lightrlhf.ppo", [*PPO, "--logger", "wandb"]),
    "flash_attn": ("lightrlhf.ppo", [*PPO, "--attn_implementation", "flash_attention_2", "--precision", "bf16-mixed"]),
    "math_verify": ("lightrlhf.check_reward", ["--reward_function", "lightrlhf.rewards.verifiers:math_answer"]),
    "reasoning_gym": ("datasets_prep.reasoning_gym.prepare_data", [*FRESH, "--tasks", "chain_sum"]),
    "gguf": ("lightrlhf.export", ["--model_name", "m", "--to", "gguf", "--destination_dir", "out"]),
    "starlette": ("lightrlhf.serve", ["--model_name", "tiny", "--engine", "lightrlhf"]),
    "uvicorn": ("lightrlhf.serve", ["--model_name", "tiny", "--engine", "lightrlhf"]),
    "pydantic": ("lightrlhf.serve", ["--model_name", "tiny", "--engine", "lightrlhf"]),
    "alfworld": ("lightrlhf.evaluate_env", ["--env", "alfworld"]),
}


@pytest.mark.parametrize("package", WANTED)
def test_an_optional_package_that_is_missing_is_a_line_with_its_extra(package, monkeypatch, tmp_path, capsys):
    program, flags = WANTED[package]
    main = importlib.import_module(program).main
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "lightrlhf.envs.dangerous_taxi", raising=False)  # which another test imported
    with pytest.raises(SystemExit) as stop:
        main(flags)
    line = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2
    name = package.replace("_", "-")
    assert f"needs the package {name}; install it" in line and line.endswith(f"pip install -e '.[{EXTRAS[package]}]'")


def test_each_optional_package_is_brought_by_its_extra_and_tested():
    setup = (ROOT / "setup.py").read_text()
    for package, extra in EXTRAS.items():
        (line,) = re.findall(rf'^(?:    "{extra}": |EXTRAS \|= .*"{extra}": )(.*)', setup, re.MULTILINE)
        assert package.replace("_", "-") in line or package == "fast_downward"  # of textworld
    assert EXTRAS.keys() - WANTED.keys() == {"textworld", "fast_downward"}  # imported beside alfworld


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "package"),
    [
        ("lightrlhf.ppo", "torch"),  # imported by the program's file
        ("lightrlhf.sft", "jsonargparse"),  # by its `main`
        ("lightrlhf.quickstart", "torch"),
        ("datasets_prep.cafe.prepare_data", "torch"),
        ("lightrlhf", "shtab"),
    ],
)
def test_a_required_package_that_is_missing_is_a_line(program, package, tmp_path):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module named {package}', name='{package}')")
    flags = ["--completion", "bash"] if program == "lightrlhf" else ["--print_config"]
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    command = [sys.executable, "-m", program, *flags]
    done = subprocess.run(command, env=environment() | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: lightrlhf needs the package {package}; install it from the clone with: pip install -e .\n"
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no limits of resources")
@pytest.mark.parametrize("program", ["lightrlhf.estimate", "lightrlhf.sft", "datasets_prep.cafe.prepare_data"])
def test_where_no_file_may_be_written_a_line_says_so(program, tmp_path):
    code = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    code += "; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    command = [sys.executable, "-c", code, "-m", program, "--help"]
    done = subprocess.run(command, env=environment() | {"PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ") and "TMPDIR" in done.stderr


@pytest.mark.slow
def test_any_other_exception_of_an_import_is_shown_as_it_is(tmp_path):
    (tmp_path / "torch.py").write_text("import no_such_package")
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    command = [sys.executable, "-m", "lightrlhf.ppo", "--help"]
    done = subprocess.run(command, env=environment() | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr and done.stderr.endswith("No module named 'no_such_package'\n")


@pytest.mark.parametrize("content", ["1 / 0", "raise SystemExit(3)"])
def test_a_package_that_fails_is_one_line_where_a_module_in_it_is_looked_for(content, tmp_path, monkeypatch):
    name = f"failing_{len(content)}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    with error_naming(UsageError, f"--env {name}.inner:Class cannot be imported: "):
        check_found(f"{name}.inner:Class", f"--env {name}.inner:Class")


def test_the_members_nearest_to_a_wrong_name_are_told_first():
    with error_naming(UsageError, "it has exact_answer,"):
        load_function("lightrlhf.rewards.verifiers:exact_anser", "--reward_function")
