"""Checks of runs and data of any trainer: pure recomputation, and verdicts that name the fault."""
