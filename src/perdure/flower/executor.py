"""A node's executor: Flower's own loop, but orders are served by forks of a process that is ready.

Flower starts a new interpreter for every order, which then loads Flower, torch and this library for
some seconds. Here all of it is loaded once, and each order gets a fork: a process of its own, as
before, that has nothing left to load.

Started as `python -m perdure.flower.executor PORT flower-supernode ...`: it starts that
command, asks it for work at the port, and ends when it ends. This process itself computes nothing
and has one thread of its own, since a fork takes over memory but no threads (those of numpy's
OpenBLAS are made anew in a fork by OpenBLAS itself).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult


class ForkExecutor:
    """Flower's protocol `Executor`: starts the process of an order by a fork."""

    def __init__(self, node: subprocess.Popen[bytes]) -> None:
        self._node, self._owner = node, os.getpid()
        signal.signal(signal.SIGCHLD, lambda *_: self._see_who_ended())
        self._see_who_ended()  # it may have been quicker than we

    def get_eligible_capacity(
        self, supported_task_types: set[TaskType], **_: object
    ) -> tuple[set[TaskType], set[str]]:
        """There is always room for another order."""
        return supported_task_types, set()

    def wait_for_capacity(self, *_: object, **__: object) -> None:
        """Nothing to wait for."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Let a fork do the work of one order."""
        from flwr.supercore.superexec.executor import LaunchResult

        if os.fork() == 0:
            _serve(spec)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Nothing to maintain: who ended is seen at once."""

    def close(self) -> None:
        """End the node. A fork, which inherits this duty, has to leave it alone."""
        if os.getpid() == self._owner and self._node.poll() is None:
            self._node.terminate()

    def _see_who_ended(self) -> None:
        """Forks are done with; when the node is gone, so are we."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            if process == self._node.pid:
                os._exit(abs(os.waitstatus_to_exitcode(status)))


def _serve(spec: ExecutionSpec) -> None:
    """What `flwr-clientapp` does, in a fork; never returns."""
    from flwr.supercore.tls import validate_and_resolve_root_certificates
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = 1
    try:
        certificates = validate_and_resolve_root_certificates(
            spec.root_certificates_path, spec.insecure
        )
        run_clientapp(
            runtime_api_address=spec.runtime_api_address,
            token=spec.token,
            insecure=spec.insecure,
            certificates=certificates,
            parent_pid=spec.parent_pid,
            runtime_dependency_install=spec.runtime_dependency_install,
        )
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # the fork must not go on as if it were the executor
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(port: int, command: list[str]) -> None:
    """Start the node, load what orders need, then serve them until the node ends."""
    node = subprocess.Popen(command)
    executor = ForkExecutor(node)
    from flwr.supercore.superexec import run_superexec

    import perdure.flower.apps
    import perdure.flower.node_worker  # noqa: F401

    # Flower chooses among its own executors and offers no way to bring another
    run_superexec.get_executor = lambda *_, **__: executor  # type: ignore[attr-defined]
    run_superexec.run_superexec(f"127.0.0.1:{port}", insecure=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
