"""The doctor: what it says of packages, of the machine, and of models that fit."""

from __future__ import annotations

import pytest
from helpers.errors import error_naming

from lightrlhf import doctor
from lightrlhf.cli.errors import RunFailure
from lightrlhf.training import roofline


def test_it_reports_the_machine_and_the_models_that_fit(capsys):
    report = doctor.run(doctor.DoctorArgs(seconds=0))
    shown = capsys.readouterr().out
    assert all(name in report["machine"] and name in shown for name in ("Python", "processor", "memory", "torch"))
    sizes = report["fits"]["CPU"]
    assert sizes["all weights, AdamW"] == pytest.approx(0.7 * doctor.total_memory() / 16)
    assert "Speed" not in shown


def test_a_speed_is_measured_for_training_and_sampling(monkeypatch):
    monkeypatch.setattr(roofline, "MATRIX_SIZES", ((64, 64, 64),))  # larger ones take seconds without AVX-512
    report = doctor.speed(0.02)
    assert [name for name in report if name.startswith("tiny model")] == list(doctor.tiny_work("cpu"))


@pytest.mark.parametrize(
    ("installed", "state", "works"),
    [("2.0", "2.0", True), (None, "missing", False), ("1.0", "1.0, not >=1.5", False)],
)
def test_packages_are_there_missing_or_of_another_version(installed, state, works, monkeypatch):
    from packaging.requirements import Requirement

    def version(name: str) -> str:
        if installed is None:
            raise doctor.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(doctor, "version", version)
    assert doctor.state_of(Requirement("some-package>=1.5")) == state and doctor.works(state) is works


def test_a_missing_required_package_is_a_failure_and_a_missing_extra_is_not(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch>=2.0", 'no-such-demo>=1; extra == "demo"'])
    report = doctor.run(doctor.DoctorArgs(seconds=0))
    assert report["extras"] == {"demo": "needs no-such-demo"}
    monkeypatch.setattr(doctor, "requires", lambda name: ["no-such-core>=1"])
    with error_naming(RunFailure, "no-such-core"):
        doctor.run(doctor.DoctorArgs(seconds=0))
