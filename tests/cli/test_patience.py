"""How long programs wait for others: a number of seconds in the environment, else the usual one."""

import pytest

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.patience import DEFAULTS, patience


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_variable_changes_how_long_a_program_waits(name, monkeypatch):
    assert patience(name) == DEFAULTS[name]
    monkeypatch.setenv(name, " 2.5 ")
    assert patience(name) == 2.5
    for wrong in ("soon", "0", "-1", "nan", "inf"):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(UsageError, match=f"{name} {wrong} "):
            patience(name)
