"""Makes the pictures of docs/page.md: a PASS, a planted bug and a study, each light, dark and on a narrow screen.

    python docs/screenshots.py

Trains for some minutes. Needs Chromium and `pip install -r requirements-page.txt`.
"""

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
FAULT = "last_uneven_shard_never_updates"
STUDY = """
title = "FSDP2 and ZeRO beside DDP"
about = "Each run trains the same model from the same weights on the same batches."
tensors = 1
[shared]
dp_size = 2
batch_size = 2
seq_length = 64
debug_steps = 10
[control]
[runs.fsdp]
strategy = "fsdp"
tp_size = 1
[runs.fsdp-tp]
strategy = "fsdp"
[runs.zero3]
strategy = "deepspeed"
tp_size = 1
zero_stage = 3
"""
COLOURS = 256  # of a file: it has half the size
# How a page is looked at: width, height and colours
LOOKS = {"": (1240, 1900, "light"), "_dark": (1240, 1900, "dark"), "_narrow": (400, 1900, "light")}


def run(folder: Path, program: str, *arguments: str, status: int = 0) -> None:
    """From the folder, so that the pages name no other."""
    done = subprocess.run(
        [sys.executable, ROOT / program, *arguments], cwd=folder, capture_output=True, text=True
    )
    if done.returncode != status:
        raise SystemExit(f"{program} {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")


def pages(folder: Path) -> dict[str, Path]:
    """Trains, and returns the pages by name."""
    (folder / "study.toml").write_text(STUDY)
    run(folder, "run_verification.py", "--output_dir", "pass")
    run(folder, "run_faults.py", FAULT, "--strategy", "fsdp", "--output", "faults.json")
    run(folder, "run_study.py", "study.toml", "--output_dir", "study")
    found = {"pass": "pass", "bug": f"faults/{FAULT}-fsdp", "study": "study"}
    return {name: folder / at / "report.html" for name, at in found.items()}


def main() -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, path in pages(Path(folder)).items():
            for look, (width, height, colours) in LOOKS.items():
                tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=colours)
                tab.goto(path.as_uri())
                # A short page has no empty part below.
                shown = min(height, tab.evaluate("document.body.offsetHeight"))
                clip = {"x": 0, "y": 0, "width": width, "height": shown}
                picture = Image.open(io.BytesIO(tab.screenshot(clip=clip))).convert("RGB")
                picture.quantize(COLOURS).save(ROOT / "docs" / f"page_{name}{look}.png", optimize=True)
                tab.close()
        browser.close()


if __name__ == "__main__":
    main()
