"""The documentation is true: links lead somewhere, and pages made from code are up to date."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import yaml

import perdure
from perdure.methods.registry import KINDS, find, hyperparameters

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TOOLS = ROOT / "tools"


@pytest.mark.parametrize("page", ["config.md", "metrics.md", "combinations.md"])
def test_pages_made_from_the_code_are_up_to_date(page: str) -> None:
    tool = runpy.run_path(str(TOOLS / "reference.py"))
    expected = tool["PAGES"][page]()
    assert (DOCS / page).read_text(encoding="utf-8") == expected, "run: make docs"


def test_the_page_of_methods_is_up_to_date() -> None:
    tool = runpy.run_path(str(TOOLS / "methods_page.py"))
    assert (DOCS / "methods.md").read_text(encoding="utf-8") == tool["page"](), "run: make docs"


def test_every_method_is_in_one_family_and_has_words() -> None:
    tool = runpy.run_path(str(TOOLS / "methods_page.py"))
    kinds = [kind for family in tool["FAMILIES"] for kind in tool["kinds_of"](family)]
    assert sorted(kinds) == sorted(KINDS)
    assert set(tool["NOTES"]) <= set(KINDS)
    for kind in KINDS:
        method = find(kind)
        assert all((method.title, method.paper)), kind
        assert method.idea.endswith("."), kind


def test_the_table_of_the_readme_is_up_to_date() -> None:
    tool = runpy.run_path(str(TOOLS / "methods_page.py"))
    table = "\n".join(["<!-- methods -->", "", *tool["readme_rows"](), "", "<!-- /methods -->"])
    assert table in (DOCS.parent / "README.md").read_text(encoding="utf-8"), "run: make docs"


@pytest.mark.parametrize("kind", KINDS)
def test_every_hyperparameter_has_a_meaning(kind: str) -> None:
    tool = runpy.run_path(str(TOOLS / "methods_page.py"))
    assert set(hyperparameters(kind)) <= set(tool["hyperparameter_docs"](find(kind)))


def test_every_public_name_is_in_the_api_reference() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^::: perdure\.(?:\w+\.)*(\w+)$", text, re.MULTILINE))
    assert set(perdure.__all__) - documented == {"__version__"}


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = set(re.findall(r"(\S+\.md)$", text, re.MULTILINE))
    assert {path.name for path in DOCS.glob("*.md")} <= pages


def test_every_recorded_field_of_an_upload_is_in_the_table_of_what_uploads_reveal() -> None:
    recorded = min((ROOT / "tests" / "golden" / "results").glob("*.json")).read_text("utf-8")
    sent = {name.split(".")[-1] for name in re.findall(r'"up/([\w.]+)"', recorded)}
    text = (DOCS / "privacy.md").read_text(encoding="utf-8").partition("# What each upload")[2]
    fields = [row.split("|")[1] for row in text.splitlines() if row.startswith("| ")]
    assert len(sent) > 10
    assert not sent - set(re.findall(r"`(\w+)`", " ".join(fields)))


def test_a_links_target_on_the_site() -> None:
    adapt = runpy.run_path(str(TOOLS / "site_hooks.py"))["with_site_links"]
    assert adapt("[a](docs/data.md#npz), [b](LICENSE)", "") == "[a](data.md#npz), b"
    assert adapt("[a](data.md), [b](../CHANGELOG.md)", "docs") == "[a](data.md), [b](changelog.md)"
    assert adapt("[a](../src/perdure), ![p](report.png)", "docs") == "a, ![p](report.png)"
    code = "```python\nx[0](../y)\n```\n`[a](../b)`"
    assert adapt(code, "docs") == code


def test_a_broken_link_of_the_site_and_a_script_from_a_network_are_found(tmp_path: Path) -> None:
    check = runpy.run_path(str(TOOLS / "check_site.py"))["main"]
    page = tmp_path / "index.html"
    page.write_text('<p id="a"><a href="index.html#a">x</a> <a href="https://x.org/">y</a>')
    assert check(tmp_path) == 0
    for bad in ('<a href="b.html">', '<a href="#b">', '<script src="https://x.org/a.js">'):
        page.write_text(bad)
        assert check(tmp_path) == 1, bad


def test_a_table_between_comments_is_replaced() -> None:
    replace = runpy.run_path(str(TOOLS / "readme_table.py"))["with_table"]
    new = replace("a\n<!-- t -->\nold\n<!-- /t -->\nb", "t", ["| new |"])
    assert new == "a\n<!-- t -->\n\n| new |\n\n<!-- /t -->\nb"
    with pytest.raises(SystemExit, match="needs one"):
        replace("no table", "t", [])


def test_versions_agree() -> None:
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f'\nversion = "{perdure.__version__}"\n' in metadata
    assert citation["version"] == perdure.__version__
    assert re.search(r"^## \[?([\d.]+)", changelog, re.MULTILINE)[1] == perdure.__version__


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
    + [f"docs/{path.name}" for path in sorted(DOCS.glob("*.md"))],
)
def test_links_to_files_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target
