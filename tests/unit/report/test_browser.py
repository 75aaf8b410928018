"""The page in a real browser: nothing sticks out on a phone, and nothing is fetched from elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from robustdist.report import ClassScore, CurvePoint, Examples, SavedScore, Step, write_report

from .conftest import NASTY, make_result

# A page of its own cannot be narrower than the browser's smallest window, a frame can.
_FRAME = """<!DOCTYPE html><body style="margin:0"><iframe src="page.html" style="border:0;width:{width}px;height:900px">
</iframe><pre id="found"></pre><script>
addEventListener("message", event => {{ document.getElementById("found").textContent = event.data; }});
</script></body>"""
_PROBE = """<script>addEventListener("load", () => {
const root = document.documentElement, wide = [];
for (const element of document.querySelectorAll("body *")) {
  let parent = element.parentElement, scrolls = false;
  while (parent) { if (getComputedStyle(parent).overflowX === "auto") scrolls = true; parent = parent.parentElement; }
  const right = element.getBoundingClientRect().right;
  if (!scrolls && right > root.clientWidth + 0.5) wide.push(element.outerHTML.slice(0, 80));
}
parent.postMessage(JSON.stringify({width: root.clientWidth, needs: root.scrollWidth, wide: wide,
  fetched: performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !name.startsWith("data:")),
  pictures: [...document.images].map(image => image.naturalWidth),
  dark: getComputedStyle(document.body).backgroundColor}), "*");
});</script>"""


@pytest.fixture(scope="module")
def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (path := shutil.which(name)) is not None:
            return path
    pytest.skip("no Chromium on this machine: the page is not looked at in a browser")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """A report with everything that a report can have, and long names."""
    curve = [CurvePoint(value, 200 - 30 * place, 200) for place, value in enumerate((0.5, 1.0, 2.0, 5.0))]
    result = make_result(
        classes=[ClassScore(label, 20, 18, 9) for label in range(10)],
        waterfall=[Step("clean", 190), Step("autoattack: apgd-ce", 120), Step(NASTY, 119)],
        curves={"eps": curve, "steps": curve, "restarts": curve},
        precision="float32",
        model_hash="0123456789abcdef" * 2,
        saved=SavedScore("examples.safetensors", 200, 119, 118),
    )
    x = torch.rand(6, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    examples = Examples(x, (x + 0.03).clamp(0, 1), [0] * 6, [0] * 6, [1] * 6)
    folder = tmp_path_factory.mktemp("report")
    history = [{"epoch": epoch, "clean_acc": 0.9, "acc": 0.5} for epoch in range(4)]
    about = {"model": "AClassifierWithAVeryLongName", "checkpoint": "a/very/long/path/" * 5 + "epoch=12-step=4711.ckpt"}
    write_report(
        folder,
        result,
        history=history,
        examples=examples,
        comparison={"ordinary training": result, "adversarial training": result},
        about=about,
        title="Robust evaluation of AClassifierWithAVeryLongName",
    )
    return folder / "report.html"


def looked_at(chromium: str, page: Path, folder: Path, width: int, *options: str) -> dict:
    source = page.read_text("utf-8")
    (folder / "page.html").write_text(source.replace("</body>", f"{_PROBE}</body>"), "utf-8")
    (folder / "frame.html").write_text(_FRAME.format(width=width))
    command = [
        *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"),
        *("--virtual-time-budget=10000", f"--user-data-dir={folder / 'profile'}", f"--window-size={width + 100},1000"),
        *options,
        *("--dump-dom", (folder / "frame.html").as_uri()),
    ]
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    text = found.group(1).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    return json.loads(text)


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_sticks_out(chromium, page, tmp_path, width):
    found = looked_at(chromium, page, tmp_path, width)
    assert found["width"] <= width
    assert found["needs"] <= found["width"]
    assert found["wide"] == []
    assert len(found["pictures"]) == 7
    assert all(size > 300 for size in found["pictures"])


@pytest.mark.slow
def test_nothing_is_fetched_and_the_dark_is_dark(chromium, page, tmp_path):
    light = looked_at(chromium, page, tmp_path, 390)
    dark = looked_at(chromium, page, tmp_path, 390, "--blink-settings=preferredColorScheme=0")
    assert light["fetched"] == dark["fetched"] == []
    assert light["dark"] == "rgb(255, 255, 255)"
    assert max(map(int, re.findall(r"\d+", dark["dark"]))) < 60
