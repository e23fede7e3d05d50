"""The wheel of `make wheel`, installed in a folder of its own and used in an empty one, without the checkout."""

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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from copies of the files, so that the checkout stays as it is."""
    source, built = (tmp_path_factory.mktemp(name) for name in ("source", "built"))
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    call(["pip", "wheel", "--no-deps", "--wheel-dir", built, source])
    (file,) = built.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """A folder of installed packages with the wheel alone; what it requires is found in this environment."""
    folder = tmp_path_factory.mktemp("site")
    call(["pip", "install", "--no-deps", "--target", folder, wheel])
    return folder


def call(words: list[object], folder: Path | None = None, **variables: str) -> str:
    """Standard output of a module with its flags."""
    command = [sys.executable, "-m", *map(str, words)]
    here = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=folder, env=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_has_every_file_of_the_packages_and_no_other(wheel):
    files = {path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()}
    wanted = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == wanted


def test_the_command_runs_without_the_checkout(site, tmp_path):
    script = site / "bin" / "lightrlhf"
    here = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": str(site)}
    shown = {}
    for words in ("--version", "ppo --help", "doctor --seconds 0"):
        done = subprocess.run([script, *words.split()], cwd=tmp_path, env=here, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        shown[words] = done.stdout
    assert shown["--version"] == f"lightrlhf {lightrlhf.__version__}\n"
    assert "--init_kl_coeff" in shown["ppo --help"] and "Extras" in shown["doctor --seconds 0"]
    assert not [*tmp_path.iterdir()]


def test_data_is_prepared_without_the_checkout(site, tmp_path):
    base = site / "datasets_prep" / "cafe" / "base"
    flags = ["--destination_dir", "data", "--tokenizer_name", base, *CAFE_SIZES]
    call(["datasets_prep.cafe.prepare_data", *flags], tmp_path, PYTHONPATH=str(site))
    assert (tmp_path / "data" / "prompts_train.pt").is_file()


def test_the_quickstart_runs_without_the_checkout(site, tmp_path):
    printed = call(["lightrlhf.quickstart", "--smoke"], tmp_path, PYTHONPATH=str(site))
    elsewhere = printed.replace(sys.prefix, "")  # of the line that activates the environment, which a checkout may hold
    assert f"--model_name {site}/datasets_prep/cafe/base" in printed and str(ROOT) not in elsewhere
    assert (tmp_path / "quickstart" / "quickstart.png").is_file()
