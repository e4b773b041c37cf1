"""Every finding has a script of its own, and no script depends on the text of this repository."""

import re

import pytest
from programs import ROOT, in_process

SCRIPTS = sorted(path.name for path in (ROOT / "findings").glob("*.py") if path.name != "finding.py")


def test_every_script_is_named_on_the_page():
    page = (ROOT / "docs/findings.md").read_text()
    assert sorted(re.findall(r"python findings/(\w+\.py)", page)) == SCRIPTS
    assert "sed -i" not in page and "git worktree" not in page


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_uses_the_libraries_alone(name):
    source = (ROOT / "findings" / name).read_text()
    assert "lockstep" not in source.lower() and f"python findings/{name}" in source


@pytest.mark.parametrize(
    "body, status", [("return True, 'x'", 0), ("return False, 'x'", 1), ("raise ValueError", 3)]
)
def test_the_status_says_whether_it_holds(body, status, tmp_path, monkeypatch):
    """The rank that a script starts is a process of its own."""
    (tmp_path / "probe.py").write_text(
        f"from finding import settle\n\n\ndef check():\n    {body}\n\n\n"
        "if __name__ == '__main__':\n    raise SystemExit(settle(check, libraries=('torch',)))\n"
    )
    monkeypatch.syspath_prepend(ROOT / "findings")
    done = in_process(tmp_path / "probe.py")
    assert done.returncode == status, done.stderr
