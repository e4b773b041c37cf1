"""Whether a tokenizer.json can be used: exit status 0, or 2 and one line. A process of its own, with limited memory.

python -m lockstep.inputs.tokenizer_trial PATH
"""

import io
import resource
import sys
from pathlib import Path

from lockstep import files
from lockstep.errors import UserError, first_line, printable, run_program
from lockstep.inputs.tokenizer import LARGEST, load, raise_unless_ours

MEMORY = 4 << 30  # bytes of address space
KEYS = {
    "version",
    "truncation",
    "padding",
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "model",
}
TEXT = (
    "The quick brown fox: it's 1,234.50! \t\n Zwölf Bären, 漢字かな, مرحبا, \U0001f600 \x00 aaaa"
    + "b" * 300
    + "\r\n\n  end"
)


def check(path: Path) -> None:
    """Raise UserError for a file that is wrong although the library might accept it."""
    content = files.read_json(path, limit=LARGEST)
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise UserError(f"{path}: not a tokenizer.json (no key 'model'); fetch it again")
    unknown = sorted(content.keys() - KEYS)
    if unknown:
        raise UserError(f"{path}: not a tokenizer.json (unknown key {_short(unknown[0])}); fetch it again")
    model = content["model"]
    if model.get("dropout"):
        raise UserError(
            f"{path}: its dropout is {_short(model['dropout'])}: each run would have other tokens; set it to null"
        )
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        wrong = next(
            (
                f"{_short(word)}: {_short(id_)}"
                for word, id_ in vocabulary.items()
                if type(id_) is not int or id_ < 0
            ),
            None,
        )
        if wrong:
            raise UserError(f"{path}: vocabulary entry {wrong} is not a token id; fetch it again")
        if len(set(vocabulary.values())) < len(vocabulary):
            raise UserError(f"{path}: two words of its vocabulary have one id; fetch it again")


def _short(value: object) -> str:
    return printable(repr(value), 60)


def main() -> int:
    path = Path(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        check(path)
        tokenizer = load(path)
        tokenizer.encode(TEXT, add_special_tokens=False)
    except MemoryError as error:
        raise UserError(
            f"{path}: needs more than {MEMORY >> 30} GiB of memory; it is damaged, fetch it again"
        ) from error
    except UserError:
        raise
    except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception
        raise_unless_ours(error)
        raise UserError(f"{path}: fails on a piece of text ({first_line(error)}); fetch it again") from error
    return 0


if __name__ == "__main__":
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")
    raise SystemExit(run_program("tokenizer_trial", main))
