"""Lines that move on a terminal and stay elsewhere; lines in a log that are for a person."""

import io
import re

from lockstep.ground import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def steps(screen, count=25):
    with progress.shown_on(screen):
        shown = progress.Steps("FSDP", count, 10)
        for number in range(1, count + 1):
            shown.add({"step": number, "loss": 5.0, "grad_norm": 1.0, "tokens": 64}, 3 << 29)
        progress.screen.note("FSDP: done")


def test_plain_lines_elsewhere():
    stream = io.StringIO()
    steps(progress.Screen(stream))
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "FSDP: step 1/25",
        "FSDP: step 10/25",
        "FSDP: step 20/25",
        "FSDP: done",
    ]
    assert lines[0] == "FSDP: step 1/25  loss 5.000000  grad norm 1.0000  1.50 GiB"
    assert re.fullmatch(
        r"FSDP: step 10/25  loss 5.000000  grad norm 1.0000  0 s left  \d+ tokens/s  1.50 GiB", lines[1]
    )
    assert "\r" not in stream.getvalue()


def test_one_line_that_moves_on_a_terminal():
    stream = Terminal()
    steps(progress.Screen(stream))
    assert stream.getvalue().count("\n") == 1 and stream.getvalue().endswith("\r\x1b[KFSDP: done\n")


def test_a_line_that_moves_is_not_wrapped(monkeypatch):
    """A second line of it could not be replaced. Negative control: a line that stays is whole."""
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    screen = progress.Screen(stream)
    screen.state("x" * 50, stays=False)
    screen.note("y" * 50)
    assert stream.getvalue() == "\r\x1b[K" + "x" * 29 + "\r\x1b[K" + "y" * 50 + "\n"


def test_a_screen_is_left_below_its_moving_line():
    stream = Terminal()
    screen = progress.Screen(stream)
    for line in ("x", "y"):
        with progress.shown_on(screen):
            screen.state(line, stays=False)
    screen.leave()
    assert stream.getvalue() == "\r\x1b[Kx\n\r\x1b[Ky\n"


def test_quiet_shows_the_last_line_alone(capsys):
    stream = Terminal()
    screen = progress.Quiet(stream)
    steps(screen)
    with progress.shown_on(screen), progress.working("Building"):
        assert screen.take("@lockstep note hello\n") and not screen.take("hello\n")
    screen.last("done")
    assert stream.getvalue() == "done\n"


def test_what_is_relayed_through_a_log_is_shown_and_nothing_else(capsys):
    steps(progress.Relay())
    log, stream = capsys.readouterr().out, io.StringIO()
    screen = progress.Screen(stream)
    others = ["(TrainController pid=7) Requesting resources"]
    taken = [screen.take(line) for line in [*log.splitlines(), *others]]
    assert taken == [True] * (len(taken) - 1) + [False]
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == [
        "FSDP: step 1/25",
        "FSDP: step 10/25",
        "FSDP: step 20/25",
        "FSDP: done",
    ]
    assert screen.take(
        "\x1b[36m(RayTrainWorker pid=1)\x1b[0m @lockstep note hello\n"
    ) and stream.getvalue().endswith("hello\n")


def test_work_is_announced_and_timed():
    stream = io.StringIO()
    with progress.shown_on(progress.Screen(stream)), progress.working("Building"):
        pass
    assert stream.getvalue().splitlines() == ["Building", "Building: done in 0 s"]


def test_durations():
    assert [progress.duration(each) for each in (0.4, 61, 7300)] == ["0 s", "1 min 1 s", "2 h 1 min"]
