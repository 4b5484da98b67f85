"""Mutation testing: find small changes of the code that no test detects.

    python tools/mutate.py [FOLDER ...] [--lines 150] [--seed 0] [--out SUMMARY.json]

Each line of a sample gets one small change (a mutant), and the tests that execute the line are run,
the fastest first, until one fails. Mutants that survive all tests are printed: each shows a missing
test, or code without effect. Everything runs in copies of the tree.

A run of the whole suite records which tests execute which lines. The record is cached in
.mutate-coverage until the code or the tests change. A line that is executed at import belongs to
all tests that execute something in its file. A line that no test executes counts as a survivor.
Code that is executed once per process (a cached function) is recorded only for the first test.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = tuple(f"src/perdure/{name}" for name in ("contract", "methods", "training"))
CACHE = ".mutate-coverage"
ORDER, REPORTS = "MUTATE_ORDER", "MUTATE_REPORTS"
"""Environment variables: the file with the tests to run, and the file for their outcomes."""
MEMORY = 12 << 30
"""Limit of the address space for the tests of a mutant, in bytes."""

Edit = tuple[ast.AST, ast.AST]
"""A node and its replacement."""

# ---- The changes

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip
EXTREMES = {"min": "max", "amin": "amax", "argmin": "argmax", "minimum": "maximum"}
EXTREMES |= {high: low for low, high in EXTREMES.items()}
EMPTY = {"list": "[]", "set": "set()", **dict.fromkeys(("dict", "Tensors", "Tree", "Params"), "{}")}
LITERALS = (ast.Constant, ast.List, ast.Dict, ast.Tuple)
NOT_NUMBERS = (ast.List, ast.Tuple, ast.JoinedStr, ast.ListComp)
QUIET_KEYWORDS = {
    "strict", "encoding", "help", "description", "title", "daemon", "device", "prefix",
    "default_factory",
}  # fmt: skip
"""Keyword arguments that do not affect results, or whose removal is only an error."""
BLUNT = {"argument", "order", "returned"}
"""Changes that are often only errors; drawn less often if a line has others."""
FIXED_ARGUMENTS = {
    "isinstance", "issubclass", "hasattr", "getattr", "setattr", "partial", "replace", "zip",
}  # fmt: skip


def altered(node: ast.AST, **fields: Any) -> Any:
    """Return a copy of a node with other fields."""
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def exchanged(values: list[Any], index: int, *others: Any) -> list[Any]:
    """Return the list with one entry replaced by others."""
    return [*values[:index], *others, *values[index + 1 :]]


def called(node: ast.AST) -> str:
    """Return the name of the called function, after the last dot."""
    func = node.func if isinstance(node, ast.Call) else None
    return getattr(func, "id", None) or getattr(func, "attr", "")


def comparison(node: ast.AST) -> Iterator[Edit]:
    """Invert a comparison, or include or exclude its bound."""
    if isinstance(node, ast.Compare):
        for index, sign in enumerate(node.ops):
            for other in COMPARISONS[type(sign)]:
                yield node, altered(node, ops=exchanged(node.ops, index, other()))


def arithmetic(node: ast.AST) -> Iterator[Edit]:
    """Exchange + and -, * and /; not for lists or strings, where that is only an error."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
        if not any(isinstance(side, NOT_NUMBERS) or is_text(side) for side in sides):
            yield node, altered(node, op=ARITHMETIC[type(node.op)]())


def is_text(node: ast.AST) -> bool:
    """Return whether a node is a string literal."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def constant(node: ast.AST) -> Iterator[Edit]:
    """Exchange 0 and 1, and increment other numbers."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield node, ast.Constant(0 * node.value if node.value == 1 else node.value + 1)


def truth(node: ast.AST) -> Iterator[Edit]:
    """Exchange True and False."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, ast.Constant(not node.value)


def logic(node: ast.AST) -> Iterator[Edit]:
    """Exchange `and` and `or`."""
    if isinstance(node, ast.BoolOp):
        yield node, altered(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


def negation(node: ast.AST) -> Iterator[Edit]:
    """Remove a `not`."""
    if is_not(node):
        yield node, node.operand


def is_not(node: ast.AST) -> bool:
    """Return whether a node is a negation."""
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def condition(node: ast.AST) -> Iterator[Edit]:
    """Negate the condition of an `if`, unless it is a `not`, which `negation` removes."""
    tests = [node.test] if isinstance(node, ast.If | ast.IfExp) else getattr(node, "ifs", [])
    for test in tests:
        if not is_not(test):
            yield test, ast.UnaryOp(ast.Not(), test)


def returned(node: ast.AST) -> Iterator[Edit]:
    """Return another value that the caller could accept."""
    if isinstance(node, ast.Return) and not is_none(node.value):
        for other in (part_of(node.value), like_kind(node.value, getattr(node, "kind", ""))):
            if other is not None:
                yield node.value, other


def is_none(node: ast.AST | None) -> bool:
    """Return whether a node is missing, or the literal None."""
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def part_of(value: ast.AST) -> ast.AST | None:
    """Return a part of a value: the first argument of a call, or the left operand."""
    match value:
        case ast.Call(args=[ast.Name() | ast.Attribute() | ast.BinOp() as first, *_]):
            return None if called(value)[:1].isupper() else first
        case ast.BinOp(left=left) if not is_text(left):
            return left
    return None


def like_kind(value: ast.AST, kind: str) -> ast.AST | None:
    """Return another value of the annotated return type."""
    if "None" in kind or not kind:
        return ast.Constant(None)
    head = kind.partition("[")[0]
    if head == "bool":
        return value.operand if is_not(value) else ast.UnaryOp(ast.Not(), value)
    if head in ("int", "float", "Tensor"):
        return ast.UnaryOp(ast.USub(), value)
    return ast.parse(EMPTY[head], mode="eval").body if head in EMPTY else None


def note_kinds(tree: ast.AST) -> None:
    """Set the annotated return type of the function at each of its return statements."""
    for function in ast.walk(tree):
        if is_function(function):
            kind = ast.unparse(function.returns) if function.returns else ""
            for node in ast.walk(function):
                if isinstance(node, ast.Return):
                    node.kind = kind  # inner functions are visited later and override it


def argument(node: ast.AST) -> Iterator[Edit]:
    """Remove an argument that may be optional: a keyword, or a literal at the end."""
    if not isinstance(node, ast.Call) or called(node) in FIXED_ARGUMENTS:
        return
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in QUIET_KEYWORDS:
            yield node, altered(node, keywords=exchanged(node.keywords, index))
    if len(node.args) > 1 and isinstance(node.args[-1], LITERALS):
        yield node, altered(node, args=node.args[:-1])


def order(node: ast.AST) -> Iterator[Edit]:
    """Exchange the last two arguments."""
    if isinstance(node, ast.Call) and called(node) not in FIXED_ARGUMENTS | set(EXTREMES):
        match node.args:
            case [*first, ast.Name() | ast.Attribute() as one, ast.Name() | ast.Attribute() as two]:
                yield node, altered(node, args=[*first, two, one])


def removal(node: ast.AST) -> Iterator[Edit]:
    """Remove a statement: a call, or an assignment to an attribute or item."""
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield node, ast.Pass()
        case ast.AnnAssign(target=target, value=ast.expr()) | ast.Assign(targets=[target]):
            if isinstance(target, ast.Attribute | ast.Subscript):
                yield node, ast.Pass()


def extreme(node: ast.AST) -> Iterator[Edit]:
    """Exchange min and max."""
    other = EXTREMES.get(called(node))
    if isinstance(node, ast.Call) and other is not None:
        name = "id" if isinstance(node.func, ast.Name) else "attr"
        yield node.func, altered(node.func, **{name: other})


def bound(node: ast.AST) -> Iterator[Edit]:
    """Shift a bound of a slice by one."""
    if isinstance(node, ast.Slice):
        for end in (node.lower, node.upper):
            if isinstance(end, ast.Constant) and isinstance(end.value, int):
                yield end, ast.Constant(end.value + 1)
            elif end is not None and not is_none(end):
                yield end, ast.BinOp(end, ast.Add(), ast.Constant(1))


OPERATORS: tuple[Callable[[ast.AST], Iterator[Edit]], ...] = (
    comparison, arithmetic, constant, truth, logic, negation, condition, returned, argument,
    order, removal, extreme, bound,
)  # fmt: skip

# ---- Where they apply

NEVER = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.arguments)
LOGGERS = {"log", "logger", "logging", "warnings"}
TYPE_MAKERS = {"TypeVar", "ParamSpec", "NewType", "cast", "getLogger"}
UNSEEN_NAMES = {"__all__", "__slots__", "TYPE_CHECKING", "__name__"}
UNSEEN_FUNCTIONS = {"__repr__", "__str__"}
UNSEEN_FIELDS = {"annotation", "returns", "decorator_list", "bases"}


@dataclass(frozen=True)
class Change:
    """One change: a range of bytes, its replacement, and the lines of the statement."""

    operator: str
    line: int
    start: int
    end: int
    text: str
    lines: range
    at_import: bool


class Finder:
    """Finds all changes in a file."""

    def __init__(self, source: str) -> None:
        self.found: list[Change] = []
        self.starts = [0]
        for line in source.encode().splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        tree = ast.parse(source)
        note_kinds(tree)
        self.visit(tree, range(0), True)

    def visit(self, node: ast.AST, lines: range, at_import: bool) -> None:
        """Collect the changes of a node, then those of its children."""
        if is_function(node):
            self._defaults(node.args, own_lines(node), at_import)
        if unseen(node):
            return
        if isinstance(node, ast.stmt):
            lines = own_lines(node)
        for operator in OPERATORS:
            for piece, other in operator(node):
                self._add(operator.__name__, piece, other, lines, at_import)
        for child in children(node):
            self.visit(child, lines, at_import and not is_function(node))

    def _defaults(self, given: ast.arguments, lines: range, at_import: bool) -> None:
        for default in (*given.defaults, *given.kw_defaults):
            if default is not None:
                self.visit(default, lines, at_import)

    def _add(
        self, operator: str, piece: Any, other: ast.AST, lines: range, at_import: bool
    ) -> None:
        start = self.starts[piece.lineno - 1] + piece.col_offset
        end = self.starts[piece.end_lineno - 1] + piece.end_col_offset
        text = written(piece, other)
        if text is not None:
            change = Change(operator, piece.lineno, start, end, text, lines, at_import)
            self.found.append(change)


def is_function(node: ast.AST) -> bool:
    """Return whether a node is a function definition."""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def own_lines(node: Any) -> range:
    """Return the lines of a statement without those of nested statements."""
    body = getattr(node, "body", None)
    if not body:
        return range(node.lineno, node.end_lineno + 1)
    return range(node.lineno, max(node.lineno + 1, body[0].lineno))


def children(node: ast.AST) -> Iterator[ast.AST]:
    """Return the children of a node that may be changed."""
    for name, value in ast.iter_fields(node):
        if name in UNSEEN_FIELDS:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not quiet_part(node, child):
                yield child


def quiet_part(node: ast.AST, child: ast.AST) -> bool:
    """Return whether a child is a keyword without effect, or a bound of a slice (see `bound`)."""
    if isinstance(child, ast.keyword):
        return child.arg in QUIET_KEYWORDS
    return isinstance(node, ast.Slice) and isinstance(child, ast.Constant)


def unseen(node: ast.AST) -> bool:
    """Return whether a node contains nothing to change: strings, logs, types, directives."""
    match node:
        case ast.FunctionDef(name=name):
            return name in UNSEEN_FUNCTIONS
        case ast.Call():
            return unseen_call(node)
        case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
            return names(target) & UNSEEN_NAMES != set()
        case ast.If(test=test):
            return names(test) & UNSEEN_NAMES != set()
        case ast.Expr(value=value):
            return unseen(value)
    return isinstance(node, NEVER)


def unseen_call(node: ast.Call) -> bool:
    """Return whether a call logs, or creates a type, an error or a string."""
    if isinstance(node.func, ast.Attribute):
        owner = node.func.value
        if is_text(owner) or names(owner) & LOGGERS:
            return True
    name = called(node)
    return name in TYPE_MAKERS or name.endswith(("Error", "Warning", "Exception"))


def names(node: ast.AST) -> set[str]:
    """Return the names in a node that is a name or a comparison."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def written(piece: ast.AST, other: ast.AST) -> str | None:
    """Return the source of a replacement, or None if it cannot be written."""
    try:
        text = ast.unparse(ast.fix_missing_locations(other))
    except ValueError:  # nested quotes in an f-string, which Python before 3.12 cannot write
        return None
    loose = isinstance(other, ast.BoolOp | ast.UnaryOp | ast.IfExp | ast.Lambda)
    if loose or (isinstance(other, ast.BinOp | ast.Compare) and type(other) is not type(piece)):
        return f"({text})"
    return text


def changes(source: str) -> list[Change]:
    """Return all changes of a file, in the order of its lines; some may not be valid Python."""
    found = Finder(source).found
    return sorted(found, key=lambda each: (each.line, each.start, each.operator, each.text))


def sound(source: str, change: Change) -> bool:
    """Return whether a change gives valid Python and a different program."""
    try:
        return ast.dump(ast.parse(changed(source, change))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def changed(source: str, change: Change) -> str:
    """Return the changed source."""
    data = source.encode()
    return (data[: change.start] + change.text.encode() + data[change.end :]).decode()


def shown(source: str, change: Change) -> tuple[str, str]:
    """Return the changed lines before and after the change, each joined into one line."""
    data = source.encode()
    first = data.rfind(b"\n", 0, change.start) + 1
    last = (data + b"\n").index(b"\n", change.end)
    head, tail = data[first : change.start].decode(), data[change.end : last].decode()
    before = data[first:last].decode()
    return " ".join(before.split()), " ".join(f"{head}{change.text}{tail}".split())


@dataclass
class Mutant:
    """A change of one file, and the outcome of its tests."""

    path: str
    source: str
    change: Change
    tests: list[str] = field(default_factory=list)
    ran: int = 0
    outcome: str = ""
    killed_by: str = ""

    def summary(self) -> dict[str, Any]:
        """Return the entry of the JSON summary, with the tests unless one killed the mutant."""
        before, after = shown(self.source, self.change)
        values = {"file": self.path, "line": self.change.line, "operator": self.change.operator}
        values |= {"before": before, "after": after, "outcome": self.outcome}
        values |= {"covering": len(self.tests), "ran": self.ran}
        return values | ({"tests": self.tests} if self.survived else {"by": self.killed_by})

    @property
    def survived(self) -> bool:
        """Return whether no test failed."""
        return self.outcome in ("survived", "not covered")


def sample(root: Path, folders: Iterable[str], count: int, seed: int) -> list[Mutant]:
    """Return one mutant per line for a number of lines, drawn with a seed."""
    draw = random.Random(seed)
    lines: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for path in files(root, folders):
        source = (root / path).read_text(encoding="utf-8")
        for change in changes(source):
            lines[path, change.line].append(Mutant(path, source, change))
    order = draw.sample(sorted(lines), len(lines))
    chosen = (drawn(lines[line], draw) for line in order)
    return list(itertools.islice((each for each in chosen if each is not None), count))


def files(root: Path, folders: Iterable[str]) -> list[str]:
    """Return the Python files in folders, or single files, relative to the root."""
    found = [root / folder for folder in folders]
    nested = [path.rglob("*.py") if path.is_dir() else [path] for path in found]
    return sorted({path.relative_to(root).as_posix() for each in nested for path in each})


def drawn(line: list[Mutant], draw: random.Random) -> Mutant | None:
    """Draw one mutant of a line: first a kind of change, then one of that kind."""
    kinds = sorted({mutant.change.operator for mutant in line})
    (kind,) = draw.choices(kinds, [1 if kind in BLUNT else 3 for kind in kinds])
    mutant = draw.choice([each for each in line if each.change.operator == kind])
    return mutant if sound(mutant.source, mutant.change) else None


# ---- Inside pytest: this file is its plugin


def pytest_configure() -> None:
    """Limit the memory of the tests of a mutant, or start to record coverage."""
    if ORDER in os.environ:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if "COVERAGE_PROCESS_START" in os.environ:
        import coverage

        coverage.process_startup()  # does nothing if it was started with Python


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep the requested tests, in their order."""
    if ORDER in os.environ:
        order = json.loads(Path(os.environ[ORDER]).read_text(encoding="utf-8"))
        known = {item.nodeid: item for item in items}
        items[:] = [known[name] for name in order if name in known]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Assign the lines that are executed from now on to this test."""
    _switch(nodeid)


def pytest_runtest_logfinish() -> None:
    """Assign the lines that are executed from now on to no test."""
    _switch("")


def _switch(context: str) -> None:
    if "COVERAGE_PROCESS_START" in os.environ:
        import coverage

        coverage.Coverage.current().switch_context(context)


def pytest_runtest_logreport(report: Any) -> None:
    """Record the outcome of each phase of a test, in the main process."""
    if REPORTS in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ[REPORTS], "a", encoding="utf-8") as out:
            out.write(json.dumps([report.nodeid, report.outcome, report.duration]) + "\n")


def pytest_sessionfinish() -> None:
    """Save the recorded lines, since a worker process may be killed."""
    if "COVERAGE_PROCESS_START" in os.environ:
        import coverage

        coverage.Coverage.current().save()


# ---- Which tests run which lines

COVERAGE_SETTINGS = """[run]
parallel = true
data_file = {folder}/lines
source = {root}/src
context = ${{PYTEST_CURRENT_TEST-}}
sigterm = true
"""
"""The context of processes that a test starts; within pytest, each test is a context."""


@dataclass
class Covered:
    """Seconds of each passing test, and the indices of the tests by file and line."""

    times: dict[str, float]
    lines: dict[str, dict[int, list[int]]]

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that execute the statement of a mutant, the fastest first."""
        lines = self.lines.get(mutant.path, {})
        wanted = lines if mutant.change.at_import else mutant.change.lines
        numbers = {number for line in wanted for number in lines.get(line, ())}
        every = list(self.times)
        return sorted((every[number] for number in numbers), key=lambda name: self.times[name])


def covered(root: Path, copied: Path, tests: str, workers: int) -> Covered:
    """Return the recorded coverage, from the cache in the root or by a run in the copy."""
    cache, key = root / CACHE / "lines.json", fingerprint(copied, tests)
    known = json.loads(cache.read_text(encoding="utf-8")) if cache.exists() else {}
    if known.get("key") != key:
        print(f"recording which tests run which lines, into {CACHE}", flush=True)
        known = {"key": key, **record(copied, tests, workers)}
        cache.parent.mkdir(exist_ok=True)
        (cache.parent / ".gitignore").write_text("*\n", encoding="utf-8")
        cache.write_text(json.dumps(known), encoding="utf-8")
    lines = {
        path: {int(line): numbers for line, numbers in found.items()}
        for path, found in known["lines"].items()
    }
    return Covered(known["times"], lines)


def fingerprint(root: Path, tests: str) -> str:
    """Return a hash of the code and the tests."""
    whole = hashlib.sha256()
    for folder in ("src", tests):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                whole.update(f"{path.relative_to(root)} {path.stat().st_size} ".encode())
                whole.update(path.read_bytes())
    return whole.hexdigest()


def record(root: Path, tests: str, workers: int) -> dict[str, Any]:
    """Run all tests once; return the seconds of those that pass, and their lines."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings, reports = folder / "settings", folder / "reports"
        settings.write_text(COVERAGE_SETTINGS.format(folder=folder, root=root), encoding="utf-8")
        more = {"COVERAGE_PROCESS_START": str(settings), REPORTS: str(reports)}
        parallel = ["-n", str(workers)] if workers > 1 and find_spec("xdist") else []
        temporary = f"--basetemp={folder / 'temporary'}"
        subprocess.run(pytest(*parallel, temporary, tests), cwd=root, env=environment(root, more))
        times = passing(reports)
        return {"times": times, "lines": lines_of(folder, root, list(times))}


def pytest(*arguments: str) -> list[str]:
    """Return the command that runs tests with this file as a plugin."""
    base = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", Path(__file__).stem]
    return [*base, "-p", "no:cacheprovider", *arguments]


def environment(root: Path, more: dict[str, str]) -> dict[str, str]:
    """Return the environment of test processes: the code of the copy, no outer pytest."""
    ours = ("COVERAGE_", "PYTEST_", "MUTATE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    paths = os.pathsep.join([str(root / "src"), str(Path(__file__).parent)])
    return kept | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | more


def passing(reports: Path) -> dict[str, float]:
    """Return the seconds of each test whose phases all passed."""
    times: dict[str, float] = defaultdict(float)
    failed = set()
    for test, outcome, duration in read_reports(reports):
        times[test] += duration
        if outcome != "passed":
            failed.add(test)
    return {test: seconds for test, seconds in times.items() if test not in failed}


def read_reports(path: Path) -> list[Any]:
    """Return the outcomes that the plugin recorded."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def lines_of(folder: Path, root: Path, tests: list[str]) -> dict[str, dict[int, list[int]]]:
    """Return the indices of the tests by file and line, from the records of all processes."""
    from coverage import CoverageData

    number = {test: place for place, test in enumerate(tests)}
    found: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for part in folder.glob("lines.*"):
        data = CoverageData(str(part))
        data.read()
        for path in data.measured_files():
            name = Path(path).relative_to(root).as_posix()
            for line, contexts in data.contexts_by_lineno(path).items():
                tested = {number.get(plain(context)) for context in contexts} - {None}
                found[name][line] |= tested
    return {
        name: {line: sorted(numbers) for line, numbers in sorted(lines.items())}
        for name, lines in found.items()
    }


def plain(context: str) -> str:
    """Return the name of a test without the phase in which a process was started."""
    return re.sub(r" \((setup|call|teardown)\)$", "", context)


# ---- Running mutants


@dataclass(frozen=True)
class Limits:
    """Limit of seconds for one run of tests, and of recorded seconds of tests for one mutant."""

    run: float
    patience: float


def groups(tests: list[str], times: dict[str, float], limits: Limits) -> Iterator[list[str]]:
    """Split the tests into runs of at most a quarter of the limit, so that only hangs exceed it."""
    group: list[str] = []
    spent = total = 0.0
    for test in tests:
        total += times[test]
        if group and total > limits.patience:
            break
        if group and spent + times[test] > limits.run / 4:
            yield group
            group, spent = [], 0.0
        group.append(test)
        spent += times[test]
    if group:
        yield group


def evaluator(mutant: Mutant, covered: Covered, root: Path, limits: Limits) -> Mutant:
    """Run the tests of a mutant in a copy of the tree until one fails."""
    mutant.tests = covered.tests(mutant)
    mutant.outcome = "survived" if mutant.tests else "not covered"
    with put_in(mutant, root):
        for group in groups(mutant.tests, covered.times, limits):
            limit = max(limits.run, 5 * covered.times[group[-1]])
            mutant.outcome, mutant.killed_by = run_tests(group, root, limit)
            mutant.ran += len(group)
            if not mutant.survived:
                break
    return mutant


@contextmanager
def put_in(mutant: Mutant, root: Path) -> Iterator[None]:
    """Write the mutant to its file within a `with` block; a new file time has it compiled."""
    path = root / mutant.path
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_text(changed(mutant.source, mutant.change), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(mutant.source, encoding="utf-8")
        os.utime(path, ns=times)


def run_tests(tests: list[str], root: Path, limit: float) -> tuple[str, str]:
    """Return the outcome of some tests on a mutant, and the test that failed."""
    with tempfile.TemporaryDirectory() as name:
        order, reports = Path(name, "order"), Path(name, "reports")
        order.write_text(json.dumps(tests), encoding="utf-8")
        more = {ORDER: str(order), REPORTS: str(reports), "PYTHONDONTWRITEBYTECODE": "1"}
        where = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        command = pytest("-x", f"--basetemp={Path(name, 'temporary')}", *where)
        code = exit_code(command, root, environment(root, more), limit)
        if code is None:
            rest = slow(tests, reports, limit)
            return run_tests(rest, root, limit) if rest else ("timeout", "")
        failed = [test for test, outcome, _ in read_reports(reports) if outcome == "failed"]
    return ("survived", "") if code in (0, 5) else ("killed", "".join(failed[:1]))


def slow(tests: list[str], reports: Path, limit: float) -> list[str]:
    """Return the remaining tests of a run that was too slow without hanging."""
    parts = Counter(test for test, _, _ in read_reports(reports))  # setup, call, teardown
    left = [test for test in tests if parts[test] < 3]
    if len(left) == len(tests) or time.time() - reports.stat().st_mtime > limit / 2:
        return []
    return left


def exit_code(command: list[str], root: Path, env: dict[str, str], limit: float) -> int | None:
    """Run a command; return its exit code, or None if it was killed at the limit."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        command, cwd=root, env=env, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and the rest of its group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def copy_tree(root: Path, to: Path) -> Path:
    """Copy the tree without hidden files, environments and build results."""

    def left_out(folder: str, entries: list[str]) -> list[str]:
        top = {"build", "dist", "runs"} if Path(folder) == root else set()
        return [name for name in entries if name.startswith(".") or name in top]

    return Path(shutil.copytree(root, to, ignore=left_out))


def judge_all(
    mutants: list[Mutant], covered: Covered, copied: Path, workers: int, limits: Limits
) -> Iterator[Mutant]:
    """Test mutants in parallel, each worker in a separate copy of the tree."""
    free: Queue[Path] = Queue()
    for number in range(workers):
        free.put(copy_tree(copied, copied.with_name(f"worker-{number}")))

    def task(mutant: Mutant) -> Mutant:
        root = free.get()
        try:
            return evaluator(mutant, covered, root, limits)
        finally:
            free.put(root)

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(task, mutants)


# ---- The report


def survivor(mutant: Mutant) -> str:
    """Return the text that is printed for a surviving mutant."""
    before, after = shown(mutant.source, mutant.change)
    head = f"{mutant.path}:{mutant.change.line} {mutant.outcome} ({mutant.change.operator})"
    lines = [head, f"  - {before}", f"  + {after}"]
    if mutant.tests:
        lines.append(f"  passed {mutant.ran} of {len(mutant.tests)} tests that run it:")
        lines += [f"    {test}" for test in mutant.tests[:5]]
    return "\n".join(lines)


def summary(mutants: list[Mutant]) -> dict[str, Any]:
    """Return the fraction of killed mutants, the number of each outcome, and all mutants."""
    outcomes = Counter(mutant.outcome for mutant in mutants)
    killed = sum(not mutant.survived for mutant in mutants)
    return {
        "mutants": len(mutants),
        "killed_share": killed / len(mutants) if mutants else 0.0,
        "outcomes": dict(sorted(outcomes.items())),
        "each": [mutant.summary() for mutant in mutants],
    }


def mutate(given: argparse.Namespace) -> dict[str, Any]:
    """Draw and test mutants; return the values of the JSON summary."""
    began = time.monotonic()
    root = given.root.resolve()
    folders = given.folders or [name for name in FOLDERS if (root / name).exists()]
    with tempfile.TemporaryDirectory() as name:
        copied = copy_tree(root, Path(name).resolve() / "tree")
        lines = covered(root, copied, given.tests, given.workers)
        mutants = sample(copied, folders, given.lines, given.seed)
        limits = Limits(given.limit, given.patience)
        judged = []
        for mutant in judge_all(mutants, lines, copied, given.workers, limits):
            judged.append(mutant)
            show(mutant, len(judged), len(mutants))
    about = {"folders": folders, "seed": given.seed, "seconds": round(time.monotonic() - began)}
    return about | summary(judged)


def show(mutant: Mutant, done: int, count: int) -> None:
    """Print a survivor and, from time to time, the progress."""
    if mutant.survived:
        print(survivor(mutant), flush=True)
    if done % 25 == 0:
        print(f"{done} of {count} mutants", file=sys.stderr, flush=True)


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("folders", nargs="*", help=f"folders or files of code; default: {', '.join(FOLDERS)}")
    add("--lines", type=int, default=150, help="how many lines get a mutant")
    add("--seed", type=int, default=0, help="decides which lines, and which changes")
    add("--workers", type=int, default=2, help="processes side by side")
    add("--limit", type=float, default=60, help="seconds for a run of tests; longer is killed")
    add("--patience", type=float, default=120, help="recorded seconds of tests for a mutant")
    add("--out", type=Path, help="a file for the JSON summary")
    add("--root", type=Path, default=ROOT, help="the tree: its code is in src")
    add("--tests", default="tests", help="the folder of tests in the tree")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    """Print the survivors, and write the summary."""
    options = arguments(given)
    if find_spec("coverage") is None:
        sys.exit("tools/mutate.py needs coverage.py: pip install pytest-cov")
    values = mutate(options)
    if options.out is not None:
        options.out.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    killed, count = values["killed_share"], values["mutants"]
    print(f"{killed:.0%} of {count} mutants killed in {values['seconds']} s", values["outcomes"])


if __name__ == "__main__":
    main()
