"""What loading a corpus costs, by its size: seconds and peak memory of a first run, which tokenizes, and of a second.

    python benchmarks/corpus_size.py --output results/corpus_size.json          1, 10, 100 and 1000 MB of text, some minutes

The text is the built-in corpus, repeated with other words put in. Each run is a process of its own, which loads the inputs and takes the
batches of 100 steps of all ranks. With a byte-level BPE tokenizer.json, which is slower, up to 100 MB.
"""

import argparse
import json
import os
import pickle
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from outputs import output

from lockstep.ground.files import write_result
from lockstep.inputs.architectures import TINY_QWEN2
from lockstep.plan import command_line
from lockstep.plan.config import BASELINE
from lockstep.training import preflight

SIZES, SIZES_BPE = (1, 10, 100, 1000), (1, 10, 100)  # MB
STEPS = 100


def write_text(path: Path, size: int) -> None:
    """`size` bytes of text or a little more."""
    from pydoc_data.topics import topics

    rng, lines = random.Random(0), "".join(topics[key] for key in sorted(topics)).splitlines()
    with open(path, "w", encoding="utf-8") as file:
        while file.tell() < size:
            for line in lines:
                file.write(
                    line + (f" {rng.choice(line.split())}{rng.randrange(10**6)}\n" if line.strip() else "\n")
                )


def write_bpe(folder: Path) -> None:
    """A model folder with a tokenizer.json of 2,000 tokens."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    tokenizer.train_from_iterator(topics.values(), trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({**TINY_QWEN2, "eos_token_id": 0}))


def peak_mib() -> int:
    """Of this process (ru_maxrss is at least what the process that started it had)."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10


def measure(flags: list[str]) -> None:
    """In this process; prints one line of JSON."""
    start = time.perf_counter()
    config = command_line.parse_config(BASELINE, flags)
    before = peak_mib()
    inputs = preflight.load_inputs(config)
    loaded = time.perf_counter()
    for step in range(STEPS):
        for dp_rank in range(config.dp_size):
            inputs.batches.windows(step, dp_rank)
    seconds = time.perf_counter() - loaded
    found = {
        "seconds_to_load": round(loaded - start, 3),
        "milliseconds_per_step": round(1e3 * seconds / STEPS, 3),
        "peak_mib_before": before,
        "peak_mib": peak_mib(),
        "tokens": len(inputs.batches.corpus.tokens),
        "bytes_sent_to_a_worker": len(pickle.dumps(inputs)),
    }
    print(json.dumps(found))


def machine() -> dict:
    words = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    names = {key.strip(): value.strip() for key, value in words.items()}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return {
        "processor": names.get("model name", platform.machine()),
        "cores": os.cpu_count(),
        "memory_gib": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest", type=int, default=max(SIZES), help="MB (default: %(default)s)")
    parser.add_argument("--output", type=output('{\n "machine": '))
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        text, model = Path(folder, "text.txt"), Path(folder, "model")
        write_bpe(model)
        for name, sizes in (("tiny-qwen2", SIZES), (str(model), SIZES_BPE)):
            for size in (each for each in sizes if each <= options.largest):
                write_text(text, size * 10**6)
                flags = [
                    "--model_name",
                    name,
                    "--dataset_name",
                    str(text),
                    "--data_cache_dir",
                    f"{folder}/cache",
                    "--device",
                    "cpu",
                ]
                for run in ("first", "second"):
                    command = [sys.executable, __file__, "--measure", *flags]
                    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                    tokenizer = "words by CRC" if name == "tiny-qwen2" else "byte-level BPE, 2000 tokens"
                    runs.append(
                        {"tokenizer": tokenizer, "text_mb": size, "run": run, **json.loads(done.stdout)}
                    )
                    print(runs[-1], flush=True)
    import numpy
    import tokenizers

    versions = {
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "tokenizers": tokenizers.__version__,
    }
    if options.output:
        write_result(
            options.output,
            json.dumps({"machine": machine(), "versions": versions, "runs": runs}, indent=1) + "\n",
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2:])
    else:
        main()
