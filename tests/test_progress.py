"""Lines that move on a terminal and stay elsewhere; lines in a log that are for a person."""

import io

from lockstep.ground import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def steps(screen, count=25):
    with progress.shown_on(screen):
        shown = progress.Steps("FSDP", count, 10)
        for number in range(1, count + 1):
            shown.add({"step": number, "loss": 5.0, "grad_norm": 1.0, "tokens": 64})
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
    assert "tokens/s" in lines[1] and lines[1].endswith(" left") and "\r" not in stream.getvalue()


def test_one_line_that_moves_on_a_terminal():
    stream = Terminal()
    steps(progress.Screen(stream))
    assert stream.getvalue().count("\n") == 1 and stream.getvalue().endswith("\r\x1b[KFSDP: done\n")


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
