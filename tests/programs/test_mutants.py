"""Faults in the code that trains, random ones and written ones: the tests notice each, or it changes no result."""

import pytest
from helpers import ROOT, mutants
from helpers.program_mutants import TESTS

SAME = {  # survivors that change no result, by a part of their name, and why
    "self.position = torch.where(self.row == self.idle_row, >>0": "any position in range serves an idle slot",
    "for index in prompt] for prompt in ([2, 3, 4, 5, 6, >>7]": "any tokens serve the trial of an architecture",
    "torch.full((2, >>3), 0.5)": "the trial has one uniform number more than it uses",
    "logits = model(input_ids=ids, use_cache=>>False)": "the cache of a whole pass is not looked at",
    "weights = >>1 / (broadcast(lengths(segments)": "weights are divided by their sum",
    "chunk_size: int = >>4096": "chunks change memory, not values",
    "use_reentrant=>>False": "both kinds of checkpoint have the same gradient",
}


@pytest.mark.timeout(7200)
def test_the_tests_kill_at_least_95_of_100_mutants_that_change_a_result(case):
    killed = changing = 0
    for number, mutant, killer in mutants.run(mutants.draw(60, seed=0)):
        name = mutant.name
        reason = next((why for part, why in SAME.items() if part in name), "")
        changing += not reason
        killed += bool(killer)
        case(f"{number} {name}", bool(killer or reason), killer or f"SURVIVED {reason}")
    assert killed >= 0.95 * changing


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("program", TESTS)
def test_the_quick_tests_of_a_program_kill_its_mutants(program, case):
    """What an interrupted run has found for the same code and tests is not tried again."""
    for number, mutant, killer in mutants.run(mutants.program_mutants([program]), ROOT / "build" / "mutants.jsonl"):
        case(f"{number} {mutant.name}", bool(killer), killer or "SURVIVED")
