"""A small source tree with its tasks for AutoExplore, and a guard that lets nothing but reading happen."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

SECRET = "the moon is a harsh mistress"
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
FORBIDDEN = (
    "os.chdir", "os.exec", "os.fork", "os.system", "os.posix_spawn", "subprocess.", "shutil.", "pty.", "socket.",
)  # fmt: skip
FORBIDDEN += ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
violations: list[str] | None = None
opened: list[str] = []


def _audit(event: str, arguments: tuple) -> None:
    """Audit hook: records opened files and forbidden events while `read_only` is active; hooks cannot be removed."""
    if violations is not None and event.startswith(FORBIDDEN):
        violations.append(event)
    if violations is not None and event == "open":
        opened.append(str(arguments[0]))
        if arguments[2] & WRITING:
            violations.append(f"write {arguments[0]}")


sys.addaudithook(_audit)


@contextmanager
def read_only():
    """Context manager: fails if the code inside starts a process, writes, or changes the working directory."""
    global violations
    violations, here = [], os.getcwd()
    try:
        yield
        assert violations == [] and os.getcwd() == here
    finally:
        violations = None


def grow(folder: Path, files: dict[str, str | bytes]) -> Path:
    """Write files below a folder."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


TEXTS = {  # two or three files at each depth, each with an answer of its own
    "ovens.py": '"""Heat of the ovens in the large bakery hall."""\n\ndef bake_bread(minutes): ...\n',
    "rolls.md": "# How the morning rolls are shaped by hand\n\nSlowly.\n",
    "prices.csv": "article,price,season,baker\nroll,0.5,all,Ada\n",
    "garden/roses.py": '"""Which roses are cut in which weeks of spring."""\n\nclass RoseCutter:\n    pass\n',
    "garden/soil.txt": "What the soil of the garden beds wants\n====\nCompost.\n",
    "garden/tools.json": '[{"tool": "spade", "weight": 2, "handle": "ash"}]',
    "garden/pond/fish.py": '"""Names of all the fish that live in the pond."""\n\ndef feed_fish(name): ...\n',
    "garden/pond/frogs.md": "## When the frogs begin their evening song\n\nLate.\n",
    "garden/pond/depth.go": "package pond\n\nfunc MeasureDepth() int { return 3 }\n",
}


def tasks_of(folder: Path, *flags: str) -> str:
    """Make the tasks of `folder/tree`; returns their folder."""
    from datasets_prep.text_envs import make_tasks

    make_tasks.main(["--repo_dir", str(folder / "tree"), "--destination_dir", str(folder / "tasks"), *flags])
    return str(folder / "tasks")


def started(env, target: str, **options):
    """Reset the environment to a task with this answer."""
    rows = [row for split in ("train", "validation", "test") for row in env.starts(split)]
    text, info = env.reset(seed=0, options=next(row for row in rows if row["targets"] == [target]) | options)
    return text, info
