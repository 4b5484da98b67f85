"""The runs of a comparison in parallel processes, none of which outlives this one."""

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

from perdure.comparison.engines import EngineChoice
from perdure.comparison.plan import PlannedRun
from perdure.runs.progress import RunFollower, RunProgress

_WAIT = 0.1
_PATIENCE = 10.0
_THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class FailedRun:
    """A run that did not reach its end, and the last thing that it said."""

    run: PlannedRun
    reason: str


class ProgressView(Protocol):
    """Who wants to know how the comparison goes."""

    def begin(self, runs: int, finished: int) -> None:
        """Before the first run: how many there are, and how many were there already."""

    def update(self, run: PlannedRun, progress: RunProgress) -> None:
        """Again and again while a run goes on."""

    def end(self, run: PlannedRun, progress: RunProgress, failure: FailedRun | None) -> None:
        """A run has ended."""


class NoProgress:
    """A view that shows nothing."""

    def begin(self, runs: int, finished: int) -> None:
        """Nothing."""

    def update(self, run: PlannedRun, progress: RunProgress) -> None:
        """Nothing."""

    def end(self, run: PlannedRun, progress: RunProgress, failure: FailedRun | None) -> None:
        """Nothing."""


@dataclass(frozen=True)
class CpuBudget:
    """How many runs go on at once, and the threads that each may use."""

    jobs: int
    threads: int

    @classmethod
    def divide(cls, jobs: int | None, runs: int) -> CpuBudget:
        """As many jobs as cores unless said otherwise; the cores are divided over the jobs.

        OMP_NUM_THREADS, if set, is the most that a job may use.
        """
        cores = _cores()
        wanted = max(1, min(jobs or cores, runs))
        said = os.environ.get("OMP_NUM_THREADS", "")
        most = int(said) if said.isdigit() and int(said) else cores
        return cls(wanted, max(1, min(cores // wanted, most)))


def run_all(
    planned: Sequence[PlannedRun],
    out: Path,
    cores: CpuBudget,
    view: ProgressView,
    import_from: Sequence[str] = (),
) -> list[FailedRun]:
    """Run what is not finished; a failing run does not stop the others."""
    waiting = [run for run in planned if not run.is_finished(out)]
    view.begin(len(planned), len(planned) - len(waiting))
    failures: list[FailedRun] = []
    with _ProcessPool(out, cores, list(import_from)) as crew:
        while waiting or crew.busy:
            while waiting and len(crew.busy) < cores.jobs:
                crew.start(waiting.pop(0))
            time.sleep(_WAIT)
            failures += crew.poll(view)
    return failures


def try_engine(run: PlannedRun, threads: int, import_from: Sequence[str] = ()) -> EngineChoice:
    """Return the engine and the chunk that suit a run, by a trial in a worker process.

    The choice is empty if the trial fails; the run itself then fails too, and names the reason.
    """
    said = b""
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with contextlib.suppress(OSError), _start(threads, pipe, nowhere) as process:
        _send_request(process, run, None, threads, import_from)
        assert process.stdout is not None
        said = process.stdout.read()
    return _choice(said.splitlines())


def _choice(lines: list[bytes]) -> EngineChoice:
    """Return the choice in the last line that a trial printed."""
    try:
        said = json.loads(lines[-1])
        return EngineChoice.read(said["kind"], said["chunk"])
    except (ValueError, KeyError, TypeError, IndexError):
        return EngineChoice()


def _start(threads: int, stdout: IO[bytes] | int, stderr: IO[bytes] | int) -> Popen[bytes]:
    return Popen(
        [sys.executable, "-m", "perdure.comparison.worker"],
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
    import_from: Sequence[str],
) -> None:
    """Write the order of a worker process; without an `out` it is a trial."""
    order = {
        "config": run.config.model_dump(mode="json", exclude_unset=True),
        "out": out,
        "threads": threads,
        "import_from": list(import_from),
    }
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
    except OSError:
        pass  # it died at once; its exit code and its log tell why


class _Job:
    """One run in its process."""

    def __init__(self, run: PlannedRun, out: Path, threads: int, import_from: list[str]) -> None:
        self.run, self.follower = run, RunFollower(run.path(out))
        self.log = run.path(out).with_name(f"seed-{run.seed}.log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = _start(threads, stdout=log, stderr=log)
        _send_request(self.process, run, str(run.path(out)), threads, import_from)

    def outcome(self) -> FailedRun | None:
        """For a process that has ended: what went wrong, if anything."""
        self.close()
        said = self.log.read_text(encoding="utf-8", errors="replace").strip()
        if self.process.returncode == 0:
            if not said:
                self.log.unlink(missing_ok=True)
            return None
        last = said.splitlines()[-1] if said else f"exit code {self.process.returncode}"
        return FailedRun(self.run, last)

    def close(self) -> None:
        """Close the pipe, which ends a process that is still at work."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


class _ProcessPool:
    """The processes at work; leaving the block ends them all, whatever the reason."""

    def __init__(self, out: Path, cores: CpuBudget, import_from: list[str]) -> None:
        self.out, self.cores, self.import_from = out, cores, import_from
        self.busy: list[_Job] = []

    def __enter__(self) -> _ProcessPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for job in self.busy:
            job.close()
        for job in self.busy:
            try:
                job.process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.process.wait()

    def start(self, run: PlannedRun) -> None:
        self.busy.append(_Job(run, self.out, self.cores.threads, self.import_from))

    def poll(self, view: ProgressView) -> list[FailedRun]:
        """Tell the view of every process; those that failed are returned."""
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


def _cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
