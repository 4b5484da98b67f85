"""Measure the shape and the size of the library: hops, doors, second dispatches, files, lines.

    python tools/house.py [--quick] [--json FILE] [--list MEASURE] [--record]

Shape may only fall: `--record` writes tests/house/shape.json and refuses a measure that rose. Size
is a budget (tests/house/budget.yaml), whose base `--record` lowers to what is there; an addition is
a line written by hand. The docstrings say how each measure is counted; those of the source are in
house_source.py. Each trace is a separate process, since what is cached or imported already would be
missing in it. Record with Python 3.11: later versions have no frames of comprehensions.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import yaml
from house_source import SOURCE_MEASURES, SRC, Items, library

ROOT = Path(__file__).resolve().parents[1]
SHAPE = ROOT / "tests" / "house" / "shape.json"
BUDGET = ROOT / "tests" / "house" / "budget.yaml"

# All names of the library that this file knows, so that a renamed one is changed here alone.
ROUND, TASK_START, TASK_END, REPORT = "train_round", "begin_task", "task_event", "write_run_report"
"""Functions between whose call and return a round, a task (two functions) and a report lie."""
NAMES = {"round": ROUND, "task": f"{TASK_START} and {TASK_END}", "report": REPORT}
TRACED = [
    (method, engine) for method in ("fot", "fedprotip", "stamp") for engine in ("serial", "vector")
]


# ---- Traces of runs ----


class Section:
    """What was called in all rounds of a run, in all its tasks, in its report, or in all of it."""

    def __init__(self) -> None:
        self.codes: dict[CodeType, int] = {}
        self.times, self.calls, self.depth = 0, 0, 0

    def add(self, code: CodeType, depth: int) -> None:
        """Count a call at a depth."""
        self.codes.setdefault(code, depth)
        self.calls, self.depth = self.calls + 1, max(self.depth, depth)

    def functions(self) -> list[tuple[str, str, int]]:
        """Return the file, the name and the depth of each function, in the order of first calls.

        The code of modules and classes is no function; comprehensions and lambdas are part of the
        function that contains them.
        """
        return [
            (Path(code.co_filename).relative_to(SRC).as_posix(), code.co_qualname, depth)
            for code, depth in self.codes.items()
            if code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        ]

    def values(self) -> dict[str, Any]:
        """Return all numbers: of distinct files, functions and packages, the depth, the calls."""
        functions = self.functions()
        files = {file for file, *_ in functions}
        return {
            "files": len(files), "functions": len(functions),
            "packages": len({file.split("/")[0] for file in files}), "depth": self.depth,
            "calls": round(self.calls / max(1, self.times)),
            "items": [f"{'  ' * (depth - 1)}{file}: {name}" for file, name, depth in functions],
        }  # fmt: skip


class Trace:
    """Records calls of functions in a folder: of rounds, tasks, the report and the whole run.

    A round lasts from the call of ROUND to its return, the report alike, and a task from the call
    of TASK_START to the call of TASK_END, the event of its evaluation. Each section is the union
    over the run: what only the first round calls counts as well. Calls are those of one round on
    average, with comprehensions and generators; the depth is the largest number of frames of the
    folder on the stack. A method is built when a function of the folder returns one that none
    returned before.
    """

    def __init__(self, folder: Path = SRC, method: type | None = None) -> None:
        self.folder, self.method = f"{folder}{os.sep}", method or Trace
        self.sections = {name: Section() for name in ("round", "task", "report", "run")}
        self.open = {"run"}
        self.built: list[Any] = []
        self.thread = threading.local()

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """Receive an event of the profiler."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self.folder):
            return
        depth = getattr(self.thread, "depth", 0) + (event == "call")
        self.thread.depth = depth if event == "call" else depth - 1
        if event == "call":
            self._mark(code.co_name, True)
            for name in self.open:
                self.sections[name].add(code, depth)
        elif isinstance(value, self.method) and all(value is not other for other in self.built):
            self.built.append(value)
        if event == "return" or code.co_name == TASK_END:
            self._mark(code.co_name, False)

    def _mark(self, function: str, starts: bool) -> None:
        ends = {ROUND: "round", REPORT: "report", TASK_START if starts else TASK_END: "task"}
        name = ends.get(function)
        if name is not None and starts:
            self.sections[name].times += 1
            self.open.add(name)
        elif name is not None:
            self.open.discard(name)

    def record(self, function: Callable[[], Any]) -> dict[str, Any]:
        """Call a function and return the values of all sections."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            function()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        values = {name: section.values() for name, section in self.sections.items()}
        return {**values, "built": len({id(method) for method in self.built})}


def traced_run(method: str, engine: str) -> dict[str, Any]:
    """Trace a run of two tasks of two rounds with report; everything else is left to defaults."""
    import perdure

    config = {
        "method": {"kind": method}, "engine": {"kind": engine},
        "stream": {"tasks": 2}, "train": {"rounds": 2},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trace = Trace(method=perdure.Method)
        values = trace.record(lambda: perdure.run(config, out=Path(folder) / "run"))
    for name, functions in NAMES.items():
        if not values[name]["calls"]:
            sys.exit(f"{functions}: no such function was called; name it at the top of {__file__}")
    return values


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a process of Python that imports the library of this tree."""
    environment = {**os.environ, "PYTHONPATH": str(SRC.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done


# ---- All measures, the ratchet and the budget ----


def run_measures(method: str, engine: str) -> tuple[dict[str, int], dict[str, Items]]:
    """Return the measures of a run (see `Trace`) and the items of its sections, in order."""
    run = json.loads(python(__file__, "--trace", method, engine).stdout)
    start, counted = f"{method} {engine}", ("files", "functions", "packages", "depth")
    measures = {
        f"{start} {section} {name}": run[section][name]
        for section in ("round", "task")
        for name in counted
    }
    for section, name in (("run", "files"), ("run", "functions"), ("report", "calls")):
        measures[f"{start} {section} {name}"] = run[section][name]
    measures[f"{start} round calls"] = run["round"]["calls"]
    measures[f"{start} methods built"] = run["built"]
    return measures, {
        f"{start} {section}": run[section]["items"] for section in run if section != "built"
    }


def import_measures() -> dict[str, int]:
    """Count the library's modules that `import perdure` loads, and whether --help loads torch."""
    script = "import sys, perdure; print(sum(n.split('.')[0] == 'perdure' for n in sys.modules))"
    helped = python("-X", "importtime", "-m", "perdure", "--help").stderr
    return {
        "modules loaded by import": int(python("-c", script).stdout),
        "torch loaded by --help": int(re.search(r"\|\s+torch$", helped, re.MULTILINE) is not None),
    }


def shape(runs: Iterable[tuple[str, str]] = TRACED) -> tuple[dict[str, int], dict[str, Items]]:
    """Return the measures that may only fall, and the items of those that have some."""
    tree = library()
    items = {name: sorted(measure(tree)) for name, measure in SOURCE_MEASURES.items()}
    measures = {name: len(found) for name, found in items.items()} | import_measures()
    for method, engine in runs:
        of_run, called = run_measures(method, engine)
        measures, items = measures | of_run, items | called
    return measures, items


def size() -> dict[str, int]:
    """Return the size: files, lines, facts, functions and names.

    Facts are the fields of Needs; functions are the public functions and properties of Method;
    public names are those that docs/api.md lists.
    """
    sys.path.insert(0, str(SRC.parent))
    import perdure

    texts = library().texts.values()
    public = (value for name, value in vars(perdure.Method).items() if name[0] != "_")
    functions = [value for value in public if inspect.isroutine(value) or _is_property(value)]
    names = re.findall(r"^::: ", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE)
    return {
        "files": len(texts),
        "lines": sum(text.count("\n") for text in texts),
        "facts of Needs": len(dataclasses.fields(perdure.Needs)),
        "functions of Method": len(functions),
        "public names": len(names),
    }


def _is_property(value: Any) -> bool:
    return isinstance(value, property)


def risen(measures: dict[str, int], recorded: dict[str, int]) -> Items:
    """Return a sentence for each measure that is above what was recorded.

    The calls of a report may vary by 3%: its axes depend on seconds that were measured.
    """
    return [
        f"{name}: must be at most {recorded[name]}, got {value}"
        for name, value in measures.items()
        if value > recorded.get(name, value) * (1.03 if name.endswith("report calls") else 1)
    ]


def budget() -> dict[str, int]:
    """Return the largest size that is allowed: the base and all additions."""
    values = yaml.safe_load(BUDGET.read_text(encoding="utf-8"))
    additions = values["additions"] or []
    return {
        name: base + sum(a.get(name, 0) for a in additions) for name, base in values["base"].items()
    }


def record(measures: dict[str, int], sizes: dict[str, int]) -> None:
    """Write measures that fell, and lower the base of the budget to the size that is there.

    The calls of a round are only what those of its report are compared with: fewer are no gain.
    """
    measures = {name: v for name, v in measures.items() if not name.endswith("round calls")}
    recorded = json.loads(SHAPE.read_text(encoding="utf-8")) if SHAPE.exists() else {}
    if above := risen(measures, recorded):
        sys.exit("\n".join([*above, "nothing was recorded: shape may only fall"]))
    lowest = {name: min(value, recorded.get(name, value)) for name, value in measures.items()}
    SHAPE.write_text(json.dumps(recorded | lowest, indent=2) + "\n", encoding="utf-8")
    text = BUDGET.read_text(encoding="utf-8")
    for name, allowed in budget().items():
        if sizes[name] < allowed:
            base = yaml.safe_load(text)["base"][name] - allowed + sizes[name]
            text = re.sub(rf"^  {name}: \d+$", f"  {name}: {base}", text, flags=re.MULTILINE)
    BUDGET.write_text(text, encoding="utf-8")


def main() -> None:
    """Measure, and print, list, write or record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="trace FOT on the serial engine alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measures to a file")
    parser.add_argument(
        "--list", metavar="MEASURE", help="list the items, such as of `fot serial round`"
    )
    parser.add_argument("--record", action="store_true", help="record measures that fell")
    parser.add_argument("--trace", nargs=2, metavar=("METHOD", "ENGINE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trace:
        print(json.dumps(traced_run(*given.trace)))
        return
    if given.list:
        of_run = [pair for pair in TRACED if given.list.startswith(" ".join(pair))]
        items = run_measures(*of_run[0])[1] if of_run else {}
        if given.list in SOURCE_MEASURES:
            items = {given.list: SOURCE_MEASURES[given.list](library())}
        if given.list not in items:
            allowed = ", ".join(
                [*SOURCE_MEASURES, *items, "or a section such as `fot serial round`"]
            )
            sys.exit(f"--list: must be one of {allowed}, got {given.list!r}")
        print("\n".join(items[given.list]))
        return
    measures, sizes = shape(TRACED[:1] if given.quick else TRACED)[0], size()
    for name, value in {**sizes, **measures}.items():
        print(f"{name:<50}{value:>8,}")
        if name.endswith("report calls"):
            ratio = value / measures[name.replace("report", "round")]
            print(f"{name.replace('calls', 'calls / those of a round'):<50}{ratio:>8.1f}")
    if given.json:
        given.json.write_text(json.dumps({**sizes, **measures}, indent=2) + "\n", encoding="utf-8")
    if given.record:
        record(measures, sizes)


if __name__ == "__main__":
    main()
