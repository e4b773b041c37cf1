"""Write a page: the template with payload, styles and scripts inside, so that the one file needs no network."""

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from lockstep.ground.files import plain, write_result
from lockstep.page.payload import Page

HERE = Path(__file__).parent
ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)
STYLES = ("vendor/uPlot.min.css", "page.css")
SCRIPTS = (
    "vendor/uPlot.iife.min.js",
    "data.js",
    "map.js",
    "picture.js",
    "tensor.js",
    "ranks.js",
    "losses.js",
    "laid_over.js",
    "issue.js",
    "page.js",
)


def write(page: Page, folder: Path) -> None:
    """Write report.html into a folder. Nothing in it that comes from a file is taken for markup or script."""
    write_result(folder / "report.html", html(page))


def html(page: Page) -> str:
    """Return report.html as text."""
    text = json.dumps(plain(page), allow_nan=False, separators=(",", ":"))
    payload = text.replace("<", "\\u003c")
    return _rendered("page.html.jinja", SCRIPTS, page=page, payload=payload)


def write_listing(
    path: Path,
    title: str,
    said: Sequence[str],
    heads: Sequence[str],
    lines: Sequence[tuple[Sequence[str], str]],
    verdict: str = "",
) -> None:
    """Write a table of runs to sort and to filter.

    `said` are the sentences above the table, and `heads` the titles of its columns. `lines` has a row for each run: its cells, and what
    the first cell links to, "" if to nothing.
    """
    given = {"title": title, "said": said, "heads": heads, "lines": lines, "verdict": verdict}
    write_result(path, _rendered("listing.html.jinja", ("listing.js",), **given))


def _rendered(template: str, scripts: Sequence[str], **given: Any) -> str:
    """Return a page with its styles and scripts inside. No other script may run, and nothing is loaded."""
    script, styles = ("\n".join(map(_read, names)) for names in (scripts, STYLES))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return ENVIRONMENT.get_template(template).render(script=script, styles=styles, digest=digest, **given)


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
