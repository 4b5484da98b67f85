"""Import paths and names of perdure 0.1 lead to the new ones, with a warning."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.core import moved


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which old modules were imported and which warnings were given."""
    for old in moved.MODULES:
        monkeypatch.delitem(sys.modules, f"perdure.{old}", raising=False)
    moved._warn.cache_clear()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("old", moved.MODULES)
def test_an_old_module_offers_everything_of_the_new_one(old: str) -> None:
    new = importlib.import_module(f"perdure.{moved.MODULES[old]}")
    with pytest.warns(DeprecationWarning, match=f"perdure.{old} is now {new.__name__};"):
        module = importlib.import_module(f"perdure.{old}")
    names = [name for name in vars(new) if not name.startswith("__")]
    assert all(getattr(module, name) is getattr(new, name) for name in names)


NAMES = [(module, old, new) for module, names in moved.NAMES.items() for old, new in names.items()]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("module", "old", "new"), NAMES)
def test_an_old_name_is_the_renamed_object(module: str, old: str, new: str) -> None:
    path = new if "." in new else f"{module}.{new}"
    home, _, name = f"perdure.{path}".rpartition(".")
    renamed = getattr(importlib.import_module(home), name)
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is now perdure.{path};"):
        assert getattr(importlib.import_module(f"perdure.{module}"), old) is renamed


@pytest.mark.usefixtures("fresh")
def test_an_old_name_is_found_at_the_old_path() -> None:
    from perdure.core.rng import Rng

    with pytest.warns(DeprecationWarning, match="perdure.rng is now"):
        old = importlib.import_module("perdure.rng")
    with pytest.warns(DeprecationWarning, match="perdure.core.rng.Draws is now"):
        assert getattr(old, "Draws") is Rng  # noqa: B009


@pytest.mark.usefixtures("fresh")
def test_a_warning_is_given_once_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    models = importlib.import_module("perdure.models")
    with pytest.warns(DeprecationWarning, match="Pass is now") as warned:
        assert getattr(models, "Pass") is getattr(models, "Pass")  # noqa: B009
    assert len(warned) == 1
    assert len(caplog.messages) == 1
    assert "perdure.models.Pass is now perdure.models.ForwardPass" in caplog.messages[0]


@pytest.mark.usefixtures("fresh")
def test_a_star_import_of_an_old_module_gets_its_public_names() -> None:
    names: dict[str, object] = {}
    with pytest.warns(DeprecationWarning, match="perdure.trees is now perdure.core.trees;"):
        exec("from perdure.trees import *", names)
    assert {"Tensors", "add", "subtract"} <= set(names)


def test_unknown_names_are_still_refused() -> None:
    with pytest.raises(AttributeError, match=r"'perdure.models' has no attribute 'Nothing'"):
        _ = importlib.import_module("perdure.models").Nothing
    with pytest.raises(ModuleNotFoundError, match=r"perdure\.nothing"):
        importlib.import_module("perdure.nothing")


def test_the_old_base_class_is_refused_with_its_new_path() -> None:
    with pytest.raises(ImportError, match=r"perdure\.methods\.base is gone"):
        importlib.import_module("perdure.methods.base")


def test_the_warning_names_the_file_that_imports(tmp_path: Path) -> None:
    script = tmp_path / "my_method.py"
    script.write_text("from perdure.trees import add\nfrom perdure.models import Pass\n")
    command = [sys.executable, "-W", "always::DeprecationWarning", str(script)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert "my_method.py:1: DeprecationWarning: perdure.trees is now perdure.core.trees" in output
    assert "my_method.py:2: DeprecationWarning: perdure.models.Pass is now" in output
