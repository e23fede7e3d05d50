"""Follow the README and three pages as a newcomer does: `make newcomer`.

A home folder without anything in it, an environment of HOME and PATH alone, the system's Python, no cache of packages
or models. The last commit is cloned there, and every command of the pages is executed as it stands, in order, in one
shell, up to the first that fails; `parse only` blocks are left out. A command that serves a page runs until the page
is there. A table tells how long each command took, and after how long there was a first result.

    python tests/newcomer.py --without "make test"     leave a command out

Left out: a container's empty file system (the system's packages are those of this machine).
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers import ROOT
from helpers.pages import Command, blocks, commands_of

PAGES = ("README.md", "howto/quickstart.md", "howto/evaluate.md", "howto/generate_and_annotate.md")
SERVES = {"make demo": "http://127.0.0.1:7860"}  # and where the page is
PATIENCE = 180  # seconds until it is
FIRST_RESULT = "make quickstart"
PATH = "/usr/local/bin:/usr/bin:/bin"
SHELL = """
cd "$HOME/lightrlhf"
told() { status=$?; echo "$status $(date +%s)" >> "$HOME/told"; [ $status = 0 ] || exit $status; }
shown() { python -c '
import sys, time, urllib.request
for second in range(int(sys.argv[2])):
    time.sleep(1)
    try:
        sys.exit(urllib.request.urlopen(sys.argv[1]).status != 200)
    except OSError:
        pass
sys.exit(f"no page at {sys.argv[1]}")' "$1" "$2"; }
true
told
"""


def main() -> None:
    """Run the program; exits with status 1 where a command fails."""
    parser = argparse.ArgumentParser(description="Follow the README and three pages as a newcomer does.")
    parser.add_argument("--without", nargs="*", default=[], help="commands to leave out")
    parser.add_argument("--path", default=PATH, help="PATH of the newcomer")
    args = parser.parse_args()
    commands = [command for page in PAGES for command in of_page(ROOT / page) if command.line not in args.without]
    with tempfile.TemporaryDirectory(prefix="newcomer-") as home:
        subprocess.run(["git", "clone", "--quiet", ROOT, f"{home}/lightrlhf"], check=True)
        told = follow(commands, Path(home), args.path)
    if not report(commands, told):
        sys.exit(1)


def follow(commands: list[Command], home: Path, path: str) -> list[tuple[int, int]]:
    """Execute commands in `home/lightrlhf`; (exit status, time) at the start and after each, up to one that fails."""
    script = home / "pasted.sh"
    script.write_text(SHELL + "".join(f"{pasted(command)}\ntold\n" for command in commands))
    subprocess.run(["env", "-i", f"HOME={home}", f"PATH={path}", "bash", script], stdin=subprocess.DEVNULL)
    lines = (home / "told").read_text().splitlines()
    return [(int(status), int(at)) for status, at in map(str.split, lines)]


def of_page(page: Path) -> list[Command]:
    """The commands of a page but those that are only parsed."""
    bodies = blocks(page.read_text(encoding="utf-8"), "bash")
    return [command for body, parse_only in bodies if not parse_only for command in commands_of(body)]


def pasted(command: Command) -> str:
    """A command as the shell reads it; one that serves ends when its page was shown."""
    if command.line in SERVES:
        address = SERVES[command.line]
        return (
            f"set -m; {command.line} & shown {address} {PATIENCE}; status=$?\n"
            "kill -TERM -- -$!; wait $!; set +m; (exit $status)"
        )
    return command.line + (f"\n{command.given}END" if command.given else "")


def report(commands: list[Command], told: list[tuple[int, int]]) -> bool:
    """Print the seconds and the exit status of each command; returns whether all ended with 0."""
    began = before = told[0][1]
    print("\nseconds  status  command")
    for command, (status, at) in zip(commands, told[1:]):
        print(f"{at - before:7}  {status:6}  {command.line[:100]}")
        if command.line == FIRST_RESULT:
            print(f"{at - began:7}          from the clone to the first result")
        before = at
    return len(told) == len(commands) + 1 and not any(status for status, _ in told)


if __name__ == "__main__":
    main()
