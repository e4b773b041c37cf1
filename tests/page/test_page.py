"""report.html: what its payload has of a real comparison and a real recording, and that nothing of a file becomes markup."""

import math
import pickle
import re
import shutil
from html.parser import HTMLParser

import pytest
import torch
from edited import overwrite
from page_cases import HOSTILE, comparison, payload, row
from page_size import large
from ranks import run_groups

from lockstep import compare, judge
from lockstep.dumps.dump import Dump
from lockstep.ground import files
from lockstep.page import recording as page_recording
from lockstep.page import writing
from lockstep.page.payload import PICTURES, Page, short
from lockstep.page.recording import _when
from lockstep.plan.config import tokens_per_step
from lockstep.recorder.recording import Recording
from lockstep.verdict import judgement
from lockstep.verdict.loss_tolerance import floors
from lockstep.verdict.picture import LEVELS, SIDE, draw
from lockstep.verdict.rows import RunVerdict, StepVerdict, Wrong

WRONG = "gradient/model.layers.1.mlp.gate_proj.weight"
SHARD = "gradient/model.layers.1.mlp.down_proj.weight"
ONE = 0x3F800000  # 1.0 in float32


def row_of(content, view, step, name):
    """(table, place) of a tensor."""
    (table,) = (one for one in content["tables"] if (one["view"], one["step"]) == (view, step))
    return table, table["names"].index(content["names"][name])


@pytest.fixture(scope="module")
def failed(dumps, new_folder):
    """The page of a comparison in which one element of FSDP's gradient is another."""
    folder = new_folder("failed")
    for name in ("ddp", "fsdp", "reference", "replay_ddp", "replay_fsdp"):
        shutil.copytree(dumps / name, folder / name)
    overwrite(folder / "fsdp", 1, WRONG, 100 * 64 + 3, ONE)
    assert (
        compare.main(
            [str(folder / name) for name in ("ddp", "fsdp", "reference")] + ["--output_dir", str(folder)]
        )
        == 1
    )
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def recordings(new_folder):
    """Pages of two ranks: of FSDP2, one of which has 1.5 times its shard of a gradient; of DDP, one of which clips by another norm."""
    folder = new_folder("recorded")
    bugs = {"fsdp": {"bug": "one shard"}, "ddp": {"bug": "norm of each rank", "clip": 0.01}}
    run_groups(
        [(2, "recorded_loops:plain", folder / kind, {"kind": kind, **bug}) for kind, bug in bugs.items()],
        timeout=120,
    )
    assert [judge.main([str(folder / kind / "run")]) for kind in bugs] == [1, 1]
    pages = {kind: (folder / kind / "run" / "report.html").read_text() for kind in bugs}
    return {**pages, "folder": folder}


def test_a_comparison_in_numbers(failed, dumps):
    content = payload(failed)
    assert (content["kind"], content["verdict"]) == ("verification", "FAIL")
    assert [view["verdict"] for view in content["views"]] == ["PASS", "FAIL"]
    step, name, what = content["views"][1]["first"]
    assert (step, name) == (1, WRONG) and "relative error" in what
    assert content["views"][1]["ranks"][3] == {"dp": 1, "tp": 1}
    assert dict(content["found_out"])["versions"].startswith("torch")
    assert content["heads"] == {"": [4, 2, None, 64]}
    assert content["losses"]["labels"] == [view["label"] for view in content["views"]]
    # The noise floor is that of the tokens of the captured batch which are rounded independently.
    ddp = Dump(dumps / "ddp")
    captured = [step for number, step in ddp.steps.items() if number]
    assert 1 <= captured[0]["independent_tokens"] <= tokens_per_step(ddp.run["config"])
    assert content["losses"]["floor"] == pytest.approx(floors(ddp.run, captured)[0], rel=1e-3)
    assert content["losses"]["floor"] > floors(ddp.run, [{**captured[0], "independent_tokens": None}])[0]
    for table in content["tables"]:
        assert {len(column) for column in (table["names"], *table["columns"].values())} == {178}
    table, place = row_of(content, 1, 1, WRONG)
    assert (
        place in table["far"]
        and table["columns"]["largest"][place] > table["columns"]["tolerated_largest"][place]
    )


def test_where_the_error_lies(failed):
    """One element is wrong, in the shard of rank 3, whose rows are cut along tp, then along dp."""
    content = payload(failed)
    table, place = row_of(content, 1, 1, WRONG)
    picture = table["pictures"][str(place)]
    assert (
        picture["shape"] == [128, 64]
        and picture["wrong"] == 1
        and picture["slices"] == [[[100, 1]], [[3, 1]]]
    )
    index, own, reference = picture["elements"][0]
    assert (index, own) == ([100, 3], 1.0) and abs(reference) < 0.1
    view = content["views"][1]
    assert view["placements"][view["placed"][str(content["names"][WRONG])]] == [
        [128, 64],
        {"dp": 0, "tp": 0},
    ]


def test_a_picture_of_the_nearest_where_nothing_is_wrong(dumps, tmp_path):
    folders = [str(dumps / name) for name in ("ddp", "fsdp", "reference")]
    assert compare.main([*folders, "--output_dir", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    content = payload(text)
    counts = [count for view in content["views"] for count in view["counts"].values()]
    nearest = max((count["worst"] for count in counts), key=lambda one: one[2])
    assert content["verdict"] == "PASS" and f"The nearest came to {nearest[2]} of what is tolerated" in text
    for table in content["tables"]:
        assert table["far"] == [] and (table["alone"] or 8 <= len(table["pictures"]) <= 16)
    assert [len(table["names"]) for table in content["tables"]] == [178, 96] * 4
    assert all(view["by_itself"].startswith("all 192 tensors are right") for view in content["views"])
    files.require_ours(tmp_path / "report.html", "x", files.REPORTS["report.html"])


def test_a_tensor_that_is_too_large_has_no_picture(dumps, tmp_path, monkeypatch):
    """Of the four nearest of a pass, those of at most 64 elements have one."""
    monkeypatch.setattr(judgement, "LARGEST_NEAR", 64)
    folders = [str(dumps / name) for name in ("ddp", "fsdp", "reference")]
    assert compare.main([*folders, "--output_dir", str(tmp_path)]) == 0
    tables = payload((tmp_path / "report.html").read_text())["tables"]
    shapes = [one["shape"] for table in tables for one in table["pictures"].values()]
    assert 0 < len(shapes) < 16 * len(tables) and all(math.prod(shape) <= 64 for shape in shapes)


def test_two_dumps_without_a_reference(dumps, tmp_path):
    compare.main([str(dumps / "ddp"), str(dumps / "fsdp"), "--output_dir", str(tmp_path)])
    content = payload((tmp_path / "report.html").read_text())
    assert "compared with each other" in content["lead"]
    assert all(table["pictures"] == {} for table in content["tables"])


def test_a_recording_has_both_ways(recordings):
    content = payload(recordings["fsdp"])
    assert (content["kind"], content["verdict"]) == ("recording", "FAIL")
    assert [view["label"] for view in content["views"]] == ["each module by itself", "from the batch"]
    by_itself, from_batch = content["views"]
    assert by_itself["first"][:2] == [1, SHARD] and from_batch["first"] is None
    for number, view in enumerate(content["views"]):
        assert view["counts"][view["name"]]["far"] == 2
        table, place = row_of(content, number, 1, SHARD)
        assert table["pictures"][str(place)]["slices"] == [[[32, 32]], [[0, 128]]]
        boxes = view["placements"][view["placed"][str(content["names"][SHARD])]]
        assert boxes == [[[[start, 0], [32, 128]]] for start in (0, 32)]
    found_out = dict(content["found_out"])
    assert found_out["optimizer"] == "torch.optim.adamw.AdamW"
    assert content["title"].startswith("Qwen2ForCausalLM, 107,072 parameters")
    assert "Qwen2ForCausalLM" in found_out["model"] and "transformers " in found_out["versions"]
    assert content["command"].startswith("python ") and content["command"] == found_out["command of the run"]
    made = {"script", "mesh", "precision", "device", "seed"}
    assert made < found_out.keys() and "not recorded" not in {found_out[name] for name in made}
    assert found_out["mesh"] == "2 ranks; groups of ranks: 0, 1"
    cut = [dict(payload(recordings[kind])["found_out"])["sharding"] for kind in ("fsdp", "ddp")]
    assert cut == [f"{count} of 26 weights are cut between ranks" for count in (26, 0)]
    assert (found_out["precision"], found_out["device"]) == ("weights in float32", "cpu")
    # The first wrong tensor is the headline, and its errors are said once.
    assert content["lead"].startswith("step 1: 1 of 26 gradients is too far") and content["causes"] == []
    assert by_itself["first"][2].startswith("rows 32 to 63 of 64 are 1.5 times what they should be (")
    assert not any("from the batch, relative error" in one for one in content["sentences"])
    table, place = row_of(content, 0, 1, "forward/model.layers.0.mlp")
    assert re.fullmatch(r"micro batch \d, rank \d", table["where"][str(place)])


def test_ranks_on_which_an_output_is_too_far(recordings):
    """Weights differ between ranks in step 2, so outputs are too far on one of them. Negative control: in step 1, no row names a rank."""
    tables = payload(recordings["ddp"])["tables"]
    found = [table["ranks"] for table in tables if table["view"] == 1]
    assert found[0] == {} and found[1]
    assert all(sorted(ranks) == ["0", "1"] for ranks in found[1].values())
    assert all(min(ranks.values()) < 1 < max(ranks.values()) for ranks in found[1].values())


def test_a_batch_that_is_wrong_has_a_picture(dumps, tmp_path):
    """Of its samples and positions. Negative control: a batch that is right has none."""
    for name in ("ddp", "fsdp", "reference", "replay_ddp", "replay_fsdp"):
        shutil.copytree(dumps / name, tmp_path / name)
    overwrite(tmp_path / "fsdp", 1, "batch/input_ids", 3, 1)
    folders = [str(tmp_path / name) for name in ("ddp", "fsdp", "reference")]
    assert compare.main([*folders, "--output_dir", str(tmp_path)]) == 1
    content = payload((tmp_path / "report.html").read_text())
    step, name, what = content["views"][1]["first"]
    assert (step, name) == (1, "batch/input_ids")
    assert re.fullmatch(r"1 of \d+ is not what was to be fed, first at \[0, 3\]: 1, not \d+", what)
    for view in (0, 1):
        table, place = row_of(content, view, 1, "batch/input_ids")
        picture = table["pictures"].get(str(place))
        assert (picture and picture["slices"]) == (None if view == 0 else [[[0, 1]], [[3, 1]]])


def test_copies_that_differ_in_a_recording(recordings):
    """In each element that is not zero, of every gradient. Negative control: FSDP2's ranks hold nothing twice."""
    content = payload(recordings["ddp"])
    found = {name: found for step, name, *found in content["views"][0]["differing"] if step == 1}
    assert {name for name in content["names"] if name.startswith("gradient/")} <= found.keys()
    # Clipped by norms of 1.037148 and 1.140863
    apart = pytest.approx([1 - 1.037148 / 1.140863], rel=1e-2)
    assert found["gradient/model.layers.0.self_attn.q_proj.weight"] == [[1], [64 * 64], apart, True]
    assert payload(recordings["fsdp"])["views"][0]["differing"] == []


def test_copies_that_differ_are_the_first_of_a_recording(recordings):
    """Gradients of the ranks differ in step 1, and what is too far follows from them in step 2. Negative control: FSDP2's, as above."""
    by_itself, from_batch = payload(recordings["ddp"])["views"]
    step, name, what = from_batch["first"]
    assert (step, name.split("/")[0], what) == (1, "gradient", "not the same on all ranks that hold it")
    assert by_itself["first"] is None


def test_a_recording_has_its_causes(recordings):
    """Without what they explain, which is the headline. Negative control: FSDP2's, of which none is known."""
    content = payload(recordings["ddp"])
    (first, _), (second, _) = content["causes"]
    assert re.fullmatch(r"the gradients were clipped by different norms, [\d.]+ and [\d.]+", first)
    assert second.startswith("rank 0 clipped by a norm of ")
    assert "clipped" not in content["lead"]
    for kind, expected in (("ddp", first), ("fsdp", "not explained: no cause that Lockstep knows")):
        text = " ".join(Elements(recordings[kind]).texts)
        assert re.search(rf"Cause\s+{re.escape(expected)}", text)


def test_the_headline_of_a_recording_has_no_cause(recordings, tmp_path):
    """Nor what a plain sentence says behind its colon; the cause has all of it."""
    recording = Recording(recordings["folder"] / "fsdp" / "run")
    for said, lead, cause in (
        ("ranks differ: more of it", "step 1: ranks differ", "ranks differ: more of it"),
        (
            Wrong("the gradient is twice", ", which is dp"),
            "step 1: the gradient is twice",
            "the factor is dp",
        ),
    ):
        page_recording.write(recording, [StepVerdict(1, wrong=[said])], RunVerdict(1))
        content = payload((recording.folder / "report.html").read_text())
        assert (content["lead"], content["causes"]) == (lead, [[cause, ""]])


def test_what_of_a_sentence_is_a_cause():
    """It stays so where steps are judged in other processes."""
    said = "the gradient is 2 times that of the mean"
    for why, cause in (
        (", which is the world size", "the factor is the world size"),
        (": each rank has its own", "each rank has its own"),
        ("; they were not reduced", "the gradients were not reduced"),
        ("", ""),
    ):
        one = pickle.loads(pickle.dumps(Wrong(said, why)))
        assert (one, one.what, one.cause) == (said + why, said, cause)


@pytest.mark.parametrize(
    "wrong, first",
    [
        (["update/a", "gradient/a"], "gradient/a"),
        (["gradient norm", "gradient/a"], "gradient/a"),
        (["backward/b", "loss of micro batch 0, rank 0", "forward/c"], "forward/c"),
        (["backward/b", "loss of micro batch 0, rank 0"], "loss of micro batch 0, rank 0"),
    ],
)
def test_the_order_of_what_is_wrong_in_a_recording(wrong, first):
    """Whatever the order in which it was found; of one part, what was found first. Of two steps, the first."""
    rows = [(1, name, "", "") for name in wrong]
    assert min(rows, key=_when)[1] == first
    assert min([*rows, (1, f"{first} again", "", ""), (0, "update/z", "", "")], key=_when)[1] == "update/z"
    assert min([*rows, (1, f"{first} again", "", "")], key=_when)[1] == first


def test_heads_of_a_recording_are_those_of_each_attention(recordings):
    heads = payload(recordings["fsdp"])["heads"]
    assert heads == {f"model.layers.{layer}.self_attn": [4, 2, None, 64] for layer in range(2)}


class Elements(HTMLParser):
    """The tags of a page, and the texts in them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)


def test_what_comes_from_a_file_is_no_markup():
    page = comparison("FAIL")
    text = writing.html(page)
    assert HOSTILE in page.views[1].causes[0][1]
    found = Elements(text)
    assert [tag for tag, _ in found.tags].count("script") == 2 and not any(
        tag == "img" for tag, _ in found.tags
    )
    assert any(HOSTILE in one for one in found.texts)
    assert f"forward/{HOSTILE}" in payload(text)["names"] and HOSTILE not in text


def test_markup_would_be_seen():
    """Negative control."""
    found = Elements(writing.html(comparison("PASS")).replace("a note", HOSTILE))
    assert any(tag == "img" for tag, _ in found.tags)


def test_only_its_own_script_may_run():
    text = writing.html(comparison("PASS"))
    (policy,) = (one["content"] for tag, one in Elements(text).tags if one.get("http-equiv"))
    assert policy.startswith("default-src 'none'; ") and "script-src 'sha256-" in policy
    own = {"http://www.w3.org"}
    assert {url for url in re.findall(r"https?://[\w.]+", text) if url not in own} <= {
        "https://github.com"
    }  # in a comment


@pytest.mark.parametrize("changes", [{"views": [], "tables": []}, {"losses": None}, {"found_out": []}])
def test_what_is_missing_is_left_out(changes):
    page = comparison("FAIL")
    for key, value in changes.items():
        setattr(page, key, value)
    assert writing.html(page).startswith("<!doctype html>\n<!-- Lockstep: ")


def test_no_tensor_was_judged():
    assert "the gradient is not finite" in writing.html(
        Page("recording", "FAIL", "", "the gradient is not finite", [], [])
    )


@pytest.mark.parametrize("shape", [(), (1,), (100,), (3, 200), (2, 3, 70), (2, 2, 5, 3)])
def test_pictures_of_every_shape(shape):
    reference = torch.arange(math.prod(shape)).reshape(shape).float()
    own = reference.clone()
    last = tuple(length - 1 for length in shape)
    own[last] += 0.5
    found = draw(own, reference, 1e-3, 1e-3)
    if not shape:  # a number is drawn as a vector of one
        own, reference, shape, last = own[None], reference[None], (1,), (0,)
    rows = math.prod(shape[:-1])
    down, across = (-(-length // size) for length, size in zip((rows, shape[-1]), found.blocks, strict=True))
    assert len(found.cells) == down * across <= SIDE**2
    assert found.cells.strip(".") == LEVELS[-1] and found.cells[-1] == LEVELS[-1]
    assert (found.wrong, found.largest) == (1, 0.5) and found.elements == [
        (list(last), float(own[last]), float(reference[last]))
    ]
    assert found.slices == [[[place, 1]] for place in last]


def test_many_runs_of_wrong_slices():
    """Six of them are listed, and one that holds all others."""
    reference = torch.zeros(1, 40)
    own = reference.clone()
    own[0, ::2] = 1.0
    across = draw(own, reference, 1e-3, 1e-3).slices[1]
    assert across == [*([place, 1] for place in range(0, 12, 2)), [12, 27]]


def test_a_picture_of_what_is_not_finite_and_of_what_is_equal():
    reference = torch.ones(4, 4)
    same = draw(reference, reference, 0.0, 0.0)
    assert set(same.cells) == {"."} and (same.wrong, same.largest, same.elements) == (0, 0.0, [])
    own = reference.clone()
    own[0, 0], own[1, 1], own[2, 2] = math.nan, math.inf, 1.001
    found = draw(own, reference, 1e-6, 1e-6)
    assert found.cells[0] == found.cells[5] == "!" and found.cells[10] == LEVELS[-1] and found.wrong == 3
    assert found.largest == pytest.approx(1e-3, rel=1e-3)


def test_numbers_are_short_and_finite():
    assert (short(1.23456789e-7), short(math.inf), short(math.nan)) == (1.235e-7, None, None)


def test_fifty_thousand_tensors_are_less_than_five_megabytes():
    page = large(wrong=True)
    counts = [(table.alone, sum(count for _, count in table.names)) for table in page.tables]
    assert sum(count for alone, count in counts if not alone) == 50_000
    assert sum(count for alone, count in counts if alone) > 20_000
    assert len(writing.html(page).encode()) < 5_000_000


def test_a_page_has_a_limit_of_pictures():
    """However many steps are wrong. Those of the first are kept."""
    page = large(wrong=True)
    rows = [row(3, f"gradient/{number}", wrong=True) for number in range(100)]
    page.add(page.views[0], 3, rows, {})
    assert [len(table.pictures) for table in page.tables if table.step == 3] == [0]
    assert sum(len(table.pictures) for table in page.tables) == PICTURES
