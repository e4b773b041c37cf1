"""The links of a table of runs (report.html): each leads to a page that is there, and to the view of its run."""

import json
import re
from html.parser import HTMLParser


class _Rows(HTMLParser):
    """Of each row of the table: its first cell, and what that links to; None if to nothing."""

    def __init__(self, text):
        super().__init__()
        self.found, self.cells, self.link = {}, [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.cells, self.link = [], None
        elif tag == "td":
            self.cells.append("")
        elif tag == "a":
            self.link = dict(attributes)["href"]

    def handle_data(self, data):
        if self.cells:
            self.cells[-1] += data

    def handle_endtag(self, tag):
        if tag == "tr" and self.cells:
            self.found[self.cells[0]] = self.link


def payload(path):
    return json.loads(re.search(r'id="payload">(.*?)</script>', path.read_text(), re.DOTALL)[1])


def pages(listing):
    """First cell -> (payload of the page that it links to, the linked view), None for a row without a link."""
    found = {}
    for run, link in _Rows(listing.read_text()).found.items():
        if link is None:
            found[run] = None
            continue
        path, _, name = link.partition("#")
        content = payload(listing.parent / path)
        (view,) = (view for view in content["views"] if view["name"] == name)
        found[run] = content, view
    return found
