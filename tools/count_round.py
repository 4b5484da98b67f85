"""How much of the library one training round goes through: its files and functions.

    python tools/count_round.py [--method fot] [--engine vector] [--list]

Counted are the distinct functions under the library's folder that are entered within `train_round`
of the third round of the second task, where everything is warm: from the sampling of clients to the
round's event. Comprehensions and lambdas count as part of the function that they stand in.
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
    """The functions of a folder that are entered between start and stop.

    within: the name of a function; if given, only what is entered within it counts.
    """

    def __init__(self, folder: Path, within: str | None = None) -> None:
        self.folder, self.within = str(folder), within
        self.codes: set[CodeType] = set()
        self.inside = within is None

    def start(self) -> None:
        """Count from here on, in this thread and in those that it starts."""
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)

    def stop(self) -> None:
        """Count no longer."""
        sys.setprofile(None)
        threading.setprofile(None)

    def _enter(self, frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code.co_name == self.within and event in ("call", "return"):
            self.inside = event == "call"
        if event == "call" and self.inside:
            self.codes.add(frame.f_code)

    def functions(self) -> list[tuple[str, str]]:
        """File and name of each function, sorted."""
        named = (code for code in self.codes if not code.co_name.startswith("<"))
        ours = (code for code in named if code.co_filename.startswith(self.folder))
        found = {(code.co_filename, code.co_firstlineno, code.co_qualname) for code in ours}
        return [(str(Path(file).relative_to(self.folder)), name) for file, _, name in sorted(found)]


class Watch:
    """Starts the counter after one round and stops it after the next."""

    def __init__(self, counter: Counter) -> None:
        self.counter, self.counting, self.done = counter, False, False

    def __call__(self, state: Any, event: dict[str, Any]) -> None:
        """Called by the library after each round and each task's end."""
        if event["event"] != "round":
            return
        if self.counting:
            self.counter.stop()
            self.counting, self.done = False, True
        elif not self.done and all(event[name] == value for name, value in START.items()):
            self.counting = True
            self.counter.start()


def config(method: str, engine: str) -> dict[str, Any]:
    """A small run that gets to the rounds that are counted."""
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
    """The functions of one round of a run."""
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
    """The two figures."""
    found = list(functions)
    return f"{len({file for file, _ in found})} files, {len(found)} functions"


def main() -> None:
    """Count, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="fot")
    parser.add_argument("--engine", default="vector", choices=["vector", "serial"])
    parser.add_argument("--list", action="store_true", help="name the functions, too")
    given = parser.parse_args()
    functions = count(config(given.method, given.engine))
    if given.list:
        print("\n".join(f"{file}: {name}" for file, name in functions))
    print(summary(functions))


if __name__ == "__main__":
    main()
