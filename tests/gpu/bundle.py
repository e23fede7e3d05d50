"""Wheels for a machine without a network: what an image with torch and transformers lacks, unpacked beside its own.

    python tests/gpu/bundle.py build build/gpu-bundle     # here, in the environment of `make install`
    python tests/gpu/bundle.py unpack build/gpu-bundle/wheels SITE     # there; `run.sh` does it

Built are the pure wheels of all requirements, in the versions of this environment, without transformers and what comes
with torch, and an archive of the tree. A package that the image has is left alone, whatever its version.
"""

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MORE = ("gymnasium",)  # of the rows that train in a text environment
COMPILED = "compiled.txt"  # names of the required packages that have no pure wheel
MOST = 40 * 2**20  # bytes


def build(folder: Path) -> None:
    """Write `wheels` and an archive of the tree into a folder. Raises: SystemExit where it is too large."""
    names = closure(["lightrlhf", *MORE]) - closure(["torch"]) - {"lightrlhf", "transformers"}
    pinned = [f"{name}=={importlib.metadata.version(name)}" for name in sorted(names) if is_pure(name)]
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    for old in wheels.glob("*.whl"):
        old.unlink()
    only = ["--no-deps", "--only-binary=:all:", "--platform", "any", "--python-version", "3.11"]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *only, "--dest", wheels, *pinned], check=True)
    archive = folder / "lightrlhf.tar.gz"
    to = ["--prefix=lightrlhf/", "--output", archive.resolve()]
    subprocess.run(["git", "-C", ROOT, "archive", *to, "HEAD"], check=True)
    compiled = sorted(names - set(filter(is_pure, names)))
    (wheels / COMPILED).write_text("\n".join(compiled), encoding="utf-8")
    size = sum(file.stat().st_size for file in [archive, *wheels.glob("*.whl")])
    print(f"{folder}: {len(pinned)} wheels and the tree, {size / 2**20:.1f} MB")
    if size > MOST:
        sys.exit(f"{folder} is larger than {MOST / 2**20:.0f} MB")


def closure(names: Iterable[str]) -> set[str]:
    """The installed packages among these and all that they require, by normalised names."""
    from packaging.requirements import Requirement

    found: set[tuple[str, str]] = set()  # package, and an extra of it or ""
    waiting = [(normalised(name), "") for name in names]
    while waiting:
        package, extra = waiting.pop()
        try:
            more = [Requirement(one) for one in importlib.metadata.requires(package) or []]
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add((package, extra))
        needed = [one for one in more if one.marker is None or one.marker.evaluate({"extra": extra})]
        asked = {(normalised(one.name), part) for one in needed for part in ("", *one.extras)}
        waiting += asked - found
    return {package for package, _ in found}


def is_pure(name: str) -> bool:
    """Whether the installed wheel of a package runs anywhere."""
    return "Tag: py3-none-any" in (importlib.metadata.distribution(name).read_text("WHEEL") or "")


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def unpack(wheels: Path, site: Path) -> None:
    """Unpack the wheels of packages that this Python lacks into a folder; print which, and what has no such wheel."""
    if not wheels.is_dir():
        sys.exit(f"{wheels} does not exist: make gpu-bundle writes it; WHEELS=FOLDER names another")
    found = []
    for wheel in sorted(wheels.glob("*.whl")):
        if not is_installed(name := normalised(wheel.name.split("-")[0])):
            zipfile.ZipFile(wheel).extractall(site)
            found.append(name)
    print(f"from {wheels}: {', '.join(found) or 'nothing is missing'}", flush=True)
    compiled = (wheels / COMPILED).read_text(encoding="utf-8").split() if (wheels / COMPILED).is_file() else []
    if missing := [name for name in compiled if not is_installed(name)]:
        print(f"missing, and compiled for each system: {', '.join(missing)}; rows that need them fail", flush=True)


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build(Path(sys.argv[2]))
    else:
        unpack(Path(sys.argv[2]), Path(sys.argv[3]))
