"""Names in a sentence, cells in a table."""

from collections.abc import Sequence

from lockstep.ground.errors import printable


def listed(names: list[str]) -> str:
    """The first three of them, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def and_more(names: list[str]) -> str:
    """All of up to three names; of more, the first, and how many others there are."""
    shown, last = (names[:1], f"{len(names) - 1} more") if len(names) > 3 else (names[:-1], names[-1])
    return " and ".join([*([", ".join(shown)] if shown else []), last])


def in_markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose first row is the head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]]


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table for a terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return [printable(line, 300) for line in lines]
