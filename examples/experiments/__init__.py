"""Experiments that reproduce the results of the pages in howto/, over seeds: `python -m examples.experiments.NAME`."""
