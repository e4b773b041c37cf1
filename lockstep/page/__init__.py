"""The page of a verdict: report.html, one file that a browser opens from disk. docs/page.md describes it."""
