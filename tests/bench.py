"""What credit costs: whole steps with every credit method, side by side in one process.

    python tests/bench.py                        # every script, the embedded default
    python tests/bench.py --repeats 9 grpo_oar   # one script, more repeats

Each repeat runs one step (rollout, score, credit, update) of every method, in turn, on the same
prompts from the same adapter, after a warm-up of each. Printed are medians with the quartiles of
the step's seconds, and the median of the ratio to `uniform` of the same script and repeat: a
machine whose speed drifts slows both.
"""

import argparse
import importlib
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PHASES = ("seconds_rollout", "seconds_score", "seconds_credit", "seconds_update")


def prepare(module, credit: str) -> SimpleNamespace:
    """A run of one method whose adapter has moved: two steps are the warm-up as well."""
    args = module.parse_args(["--credit", credit, "--warmup_steps", "0"])
    tokenizer, train_set, _ = module.load_data(args)
    run = module.build_run(args, tokenizer, module.Grader())
    bench = SimpleNamespace(module=module, credit=credit, run=run, data=train_set)
    for rollout in range(2):
        step(bench, rollout)
    return bench


def step(bench: SimpleNamespace, rollout: int) -> dict[str, float]:
    """Seconds of one whole step, and of its phases."""
    module, run, began = bench.module, bench.run, time.perf_counter()
    batch, _, _ = module.collect(run, rollout, *bench.data)
    seconds = {"seconds_rollout": time.perf_counter() - began}
    seconds |= module.score(run, batch, True)
    for index in module.update_rows(run.args, batch):
        seconds |= module.update(run, batch, index, True)
    return {name: seconds[name] for name in PHASES} | {"step": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("scripts", nargs="*", default=[p.stem for p in ROOT.glob("grpo_*.py")])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print("| script | credit | step, s | quartiles | " + " | ".join(PHASES) + " | over uniform |")
    print("|---|---|---|---|" + "---|" * 5)
    for name in options.scripts:
        module = importlib.import_module(name)
        module.use_every_core()
        credits = get_args(get_type_hints(module.Args)["credit"])
        benches = [prepare(module, credit) for credit in credits]
        timings = {bench.credit: [] for bench in benches}
        for repeat in range(options.repeats):
            for bench in benches:
                timings[bench.credit].append(step(bench, 2 + repeat))
        for credit, rows in timings.items():
            whole = [row["step"] for row in rows]
            ratios = [a["step"] / b["step"] for a, b in zip(rows, timings["uniform"], strict=True)]
            low, middle, high = statistics.quantiles(whole, n=4)
            phases = " | ".join(f"{statistics.median(r[p] for r in rows):.2f}" for p in PHASES)
            print(
                f"| {name} | {credit} | {middle:.2f} | {low:.2f} - {high:.2f} | {phases} | "
                f"{statistics.median(ratios):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
