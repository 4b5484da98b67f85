"""How the cores are divided over the runs of a comparison."""

from __future__ import annotations

import pytest

from perdure.runs.compare import processes as jobs
from perdure.runs.compare.processes import CpuBudget


@pytest.mark.parametrize(
    ("said", "asked", "runs", "expected"),
    [
        ("", None, 9, CpuBudget(4, 1)),
        ("", 1, 9, CpuBudget(1, 4)),
        (
            "",
            3,
            9,
            CpuBudget(3, 1),
        ),  # rounded up, three runs would share four cores with six threads
        ("", None, 1, CpuBudget(1, 4)),
        ("1", 1, 9, CpuBudget(1, 1)),
        ("3", 1, 9, CpuBudget(1, 3)),
        ("8", 2, 9, CpuBudget(2, 2)),
        ("0", 1, 9, CpuBudget(1, 4)),
        ("many", 1, 9, CpuBudget(1, 4)),
    ],
)
def test_threads_of_a_job(said, asked, runs, expected, monkeypatch):
    monkeypatch.setattr(jobs, "available_cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert CpuBudget.divide(asked, runs) == expected
