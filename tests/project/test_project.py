"""pyproject.toml and environment.sh: what is installed is what there is, and nobody edits sys.path."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from programs import completed

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHON_FILES = [
    *ROOT.glob("*.py"),
    *(
        path
        for room in ("lockstep", "tests", "benchmarks", "examples", "findings", "results")
        for path in (ROOT / room).rglob("*.py")
    ),
]
EDIT = re.compile(r"\bsys\.path(\[[^]]*\]\s*\+?=[^=]|\.(insert|append|extend|remove)\b|\s*\+?=[^=])")


def test_every_script_at_the_root_is_installed():
    assert sorted(PROJECT["tool"]["setuptools"]["py-modules"]) == sorted(
        path.stem for path in ROOT.glob("*.py")
    )


def test_nobody_edits_sys_path():
    # Scripts are started as Python does, and the modules beside them found again, in their folder.
    like_python = [ROOT / "lockstep" / "record.py", ROOT / "lockstep" / "ground" / "user_file.py"]
    files = [path for path in PYTHON_FILES if path not in (Path(__file__), *like_python)]
    assert [path.name for path in files if EDIT.search(path.read_text())] == []


def test_an_edit_of_sys_path_would_be_seen():
    """Negative control."""
    assert all(
        EDIT.search(line) for line in ("sys.path.insert(0, x)", "sys.path[:0] = [x]", "sys.path += [x]")
    )


def test_every_extra_reads_a_file_of_pins():
    dynamic = PROJECT["tool"]["setuptools"]["dynamic"]
    for said in dynamic["optional-dependencies"].values():
        for name in [said["file"]] if isinstance(said["file"], str) else said["file"]:
            lines = [
                line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")
            ]
            assert lines and all(re.fullmatch(r"[\w-]+(\[\w+\])?==[\w.]+", line) for line in lines), name


def test_environment_finds_lockstep_from_any_folder(tmp_path):
    """Where it is not installed PYTHONPATH says where it is: an interpreter that satisfies the file is used as it is."""
    (tmp_path / "environment.sh").write_text((ROOT / "environment.sh").read_text())
    (tmp_path / "lockstep").mkdir()
    (tmp_path / "lockstep" / "__init__.py").write_text("")
    (tmp_path / "wanted.txt").write_text("# nothing\npytest==" + pytest.__version__ + "\n")
    script = 'cd / && source "$0" wanted.txt && "$PYTHON" -P -c "import lockstep; print(lockstep.__file__)"'
    done = completed(
        ["bash", "-c", script, tmp_path / "environment.sh"],
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.strip() == str(tmp_path / "lockstep" / "__init__.py"), done.stderr


# The field's words: what the table in CONTRIBUTING.md says not to write.
AVOIDED = re.compile(r"\btruths?\b|\bspacings?\b|\broundings\b|\bone rounding\b|\bmistakes?\b", re.IGNORECASE)
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def test_the_words_are_those_of_the_field():
    files = [path for path in (*PYTHON_FILES, *PAGES, *ROOT.glob("*.sh")) if path != Path(__file__)]
    found = {path.name: AVOIDED.findall(path.read_text()) for path in files}
    assert {name: words for name, words in found.items() if words and name != "CONTRIBUTING.md"} == {}
    assert found["CONTRIBUTING.md"], "negative control: its table has them"


def files_named(page):
    """The files and folders of this repository that a page names."""
    pattern = r"`((?:lockstep|benchmarks|tests|examples|findings|docs)/[\w./-]*)`"
    return set(re.findall(pattern, page.read_text()))


def test_pages_name_files_that_exist():
    named = {(page.name, name) for page in PAGES for name in files_named(page)}
    assert len(named) > 20
    assert [(page, name) for page, name in sorted(named) if not (ROOT / name).exists()] == []


def anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ +(.+?) *$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def broken_links(page):
    """The relative links of a page to a file, or a heading, that is not there."""
    broken = []
    for target, anchor in re.findall(r"\]\(([^)\s#:]*)(?:#([\w-]*))?\)", page.read_text()):
        other = page.parent / target if target else page
        if not other.exists() or (anchor and anchor not in anchors(other)):
            broken.append(f"{target}#{anchor}" if anchor else target)
    return broken


def test_pages_link_to_what_exists():
    pages = [*PAGES, *ROOT.glob("results/*.md")]
    assert {page.name: broken_links(page) for page in pages if broken_links(page)} == {}


def test_a_file_that_is_gone_would_be_seen(tmp_path):
    """Negative control."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\nsee `lockstep/dump.py`, [that](gone.md), [this](page.md#a-page), [not this](#another) and `python -m lockstep.train`"
    )
    (name,) = files_named(page)
    assert (
        name == "lockstep/dump.py"
        and not (ROOT / name).exists()
        and broken_links(page) == ["gone.md", "#another"]
    )
