"""The web page in a real browser: an image is dropped, and its class is shown."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from PIL import Image
from served import DIGITS, VALUES, served

import perdure

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
pytest.importorskip("uvicorn")
websockets = pytest.importorskip("websockets")

LOADED = "document.readyState === 'complete' && document.getElementById('drop') !== null"
DROP = """(async () => {
  const problems = [];
  addEventListener("error", (event) => problems.push(event.message));
  const settled = async (id) => {
    for (let turn = 0; turn < 200 && document.getElementById(id).hidden; turn++)
      await new Promise((done) => setTimeout(done, 50));
    return !document.getElementById(id).hidden;
  };
  await settled("drop");
  const drop = (bytes, name) => {
    const data = new DataTransfer();
    data.items.add(new File([bytes], name));
    document.getElementById("drop").dispatchEvent(
      new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));
  };
  const text = (id) => document.getElementById(id).textContent;
  const bytes = Uint8Array.from(atob("%s"), (letter) => letter.charCodeAt(0));
  drop(bytes, "digit.png");
  const shown = await settled("result");
  const said = {shown, class: text("class"), probability: text("probability"), task: text("task"),
                resized: text("resized"), about: text("about"),
                wide: document.documentElement.scrollWidth > innerWidth};
  drop(new Uint8Array([1, 2, 3]), "broken.png");
  await settled("problem");
  return JSON.stringify({...said, problem: text("problem"), problems});
})()"""


async def evaluated(port: str, script: str) -> Any:
    """Return what a script in the first page of a browser gives."""
    with urlopen(f"http://127.0.0.1:{port}/json/list") as reply:
        pages = [page for page in json.load(reply) if page["type"] == "page"]
    async with websockets.connect(pages[0]["webSocketDebuggerUrl"], max_size=None) as socket:
        while await asked(socket, LOADED) is not True:
            await asyncio.sleep(0.1)
        return json.loads(await asked(socket, script))


async def asked(socket: Any, script: str) -> Any:
    options = {"expression": script, "awaitPromise": True, "returnByValue": True}
    await socket.send(json.dumps({"id": 1, "method": "Runtime.evaluate", "params": options}))
    while (answer := json.loads(await socket.recv())).get("id") != 1:
        pass
    return answer["result"]["result"].get("value")


def look(address: str, script: str, folder: Path) -> Any:
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}", "--remote-debugging-port=0", address,
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"DevTools listening on ws://127\.0\.0\.1:(\d+)/", line):
                return asyncio.run(evaluated(found[1], script))
        raise AssertionError("the browser did not start")
    finally:
        process.terminate()
        process.wait(30)
        process.stderr.close()


def test_a_dropped_image_is_classified(tmp_path: Path) -> None:
    perdure.run(VALUES, out=tmp_path / "run")
    large = np.kron(DIGITS[0], np.ones((4, 4), dtype=np.uint8))
    buffer = io.BytesIO()
    Image.fromarray(large).save(buffer, "png")
    with served(tmp_path / "run") as address:
        said = look(address, DROP % base64.b64encode(buffer.getvalue()).decode(), tmp_path)
    assert said["shown"], said
    assert said["problems"] == []
    assert not said["wide"]
    assert said["class"] in said["about"]
    assert re.fullmatch(r"\d+\.\d% ", said["probability"])
    assert re.fullmatch(r"[12] of 2 \(margin .*\)", said["task"])
    assert said["resized"] == "Resized from 32 x 32 pixels."
    assert "must be an image that can be read" in said["problem"]
