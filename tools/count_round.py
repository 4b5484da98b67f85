"""Count the files and functions of the library that one training round uses.

    python tools/count_round.py [--method fot] [--engine vector] [--list]

Counts the distinct functions of the library that are called within `train_round` of the third round
of the second task, when all caches are filled: from the sampling of clients to the event of the
round. Comprehensions and lambdas count as part of the function that contains them.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PROMPTED = ("fed-l2p", "fed-dualp", "pip")
START = {"task": 1, "round": 1}


class Counter:
    """Counts the functions of a folder that are called between `start` and `stop`.

    Args:
        folder: Folder of the functions.
        within: Name of a function. If given, only calls within it count.
    """

    def __init__(self, folder: Path, within: str | None = None) -> None:
        self.folder, self.within = str(folder), within
        self.codes: set[CodeType] = set()
        self.inside = within is None

    def start(self) -> None:
        """Start to count, in this thread and in those that it starts."""
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)

    def stop(self) -> None:
        """Stop to count."""
        sys.setprofile(None)
        threading.setprofile(None)

    def _enter(self, frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code.co_name == self.within and event in ("call", "return"):
            self.inside = event == "call"
        if event == "call" and self.inside:
            self.codes.add(frame.f_code)

    def functions(self) -> list[tuple[str, str]]:
        """Return the file and the name of each function, sorted."""
        named = (code for code in self.codes if not code.co_name.startswith("<"))
        inside = (code for code in named if code.co_filename.startswith(self.folder))
        functions = {(code.co_filename, code.co_firstlineno, code.co_qualname) for code in inside}
        return [
            (str(Path(file).relative_to(self.folder)), name) for file, _, name in sorted(functions)
        ]


class Watch:
    """Starts the counter after one round and stops it after the next."""

    def __init__(self, counter: Counter) -> None:
        self.counter, self.counting, self.done = counter, False, False

    def __call__(self, state: Any, event: dict[str, Any]) -> None:
        """Receive an event of the run: the end of a round or of a task."""
        if event["event"] != "round":
            return
        if self.counting:
            self.counter.stop()
            self.counting, self.done = False, True
        elif not self.done and all(event[name] == value for name, value in START.items()):
            self.counting = True
            self.counter.start()


def config(method: str, engine: str) -> dict[str, Any]:
    """Return the config of a small run that reaches the counted round."""
    values: dict[str, Any] = {
        "data": {"source": "digits", "limit": 260, "test_limit": 120},
        "stream": {"kind": "permuted", "tasks": 2},
        "clients": {"count": 4, "per_round": 3},
        "model": {"kind": "mlp", "hidden": [24, 24]},
        "method": {"kind": method},
        "engine": {"kind": engine},
        "train": {"rounds": 3, "local_epochs": 2, "batch_size": 16, "lr": 0.05},
    }
    if method in PROMPTED:
        small = {"init": "random", "width": 8, "heads": 2, "depth": 5, "patch": 4}
        values["model"] = {"kind": "vit", **small}
    return values


def count(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the functions that one round of a run calls."""
    import perdure

    counter = Counter(Path(perdure.__file__).parent, within="train_round")
    watch = Watch(counter)
    try:
        perdure.run(values, watch=watch)
    except perdure.UserError as error:
        sys.exit(str(error))
    finally:
        counter.stop()
    if not watch.done:
        sys.exit("the run ended before the round that is counted")
    return counter.functions()


def summary(functions: Iterable[tuple[str, str]]) -> str:
    """Return the numbers of files and functions as text."""
    pairs = list(functions)
    return f"{len({file for file, _ in pairs})} files, {len(pairs)} functions"


def main() -> None:
    """Count, and print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="fot")
    parser.add_argument("--engine", default="vector", choices=["vector", "serial"])
    parser.add_argument("--list", action="store_true", help="print the functions as well")
    given = parser.parse_args()
    functions = count(config(given.method, given.engine))
    if given.list:
        print("\n".join(f"{file}: {name}" for file, name in functions))
    print(summary(functions))


if __name__ == "__main__":
    main()
