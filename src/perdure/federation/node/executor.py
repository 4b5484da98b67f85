"""Run a node's executor: Flower's loop, but with requests served by forks of a ready process.

Flower starts a new interpreter for every request, which loads Flower, torch and this library for
some seconds. Here everything is loaded once, and each request is served by a fork, a separate
process that has nothing left to load.

Started as `python -m perdure.federation.node.executor PORT DIR flower-supernode ...`, it starts
the command, asks it for work at the port, and ends when it ends. DIR is the node's folder, whose
policy decides
which code of a submission may be executed. This process itself computes nothing and has
one thread, since a fork copies memory but no threads (OpenBLAS recreates its threads in a fork).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult


class ForkExecutor:
    """An `Executor` of Flower that serves each request in a fork."""

    def __init__(self, node: subprocess.Popen[bytes], folder: Path) -> None:
        """Serve the requests of a node's process, and end when it ends."""
        self._node, self._folder, self._owner = node, folder, os.getpid()
        signal.signal(signal.SIGCHLD, lambda *_: self._reap_children())
        self._reap_children()  # the node may have ended before the handler was set

    def get_eligible_capacity(
        self, supported_task_types: set[TaskType], **_: object
    ) -> tuple[set[TaskType], set[str]]:
        """Return that there is capacity for another request, always."""
        return supported_task_types, set()

    def wait_for_capacity(self, *_: object, **__: object) -> None:
        """Return at once: there is always capacity."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Serve one request in a fork."""
        from flwr.supercore.superexec.executor import LaunchResult

        if os.fork() == 0:
            _serve(spec, self._folder)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Do nothing: ended forks are reaped at once."""

    def close(self) -> None:
        """End the node, unless this is a fork, which inherits the executor."""
        if os.getpid() == self._owner and self._node.poll() is None:
            self._node.terminate()

    def _reap_children(self) -> None:
        """Reap ended forks, and exit if the node ended."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            if process == self._node.pid:
                os._exit(abs(os.waitstatus_to_exitcode(status)))


def _serve(spec: ExecutionSpec, folder: Path) -> None:
    """Do the work of `flwr-clientapp` in a fork, and exit."""
    from flwr.supercore.tls import validate_and_resolve_root_certificates
    from flwr.supernode.runtime import run_clientapp

    from perdure.federation.admin.folders import NodeFolder
    from perdure.federation.admin.submission import check_app

    runtime: Any = run_clientapp
    install = runtime.install_from_fab

    def checked_install(content: bytes, *args: Any, **kwargs: Any) -> Any:
        check_app(content, NodeFolder.read(folder).policy)
        return install(content, *args, **kwargs)

    runtime.install_from_fab = checked_install
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = 1
    try:
        certificates = validate_and_resolve_root_certificates(
            spec.root_certificates_path, spec.insecure
        )
        runtime.run_clientapp(
            runtime_api_address=spec.runtime_api_address,
            token=spec.token,
            insecure=spec.insecure,
            certificates=certificates,
            parent_pid=spec.parent_pid,
            runtime_dependency_install=spec.runtime_dependency_install,
        )
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # the fork must not continue as the executor
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(port: int, folder: Path, command: list[str]) -> None:
    """Start the node, load all that requests need, and serve them until the node ends."""
    node = subprocess.Popen(command)
    executor = ForkExecutor(node, folder)
    from flwr.supercore.superexec import run_superexec

    # Flower has a fixed list of executors
    run_superexec.get_executor = lambda *_, **__: executor  # type: ignore[attr-defined]
    run_superexec.run_superexec(f"127.0.0.1:{port}", insecure=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
