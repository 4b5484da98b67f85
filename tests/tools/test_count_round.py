"""The counter of files and functions counts what it should."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import count_round

pytestmark = pytest.mark.slow

ONE = "from two import third\n\n\ndef first():\n    return [second() for _ in range(2)]\n\n\n"
ONE += "def second():\n    return third()\n\n\ndef never():\n    return 1\n"
TWO = "class Some:\n    def method(self):\n        return (lambda: 1)()\n\n\n"
TWO += "def third():\n    return Some().method()\n"


@pytest.fixture
def one(tmp_path, monkeypatch):
    (tmp_path / "one.py").write_text(ONE, encoding="utf-8")
    (tmp_path / "two.py").write_text(TWO, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    import one

    yield one
    del sys.modules["one"], sys.modules["two"]


def test_a_known_set_of_functions_is_counted(one, tmp_path):
    counter = count_round.Counter(tmp_path)
    counter.start()
    one.first()
    counter.stop()
    one.never()
    found = counter.functions()
    assert found == [
        ("one.py", "first"), ("one.py", "second"), ("two.py", "Some.method"), ("two.py", "third"),
    ]  # fmt: skip
    assert count_round.summary(found) == "2 files, 4 functions"


def test_one_round_is_counted():
    counter = count_round.Counter(Path(__file__).parent)
    watch = count_round.Watch(counter)
    for task in (0, 1):
        for number in range(4):
            rounds(task, number)
            watch(None, {"event": "round", "task": task, "round": number})
        watch(None, {"event": "task", "task": task})
    assert watch.done
    assert [name for _, name in counter.functions()] == ["rounds", "counted_round"]


def rounds(task, number):
    if (task, number) == (1, 2):
        counted_round()
    elif (task, number) != (0, 0):
        other_round()


def counted_round():
    return None


def other_round():
    return None


def test_a_round_of_the_library():
    command = [sys.executable, count_round.__file__, "--method", "fedavg", "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *functions, last = done.stdout.splitlines()
    assert any(line.startswith("training/") for line in functions)
    assert last.endswith(f"{len(functions)} functions")
