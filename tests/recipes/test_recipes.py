"""Recipes: their headers, the commands in their comments, and those of the papers' size at work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from recipe_data import stand_in
from rich.console import Console

from claims.catalog import PAPERS
from perdure.cli import recipes as listing
from perdure.config import override, override_key, parse, read_yaml
from perdure.core.errors import UserError
from perdure.data.named.load import NamedData
from perdure.data.sources.arrays import DigitsData
from perdure.methods.registry import build
from perdure.recipes import Recipe, find_config, list_recipes, read_recipe, recipe_names
from perdure.runs.compare.plan import plan
from perdure.runs.compare.variants import MethodChoice, read_methods, read_seeds, read_sweep
from perdure.runs.run import run
from perdure.training.experiment import build_experiment

COMMAND = "# perdure run x\n"
HEADER = "# paper: FOT | table: Table 1 | size: paper | minutes: 70\n"
FOUND = list_recipes()
IMAGES = [recipe for recipe in FOUND if "kind: text" not in recipe.path.read_text()]
LARGE = [recipe for recipe in FOUND if recipe.size == "paper"]
LAST = {
    "FOT": {"Table": 14, "Figure": 9},
    "FedProTIP": {"Table": 20, "Figure": 7},
    "STAMP": {"Table": 8, "Figure": 26},
    "SPECIAL": {"Table": 15, "Figure": 4},
    "PIP": {"Table": 17, "Figure": 3},
}
"""The last table and figure of each paper (of SPECIAL: the last that is cited by number)."""
FIRST_ROUNDS = {
    "stream.tasks": 2,
    "clients.count": 3,
    "clients.per_round": 2,
    "train.rounds": 1,
    "train.max_steps": 1,
    "train.batch_size": 4,
    "engine.kind": "serial",
    "runs.report": False,
}


def _name(recipe: Recipe) -> str:
    return recipe.name


def _write(folder: Path, text: str) -> Path:
    path = folder / "x.yaml"
    path.write_text(text)
    return path


def test_the_command_and_the_header_are_read(tmp_path: Path) -> None:
    found = read_recipe(_write(tmp_path, f"{COMMAND}{HEADER}# more: words | here\nseed: 0\n"))
    assert found.command == "perdure run x"
    assert (found.paper, found.table, found.size) == ("FOT", "Table 1", "paper")
    assert found.minutes == 70


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "second line"),
        (COMMAND + "#\n", "second line"),
        (COMMAND + "# paper: FOT | size: small | minutes: 1", "second line"),
        (COMMAND + HEADER.replace("size: paper", "size: huge"), "must be small or paper"),
        (COMMAND + HEADER.replace("70", "long"), "must be a number, got 'long'"),
    ],
)
def test_a_header_that_cannot_be_read_is_named(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        read_recipe(_write(tmp_path, text))


def test_every_recipe_of_the_repository_has_a_header() -> None:
    assert {recipe.path for recipe in FOUND} == set(FOUND[0].path.parent.glob("*.yaml"))
    assert len(FOUND) > 30
    assert [recipe.size for recipe in FOUND] == sorted((r.size for r in FOUND), reverse=True)


def test_the_list_is_whole_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = StringIO()
    monkeypatch.setattr(
        listing, "stdout_console", lambda: Console(width=100, file=seen, markup=False)
    )
    listing.recipes()
    lines = seen.getvalue().splitlines()
    for recipe in FOUND:
        (start,) = (line for line in lines if line.split()[:1] == [recipe.name])
        assert f" {recipe.minutes:g} " in start
    assert "…" not in seen.getvalue()


@pytest.mark.parametrize("size", ["small", "paper"])
def test_every_paper_has_recipes_of_both_sizes(size: str) -> None:
    assert {r.paper for r in FOUND if r.size == size} >= set(PAPERS)


@pytest.mark.parametrize("recipe", FOUND, ids=_name)
def test_the_tables_that_a_recipe_names_are_there(recipe: Recipe) -> None:
    assert recipe.paper in (*PAPERS, "-")
    assert (recipe.paper == "-") == (recipe.table == "-")
    cited = recipe.table.split(", ") if recipe.table != "-" else []
    for name in cited:
        found = re.fullmatch(r"(Table|Figure) (A?)([1-9]\d*)", name)
        assert found, f"{name!r} is not of the form Table 3 or Figure 3"
        kind, appendix, number = found[1], found[2], int(found[3])
        assert number <= LAST[recipe.paper][kind]
        # PIP alone numbers the tables of its supplement A8, A9, ...
        assert bool(appendix) == (recipe.paper == "PIP" and kind == "Table" and number > 7)
    assert len(cited) == len(set(cited))


@pytest.mark.parametrize("paper", PAPERS)
def test_what_has_a_paper_sized_recipe_has_a_small_one(paper: str) -> None:
    small, large = (
        {table for r in FOUND if (r.paper, r.size) == (paper, size) for table in _tables(r)}
        for size in ("small", "paper")
    )
    without = {"Table A9", "Table A10", "Table A11", "Table A12", "Table A13", "Table A15"}
    without |= {"Table A17"}  # Figures 2 and 3 of PIP in numbers, on data sets of the paper's
    without |= {"Figure 8"} if paper == "FOT" else set()  # Table 13 as a figure
    without |= {"Figure 24"} if paper == "STAMP" else set()  # Figure 22 with 100 clients
    assert large - small <= without


def _tables(recipe: Recipe) -> list[str]:
    return recipe.table.split(", ")


def test_the_page_names_the_recipes_of_the_papers_and_no_others() -> None:
    page = Path(__file__).parents[2] / "docs" / "recipes.md"
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    named = set(re.findall(r"`([\w-]+)`", " ".join(rows)))
    assert named == {_name(recipe) for recipe in FOUND if recipe.paper != "-"}


@pytest.mark.parametrize("recipe", FOUND, ids=_name)
def test_a_recipe_says_where_its_data_comes_from(recipe: Recipe) -> None:
    config = parse(read_yaml(recipe.path))
    sources = getattr(config.stream, "domains", None) or [config.data]
    assert all(isinstance(source, NamedData | DigitsData) for source in sources)
    text = recipe.path.read_text(encoding="utf-8")
    assert ("(perdure data list)" in text) == isinstance(sources[0], NamedData)


@pytest.mark.parametrize("recipe", FOUND, ids=_name)
def test_the_comments_name_recipes_that_are_there(recipe: Recipe) -> None:
    text = recipe.path.read_text(encoding="utf-8").replace("\n#", "")
    names = re.findall(r"perdure (?:run|compare) (\S+)", text)
    names += re.findall(r"\b[a-z0-9-]+-paper\b", text)
    for listed in re.findall(r"(?:Small|At the paper's size): ([\w, -]+)", text):
        names += re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)+", listed)
    assert recipe.name in names
    assert set(names) <= set(recipe_names())


@pytest.mark.parametrize("spelling", [str, Path])
def test_a_recipe_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: type
) -> None:
    monkeypatch.chdir(tmp_path)
    (bundled,) = (recipe.path for recipe in FOUND if recipe.name == "split-digits")
    assert find_config(spelling("split-digits")) == bundled
    Path("split-digits").mkdir()
    assert find_config(spelling("split-digits")) == bundled
    Path("split-digits").rmdir()
    Path("split-digits").write_text("seed: 1\n")
    assert find_config(spelling("split-digits")) == Path("split-digits")


def test_a_library_call_takes_the_name_of_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"split-digit: no such config file or recipe \(did you"):
        run("split-digit")
    monkeypatch.setattr("perdure.recipes.RECIPES_DIR", tmp_path)
    Path("tiny.yaml").write_text("{stream: {tasks: 1}, train: {rounds: 1}, data: {limit: 60}}\n")
    assert run("tiny").values["rounds"] == 1


@pytest.mark.parametrize("recipe", FOUND, ids=_name)
def test_the_settings_in_the_comments_are_good(recipe: Recipe) -> None:
    values = read_yaml(recipe.path)
    build(parse(values).method)
    for words in _commands(recipe.path):
        settings = [word for option, word in words if option == "--set"]
        chosen = override(values, settings)
        methods = [read_methods(word) for option, word in words if option == "--methods"]
        seeds = [read_seeds(word) for option, word in words if option == "--seeds"]
        sweeps = [read_sweep(word) for option, word in words if option == "--sweep"]
        own = parse(chosen).method
        usual = (MethodChoice(own["kind"]),)
        planned = plan(chosen, (methods or [usual])[0], (seeds or [(0,)])[0], sweeps)
        assert planned
        for each in (own, *(one.config.method for one in planned)):
            build(each)


def _commands(path: Path) -> Iterator[list[tuple[str, str]]]:
    """The options of each command in a recipe's comments, with their words."""
    text = path.read_text(encoding="utf-8").replace("\\\n#", " ")
    for line in text.splitlines():
        start = re.search(r"--(set|sweep|methods) ", line)
        if line.startswith("#") and start and "$" not in line:
            words = shlex.split(line[start.start() :].replace("`", ""))
            yield [pair for pair in pairwise(words) if pair[0][:2] == "--"]


def test_a_setting_in_a_comment_can_be_bad(tmp_path: Path) -> None:
    comment = "# Table 2: --set method.threshold=2\n"
    path = _write(tmp_path, f"{COMMAND}{HEADER}{comment}method: {{kind: fot}}\n")
    with pytest.raises(UserError, match=r"method\.threshold"):
        test_the_settings_in_the_comments_are_good(read_recipe(path))


@pytest.mark.parametrize("recipe", IMAGES, ids=_name)
def test_a_recipe_is_good_on_data_of_its_names(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = _on_stand_ins(recipe, tmp_path, monkeypatch)
    built = build_experiment(parse(values))
    assert built.initial_state().server.params
    assert built.task_count == values["stream"].get("tasks", built.task_count)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", LARGE, ids=_name)
def test_a_recipe_of_the_papers_size_makes_a_round_of_two_tasks(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = _on_stand_ins(recipe, tmp_path, monkeypatch)
    assert run(parse(_cut(values))).values["rounds"] == 2


def _on_stand_ins(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The values of a recipe, in a folder where its data seem to be."""
    values = _without_weights(read_yaml(recipe.path))
    if "." in values["model"]["kind"]:
        pytest.importorskip(values["model"]["kind"].partition(".")[0])
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PERDURE_DATA", str(folder))
    config = parse(values)
    for source in (config.data, *(getattr(config.stream, "domains", None) or [])):
        if isinstance(source, NamedData):
            stand_in(source.source, source.size)
    return values


def _without_weights(values: dict[str, Any]) -> dict[str, Any]:
    """A random start, or for a transformer the small one that is at hand."""
    init = "builtin" if values["model"]["kind"] == "vit" else "null"
    return override(values, [f"model.init={init}"])


def _cut(values: dict[str, Any]) -> dict[str, Any]:
    """One round of each of two tasks, of a narrow net, on few images."""
    settings = dict(FIRST_ROUNDS)
    domains = [{**each, "limit": 60} for each in values["stream"].get("domains") or []]
    if domains:
        values = override_key(values, "stream.domains", domains)
    if values["model"]["kind"] not in ("vit", "mlp"):
        settings["model.width"] = 4
    if values["data"].get("size", 0) > 32:
        settings["data.size"] = 16
    if values["method"]["kind"] == "fot":
        settings["method.sketch_ratio"] = 0.01
    if values["data"].get("source", "digits") != "digits":
        settings |= {"data.limit": 400, "data.test_limit": 40}
    return override(values, [f"{key}={value}" for key, value in settings.items()])
