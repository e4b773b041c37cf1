"""The page in headless Chromium: no error, no request, the first failure is open, the keyboard reaches everything, axe-core finds nothing.

Needs `pip install -r requirements-page.txt` and Chromium, such as Debian's; else these tests are skipped.
"""

import itertools
import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from page_cases import (
    HEADED,
    HEADLESS,
    HIDDEN,
    HOSTILE,
    WRONG,
    comparison,
    copies,
    fed,
    hidden,
    names,
    positions,
    recording,
    row,
    study,
    uncounted,
)
from page_size import large

from lockstep.page.payload import Page
from lockstep.page.writing import html, write_listing

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = [name for name in ("playwright", "axe_playwright_python") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(
        bool(MISSING), reason=f"{', '.join(MISSING)} missing: pip install -r requirements-page.txt"
    ),
    pytest.mark.skipif(BROWSER is None, reason="no Chromium found: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def files(new_folder):
    """NAME -> report.html."""
    folder = new_folder("pages")
    pages = {
        "fail": comparison("FAIL"),
        "pass": comparison("PASS"),
        "hidden": hidden(),
        "recording": recording(),
        "fed": fed(),
        "positions": positions(),
        "copies": copies(),
        "uncounted": uncounted(),
        "study": study(),
        "large": large(wrong=True),
        "empty": Page(
            "recording", "FAIL", "a run", "the gradient is not finite", [], [("versions", "torch")]
        ),
    }
    for name, page in pages.items():
        (folder / f"{name}.html").write_text(html(page), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in pages}


BY_A_FACTOR = "off by a factor: 300 times what one may be off by"
FROM_BATCH = 'input[name="alone"][value="false"]'
LISTING = [
    (["b_fault", "DDP", "step 10", "1.5e-07 of 3e-06"], "b/report.html"),
    (["a_fault", "FSDP", "step 9", "2e-08 of 3e-06"], ""),
    ([HOSTILE, "FSDP", "", ""], ""),
]


class Opened:
    """A page in a tab, and what it said and asked for."""

    def __init__(self, browser, path, *, width=1200, scheme="light", ready="#choices > *, .uplot", run=""):
        self.tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.said, self.asked, self.refused = [], [], []
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.on("requestfailed", lambda request: self.refused.append(request.url))
        self.tab.goto(path.as_uri() + (f"#{run}" if run else ""))
        self.tab.wait_for_selector(ready)

    def text(self, selector):
        return self.tab.inner_text(selector)


@pytest.fixture
def opened(browser, files):
    tabs = []

    def of(name, **settings):
        tabs.append(Opened(browser, files[name] if isinstance(name, str) else name, **settings))
        return tabs[-1]

    yield of
    for one in tabs:
        one.tab.close()


@pytest.mark.parametrize(
    "name",
    [
        "fail",
        "pass",
        "hidden",
        "recording",
        "fed",
        "positions",
        "copies",
        "uncounted",
        "study",
        "large",
        "empty",
    ],
)
def test_no_error_and_no_request(opened, files, name):
    page = opened(name)
    assert (page.said, page.asked) == ([], [files[name].as_uri()])


def test_an_error_and_a_request_would_be_seen(opened, files, tmp_path):
    """Negative control; and both are refused, a script that is not the page's own and what it asks for."""
    text = (
        files["fail"]
        .read_text()
        .replace(
            "<main>",
            '<main><script>fetch("https://example.org")</script><img src="https://example.org/a.png">',
        )
    )
    (tmp_path / "report.html").write_text(text)
    page = opened(tmp_path / "report.html")
    assert any("Content Security Policy" in said for said in page.said)
    assert page.asked[1:] == ["https://example.org/a.png"] == page.refused


def test_the_first_failure_is_open(opened):
    page = opened("fail")
    assert page.text("h1").startswith("FAIL")
    first = "gradient/model.layers.1.mlp.down_proj.weight"
    assert page.text(".finding .tensor") == first and page.text("#tensor h3") == first
    said = page.text(".finding")
    assert "elements are too far off: rows 4 to 7 of 8, counted from 0." in said
    where = "Ranks\nthe shard of ranks 1, 3 (tp 1) alone, with 100 % of the squared error"
    assert f"{where}; the copy of rank 3 (dp 1, tp 1) differs in 6 elements, and was not compared" in said
    assert page.text(".rank.differs").startswith("rank 3")
    assert "too far" in page.tab.get_attribute(".cell.open", "aria-label")


def test_a_pass_says_how_near_it_came(opened):
    page = opened("pass")
    assert page.text("h1").startswith("PASS") and "of what is tolerated" in page.text(".lead")
    assert page.tab.query_selector(".finding") is None and page.tab.query_selector(".far[data-name]") is None


def test_a_tensor_opens_and_steps_and_runs_are_switched(opened):
    page = opened("fail")
    page.tab.check(FROM_BATCH)
    page.tab.click('.cell[aria-label^="forward/model.layers.0.mlp,"]')
    assert page.text("#tensor h3") == "forward/model.layers.0.mlp"
    assert "step 1" in page.text("#tensor")
    page.tab.check('input[name="step"][value="2"]')
    assert "step 2" in page.text("#tensor")
    page.tab.check('input[name="view"][value="0"]')
    assert "DDP" in page.text("#tensor") and page.tab.query_selector(".far[data-name]") is None


def test_crosses_and_counts_follow_what_is_chosen(opened):
    """A step's cross is of the chosen run and way to compute, a way's of the run. Negative control: a run that is right has none."""
    page = opened("hidden")

    def crosses():
        marked = page.tab.locator("#choices input:has(+ span.bad)").all()
        return [f"{one.get_attribute('name')} {one.get_attribute('value')}" for one in marked]

    assert crosses() == ["view 1", "alone true", "step 1"]
    assert page.text("#way").startswith("FSDP, step 1, each module by itself: 1 of 2 tensors is too far.")
    page.tab.check('input[name="step"][value="2"]')
    assert page.text("#way").startswith("FSDP, step 2, each module by itself: 0 of 2 tensors")
    page.tab.check(FROM_BATCH)
    assert crosses() == ["view 1", "alone true"]
    page.tab.check('input[name="view"][value="0"]')
    assert crosses() == ["view 1"] and page.text("#way").startswith("DDP, step 2, from the batch: 0 of 60")


def test_counts_have_their_keys(opened):
    """Of each run and each way to compute; and the page opens on the way that the headline speaks of."""
    lines = opened("hidden").tab.locator(".verdicts tbody tr").all_inner_texts()
    assert [line.split("\t")[-2] for line in lines] == [
        "0 of 4 tensors",
        "0 of 120 tensors",
        "1 of 4 tensors",
        "0 of 120 tensors",
    ]
    assert "too far in steps 1, 2 together" in opened("hidden").text(".verdicts thead")
    assert (
        opened("recording").text(".verdicts tbody tr:last-child td").startswith("1 of 49 tensors and losses")
    )


def test_a_map_has_lines_and_columns_of_the_forward_pass(opened):
    """In all of its grids; what is of no layer is in a column of its own."""
    page = opened("fail")
    page.tab.check(FROM_BATCH)
    found = page.tab.evaluate("""() => Object.fromEntries([...document.querySelectorAll('#map .grid')].map((grid) => [grid.ariaLabel, {
        columns: [...grid.querySelectorAll('.column')].map((one) => one.textContent),
        lines: [...grid.querySelectorAll('.line:not(.head):not(.empty)')].map((line) => line.firstChild.textContent),
        outside: [...grid.querySelectorAll('.line:not(.head)')].filter((line) => !/layers/.test(line.firstChild.textContent))
            .flatMap((line) => [...line.querySelectorAll('.cell:not(.none)')].map((cell) => [...line.children].indexOf(cell))),
    }]))""")
    layers = ["layers.0", "layers.1"]
    for kind, lines in {
        "Outputs": ["batch: input_ids", "embed_tokens", *layers, "norm", "lm_head"],
        "Gradients at outputs": ["embed_tokens", *layers, "norm", "lm_head"],
        "Gradients of weights": ["embed_tokens", *layers, "norm", "lm_head"],
    }.items():
        assert [line for line in found[kind]["lines"] if "script" not in line] == lines
        assert found[kind]["columns"][:3] == ["itself", "self_attn.q_proj", "self_attn.o_proj"]
        assert set(found[kind]["outside"]) == {1}


@pytest.mark.parametrize("width", [1200, 400])
def test_a_click_on_the_map_moves_nothing(opened, width):
    """Nor does the pointer, however long the name is that it reads. On a narrow screen, a button leads to the tensor below."""
    page = opened("fail", width=width)
    page.tab.check(FROM_BATCH)
    cells = [
        f'.cell[aria-label^="{name},"]' for name in (HEADED, "forward/model.norm", "gradient/lm_head.weight")
    ]
    page.tab.locator(cells[0]).scroll_into_view_if_needed()

    def places():
        return page.tab.evaluate(
            "(cells) => [scrollY, ...cells.map((one) => Math.round(document.querySelector(one).getBoundingClientRect().top))]",
            cells,
        )

    before = places()
    for cell in cells:
        page.tab.evaluate(
            "(one) => { for (const kind of ['mouseover', 'click']) document.querySelector(one).dispatchEvent(new MouseEvent(kind, { bubbles: true })); }",
            cell,
        )
        assert places() == before
    assert page.text("#tensor h3") == "gradient/lm_head.weight"
    assert page.tab.locator("#reading button").count() == (width == 400)
    if width == 400:
        button, box = (page.tab.locator(one).bounding_box() for one in ("#reading button", "#reading"))
        assert box["y"] <= button["y"] and button["y"] + button["height"] <= box["y"] + box["height"]
        page.tab.click("#reading button")
        assert 0 <= page.tab.locator("#tensor-name").bounding_box()["y"] < 450


def test_the_open_tensor_and_its_cell_are_in_view_together(opened):
    """After a click on a low cell, and after the finding's button."""
    page = opened("fail")

    def seen(selector):
        return page.tab.evaluate(
            "(one) => { const box = one.getBoundingClientRect(); return box.bottom > 0 && box.top < innerHeight; }",
            page.tab.query_selector(selector),
        )

    page.tab.check(FROM_BATCH)
    page.tab.set_viewport_size({"width": 1200, "height": 400})
    page.tab.click('.cell[aria-label^="parameter/lm_head.weight,"]')
    assert page.text("#tensor h3") == "parameter/lm_head.weight" and seen("#tensor h3")
    page.tab.click(".finding button")
    assert seen(".cell.open") and seen("#tensor h3")


def test_the_finding_leads_to_its_tensor(opened):
    """From any run, step and tensor, on a narrow screen, where it is far below."""
    page = opened("fail", width=400)
    page.tab.check(FROM_BATCH)
    page.tab.check('input[name="view"][value="0"]')
    page.tab.check('input[name="step"][value="2"]')
    page.tab.click('.cell[aria-label^="forward/model.norm,"]')
    page.tab.click(".finding button")
    assert page.text("#tensor h3") == "gradient/model.layers.1.mlp.down_proj.weight"
    assert "step 1, FSDP, each module by itself: too far" in page.text("#tensor")
    assert page.tab.is_checked('input[name="view"][value="1"]') and page.tab.is_checked(
        'input[name="step"][value="1"]'
    )
    assert 0 <= page.tab.evaluate("document.getElementById('tensor').getBoundingClientRect().top") < 450
    page.tab.click(".to-cell")
    assert 0 <= page.tab.evaluate("document.querySelector('.cell.open').getBoundingClientRect().top") < 900


def test_each_module_by_itself(opened):
    """What is wrong by itself has a map of its own, which is open first."""
    page = opened("fail")

    def wrong():
        return page.tab.eval_on_selector_all(".far[data-name]", "all => all.map((one) => one.ariaLabel)")

    page.tab.check(FROM_BATCH)
    assert len(wrong()) > 2 and "By itself, relative error" in page.text("#tensor")
    page.tab.check('input[name="alone"][value="true"]')
    assert [label.split(",")[0] for label in sorted(wrong())] == sorted(
        (HIDDEN, "gradient/model.layers.1.mlp.down_proj.weight")
    )
    page.tab.click(f'.cell[aria-label^="{HIDDEN},"]')
    assert "By itself, rows 4 to 7 of 8 are 1.003 times what they should be" in page.text("#tensor")
    assert "The factor is in rows 4 to 7 of 8." in page.text("#tensor")
    assert "the shard of ranks 1, 3 (tp 1) alone." in page.text("#on-ranks")
    page.tab.check('input[name="view"][value="0"]')
    assert not wrong() and "by itself, 0." in page.text("#reading"), page.text("#reading")
    assert not page.said


def test_what_only_a_module_by_itself_shows_is_open(opened):
    page = opened("hidden")
    assert page.tab.is_checked('input[name="alone"][value="true"]')
    assert page.text("#tensor h3") == HIDDEN
    assert BY_A_FACTOR in page.text("#tensor") and "300 times what is tolerated" not in page.text("body")
    assert (
        "Ranks\nthe shard of ranks 1, 3 (tp 1) alone\n"
        "Where\nThe factor is in rows 4 to 7 of 8. No element is too far off alone; only together do they show the factor."
    ) in page.text(".finding")
    assert ", of a factor" in page.text(".verdicts tbody tr:nth-child(3)")
    text = issue_of(page)
    assert "The factor is in rows 4 to 7" in text and "undefined" not in text
    page.tab.keyboard.press("Escape")
    page.tab.check('input[name="alone"][value="false"]')
    assert page.tab.query_selector(".far[data-name]") is None


def test_both_ways_to_judge_a_recording(opened):
    page = opened("recording")

    def shown():
        return page.tab.locator(".cell:not(.none)[data-name]").count()

    alone = shown()
    page.tab.check('input[name="view"][value="1"]')
    assert shown() > alone > 0


def test_a_factor_that_a_distance_hides(opened):
    page = opened("recording")
    page.tab.click(f'.cell[aria-label^="{HIDDEN},"]')
    shown = page.text("#tensor")
    assert "all of it is 1.003 times what it should be" in shown and BY_A_FACTOR in shown, shown
    page.tab.check('input[name="view"][value="1"]')
    assert "1.003 times" not in page.text("#tensor")


def test_the_heads_that_the_error_is_in(opened):
    """And, as negative controls, a weight whose columns are not the heads' number of elements, and one of no attention."""
    page = opened("fail")
    page.tab.check(FROM_BATCH)
    shown = {}
    for name in (HEADED, HEADLESS, HEADED.replace("self_attn.q_proj", "mlp.down_proj")):
        page.tab.click(f'.cell[aria-label^="{name},"]')
        shown[name] = page.text("#tensor")
    assert "heads 2 to 3 of 4 (rows 4 to 7 of 8)" in shown[HEADED]
    assert "4 heads of 2 rows, divided by dotted lines" in shown[HEADED]
    assert "rows 4 to 7 of 8" in shown[HEADLESS]
    assert all("head" not in said for name, said in shown.items() if name != HEADED)


@pytest.mark.parametrize(
    "name, shape, runs, said",
    [
        # 4 heads of 16: queries are columns 0 to 63, keys 64 to 127, values 128 to 191
        ("gradient/h.0.attn.c_attn.weight", [64, 192], [[80, 16]], "head 1 of 4 of the keys"),
        ("gradient/h.0.attn.c_attn.bias", [192], [[0, 64]], "all 4 heads of the queries"),
        ("forward/h.0.attn.c_attn", [2, 8, 192], [[60, 8]], "head 3 of 4 of the queries; head 0 of 4 of the keys"),
        ("gradient/h.0.attn.c_proj.weight", [64, 64], [[16, 32]], "heads 1 to 2 of 4"),
        ("gradient/h.0.mlp.c_proj.weight", [256, 64], [[16, 32]], None),
        ("gradient/h.0.attn.c_attn.weight", [64, 200], [[80, 16]], None),
    ],
)  # fmt: skip
def test_heads_of_fused_projections(opened, name, shape, runs, said):
    found = opened("pass").tab.evaluate(
        """([name, shape, runs]) => {
            page.heads = { "": [4, null, null, 64] };
            page.names.push(name);
            const heads = headsOf(page.names.length - 1, shape);
            return heads && headText(heads, runs);
        }""",
        [name, shape, runs],
    )
    assert found == said


def test_shards_of_positions(opened):
    """A rank has two pieces of each sequence; the error is in both, and in one of its heads."""
    page = opened("positions")
    said = page.text(".finding")
    assert "positions 2 to 3, 12 of 16, head 2 of 4 (columns 4 to 5 of 8), counted from 0." in said, said
    assert "rank 1's shard (cp 0, tp 1) alone, with 100 % of the squared error" in said, said
    lines = page.tab.locator("#on-ranks tbody tr").all_inner_texts()
    assert [line.split("\t")[0] for line in lines] == ["0", "✕ 1", "2", "3"]
    holds, square, error = lines[1].split("\t")[1:]
    assert holds == "positions 0 to 3, columns 4 to 7; and positions 12 to 15, columns 4 to 7", lines
    assert square == "100 %" and all("\t0 %\t" in line for line in (lines[0], *lines[2:]))
    assert float(error) > 0.1 and all(line.endswith("\t0") for line in (lines[0], *lines[2:])), lines
    page.tab.focus("canvas.picture")
    for _ in range(4):
        page.tab.keyboard.press("ArrowRight")
    assert page.text(".at").startswith("head 2 of 4, sample 0, position 0, column 4: largest error 0")


LAYER = "model.layers.0.mlp.up_proj"
# cp rank 0 has the head and the tail of each sequence
PIECES = {"cp": [[[0, 4], [12, 4]], [[4, 8]]]}
STAGES = {"pp": {"units": [[["embedding", 0]], [[1, "lm_head"]]]}}


@pytest.mark.parametrize(
    ("mesh", "shape", "sharded", "cuts", "name", "held"),
    [
        # tp cuts columns
        ({"cp": 2, "tp": 2}, [2, 16, 6], {"cp": 1, "tp": 2}, PIECES, f"forward/{LAYER}", [
            [[[0, 0, 0], [2, 4, 3]], [[0, 12, 0], [2, 4, 3]]], [[[0, 0, 3], [2, 4, 3]], [[0, 12, 3], [2, 4, 3]]],
            [[[0, 4, 0], [2, 8, 3]]], [[[0, 4, 3], [2, 8, 3]]]]),
        # or positions, of those that cp has left: sequence parallelism
        ({"cp": 2, "tp": 2}, [2, 16, 6], {"cp": 1, "tp": 1}, PIECES, f"backward/{LAYER}",
            [[[[0, start, 0], [2, 4, 6]]] for start in (0, 12, 4, 8)]),
        # FSDP shards weights over dp and cp together, as a DeviceMesh of both that was flattened
        ({"dp": 2, "cp": 2}, [8, 2], {"dp": 0, "cp": 0}, PIECES, f"gradient/{LAYER}.weight",
            [[[[2 * rank, 0], [2, 2]]] for rank in range(4)]),
        # and of 6 rows one rank has none
        ({"dp": 2, "cp": 2}, [6, 2], {"dp": 0, "cp": 0}, PIECES, f"gradient/{LAYER}.weight",
            [[[[0, 0], [2, 2]]], [[[2, 0], [2, 2]]], [[[4, 0], [2, 2]]], []]),
        # of what tp has left
        ({"dp": 2, "tp": 2}, [8, 2], {"dp": 0, "tp": 0}, {}, f"parameter/{LAYER}.weight",
            [[[[start, 0], [2, 2]]] for start in (0, 4, 2, 6)]),
        ({"pp": 2}, [4], {}, STAGES, f"gradient/{LAYER}.bias", [[[[0], [4]]], []]),
        ({"pp": 2}, [4], {}, STAGES, "forward/model.layers.1", [[], [[[0], [4]]]]),
        ({"pp": 2}, [4], {}, STAGES, "gradient/model.norm.weight", [[[[0], [4]]]] * 2),
    ],
)  # fmt: skip
def test_what_each_rank_holds(opened, mesh, shape, sharded, cuts, name, held):
    ranks = [
        dict(zip(mesh, place, strict=True))
        for place in itertools.product(*(range(size) for size in mesh.values()))
    ]
    found = opened("pass").tab.evaluate(
        """([ranks, contract, name, shape, sharded]) => {
            page.views.push({ ranks, contract });
            page.names.push(name);
            return boxesOf(page.views.length - 1, page.names.length - 1, shape, sharded);
        }""",
        [ranks, {"cuts": cuts}, name, shape, sharded],
    )
    assert found == held


def test_a_copy_that_differs(opened):
    page = opened("fail")
    lines = page.tab.locator("#on-ranks tbody tr").all_inner_texts()
    assert lines[0].startswith("0, 2\trows 0 to 3\t") and lines[1].startswith("✕ 1\trows 4 to 7\t")
    assert lines[2] == "3\trows 4 to 7\t\tnot judged\t6 of 24 elements differ", lines
    other = "; the copy of rank 3 (dp 1, tp 1) differs in 6 elements, and was not compared with the reference"
    assert other in page.text(".finding") and other in page.text("#on-ranks")
    page.tab.check(FROM_BATCH)
    page.tab.click(f'.cell[aria-label^="{HEADED},"]')
    assert page.tab.query_selector("#on-ranks") is None


def test_the_mesh_marks_the_ranks_that_are_wrong(opened):
    """By the shards, and by the samples of each. A copy that was not judged is marked as such. Negative control: where the tensor is near enough."""

    def marked(page):
        return page.tab.locator(".rank.wrong b").all_inner_texts()

    page = opened("fail")
    assert marked(page) == ["rank 1"] and page.text(".rank.differs b") == "rank 3"
    assert "✕ wrong here" in page.text(".rank.wrong")
    page.tab.check('input[name="view"][value="0"]')
    assert marked(page) == []
    page = opened("copies")
    assert marked(page) == []
    page.tab.check('input[name="step"][value="2"]')
    page.tab.click('.cell[aria-label^="forward/model.norm,"]')
    assert marked(page) == ["rank 1"]
    assert ["not judged" in one for one in page.tab.locator(".rank").all_inner_texts()] == [False] * 3 + [
        True
    ]
    assert marked(opened("positions")) == ["rank 1"]


def test_what_the_page_says_of_ranks_is_not_said_again(opened, tmp_path):
    """Nor of elements. Negative control: another observation stays."""
    page = comparison("FAIL")
    said = [
        "not the same on all ranks that hold it: different on rank 3",
        "4 of 48 elements are wrong",
        "twice",
    ]
    page.views[1].observed = said
    (tmp_path / "report.html").write_text(html(page))
    shown = opened(tmp_path / "report.html")
    assert shown.text('[data-title="Observed"]') == "Observed\ntwice"
    text = issue_of(shown)
    assert "- observed: twice\n" in text and text.count("- observed: ") == 1


def test_copies_that_differ_before_anything_is_too_far(opened):
    """In a recording: the first wrong tensor, no rank is blamed, and the map has them marked. Negative control: the output, which no rank has another copy of."""
    page = opened("copies")
    assert page.text(".finding .tensor") == WRONG == page.text("#tensor h3")
    said = page.text(".finding")
    blamed = "Ranks\nrank 1 has another copy than ranks 0, 2, 3, in 6 elements; no copy is known to be right"
    assert blamed in said and "elements are too far" not in said
    assert (
        "Ruled out\noutputs (1): right\nWrong in step 1\n1 of 1 gradients of weights, 1 of 1 updates" in said
    )
    marked = page.tab.eval_on_selector_all(
        ".cell.copies[data-name]", "all => all.map((one) => one.ariaLabel)"
    )
    assert [one.split(", ")[0] for one in marked] == [WRONG, WRONG.replace("gradient/", "update/")]
    assert all(", copies differ between ranks; the copy that was judged: 0." in one for one in marked)
    assert "0 of 3 tensors are too far; copies of 2 of them differ between ranks." in page.text("#way")
    page.tab.keyboard.press("Escape")
    page.tab.check('input[name="step"][value="2"]')
    assert page.tab.query_selector(".cell.copies[data-name]") is None


@pytest.mark.parametrize(
    "name, said",
    [
        (
            "fail",
            "FSDP: the gradient of model.layers.1.mlp.down_proj.weight is wrong on rank 1 in step 1: it is 1.8711 times the reference's; rank 3 has other values of it, which were not compared.",
        ),
        (
            "hidden",
            "FSDP: the gradient of lm_head.weight is wrong on ranks 1, 3 in step 1: rows 4 to 7 of 8 are 1.003 times what they should be.",
        ),
        (
            "copies",
            "Copies of the gradient of model.layers.1.mlp.down_proj.weight differ between ranks in step 1: rank 1's differs by a relative 8.76e-1 in 6 elements.",
        ),
        (
            "positions",
            "FSDP: the output of model.layers.0.self_attn.q_proj is wrong on rank 1 in step 1: relative error 1.99e-01 (2-norm), tolerated 1.1e-07.",
        ),
        ("uncounted", "Step 1: micro batches count 1 and 2 (in micro batch 0; by 1)."),
    ],
)
def test_a_headline_has_the_tensor_the_ranks_and_one_number(opened, name, said):
    """And the cause has a row of its own. Where no tensor is too far, the sentence of the verdict is the headline."""
    page = opened(name)
    assert page.text(".lead") == said
    assert page.tab.locator(".finding [data-title=Cause]").count() == 1


@pytest.mark.parametrize(
    "name, what, said",
    [
        ("forward/a.input", "", "the input of a"),
        ("backward/a.input.1", "", "the gradient at the input of a"),
        ("exp_avg_sq/a.weight", "", "the second moment of a.weight"),
        ("momentum/a.weight", "", "the momentum of a.weight"),
        ("gradient norm", "", "the gradient norm"),
        ("", "is 7.4, DDP's is 7.6; 1e-6 is tolerated", "it is 7.4, DDP's is 7.6"),
        ("", "in micro batch 0, all of it is 1.02 times what it should be (47.5 times what a factor may be off by)", "in micro batch 0, all of it is 1.02 times what it should be"),
        ("", "relative error 1 (2-norm), tolerated 2; 3 (largest element), tolerated 1", "relative error 3 (largest element), tolerated 1"),
        ("", "relative error 1 (2-norm), tolerated 2; 3 (largest element), tolerated 1; its change is 0.5 times the reference's", "its change is 0.5 times the reference's"),
    ],
)  # fmt: skip
def test_tensors_and_their_errors_in_words(opened, name, what, said):
    """Of two errors, the one that is beyond what is tolerated."""
    found = opened("pass").tab.evaluate(
        "([name, what]) => what ? oneNumber(what, { error: 1, tolerated: 2 }) : inWords(name)", [name, what]
    )
    assert found == said


def test_a_copy_that_differs_is_not_shown_as_right(opened):
    """Where its share stands: in the panel, beside the map, and for a screen reader. Negative control: the output, of which no rank has another copy."""
    page = opened("copies")
    said = "copies differ between ranks: rank 1's differs by a relative 8.76e-1 in 6 elements; the copy that was judged: 0.2 of what is tolerated"
    assert said in page.text("#tensor") and said in page.text("#reading")
    assert "6 of 48 elements differ, by a relative 8.76e-1" in page.text("#on-ranks")
    lines = page.tab.locator('#tensor [aria-label="Errors from the batch"] tbody tr').all_inner_texts()
    assert [("copies differ" in line) for line in lines] == [True, False]
    page.tab.click('.cell[aria-label^="forward/model.norm,"]')
    assert "copies differ" not in page.text("#tensor") + page.text("#reading")


def test_counts_of_one_thing_are_the_same_everywhere(opened):
    """Too far, and copies that differ: in the table, above the map, below it, in the finding and in the issue."""
    page = opened("copies")
    of_all = "1 of 6 tensors and losses; copies of 2 differ between ranks"
    assert of_all in page.text(".verdicts") and f"| {of_all} |" in issue_of(page)
    page.tab.keyboard.press("Escape")
    assert "0 of 3 tensors are too far; copies of 2 of them differ between ranks." in page.text("#way")
    assert "In step 1, the copies of 2 tensors differ between ranks." in page.text("#ranks")
    page.tab.check('input[name="step"][value="2"]')
    assert page.text("#way").endswith("1 of 3 tensors is too far.")


def test_the_numbers_of_each_rank(opened):
    """Of an output that each rank has for its own samples; and that the ranks' weights were no longer the same."""
    page = opened("copies")
    page.tab.check('input[name="step"][value="2"]')
    page.tab.click('.cell[aria-label^="forward/model.norm,"]')
    said = page.text("#on-ranks")
    assert (
        "rank 1 alone; on ranks 0, 2 it is near enough; but weights of the ranks differ since step 1" in said
    )
    lines = page.tab.locator("#on-ranks tbody tr").all_inner_texts()
    assert lines[0] == "0\t0.2" and lines[1].startswith("1\t✕ ") and lines[1].endswith(" times")


def test_what_is_before_the_first_wrong_tensor_of_a_recording_is_ruled_out(opened, tmp_path):
    """Of its kind, in the order of a step. Negative control: of gradients of weights, whose order says nothing."""
    page = recording()
    far, view = f"forward/{WRONG.removeprefix('gradient/').removesuffix('.weight')}", page.views[0]
    rows = [row(2, name, name == far) for name in names() if name.startswith("forward/")]
    view.first = (2, far, rows[0].describe())
    page.add(view, 2, rows, {})
    (tmp_path / "report.html").write_text(html(page))
    before = [one.name for one in rows].index(far)
    assert f"Ruled out\noutputs before it ({before}): right" in opened(tmp_path / "report.html").text(
        ".finding"
    )
    assert "before it" not in opened("recording").text(".finding")


def test_copies_in_as_many_elements_are_counted_once(opened):
    found = opened("pass").tab.evaluate(
        "(counts) => apartText(new Map(counts.map((count, rank) => [rank, { count, apart: count / 1000 }])))",
        [64, 64],
    )
    assert found == "those of ranks 0, 1 differ by a relative 6.40e-2 in 64 elements each"


def test_where_no_tensor_is_too_far_a_failure_says_so(opened):
    """Negative control: not where one is, and not of a PASS."""
    page = opened("uncounted")
    assert page.text(".finding h2") == "No tensor is too far" and page.tab.is_visible(".notes")
    assert issue_of(page).startswith("# Step 1: micro batches count 1 and 2 (a recorded run)")
    for name in ("copies", "recording", "pass", "fail"):
        assert "No tensor is too far" not in opened(name).text("header")


def test_what_is_first_may_be_no_tensor(opened, files, tmp_path):
    """Such as the norm of the gradient: then no tensor is open."""
    page = comparison("FAIL")
    page.views[1].first = (1, "gradient norm", "2 times the reference's")
    (tmp_path / "report.html").write_text(html(page))
    shown = opened(tmp_path / "report.html")
    assert shown.text(".finding .tensor") == "gradient norm" and shown.said == []
    assert shown.text(".finding h2").startswith("First wrong value") and "First wrong value" in issue_of(
        shown
    )
    shown.tab.keyboard.press("Escape")
    assert "Choose a tensor" in shown.text("#tensor")


def test_only_a_shard_that_is_wrong_has_a_red_frame(opened):
    """That of tp rank 1. Negative control: of a tensor that is near enough, none has."""
    page = opened("fail")
    frames = """() => { const canvas = document.querySelector('#tensor canvas'); const { width, height } = canvas;
        const bad = getComputedStyle(document.documentElement).getPropertyValue('--bad').trim();
        const at = (x, y) => '#' + [...canvas.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3).map((one) => one.toString(16).padStart(2, '0')).join('');
        return [0, height / 2].map((top) => at(1, Math.round(top + height / 4)) === bad); }"""
    assert page.tab.evaluate(frames) == [False, True]
    page.tab.check('input[name="view"][value="0"]')
    page.tab.check(FROM_BATCH)
    page.tab.click(f'.cell[aria-label^="{HIDDEN},"]')
    assert page.tab.evaluate(frames) == [False, False]


@pytest.mark.parametrize("wrong, expected", [([0, 3], [0, 3]), ([2], [2]), ([], [])])
def test_shards_that_lie_across_each_other_are_told_apart(opened, wrong, expected):
    """Each of four ranks has a quarter, so wrong rows and columns alone would name ranks 1 and 2, too."""
    found = opened("pass").tab.evaluate(
        """(wrong) => {
            const boxes = [[0, 0], [0, 4], [4, 0], [4, 4]].map((start) => [[start, [4, 4]]]);
            const cells = Array.from({ length: 64 }, (_, place) => (wrong.includes(2 * (place >= 32) + (place % 8 >= 4)) ? "Z" : "0")).join("");
            const along = (side) => wrong.map((rank) => [4 * side(rank), 4]);
            const slices = [along((rank) => rank >> 1), along((rank) => rank % 2)];
            const picture = { shape: [8, 8], blocks: [1, 1], cells, largest: 1, beyond: 1e-3 };
            return boxes.map((each, rank) => [rank, isWrong(each, slices, { picture, hidden: null })]).filter(([, far]) => far).map(([rank]) => rank);
        }""",
        wrong,
    )
    assert found == expected


def test_which_copy_differs_is_seen_without_scrolling(opened):
    """In the panel of the open tensor, on a small screen."""
    page = opened("fail")
    page.tab.set_viewport_size({"width": 1280, "height": 800})
    page.tab.click(".finding button")
    for seen in ("#on-ranks .differs-row", "#on-ranks .where"):
        box, panel = (page.tab.locator(one).first.bounding_box() for one in (seen, "#tensor"))
        assert panel["y"] <= box["y"] and box["y"] + box["height"] <= min(800, panel["y"] + panel["height"])


def test_a_finding_names_what_else_is_wrong(opened):
    """By itself, in the same step: two moments and a factor. Negative control: a finding of the only tensor."""
    assert f"Also wrong\n{HIDDEN}, {HEADED}, {HEADLESS}" in opened("fail").text(".finding")
    for name in ("hidden", "large"):  # the only tensor, and one of thousands
        assert "Also wrong" not in opened(name).text(".finding")


def test_ways_to_compute_are_said_once_and_in_one_order(opened):
    for name in ("fail", "recording"):
        page = opened(name)
        ways = page.tab.locator(".ways dfn").all_inner_texts()
        assert ways == ["each module by itself", "from the batch"]
        assert page.text("body").count("What follows from a wrong tensor is then too far as well.") == 1
        choice = page.tab.locator("#choices fieldset", has=page.tab.locator("legend:text-is('Computed')"))
        labels = choice.locator("label").all_inner_texts()
        assert [one.strip().removesuffix(", has failures").strip() for one in labels] == ways
        lines = page.text(".verdicts tbody")
        assert lines.index(ways[0]) < lines.index(ways[1])
    assert opened("positions").tab.query_selector(".ways") is None


def test_ids_are_equal_or_not(opened):
    """They have no distance, norm or share."""
    page = opened("fed")
    said = "2 of 32 are not what was to be fed, first at [1, 3]: 12, not 11"
    assert said in page.text(".finding") and "2 of 32 elements are not equal: sample 1 of 4" in page.text(
        ".finding"
    )
    panel = page.text("#tensor")
    assert said in panel and "[1, 3]\t12\t11\n[1, 4]\t13\t12" in panel
    page.tab.hover("#tensor canvas", position={"x": 5, "y": 5})
    assert page.text("#tensor .at") == "sample 0, position 0: equal"
    assert "not equal in step 1: batch/input_ids" in page.text(".verdicts").replace("\n", " ")
    everything = page.text("body") + issue_of(page)
    assert [one for one in ("norm", "∞", "not finite", "|run − reference|") if one in everything] == [], (
        everything
    )


def test_the_keyboard_reaches_everything(opened):
    page = opened("fail")
    reached = set()
    for _ in range(80):
        page.tab.keyboard.press("Tab")
        reached.add(
            page.tab.evaluate(
                "(document.activeElement.id || document.activeElement.className || document.activeElement.tagName).split(' ')[0] + '|' + (document.activeElement.textContent || '').slice(0, 20)"
            )
        )
    found = " ".join(sorted(reached))
    for wanted in ("issue|Copy as issue", "Compare with another", "Print", "cell|", "picture|", "SUMMARY|"):
        assert wanted in found, (wanted, found)
    page.tab.check(FROM_BATCH)
    page.tab.focus('[aria-label="Outputs"] .cell[tabindex="0"]')
    before = page.tab.evaluate("document.activeElement.dataset.name")
    page.tab.keyboard.press("ArrowDown")
    page.tab.keyboard.press("ArrowRight")
    after = page.tab.evaluate("document.activeElement.dataset.name")
    assert after != before and page.text("#reading code") in page.tab.evaluate(
        "document.activeElement.ariaLabel"
    )
    page.tab.keyboard.press("Enter")
    assert page.text("#tensor h3") == page.text("#reading code")
    # all cells are reached by arrows: from line to line, and along each
    cells = page.tab.evaluate("""() => { const grid = document.querySelector('[role=grid][aria-label=Outputs]'); const seen = new Set();
        const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
        grid.querySelector('.cell').focus();
        for (let line = 0; line < grid.children.length; line++) { press('Home');
            for (let at = 0; at < 60; at++) { seen.add(document.activeElement.dataset.name); press('ArrowRight'); } press('ArrowDown'); }
        return [seen.size, grid.querySelectorAll('.cell[data-name]').length]; }""")
    assert cells[0] == cells[1]


@pytest.mark.parametrize("scheme, width", [("light", 1200), ("dark", 1200), ("light", 400), ("dark", 400)])
@pytest.mark.parametrize(
    "name", ["fail", "pass", "hidden", "recording", "copies", "uncounted", "fed", "positions", "study"]
)
def test_axe_finds_no_violation(opened, name, scheme, width):
    page = opened(name, scheme=scheme, width=width)
    assert violations(page) == []
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width


def violations(page):
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page.tab).response["violations"]
    return [(one["id"], [node["html"][:160] for node in one["nodes"][:3]]) for one in found]


def test_a_violation_would_be_found(opened):
    """Negative control: text that is hardly darker than its ground."""
    page = opened("fail")
    page.tab.add_style_tag(content=".lead { color: #ddd !important; background: #fff }")
    assert [name for name, _ in violations(page)] == ["color-contrast"]


def test_what_comes_from_a_file_stays_text(opened):
    page = opened("fail")
    assert HOSTILE in page.tab.content().replace("&lt;", "<").replace(
        "&gt;", ">"
    ) or HOSTILE in page.tab.evaluate("JSON.stringify(page.names)").replace("\\\\", "")
    assert page.tab.evaluate("window.broken") is None and page.said == []


PRINTED = re.compile(rb"/Type\s*/Page\b")  # of a PDF


def issue_of(page):
    """The text of "Copy as issue", whose dialog stays open."""
    page.tab.click("#issue")
    return page.tab.input_value("dialog textarea")


def test_copy_as_issue(opened):
    page = opened("fail")
    text = issue_of(page)
    assert violations(page) == []
    assert len(text.split("\n")[0]) < 160
    for wanted in (
        "# FSDP: the gradient of model.layers.1.mlp.down_proj.weight is wrong on rank 1 in step 1: shard (tiny-qwen2 in fp32)\n",
        "**FAIL**: tiny-qwen2 in fp32",
        "The page report.html, which belongs to this, has the map",
        "\n- cause: shard: see ",
        "### First wrong tensor: FSDP",
        "`gradient/model.layers.1.mlp.down_proj.weight` in step 1",
        "rows 4 to 7",
        "| [7, 5] | 2 | 1 |",
        "versions: torch 2.13.0",
        "compared",
    ):
        assert wanted in text, wanted
    page.tab.keyboard.press("Escape")
    page.tab.wait_for_selector("dialog", state="detached")


def test_an_issue_of_a_recording(opened):
    """Its title has the cause; what the page says of the first tensor, of its cause, and of later steps is not said again."""
    text = issue_of(opened("copies"))
    assert text.startswith(
        "# Copies of the gradient of model.layers.1.mlp.down_proj.weight differ between ranks in step 1: the gradients were not reduced (a recorded run)\n"
    )
    assert "\n- cause: the gradients were not reduced\n" in text and "\n- step 1: 4 micro batches\n" in text
    assert not any(
        one in text for one in ("gradients differ between", "step 2: 4", "is the first of", "near enough; ")
    )


@pytest.mark.parametrize("name", ["fail", "hidden", "recording", "copies", "uncounted", "fed", "empty"])
def test_an_issue_repeats_no_line(opened, name):
    text = issue_of(opened(name))
    lines = [line for line in text.splitlines() if line.strip("`") and not line.startswith("|--")]
    assert len(lines) == len(set(lines))


def test_an_issue_has_all_steps_and_the_runs_that_pass_and_opens_at_its_beginning(opened):
    """Whatever is open: here, the run that passes."""
    page = opened("fail")
    page.tab.check('input[name="view"][value="0"]')
    text = issue_of(page)
    for wanted in (
        "| DDP: PASS | from the batch | 0 of 120 tensors |",
        "| FSDP: FAIL | each module by itself | 4 of 4 tensors |",
        "tensors; copies of 1 differ between ranks |",
        "- ranks: the shard of ranks 1, 3 (tp 1) alone",
        "### Also wrong in this step",
        f"| FSDP | `{HIDDEN}` | rows 4 to 7 of 8 are 1.003 times",
        f"| FSDP | `{HEADED}` | ",
        "python -m lockstep.compare",
    ):
        assert wanted in text, wanted
    assert page.tab.evaluate("document.querySelector('dialog textarea').scrollTop") == 0
    assert page.tab.evaluate(
        "(one => one.scrollHeight > one.clientHeight)(document.querySelector('dialog textarea'))"
    )


def test_what_the_verdict_is_about_comes_first_in_a_panel(opened):
    """Where and on which ranks, then the errors. Negative control: from the batch where that is open. Of the runs, the open one is first."""
    by_itself, from_batch = "Errors of each module by itself", "Errors from the batch"
    page = opened("hidden")
    heads = page.tab.locator("#tensor h3").all_inner_texts()
    assert heads[1:5] == ["On the ranks", "Where the error lies", by_itself, from_batch]
    first = page.tab.locator(f'#tensor [aria-label="{by_itself}"] tbody tr').first.inner_text()
    assert first.split("\t")[:2] == ["1", "FSDP"] and "1.003 times" in first
    assert "Less is tolerated by itself" in page.text("#tensor")
    page.tab.check('input[name="alone"][value="false"]')
    heads = page.tab.locator("#tensor h3").all_inner_texts()
    assert heads.index(from_batch) < heads.index(by_itself)


def test_a_failing_run_has_what_is_farthest_beyond(opened):
    page = opened("fail")
    lines = page.tab.locator(".verdicts tbody tr").all_inner_texts()
    assert float(lines[1].split("\t")[-1].split(" ")[0]) < 1
    assert float(lines[2].split("\t")[-1].split(" ")[0].replace(",", "")) > 10
    assert "nearest" not in page.text("header")


@pytest.mark.parametrize("width", [320, 400, 420])
def test_the_summary_is_not_cut_off_on_a_narrow_screen(opened, width):
    page = opened("fail", width=width)
    for shown in page.tab.query_selector_all(".verdicts :is(th, td)"):
        box = shown.bounding_box()
        assert box is None or box["x"] + box["width"] <= width


def test_a_long_name_makes_no_page_wider(opened, tmp_path):
    """In the sentence of a PASS and in the sentences of a recording. Negative control: words that may not be broken."""
    page = comparison("PASS")
    name = "parameter/model.layers.1.post_attention_layernorm.and.more.weight"
    page.views[0].counts["from the batch"].worst = (1, name, 0.9, False)
    page.lead, page.sentences = f"The gradient of {name} is wrong.", [f"{name} differs"]
    (tmp_path / "report.html").write_text(html(page))
    tab = opened(tmp_path / "report.html", width=400).tab
    assert f"0.9 of what is tolerated: {name} in step 1" in tab.inner_text(".lead")
    wide = "document.documentElement.scrollWidth"
    assert tab.evaluate(wide) <= 400
    tab.add_style_tag(content="* { overflow-wrap: normal !important }")
    assert tab.evaluate(wide) > 400


def test_a_contract_is_in_lines(opened):
    lines = opened("fail").tab.locator("#contracts .differs-row").all_inner_texts()
    assert lines == ["sharding: replicas\t2\thas none", "sharding: shards\thas none\t2, 4"]


def test_where_no_tensor_was_judged(opened):
    page = opened("empty")
    assert "No tensor was judged" in page.text("#model") and page.tab.query_selector(".verdicts") is None
    assert page.text(".finding h2") == "No tensor was judged" and "Cause\nnot explained" in page.text(
        ".finding"
    )
    assert issue_of(page).startswith("# The gradient is not finite (a run)\n") and page.said == []


def test_a_report_is_laid_over_another(opened, files):
    page = opened("fail")
    page.tab.set_input_files("#other", files["pass"])
    page.tab.wait_for_selector("#over table")
    said = page.text("#over")
    assert "The verdict was PASS and is FAIL." in said
    assert f"First wrong tensor: was none, is {WRONG} in step 1, FSDP: shard." in said
    assert page.text("#over tbody tr:first-child code") == "gradient/model.layers.1.mlp.down_proj.weight"
    assert "versions: was torch 2.12.0, is torch 2.13.0" in said
    assert "Contract of" not in said and "alone" not in said and "Losses of" not in said
    assert violations(page) == []


def test_what_only_one_report_has_is_said(opened, tmp_path):
    """A run, a step, an entry of a contract, a loss; and what is said run by run stays whole."""
    other = comparison("PASS")
    mesh = "DDP (TP=1, DP=2): batch_size 2"
    other.found_out.append(("mesh", mesh))
    other.views[0].label = "ZeRO"
    other.views[1].contract["eps"] = 1e-6
    other.losses.loss[1] = [3.0, 2.5, 1.0]
    other.tables = [one for one in other.tables if one.view == 0 or one.step == 1]
    (tmp_path / "other.html").write_text(html(other), encoding="utf-8")
    page = opened("fail")
    page.tab.set_input_files("#other", tmp_path / "other.html")
    page.tab.wait_for_selector("#over table")
    said = page.text("#over").split("\n")
    for wanted in (
        "ZeRO is in the other report alone.",
        "DDP is in this report alone.",
        "FSDP: step 2 in one report alone.",
        "Contract of FSDP: eps: was 0.000001, is 1e-8",
        "Losses of FSDP: up to 5.00e-1 apart, in step 2.",
        f"mesh: was {mesh}, is not said",
    ):
        assert wanted in said, (wanted, said)


def test_a_report_of_other_tensors_is_laid_over(opened, files):
    """What is in both is compared. FSDP has other tensors there."""
    page = opened("pass")
    page.tab.set_input_files("#other", files["fail"])
    page.tab.wait_for_selector("#over table")
    assert "The verdict was FAIL and is PASS." in page.text("#over")


def test_a_file_that_is_no_report_is_refused(opened, tmp_path):
    page = opened("fail")
    (tmp_path / "other.html").write_text("<p>hello")
    page.tab.set_input_files("#other", tmp_path / "other.html")
    page.tab.wait_for_selector("#over p")
    assert "it is no report.html of this version" in page.text("#over")


def test_losses_are_drawn_and_zero_is_zero(opened):
    page = opened("fail")
    assert page.tab.locator("#losses .uplot").count() == 3
    assert page.tab.evaluate("document.querySelectorAll('#losses canvas').length") == 3
    legends = page.tab.locator("#losses .u-legend").all_inner_texts()
    floors = ("noise floor (control run)", "noise floor (derived)", "tolerated")
    assert [all(floor in legend for floor in floors) for legend in legends] == [False, True, False]
    page.tab.evaluate("document.querySelector('#losses details').open = true")
    assert "(0)" in page.text("#losses details table")


def test_a_link_opens_its_run(opened):
    """report.html#NAME. Negative control: a name that no run has."""
    assert "DDP" in opened("fail", run="ddp").text("#tensor")
    assert "FSDP" in opened("fail", run="nosuch").text("#tensor")


def test_of_many_runs_the_chosen_one_is_drawn(opened):
    page = opened("study", run="run-2")

    def shown():
        assert page.tab.locator("#losses .uplot").count() == 2  # no gradient norms
        return page.tab.locator("#losses .u-legend").all_inner_texts()[1]

    assert "run-2: FSDP" in shown() and not page.tab.is_visible("#model")
    page.tab.select_option("#run", "5")
    assert "FSDP 5" in shown() and "run-2" not in shown()
    page.tab.evaluate("document.querySelector('#losses details').open = true")
    lines = page.tab.locator("#losses details tbody tr").all_inner_texts()
    assert lines[0].split("\t")[2] == "3.000000500 (5.00e-7)"
    heads = page.tab.locator(".verdicts tbody th").all_inner_texts()
    assert heads[:4] == ["DDP", "run-1: FSDP", "run-2: FSDP", "FSDP 3"] and page.said == []


def test_print_has_the_verdict_and_how_it_was_found_out(opened):
    """On paper at once, on the screen after a key. Negative control: the map is on the screen alone."""
    page = opened("fail")

    def shown():
        return [page.tab.is_visible(one) for one in ("h1", "#how dd:last-child", "#model")]

    assert shown() == [True, False, True]
    page.tab.emulate_media(media="print")
    assert shown() == [True, True, False]
    page.tab.emulate_media(media="screen")
    page.tab.focus("#how summary")
    page.tab.keyboard.press("Enter")
    assert shown() == [True, True, True] and "side by side under Contracts" in page.text("#how")


def test_print_is_one_page(opened):
    """Negative control: with the map, it is more."""
    page = opened("fail").tab
    assert len(PRINTED.findall(page.pdf())) == 1
    page.add_style_tag(content="@media print { main:has(#model) { display: block !important } }")
    assert len(PRINTED.findall(page.pdf())) > 1


def test_a_listing_is_printed(opened, tmp_path):
    write_listing(tmp_path / "report.html", "Faults", ["3 of 3"], ["fault"], [(["a"], "")], "FAIL")
    page = opened(tmp_path / "report.html", ready="#listing").tab
    page.emulate_media(media="print")
    assert page.is_visible("#listing") and not page.is_visible("#filter")


def test_steps_are_chosen_by_keyboard(opened):
    page = opened("fail").tab
    shown = "[...document.querySelectorAll('.plot')].map((box) => [box.chart.scales.x.min, box.chart.scales.x.max])"
    assert page.evaluate(shown) == [[1, 3]] * 3
    page.fill("#steps-shown input >> nth=0", "2")
    page.keyboard.press("Enter")
    assert page.evaluate(shown) == [[2, 3]] * 3
    page.fill("#steps-shown input >> nth=0", "4")  # behind the last one
    page.keyboard.press("Enter")
    assert page.evaluate(shown) == [[2, 3]] * 3


def test_tab_leads_to_the_open_failure(opened):
    page = opened("fail").tab
    stop = page.locator('[aria-label="Gradients of weights"] .cell[tabindex="0"]')
    assert stop.count() == 1 and "open" in stop.get_attribute("class")


def test_what_follows_from_copies_that_differ_is_not_called_wrong_by_itself(opened):
    """Modules behind such an output had other inputs than the reference. Negative control: without the output, they are wrong by themselves."""
    page = opened("fail").tab
    found = "wrongByThemselves(1, 1).map(([name]) => name)"
    assert page.evaluate(found) == [WRONG, HIDDEN, HEADED, HEADLESS]
    unlike = 'page.views[1].differing.unshift([1, "forward/model.norm", [3]])'
    assert page.evaluate(f"{unlike}, {found}") == ["forward/model.norm"]


def test_the_large_page_has_all_tensors(opened, files):
    page = opened("large")
    assert (
        page.tab.evaluate("tables.reduce((sum, table) => sum + (table.alone ? 0 : table.names.length), 0)")
        == 50_000
    )
    assert Path(files["large"]).stat().st_size < 5_000_000
    assert json.loads(page.tab.evaluate("JSON.stringify(state)"))["tensor"] is not None


@pytest.mark.parametrize("scheme, width", [("light", 1200), ("dark", 400)])
def test_a_listing_is_sorted_and_filtered(opened, tmp_path, scheme, width):
    heads = ["fault", "strategy", "loss", "difference"]
    write_listing(tmp_path / "report.html", "Faults", ["3 of 3"], heads, LISTING, "FAIL")
    page = opened(tmp_path / "report.html", ready="#listing", scheme=scheme, width=width)

    assert page.text("h1") == "FAIL Faults" and page.tab.title() == "FAIL: Faults"

    def firsts():
        return page.tab.locator("#listing tbody tr:visible td:first-child").all_inner_texts()

    assert firsts() == ["b_fault", "a_fault", HOSTILE]
    for head, expected in (
        ("loss", ["a_fault", "b_fault", HOSTILE]),
        ("loss", ["b_fault", "a_fault", HOSTILE]),
        ("difference", ["a_fault", "b_fault", HOSTILE]),
    ):
        page.tab.click(f"#listing button:text-is('{head}')")
        assert firsts() == expected, head
    page.tab.fill("#filter", "ddp step")
    assert firsts() == ["b_fault"] and page.text("#count") == "1 of 3 rows"
    assert page.tab.get_attribute("#listing a", "href") == "b/report.html"
    assert (page.said, violations(page)) == ([], [])
