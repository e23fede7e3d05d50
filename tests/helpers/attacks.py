"""Attacks: many cases of one class each, one printed line a case, and a table of them at the end.

A test that uses the fixture `case` is an attack. They run in the nightly tier (`make attacks`); the ordinary tests hold
one red case of each class.
"""

from collections import defaultdict

import pytest

TRIED: defaultdict[str, list[bool]] = defaultdict(list)  # by file: whether each case held


@pytest.fixture
def case(request):
    """Returns `case(name, held, seen="")`: notes and prints one case; the test fails if any did not hold."""
    broken = []
    row = request.path.stem.removeprefix("test_")
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def note(name: str, held: bool, seen: str = "") -> None:
        TRIED[row].append(bool(held))
        line = f"{row} {len(TRIED[row]):4d} {'held' if held else 'BROKEN'} {name}{': ' if seen else ''}{seen}"
        capture.suspend_fixture()  # a test that reads its programs' output with capsys
        print(line.replace("\0", "?"), flush=True)
        capture.resume_fixture()
        if not held:
            broken.append(line)

    yield note
    assert not broken, f"{len(broken)} did not hold:\n" + "\n".join(broken[:20])


def pytest_terminal_summary(terminalreporter):
    for row, held in TRIED.items():
        terminalreporter.write_line(f"{row}: {sum(held)} of {len(held)} held")
