"""The wheel of `make wheel`, installed in an environment of its own and used in an empty folder without the clone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers import CAFE_SIZES, ROOT

import lightrlhf

pytestmark = pytest.mark.thorough
PACKAGES = ("lightrlhf", "datasets_prep")
EVERY_HELP = """
import contextlib, importlib, io
from lightrlhf.programs import PROGRAMS
for name, one in PROGRAMS.items():
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        importlib.import_module(one.module).main(["--help"])
    print(name, shown.getvalue().count("usage: "))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from copies of the files, so that the checkout stays as it is."""
    source, built = (tmp_path_factory.mktemp(name) for name in ("source", "built"))
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    call([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", built, source])
    (file,) = built.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory):
    """`bin` of an environment with the wheel, its extra `demo`, and what these require: a minute."""
    folder = tmp_path_factory.mktemp("environment")
    call([sys.executable, "-m", "venv", folder])
    for wanted in ("torch", f"{wheel}[demo]"):  # torch first, as in the Makefile
        pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile"]
        call([*pip, "--constraint", ROOT / "constraints.txt", wanted])
    yield folder / "bin"
    shutil.rmtree(folder)  # 1.6 GB


def call(command: list[object], folder: Path | None = None) -> str:
    """Standard output of a command that knows of no checkout."""
    here = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=folder, env=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_has_every_file_of_the_packages_and_no_other(wheel):
    files = {path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()}
    wanted = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == wanted


def test_the_command_runs(programs, tmp_path):
    assert call([programs / "lightrlhf", "--version"], tmp_path) == f"lightrlhf {lightrlhf.__version__}\n"
    assert "--init_kl_coeff" in call([programs / "lightrlhf", "ppo", "--help"], tmp_path)
    assert "Extras" in call([programs / "lightrlhf", "doctor", "--seconds", 0], tmp_path)
    assert not [*tmp_path.iterdir()]
    lacks = "from lightrlhf.cli.packages import needs_package; print(needs_package('--env', 'gymnasium'))"
    assert call([programs / "python", "-c", lacks], tmp_path).endswith("with: pip install 'lightrlhf[envs]'\n")


def test_every_program_has_its_help(programs, tmp_path):
    shown = call([programs / "python", "-c", EVERY_HELP], tmp_path).split()
    assert shown == [word for name in lightrlhf.programs.PROGRAMS for word in (name, "1")]


def test_the_demo_has_its_page(programs, tmp_path):
    call([programs / "python", "-c", "from lightrlhf.demo import page, rollouts_tab, chat_tab"], tmp_path)


def test_data_is_prepared(programs, tmp_path):
    place = "import datasets_prep.cafe as cafe; print(cafe.__path__[0])"
    base = Path(call([programs / "python", "-c", place], tmp_path).strip()) / "base"
    flags = ["--destination_dir", "data", "--tokenizer_name", base, *CAFE_SIZES]
    call([programs / "python", "-m", "datasets_prep.cafe.prepare_data", *flags], tmp_path)
    assert (tmp_path / "data" / "prompts_train.pt").is_file()


def test_the_quickstart_runs(programs, tmp_path):
    """SFT, reward model, PPO and evaluation."""
    printed = call([programs / "python", "-m", "lightrlhf.quickstart", "--smoke"], tmp_path)
    assert f"--model_name {programs.parent}/lib" in printed and str(ROOT) not in printed
    assert (tmp_path / "quickstart" / "quickstart.png").is_file()
