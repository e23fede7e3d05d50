"""What `make newcomer` does with the commands of a page: one shell, in order, up to the first that fails."""

import sys
from pathlib import Path

import newcomer
import pytest
from helpers.pages import commands_of

PAGE = """
NAME=tea
cat > order.txt <<'END'
one $NAME, please
two lines
END
test "$NAME" = tea && test "$(wc -l < order.txt)" = 2   # of the shell before
"""


@pytest.fixture
def home(tmp_path):
    (tmp_path / "lightrlhf").mkdir()
    return tmp_path


def statuses(page: str, home: Path) -> list[int]:
    return [status for status, _ in newcomer.follow(commands_of(page), home, f"{Path(sys.executable).parent}:/bin")]


def test_commands_share_a_shell_in_an_empty_environment(home, monkeypatch):
    monkeypatch.setenv("MINE", "1")
    assert statuses(PAGE + 'test -z "$MINE" && test "$HOME" != ~root && ls order.txt', home) == [0] * 5


def test_nothing_follows_a_command_that_fails(home, capsys):
    commands = commands_of("true\nexit-of-none\ntouch late")
    told = newcomer.follow(commands, home, "/bin")
    assert [status for status, _ in told] == [0, 0, 127] and not (home / "lightrlhf" / "late").exists()
    assert not newcomer.report(commands, told) and "127  exit-of-none" in capsys.readouterr().out


def test_a_server_is_ended_once_its_page_was_shown(home, monkeypatch):
    from helpers.demo_page import free_port

    serve = f"python -m http.server {(port := free_port())} --bind 127.0.0.1"
    monkeypatch.setattr(newcomer, "SERVES", {serve: f"http://127.0.0.1:{port}"})
    assert statuses(f"{serve}\ntrue", home) == [0, 0, 0]
