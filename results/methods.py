"""Draws results/data/methods.png: one wrong completion of a policy under four methods.

    accelerate launch grpo_oar.py && python results/methods.py runs/grpo_oar-oar_g-1
    python results/methods.py runs/grpo_arca-uniform-2 8  # README's: of its third command, --seed 2

Takes the groups of decisive_tokens.py, and of their wrong completions the first.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from decisive_tokens import ROOT, measure

TITLES = {
    "arca": "ARCA: how far has the adapter moved the policy here?",
    "oar_p": "OAR-P: how does the answer change if this token is replaced?",
    "oar_g": "OAR-G: how does the answer change with this token's embedding?",
    "s_trace": "S-trace: which later tokens does its ratio reach?",
}
COLUMNS, FULL = (60, 92), 3.0  # characters a line; the weight that has the full tint


def draw(axis, title: str, tokens: list[dict], columns: int) -> None:
    """One completion as lines of monospaced text, each token on its tint."""
    axis.set_xlim(0, columns)
    axis.set_ylim(-1.3, 1.2)
    axis.axis("off")
    axis.text(0, 0.75, title, fontsize=12, fontweight="bold")
    x, y = 0, 0.0
    for token in tokens:
        text = token["text"].replace("\n", " ")
        if x + len(text) > columns:
            x, y = 0, y - 0.8
        share = min(token["weight"] / FULL, 1.0)
        tint = {"color": "#D55E00", "alpha": share, "linewidth": 0}
        axis.add_patch(plt.Rectangle((x, y - 0.27), len(text), 0.68, **tint))
        for i, character in enumerate(text):
            axis.text(x + i + 0.5, y, character, family="monospace", fontsize=11, ha="center")
        if token["role"] == "first_wrong":
            axis.plot([x, x + len(text)], [y - 0.3] * 2, color="black", linewidth=2)
        x += len(text)


def main() -> None:
    _, made = measure(sys.argv[1], sys.argv[1], *map(int, sys.argv[2:]))
    groups = {group["heading"]: group for group in made}
    wrong = {x: next(c for c in groups[x]["completions"] if c["reward"] == 0) for x in TITLES}
    texts = {x: [t for t in wrong[x]["tokens"] if not t["text"].startswith("<|")] for x in TITLES}
    least, most = COLUMNS
    columns = max(least, min(most, sum(len(token["text"]) for token in texts["arca"])))
    figure, axes = plt.subplots(len(TITLES), 1, figsize=(0.12 * columns, 4.4))
    for axis, (credit, title) in zip(axes, TITLES.items(), strict=True):
        draw(axis, title, texts[credit], columns)
    prompt, answer = (groups["arca"][name] for name in ("prompt", "answer"))
    figure.suptitle(f"{prompt}  (right: {answer})", x=0.02, ha="left")
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(ROOT / "results/data/methods.png", dpi=100)
    print(f"wrote {Path('results/data/methods.png')}")


if __name__ == "__main__":
    main()
