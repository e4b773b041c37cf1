"""The loops of the tests (tests/record_bugs.py, tests/record_strangers.py), recorded on a GPU, whose ranks share it over gloo, and judged.

    PYTHONPATH=. python benchmarks/gpu_tests.py --output results/gpu_tests.json
    PYTHONPATH=. python benchmarks/gpu_tests.py Fused Recurrent                 some of them

What these files say of "cpu" is changed in copies of them, and tensors are made on the GPU. Exit status: 0 every verdict is the one that the
tests demand of the same loop on a CPU; 1 one is not, or a loop did not run.
"""

import argparse
import collections
import contextlib
import datetime
import io
import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_loops import DEVICE, in_processes
from outputs import output

from lockstep.ground.files import write_result

ROOT = Path(__file__).parents[1]
MODULES = ("record_bugs", "record_strangers")
VERDICTS = {0: "PASS", 1: "FAIL", 2: "not judged"}


def copied(folder: Path) -> None:
    """The loops, and what they import, for the GPU."""
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*folder.glob("tests/record*.py"), folder / "examples" / "record" / "trainer.py"):
        text = path.read_text().replace('"cpu"', f'"{DEVICE}"')
        made = "torch.Generator(torch.get_default_device())"
        path.write_text(text.replace("torch.Generator()", made))


def wanted() -> dict[str, tuple[str, int, int]]:
    """(module, steps, exit status of the judge) of each loop, by its name."""
    import test_record_bugs as bugs
    import test_record_strangers as strangers

    found = {name: ("record_bugs", 2, 1) for name in bugs.BUGS}
    found |= {name: ("record_bugs", 2, 0) for name in bugs.VARIANTS}
    found |= {name: ("record_strangers", 2, 1) for name in strangers.WRONG}
    found |= {name: ("record_strangers", 2, 0) for name in strangers.RIGHT}
    return found | {name: ("record_strangers", 2, 2) for name in strangers.REFUSED}


def train(module: str, name: str, folder: Path, steps: int) -> int:
    """Forks the ranks of a loop, and ends them all when one fails."""
    kind = getattr(sys.modules[module], name)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = []
    for rank in range(kind.ranks):
        pid = os.fork()
        if pid == 0:
            _be_rank(kind, rank, port, folder, steps)
        ranks.append(pid)
    status = 0
    while ranks:
        pid, ended = os.wait()
        ranks.remove(pid)
        if ended and not status:
            status = 1
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return status


def _be_rank(kind: type, rank: int, port: int, folder: Path, steps: int) -> None:
    size = str(kind.ranks)
    os.environ.update(RANK=str(rank), WORLD_SIZE=size, LOCAL_RANK="0", LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    status = 1
    try:
        torch.set_num_threads(1)
        torch.set_default_device(DEVICE)
        torch.backends.fp32_precision = "ieee"
        torch.backends.cudnn.conv.fp32_precision = torch.backends.cudnn.rnn.fp32_precision = "ieee"
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
        kind().run(folder, steps)
        dist.barrier()
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def judged(module: str, name: str, folder: Path, tests: Path) -> int:
    from lockstep import judge

    kind = getattr(sys.modules[module], name)
    given = ["--expect", kind.expected] if kind.expected else []
    if module == "record_strangers" and kind.LOSS:
        given += ["--loss", f"{tests / 'record_strangers.py'}:{kind.LOSS}"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = judge.main([str(folder), *given])
    (folder / "said.txt").write_text(said.getvalue())
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("loops", nargs="*", help="names (default: all)")
    parser.add_argument("--lanes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--limit", type=float, default=60, help="seconds of a loop")
    parser.add_argument("--work_dir", type=Path, default=Path("runs/gpu_tests"))
    parser.add_argument("--output", type=output('{\n "device": '), default=Path("runs/gpu_tests.json"))
    options = parser.parse_args()
    # This process forks, so it makes no CUDA context
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    folder = options.work_dir.absolute()
    path = os.pathsep.join(str(folder / room) for room in ("tests", "tests/recorded"))
    if not folder.is_dir():  # begins once more, where the copies are
        copied(folder)
        os.environ["PYTHONPATH"] = path + os.pathsep + os.environ["PYTHONPATH"]
        os.execv(sys.executable, [sys.executable, *sys.argv])
    assert os.environ["PYTHONPATH"].startswith(path), f"{folder} exists already; remove it first"
    loops = {name: row for name, row in wanted().items() if not options.loops or name in options.loops}
    begun = {
        name: (lambda name=name, row=row: train(row[0], name, folder / name, row[1]))
        for name, row in loops.items()
    }
    recorded = in_processes(begun, options.lanes, options.limit, folder)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    there = {name: row for name, row in loops.items() if (folder / name / "model.json").is_file()}
    ended = {
        name: (lambda name=name, row=row: judged(row[0], name, folder / name, folder / "tests"))
        for name, row in there.items()
    }
    status = in_processes(ended, 2 * options.lanes, options.limit, folder)
    found = {}
    for name, (_, _, right) in loops.items():
        verdict = VERDICTS.get(status.get(name, -1), "not recorded")
        said = (folder / name / "said.txt").read_text().splitlines() if name in status else []
        last = next((line for line in reversed(said) if line.strip() and not line.startswith("report")), "")
        found[name] = {"wanted": VERDICTS[right], "verdict": verdict, "said": last}
        if verdict != VERDICTS[right]:
            print(f"{name}: {verdict}, wanted {VERDICTS[right]}; {last[:200]} (recorded: {recorded[name]})")
    print(collections.Counter((one["wanted"], one["verdict"]) for one in found.values()))
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    content = {"device": device, "torch": torch.__version__, "loops": found}
    write_result(options.output, json.dumps(content, indent=1) + "\n")
    return int(any(one["wanted"] != one["verdict"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
