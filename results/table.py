"""Write results/loss_curves.md, the verdicts on loss and gradient norm stored here: python results/table.py"""

import json
from pathlib import Path

HERE = Path(__file__).parent
RUNS = {
    "tiny-qwen2-fp32-lr1e-5": "tiny, fp32, lr 1e-5",
    "tiny-qwen2-fp32-lr1e-3": "tiny, fp32, lr 1e-3",
    "tiny-qwen2-autocast-lr1e-5": "tiny, autocast, lr 1e-5",
    "tiny-qwen2-autocast-lr1e-3": "tiny, autocast, lr 1e-3",
}


def page() -> str:
    lines = [
        "# Loss curves",
        "",
        "Made by `python results/table.py` from the `verdict.json` of each folder. TP=2 x DP=2 against DDP over 2 ranks. Losses in nats,",
        "the gradient norm relative to DDP's. In brackets the largest difference that is tolerated at any step.",
        "",
        "| run | strategy | first loss | max difference | mean difference | grad norm | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for folder, what in RUNS.items():
        content = json.loads((HERE / folder / "verdict.json").read_text())
        bound = content["tolerance"]
        for v in content["verdicts"]:
            pairs = [
                (abs(v["first_diff"]), bound["first"]),
                (v["max_abs_diff"], bound["maximum"]),
                (v["mean_abs_diff"], bound["mean"]),
                (v["max_grad_norm_diff"], max(bound["grad_norm"])),
            ]
            cells = " | ".join(f"{value:.1e} (<= {limit:.1e})" for value, limit in pairs)
            lines.append(
                f"| {what} | {v['label'].split(' (')[0]} | {cells} | {'PASS' if v['passed'] else 'FAIL'} |"
            )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    (HERE / "loss_curves.md").write_text(page())
