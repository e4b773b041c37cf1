"""How large a page of 50,000 tensors is, and how long a browser takes to show it.

    python benchmarks/page_size.py

Needs Chromium and `pip install -r requirements-page.txt`. Prints the table of docs/page.md; times are medians, in seconds.
"""

import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lockstep.page.payload import Page, View
from lockstep.page.writing import html
from lockstep.verdict.distance import distance_of
from lockstep.verdict.judgement import FINE, MOST, Judgement
from lockstep.verdict.picture import COARSE, SIDE, draw

TENSORS, STEPS, LAYERS, OPENED = 50_000, 2, 595, 5
MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "mlp")
LEAVES = tuple(f"{module}.{leaf}" for module in MODULES[:4] for leaf in ("weight", "bias"))
SIZES = ("error", "largest_error", "norm", "largest", "own_norm")
STEP = """() => {
    const began = performance.now();
    const other = document.querySelector('input[name="step"]:not(:checked)');
    other.click();
    document.body.offsetHeight;
    return (performance.now() - began) / 1000;
}"""
TIMES = """() => [performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000,
    performance.getEntriesByType('navigation')[0].domInteractive / 1000]"""


def large(*, wrong: bool) -> Page:
    """One run in two steps, with each module by itself. `wrong`: all tensors are too far, and have as many pictures as there may be."""
    kinds = {"forward": MODULES, "backward": MODULES}
    kinds |= dict.fromkeys(("gradient", "exp_avg", "exp_avg_sq", "parameter"), LEAVES)
    names = [
        f"{kind}/model.layers.{layer}.{one}"
        for kind, each in kinds.items()
        for layer in range(LAYERS)
        for one in each
    ]
    names += [f"forward/further.{number}.module" for number in range(TENSORS // STEPS - len(names))]
    reference = torch.rand(256, 256, generator=torch.Generator().manual_seed(0)).double()
    distance = distance_of(reference * (1 + 1e-7), reference)
    tolerated = distance.error / 10 if wrong else distance.error * 2
    pictures = [
        draw(reference * (1 + 1e-7), reference, tolerated, distance.largest_error, side)
        for side in (SIDE, COARSE)
    ]
    rows, drawn, chance = [], Counter[str](), random.Random(0)
    for name in names:
        times = chance.uniform(0.5, 0.9)
        own = replace(distance, **{size: times * chance.random() * getattr(distance, size) for size in SIZES})
        row = Judgement(1, name, own, tolerated * times, distance.largest_error * times)
        if wrong:
            row.tolerated = own.error * times / 10
        drawn[row.which_pass] += 1
        if wrong and drawn[row.which_pass] <= MOST:
            row.picture = pictures[drawn[row.which_pass] > FINE]
        rows.append(row)
    first = (1, names[0], rows[0].describe()) if wrong else None
    verdict = "FAIL" if wrong else "PASS"
    view = View("run", "a run", verdict, first=first)
    page = Page("verification", verdict, "50,000 tensors", "A page to measure.", [], [])
    alone = [row for row in rows if row.which_pass in ("forward", "backward", "gradient")]
    for step in range(1, STEPS + 1):
        page.add(view, step, rows, {})
        page.add(view, step, [replace(row, picture=None) for row in alone], {}, alone=True)
    return page


def measure(browser: Any, path: Path) -> list[float]:
    """[first paint, map complete, another step], medians."""
    found = []
    for _ in range(OPENED):
        tab = browser.new_page(viewport={"width": 1400, "height": 1000})
        tab.goto(path.as_uri())
        tab.wait_for_timeout(500)
        found.append([*tab.evaluate(TIMES), tab.evaluate(STEP)])
        tab.close()
    return [statistics.median(times) for times in zip(*found, strict=True)]


def main() -> None:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for wrong in (False, True):
            page, began = large(wrong=wrong), time.perf_counter()
            text = html(page)
            made, path = time.perf_counter() - began, Path(folder) / "report.html"
            path.write_text(text, encoding="utf-8")
            paint, complete, step = measure(browser, path)
            drawn = sum(len(table.pictures) for table in page.tables)
            print(
                f"| {page.verdict}, {drawn:,} pictures | {TENSORS:,} | {len(text.encode()) / 1e6:.3f} MB | {made:.1f} s | {paint:.2f} s | {complete:.1f} s | {step:.2f} s |"
            )
        browser.close()


if __name__ == "__main__":
    main()
