"""Names in a sentence."""


def listed(names: list[str]) -> str:
    """The first three of them, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def and_more(names: list[str]) -> str:
    """All of up to three names; of more, the first, and how many others there are."""
    shown, last = (names[:1], f"{len(names) - 1} more") if len(names) > 3 else (names[:-1], names[-1])
    return " and ".join([*([", ".join(shown)] if shown else []), last])
