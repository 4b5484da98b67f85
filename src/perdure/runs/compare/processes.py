"""Run a comparison in parallel processes, which end when this process ends."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from types import TracebackType
from typing import IO, Protocol

from perdure.runs.compare.common_settings import EngineChoice
from perdure.runs.compare.plan import PlannedRun
from perdure.runs.progress import RunFollower, RunProgress

_POLL_SECONDS = 0.1
_STOP_SECONDS = 10.0
_THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class FailedRun:
    """A run that failed."""

    run: PlannedRun
    """The run."""
    reason: str
    """Last line of its log, or its exit code."""


class ProgressView(Protocol):
    """Receives the progress of a comparison."""

    def begin(self, runs: int, finished: int) -> None:
        """Start, given the number of all runs and of those that finished before."""

    def update(self, run: PlannedRun, progress: RunProgress) -> None:
        """Receive the progress of a running run; called about ten times per second."""

    def end(self, run: PlannedRun, progress: RunProgress, failure: FailedRun | None) -> None:
        """Receive the end of a run; `failure` is None if it finished."""


class NoProgress:
    """A view that shows nothing."""

    def begin(self, runs: int, finished: int) -> None:
        """Show nothing."""

    def update(self, run: PlannedRun, progress: RunProgress) -> None:
        """Show nothing."""

    def end(self, run: PlannedRun, progress: RunProgress, failure: FailedRun | None) -> None:
        """Show nothing."""


@dataclass(frozen=True)
class CpuBudget:
    """How the cores are divided among parallel runs."""

    jobs: int
    """Number of parallel runs."""
    threads: int
    """Threads per run."""

    @classmethod
    def divide(cls, jobs: int | None, runs: int) -> CpuBudget:
        """Divide the cores that this process may use."""
        cores = available_cores()
        parallel = max(1, min(jobs or cores, runs))
        limit = os.environ.get("OMP_NUM_THREADS", "")
        max_threads = int(limit) if limit.isdigit() and int(limit) else cores
        return cls(parallel, max(1, min(cores // parallel, max_threads)))


@dataclass(frozen=True)
class WorkerInputs:
    """What the processes of runs find besides their configs."""

    import_from: tuple[str, ...] = ()
    """Folders with code of users."""
    data: Path | None = None
    """File with the data that was given in Python."""


NOTHING = WorkerInputs()


def run_all(
    planned: Sequence[PlannedRun],
    out: Path,
    cores: CpuBudget,
    view: ProgressView,
    inputs: WorkerInputs = NOTHING,
    until: float | None = None,
) -> list[FailedRun]:
    """Run all runs that are not finished; a failing run does not stop the others."""
    waiting = [run for run in planned if not run.is_finished(out)]
    view.begin(len(planned), len(planned) - len(waiting))
    failures: list[FailedRun] = []
    with _ProcessPool(out, cores, inputs) as pool:
        while waiting or pool.busy:
            if until is not None and time.monotonic() >= until:
                waiting.clear()
            while waiting and len(pool.busy) < cores.jobs:
                pool.start(waiting.pop(0))
            time.sleep(_POLL_SECONDS)
            failures += pool.poll(view)
    return failures


def try_engine(run: PlannedRun, threads: int, inputs: WorkerInputs = NOTHING) -> EngineChoice:
    """Return the fastest engine and its chunk for a run, by a trial in a worker process.

    The choice is empty if the trial fails; the run then fails as well, and reports the reason.
    """
    output = b""
    pipe, discarded = subprocess.PIPE, subprocess.DEVNULL
    with contextlib.suppress(OSError), _start(threads, pipe, discarded) as process:
        _send_request(process, run, None, threads, inputs)
        assert process.stdout is not None
        output = process.stdout.read()
    return _choice(output.splitlines())


def _choice(lines: list[bytes]) -> EngineChoice:
    """Return the choice in the last line that a trial printed."""
    try:
        engine = json.loads(lines[-1])
        return EngineChoice.read(engine["kind"], engine["chunk"])
    except (ValueError, KeyError, TypeError, IndexError):
        return EngineChoice()


def _start(threads: int, stdout: IO[bytes] | int, stderr: IO[bytes] | int) -> Popen[bytes]:
    return Popen(
        [sys.executable, "-m", "perdure.runs.compare.worker"],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=os.environ | dict.fromkeys(_THREAD_SETTINGS, str(threads)),
    )


def _send_request(
    process: Popen[bytes],
    run: PlannedRun,
    out: str | None,
    threads: int,
    inputs: WorkerInputs,
) -> None:
    """Send a run to a worker process; if `out` is None, it is only a trial of its engine."""
    request = {
        "config": run.config.model_dump(mode="json", exclude_unset=True),
        "out": out,
        "threads": threads,
        "import_from": list(inputs.import_from),
        "data": None if inputs.data is None else str(inputs.data),
    }
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
    except OSError:
        pass  # the process has ended; its exit code and its log contain the reason


class _Job:
    """One run and its process."""

    def __init__(self, run: PlannedRun, out: Path, threads: int, inputs: WorkerInputs) -> None:
        self.run, self.follower = run, RunFollower(run.path(out))
        self.log = run.path(out).with_name(f"seed-{run.seed}.log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = _start(threads, stdout=log, stderr=log)
        _send_request(self.process, run, str(run.path(out)), threads, inputs)

    def outcome(self) -> FailedRun | None:
        """Return the failure of a process that has ended, or None if it succeeded."""
        self.close()
        text = self.log.read_text(encoding="utf-8", errors="replace").strip()
        if self.process.returncode == 0:
            if not text:
                self.log.unlink(missing_ok=True)
            return None
        last = text.splitlines()[-1] if text else f"exit code {self.process.returncode}"
        return FailedRun(self.run, last)

    def close(self) -> None:
        """Close the pipe, which ends the process."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


class _ProcessPool:
    """The running processes; leaving the `with` block ends them all."""

    def __init__(self, out: Path, cores: CpuBudget, inputs: WorkerInputs) -> None:
        self.out, self.cores, self.inputs = out, cores, inputs
        self.busy: list[_Job] = []

    def __enter__(self) -> _ProcessPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for job in self.busy:
            job.close()
        for job in self.busy:
            try:
                job.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.process.wait()

    def start(self, run: PlannedRun) -> None:
        self.busy.append(_Job(run, self.out, self.cores.threads, self.inputs))

    def poll(self, view: ProgressView) -> list[FailedRun]:
        """Report every process to the view; return the runs that failed."""
        failures: list[FailedRun] = []
        for job in list(self.busy):
            ended = job.process.poll() is not None
            progress = job.follower.poll()
            if not ended:
                view.update(job.run, progress)
                continue
            self.busy.remove(job)
            failure = job.outcome()
            view.end(job.run, job.follower.poll(), failure)
            failures += [failure] if failure else []
        return failures


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
