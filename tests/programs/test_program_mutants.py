"""The list of one-line faults applies to the programs as they are."""

import ast

import pytest
from helpers import ROOT
from helpers.mutants import program_mutants
from helpers.program_mutants import FAULTS, TESTS


@pytest.mark.parametrize("program", TESTS)
def test_ten_faults_apply_to_each_program(program):
    assert len(FAULTS[program]) == 10
    text = (ROOT / "lightrlhf" / f"{program}.py").read_text(encoding="utf-8")
    for mutant in program_mutants([program]):
        assert text.count(mutant.old) == 1, mutant.old
        assert ast.dump(ast.parse(mutant.source())) != ast.dump(ast.parse(text)), mutant.old
    assert all((ROOT / "tests" / "programs" / name).is_file() for name in TESTS[program].split())
