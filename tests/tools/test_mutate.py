"""Mutation testing finds the tests that are missing."""

import ast
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import mutate

ONCE = [
    ("comparison", "x = a < b", ["x = a <= b", "x = a > b"]),
    ("comparison", "x = a is b", ["x = a is not b"]),
    ("arithmetic", "x = a + b", ["x = a - b"]),
    ("arithmetic", "x = a / b * c", ["x = a / b / c", "x = a * b * c"]),
    ("arithmetic", "x = [a] + b", []),
    ("constant", "x = 0", ["x = 1"]),
    ("constant", "x = 1.0", ["x = 0.0"]),
    ("constant", "x = f(4)", ["x = f(5)"]),
    ("truth", "x = True", ["x = False"]),
    ("logic", "x = a and b or c", ["x = (a or b) or c", "x = ((a and b) and c)"]),
    ("negation", "x = not (a or b)", ["x = (a or b)"]),
    ("condition", "if a == b:\n    x = c", ["if (not a == b):"]),
    ("condition", "x = a if b else c", ["x = a if (not b) else c"]),
    ("condition", "x = [a for a in b if c]", ["x = [a for a in b if (not c)]"]),
    ("returned", "def f() -> bool:\n    return a", ["return (not a)"]),
    ("returned", "def f() -> Tensor:\n    return g(a)", ["return (-g(a))", "return a"]),
    ("returned", "def f() -> dict[str, int]:\n    return a", ["return {}"]),
    ("returned", "def f() -> int | None:\n    return a", ["return None"]),
    ("returned", "def f() -> Server:\n    return a", []),
    ("argument", "x = f(a, b=c)", ["x = f(a)"]),
    ("argument", "x = f(a, {})", ["x = f(a)"]),
    ("argument", "x = zip(a, b, strict=c)", []),
    ("order", "x = f(a, b, c)", ["x = f(a, c, b)"]),
    ("removal", "a.b = c", ["pass"]),
    ("removal", "a.b()", ["pass"]),
    ("removal", "a = b", []),
    ("extreme", "x = min(a, b)", ["x = max(a, b)"]),
    ("extreme", "x = a.amax(b)", ["x = a.amin(b)"]),
    ("bound", "x = a[b:1]", ["x = a[(b + 1):1]", "x = a[b:2]"]),
]

UNSEEN = '''"""Text."""
import a
from b import c
__all__ = ["f"][0:1]
T = TypeVar("T", bound=1)
if TYPE_CHECKING:
    x = 1

@cache(1)
def f(a: A[0], b: int) -> B[1]:
    """Text."""
    log.info("text %d", 1)
    raise UserError(1 + 1)

class C(Base[1]):
    x: A[0]

    def __repr__(self):
        return f"{1 + 1}"
'''


def afters(source: str, operator: str) -> list[str]:
    found = [each for each in mutate.changes(source) if each.operator == operator]
    return [mutate.shown(source, each)[1] for each in found]


@pytest.mark.parametrize(("operator", "source", "expected"), ONCE)
def test_each_operator(operator, source, expected):
    assert sorted(afters(source, operator)) == sorted(expected)


def test_every_operator_has_a_case():
    assert {operator.__name__ for operator in mutate.OPERATORS} == {case[0] for case in ONCE}


@pytest.mark.slow
def test_changes_leave_valid_python_that_differs():
    source = Path(mutate.__file__).read_text(encoding="utf-8")
    found = mutate.changes(source)
    assert len(found) > 300
    for change in found[::20]:
        assert ast.dump(ast.parse(mutate.changed(source, change))) != ast.dump(ast.parse(source))


def test_what_shows_in_no_result_is_left_alone():
    assert mutate.changes(UNSEEN) == []


def test_places_count_bytes():
    source = "x = 'é', a < b\n"
    (first, _) = mutate.changes(source)
    assert mutate.changed(source, first) == "x = 'é', a <= b\n"


def test_lines_of_a_statement_and_of_its_head():
    source = "def f(a=1):\n    if a < 2:\n        return g(\n            a, b=3\n        )\n"
    where = {(each.text, each.at_import): each.lines for each in mutate.changes(source)}
    assert where["0", True] == range(1, 2)
    assert where["a <= 2", False] == range(2, 3)
    assert where["4", False] == range(3, 6)


PATH = "src/tiny/__init__.py"
SOURCE = """TOP = 2


def clipped(x):
    if x > TOP:
        return TOP
    return x


def unused(a):
    return a + a
"""
TESTS = """import tiny


def test_high():
    assert tiny.clipped(3) == 2


def test_low():
    assert tiny.clipped(1) == 1


def test_red():
    assert tiny.clipped(3) == 9
"""
HIGH, LOW = "tests/test_tiny.py::test_high", "tests/test_tiny.py::test_low"
LINES = [1, 5, 6, 7, 11]
EXPECTED = {
    (1, "TOP = 3"): "killed",
    (5, "if x >= TOP:"): "survived",
    (5, "if x < TOP:"): "killed",
    (5, "if (not x > TOP):"): "killed",
    (6, "return None"): "killed",
    (7, "return None"): "killed",
    (11, "return a - a"): "not covered",
    (11, "return a"): "not covered",
    (11, "return None"): "not covered",
}


def tree(root: Path, source: str, tests: str) -> Path:
    for name, text in ((PATH, source), ("tests/test_tiny.py", tests), ("pytest.ini", "[pytest]\n")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


@pytest.fixture
def tiny(tmp_path):
    return tree(tmp_path / "tiny", SOURCE, TESTS)


def judged(root: Path, source: str, after: str, covered: mutate.Covered, limit: float):
    mutants = [mutate.Mutant(PATH, source, change) for change in mutate.changes(source)]
    (mutant,) = (each for each in mutants if mutate.shown(source, each.change)[1] == after)
    return mutate.evaluator(mutant, covered, root, mutate.Limits(limit, 60))


@pytest.mark.slow
@pytest.mark.parametrize("after", ["if x >= TOP:", "if x < TOP:", "TOP = 3", "return a - a"])
def test_a_mutant_is_judged_by_the_tests_of_its_line(tiny, after):
    covered = mutate.Covered({HIGH: 0.1, LOW: 0.2}, {PATH: {5: [0, 1], 6: [0], 7: [1]}})
    mutant = judged(tiny, SOURCE, after, covered, 60)
    assert mutant.outcome == EXPECTED[mutant.change.line, after]
    assert mutant.killed_by == (HIGH if mutant.outcome == "killed" else "")
    assert (tiny / PATH).read_text(encoding="utf-8") == SOURCE


def test_a_mutant_that_hangs_is_killed(tmp_path):
    source = "def counted(n):\n    while n:\n        n -= 1\n    return n\n"
    tests = "import tiny\n\n\ndef test_high():\n    assert tiny.counted(2) == 0\n"
    root = tree(tmp_path / "tiny", source, tests)
    mutant = judged(root, source, "n += 1", mutate.Covered({HIGH: 0.1}, {PATH: {3: [0]}}), 3)
    assert (mutant.outcome, mutant.survived) == ("timeout", False)


def test_a_run_that_is_only_slow_goes_on(monkeypatch, tmp_path):
    runs = []

    def busy(command, root, env, limit):
        order = json.loads(Path(env[mutate.ORDER]).read_text(encoding="utf-8"))
        runs.append(order)
        report = json.dumps([order[0], "passed", 1.0]) + "\n"
        Path(env[mutate.REPORTS]).write_text(3 * report, encoding="utf-8")
        return 0 if len(order) == 1 else None

    monkeypatch.setattr(mutate, "exit_code", busy)
    assert mutate.run_tests(["a", "b", "c"], tmp_path, 60) == ("survived", "")
    assert runs == [["a", "b", "c"], ["b", "c"], ["c"]]
    assert mutate.run_tests(["a", "b"], tmp_path, -1) == ("timeout", "")


@pytest.mark.slow
def test_the_whole_tool(tiny, tmp_path, capsys):
    pytest.importorskip("coverage")
    out = tmp_path / "out.json"
    drawn = ["--lines", "3", "--seed", "10", "--workers", "1"]
    mutate.main(["--root", str(tiny), "src/tiny", "--out", str(out), *drawn])
    values = json.loads(out.read_text(encoding="utf-8"))
    assert values["outcomes"] == {"killed": 1, "not covered": 1, "survived": 1}
    for each in values["each"]:
        assert each["outcome"] == EXPECTED[each["line"], each["after"]]
    assert f"{PATH}:11 not covered" in capsys.readouterr().out
    known = json.loads((tiny / mutate.CACHE / "lines.json").read_text(encoding="utf-8"))
    assert set(known["times"]) == {HIGH, LOW}  # a test that fails anyway kills nothing
    assert {line: len(tests) for line, tests in known["lines"][PATH].items() if tests} == {
        "5": 2, "6": 1, "7": 1,
    }  # fmt: skip


def test_a_sample_is_that_of_its_seed(tiny):
    def drawn(seed, count):
        return [each.change for each in mutate.sample(tiny, ["src"], count, seed)]

    assert drawn(3, 4) == drawn(3, 4) == drawn(3, 5)[:4]
    assert drawn(3, 5) != drawn(4, 5)
    assert sorted(change.line for change in drawn(3, 100)) == LINES


def test_tests_are_run_fastest_first_in_runs_that_fit_the_limit():
    times = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 9.0, "e": 50.0}
    change = mutate.changes("x = 1\n")[0]
    covered = mutate.Covered(times, {"f": {1: [0, 1, 2], 2: [2, 3, 4]}})
    names = covered.tests(mutate.Mutant("f", "x = 1\n", change))
    assert names == ["b", "c", "a", "d", "e"]
    groups = list(mutate.groups(names, times, mutate.Limits(20, 30)))
    assert groups == [["b", "c"], ["a"], ["d"]]


def test_the_tool_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(mutate, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install pytest-cov"):
        mutate.main([])
