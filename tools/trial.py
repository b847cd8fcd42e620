"""Trains a method beside GRPO on the same seeds, and writes a page that says which one is better.

    pip install -r results/requirements.txt
    python tools/trial.py mine.py                  # on the wrong policy of results/README.md
    python tools/trial.py "mine.py --floor 0.2" --seeds 8 -- --model_name_or_path Qwen/Qwen3-1.7B \\
        --dataset_name openai/gsm8k --dataset_config main --max_completion_length 256

A method is a file as tools/fork.py describes it, or a script with CREDIT regions; with flags of its
own, put it in quotes. The flags after `--` go to all runs. First tools/worth.py measures the
method's gradient. Then GRPO, the method and, if it has one, its control --credit shuffled are
trained with the seeds 1, 2, 3, ... The page has learning curves, the differences that
tools/compare.py explains, and the commands.

After Ctrl-C or `kill -9` the same command goes on, and with more --seeds it trains those that are
missing. Runs are made again if the method, a flag, a reward function, the model, the data or the
code here has changed. They are in runs/trials/, where all methods share GRPO's.
"""

import argparse
import base64
import io
import multiprocessing
import re
import shlex
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import get_args, get_type_hints

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "results")]

import compare
import worth
from jinja2 import Template
from studies import STUDIES, cores, train_all

GRPO = "GRPO"
FOLDER = ROOT / "runs/trials"
PAGE = ROOT / "tools/trial_page.html"
Runs = dict[Path, list[str]]  # the commands of a method's runs, by their folders


def methods_of(method: str) -> dict[str, str]:
    """Returns by their names GRPO, the control if the method has one, and the method."""
    script, own_flags = worth.load_method(method)
    name = shlex.join([Path(shlex.split(method)[0]).stem, *own_flags])
    methods = {GRPO: shlex.join([str(ROOT / "grpo_arca.py"), *worth.PLAIN_FLAGS])}
    if "shuffled" in get_args(get_type_hints(script.Args)["credit"]) and not re.search(
        r"--credit\b", method
    ):
        methods[f"{name}, shuffled"] = f"{method} --credit shuffled"
    return methods | {name: method}


def runs_of(name: str, method: str, flags: list[str], setting: str, seeds: int) -> Runs:
    """Returns the runs of a method, and writes its script where no later change reaches it.

    They are in a folder whose name tells what they depend on.
    """
    path, *own_flags = shlex.split(method)
    text = worth.source_of(Path(path))
    plain_name = re.sub(r"[^\w.-]+", "_", name)
    folder = FOLDER / f"{plain_name}-{worth.digest(text, own_flags, setting)}"
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"grpo_{Path(path).stem.removeprefix('grpo_')}.py"
    script.write_text(text)
    if not (folder / "common").exists():
        (folder / "common").symlink_to(ROOT / "common")
    runs = {}
    for seed in range(1, seeds + 1):
        output = folder / f"{plain_name}-{seed}"
        words = [*flags, *own_flags, f"--seed={seed}", f"--output_dir={output}"]
        runs[output] = [sys.executable, str(script), *words]
    return runs


def write_page(measured: str, runs: dict[str, Runs]) -> None:
    """Writes the page of finished runs, the method's own last, and prints its tables."""
    groups = {name: [compare.read_run(folder) for folder in own] for name, own in runs.items()}
    *_, name = groups
    page = groups[name][0].folder.with_name("trial.html")
    table = compare.differences(groups)
    picture = io.BytesIO()
    compare.draw(groups, table, picture)
    tables = [compare.ends_of(groups), table[compare.SHOWN]]
    text = Template(PAGE.read_text(encoding="utf-8"), autoescape=True).render(
        name=name,
        rows=table.to_dict("records"),
        metric=groups[GRPO][0].metric,
        seeds=len(groups[GRPO]),
        picture=base64.b64encode(picture.getvalue()).decode(),
        tables=[
            own.to_html(index=False, float_format="%.3f", na_rep="", border=0) for own in tables
        ],
        measured=measured,
        command=shlex.join(["python", *sys.argv]),
        commands=[shlex.join(next(iter(own.values()))) for own in runs.values()],
    )
    page.write_text(text, encoding="utf-8")
    print(*map(compare.as_text, tables), page, sep="\n\n")


def main() -> None:
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", help='"file.py --flag value"')
    parser.add_argument("--seeds", type=int, default=4, help="how many, at least 2")
    parser.add_argument("--processes", type=int, default=1 if worth.trainer.CUDA else cores())
    parser.add_argument("--batches", type=int, default=100, help="for the worth; 0: do not measure")
    options = parser.parse_args(sys.argv[1:split])
    flags = sys.argv[split + 1 :] or STUDIES["wrong_policy"].command_line(1, "0.002")
    methods = methods_of(options.method)
    measured = ""
    if options.batches > 0:
        _, *own = methods.values()  # GRPO is always measured
        command = [
            sys.executable, str(ROOT / "tools/worth.py"), *own, f"--batches={options.batches}",
            f"--processes={options.processes}", "--", *flags,
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            sys.exit(done.returncode)  # it has said why
        measured = done.stdout
        print(measured)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        setting = pool.submit(worth.folder_name, tuple(flags)).result()  # and its memory is free
    runs = {arm: runs_of(arm, methods[arm], flags, setting, options.seeds) for arm in methods}
    commands: Runs = {}
    for of_one_seed in zip(*(own.items() for own in runs.values()), strict=True):
        commands.update(item for item in of_one_seed if not compare.has_ended(item[0]))
    updates = worth.trainer.parse_args(flags).max_steps * len(commands)
    train_all(commands, updates, options.processes)
    if not all(map(compare.has_ended, commands)):
        sys.exit("Not all runs have ended. The same command goes on.")
    write_page(measured, runs)


if __name__ == "__main__":
    main()
