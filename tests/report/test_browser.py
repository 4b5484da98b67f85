"""The page in a real browser: no error, nothing wider than the window, both themes, keys.

The page runs in a frame of a chosen width (a headless window has a minimum width), and a probe
inside it reports what it measured.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
from made_runs import several

from perdure.report import page
from perdure.report.page import all_figures

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

WATCH = """<script>
window.problems = [];
addEventListener("error", (event) => problems.push(String(event.message)));
for (const name of ["error", "warn"]) console[name] = (...words) => problems.push(words.join(" "));
</script>"""
PROBE = """<script>
addEventListener("load", () => {
  const shown = (each) => each.getClientRects().length > 0;
  const tabs = [...document.querySelectorAll("#accuracy [role=tab]")];
  const press = (key) => {
    const event = new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true});
    document.activeElement.dispatchEvent(event);
    return document.activeElement.textContent;
  };
  const panels = () => [...document.querySelectorAll("#accuracy [role=tabpanel]")].filter(shown);
  const before = panels().map((panel) => panel.id);
  tabs[0].focus();
  const pressed = ["ArrowRight", "End", "ArrowRight", "ArrowLeft", "Home"].map(press);
  tabs[1].click();
  const after = panels().map((panel) => panel.id);
  const charts = [...document.querySelectorAll("#accuracy svg[role=img]")].filter(shown);
  const style = getComputedStyle(document.body);
  parent.postMessage({
    problems, before, after, pressed,
    width: document.documentElement.scrollWidth,
    window: innerWidth,
    figures: [...document.querySelectorAll("figure")].map((figure) => figure.id),
    charts: charts.map((chart) => chart.getBoundingClientRect().height),
    paper: style.backgroundColor,
    ink: style.color,
    line: getComputedStyle(document.querySelector(".line")).stroke,
    cell: getComputedStyle(document.querySelector("table.heat td")).backgroundColor,
  }, "*");
});
</script>"""
HOST = """<!doctype html><iframe width="%s" height="900" srcdoc="%s"></iframe>
<pre id="said"></pre><script>
onmessage = (event) => document.getElementById("said").append(JSON.stringify(event.data));
</script>"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page(several(tmp_path_factory.mktemp("runs")))


def look(text: str, folder: Path, width: int, *flags: str) -> dict[str, Any]:
    """Return what the probe reports on the page in a frame of this width."""
    probed = text.replace("<head>", f"<head>{WATCH}", 1).replace("</body>", f"{PROBE}</body>", 1)
    host = folder / "host.html"
    host.write_text(HOST % (width, escape(probed)), encoding="utf-8")
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000", *flags,
        "--dump-dom", host.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    found = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(unescape(found[1]))
    return said


def test_on_a_phone_in_light(text: str, tmp_path: Path) -> None:
    said = look(text, tmp_path, 390)
    assert said["problems"] == []
    assert said["width"] <= said["window"] == 390
    assert (said["paper"], said["line"]) == ("rgb(255, 255, 255)", "rgb(0, 114, 178)")
    assert said["charts"]
    assert min(said["charts"]) > 150


def test_on_a_desk_in_the_dark(text: str, tmp_path: Path) -> None:
    said = look(text, tmp_path, 1280, "--blink-settings=preferredColorScheme=0")
    assert said["problems"] == []
    assert said["width"] <= said["window"] == 1280
    assert (said["paper"], said["line"]) == ("rgb(20, 23, 28)", "rgb(86, 180, 233)")


def test_every_figure_is_there_and_tabs_follow_the_keys(
    text: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    said = look(text, tmp_path, 800)
    runs = several(tmp_path_factory.mktemp("again"))
    assert sorted(said["figures"]) == sorted(f"figure-{each.key}" for each in all_figures(runs))
    assert said["before"] == ["accuracy-task_agnostic"]
    assert said["pressed"] == ["Task-aware", "Routed", "Task-agnostic", "Routed", "Task-agnostic"]
    assert said["after"] == ["accuracy-task_aware"]
