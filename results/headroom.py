"""Which credit helps a policy that is wrong? Oracles and methods against GRPO, paired by seed.

    python results/headroom.py                     # hours of one core; a killed run resumes
    python results/headroom.py --processes 2
    python results/headroom.py --list              # the runs, and which are done
    python results/headroom.py --tabulate          # tables and figure of what is there

The policy of common/misconceived_policy has misconceptions: it forgets most carries of certain
operands, also where it decodes greedily. It learns chains of 8 operations in rollouts of 16
completions, one update each. Before any credit method is tried, oracles that know what each step is
worth (step_values.py) must learn clearly faster than GRPO.

Then credit methods are compared on it: each on all SEEDS at RATE, and at two other rates. The
oracles and the VARIANTS have RATE alone. RATE had GRPO's highest mean reward in training on seed 1.
FOUR_UPDATES take four updates a rollout, at half of RATE, on sixteen seeds. Differences are to GRPO
at RATE, or to GRPO with four updates. Data order and the random numbers of a seed are the same for
all methods, so runs are paired by seed. A run whose lines are in the published runs.csv is not made
again: remove its lines there to make it anew.

It writes to results/data/headroom/: untrained.csv, the policy before training; runs.csv, a line for
each run and evaluation; table.csv, a line for each method and rate; control.png and methods.png.
"""

import argparse
import contextlib
import csv
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import learning_curves
import numpy as np
from learning_curves import area, interval, start, write_table

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs/headroom"
DATA = ROOT / "results/data/headroom"
POLICY = ROOT / "common/misconceived_policy"
GRPO = "GRPO"
METHODS = {  # the script and the flags of each
    GRPO: ["grpo_arca.py", "--credit", "uniform"],
    "right answers only": ["grpo_arca.py", "--credit", "uniform", "--negative_weight", "0"],
    "ARCA": ["grpo_arca.py", "--credit", "arca"],
    "OAR-G": ["grpo_oar.py", "--credit", "oar_g"],
    "S-trace": ["grpo_strace.py", "--credit", "s_trace"],
}
EXACT = ["results/step_values.py", "--together", "--oracle"]
ORACLES = {
    "least variance": [*EXACT, "least_variance"],
    "step values": [*EXACT, "step_values"],
    "step values, right answers only": [*EXACT, "right_only"],
}
GRPO_WITH_KL = "GRPO, its KL logged"
ARCA_LATER = "ARCA after 10 rollouts of GRPO"
NO_EMPTY_STEP = "GRPO, no step without a gradient"
VARIANTS = {
    "S-trace, lambda 0.5": [*METHODS["S-trace"], "--trace_lambda", "0.5"],
    "S-trace, normalized": [*METHODS["S-trace"], "--trace_normalize", "True"],
    # A beta that is too small to matter makes the script log the KL divergence.
    GRPO_WITH_KL: [
        *METHODS[GRPO],
        "--beta",
        "1e-9",
        "--save_steps",
        "10",
        "--save_total_limit",
        "10",
    ],
    ARCA_LATER: METHODS["ARCA"],
    NO_EMPTY_STEP: [*METHODS[GRPO], "--skip_zero_gradient", "True"],
}
GRPO_FOUR = "GRPO, four updates"
FOUR_UPDATES = {
    GRPO_FOUR: METHODS[GRPO],
    "right answers only, four updates": METHODS["right answers only"],
    "ARCA, four updates": METHODS["ARCA"],
    "S-trace, four updates": METHODS["S-trace"],
    # fipo.py is grpo_arca.py with the functions that HEADROOM.md shows.
    "FIPO, four updates": ["fipo.py"],
    "FIPO, shuffled, four updates": ["fipo.py", "--credit", "shuffled"],
}
COMMANDS = METHODS | ORACLES | VARIANTS | FOUR_UPDATES
COLORS = learning_curves.COLORS | {
    "least variance": "#CC79A7",
    "step values": "#56B4E9",
    "step values, right answers only": "#888888",
    "S-trace, lambda 0.5": "#009E73",
    "S-trace, normalized": "#009E73",
    GRPO_WITH_KL: "black",
    ARCA_LATER: "#0072B2",
    NO_EMPTY_STEP: "black",
    GRPO_FOUR: "black",
    "right answers only, four updates": "#E69F00",
    "ARCA, four updates": "#0072B2",
    "S-trace, four updates": "#009E73",
    "FIPO, four updates": "#56B4E9",
    "FIPO, shuffled, four updates": "#888888",
}
RATE = "0.002"
OTHER_RATES = ("0.001", "0.004")
RATE_FOUR_UPDATES = "0.001"
SEEDS = tuple(range(1, 9))
SEEDS_FOUR_UPDATES = tuple(range(1, 17))
FEWEST_SEEDS = 3  # for an interval in the figure and on the page
ROLLOUTS = 50
EVERY = 10  # rollouts between evaluations
BAR = 0.8  # the control is found if the interval of the share of GRPO's rollouts is below it
TRAINING_FLAGS: dict[str, Any] = {
    "model_name_or_path": POLICY,
    "dataset_config": 8,
    "max_completion_length": 170,
    "per_device_train_batch_size": 16,
    "steps_per_generation": 1,
    "gradient_accumulation_steps": 1,
    "max_steps": ROLLOUTS,
    "warmup_steps": 3,
    "eval_steps": EVERY,
    "max_eval_samples": 60,
    "num_generations_eval": 4,
    "per_device_eval_batch_size": 240,
    "resume_from_checkpoint": "latest",
}


# ---- Runs ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Run:
    """One training run."""

    method: str
    rate: str
    seed: int

    @property
    def folder(self) -> Path:
        name = self.method.replace(" ", "_").replace(",", "")
        return RUNS / f"{name}-{self.rate}-{self.seed}"

    @property
    def updates_per_rollout(self) -> int:
        return 4 if self.method in FOUR_UPDATES else 1

    @property
    def beginning(self) -> "Run":
        """The run whose first rollouts it shares, if it goes on from another run's checkpoint."""
        return Run(GRPO_WITH_KL, self.rate, self.seed)

    def command(self) -> list[str]:
        """Returns the command line that trains it, or goes on with it."""
        flags = TRAINING_FLAGS | {
            "learning_rate": self.rate,
            "seed": self.seed,
            "output_dir": self.folder,
        }
        if self.method == ARCA_LATER and not list(self.folder.glob("checkpoint-*")):
            flags["resume_from_checkpoint"] = self.beginning.folder / f"checkpoint-{EVERY}"
        if self.updates_per_rollout > 1:
            flags["steps_per_generation"] = self.updates_per_rollout
            flags["per_device_train_batch_size"] //= self.updates_per_rollout
            for name in ("max_steps", "eval_steps", "warmup_steps"):
                flags[name] *= self.updates_per_rollout
        script, *own = COMMANDS[self.method]
        shared = [f"--{name}={value}" for name, value in flags.items()]
        return [sys.executable, str(ROOT / script), *own, *shared]

    def published_lines(self) -> list[dict[str, str]]:
        """Returns its lines of the published runs.csv."""
        key = (self.method, self.rate, str(self.seed))
        published = published_runs()
        lines = [row for row in published if (row["method"], row["rate"], row["seed"]) == key]
        return [line | {"kl": line.get("kl", "")} for line in lines]  # the first ones lack it

    def is_done(self) -> bool:
        """Returns whether it is complete, in its folder or in the published table."""
        published = any(row["rollout"] == str(ROLLOUTS) for row in self.published_lines())
        return published or self.is_whole()

    def is_whole(self) -> bool:
        """Returns whether its folder has all of it."""
        return (self.folder / "summary.json").exists()

    def has_reached_bar(self) -> bool:
        """Returns whether it has been evaluated at the bar, and so tells something of the share."""
        if not (self.folder / "metrics.jsonl").exists():
            return False
        least = BAR * ROLLOUTS * self.updates_per_rollout
        return any(row["step"] >= least and "eval" in row for row in self.rows())

    def rows(self) -> list[dict[str, Any]]:
        """Returns the lines of its metrics: updates, and evaluations with the key `eval`."""
        rows = read_metrics(self.folder)
        if self.method == ARCA_LATER:
            first = [row for row in self.beginning.rows() if row["step"] <= EVERY]
            rows = first + [row for row in rows if row["step"] > EVERY]
        return rows

    def updates(self) -> list[dict[str, Any]]:
        """Returns the lines of its updates."""
        return [row for row in self.rows() if "reward" in row]


def published_runs() -> list[dict[str, str]]:
    """Returns the lines of the published runs.csv, none if there is no such file."""
    path = DATA / "runs.csv"
    return read_csv(path) if path.exists() else []


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's metrics.jsonl."""
    rows = []
    for line in (folder / "metrics.jsonl").open():
        with contextlib.suppress(ValueError):  # the last one may be torn
            rows.append(json.loads(line))
    return rows


def train(runs: list[Run], processes: int) -> None:
    """Makes the runs that are missing, and says how much time is left."""
    missing = [run for run in runs if not run.is_done()]
    print(f"{len(runs)} runs, {len(missing)} to do", flush=True)
    began = time.time()
    with ThreadPoolExecutor(processes) as pool:
        futures = {pool.submit(start, run.command(), run.folder): run for run in missing}
        for done, future in enumerate(as_completed(futures), start=1):
            run = futures[future]
            state = "done" if run.is_done() else f"FAILED, see {run.folder / 'log.txt'}"
            minutes = (time.time() - began) / done * (len(missing) - done) / 60
            clock = time.strftime("%H:%M")
            print(f"{clock} {run.folder.name} {state}; {minutes:.0f} min left", flush=True)


def planned_runs() -> list[Run]:
    """Returns all runs, the most telling ones first: an early stop leaves whole pairs."""
    first = [*METHODS, "least variance"]
    runs = [Run(method, RATE, seed) for seed in SEEDS for method in first]
    for seed in SEEDS:
        runs += [Run(method, rate, seed) for rate in OTHER_RATES for method in METHODS]
    for seed in SEEDS:
        runs += [Run(method, RATE, seed) for method in VARIANTS]
    for seed in SEEDS_FOUR_UPDATES:
        runs += [Run(method, RATE_FOUR_UPDATES, seed) for method in FOUR_UPDATES]
    for seed in SEEDS:
        runs += [Run(method, RATE, seed) for method in ORACLES if method not in first]
    return runs


# ---- The policy before training ------------------------------------------------------------------
def evaluate_untrained() -> list[dict[str, Any]]:
    """Returns accuracies of the policy before training, on 200 problems with 8 samples each."""
    rows = []
    for operations in (8, 5):
        evaluations = {}
        for temperature in (1.0, 0.3):
            folder = RUNS / f"untrained-{operations}-{temperature}"
            if not (folder / "summary.json").exists():
                flags = {
                    "model_name_or_path": POLICY,
                    "dataset_config": operations,
                    "max_completion_length": 170,
                    "temperature": temperature,
                    "max_steps": 0,
                    "num_generations_eval": 8,
                    "output_dir": folder,
                }
                words = [f"--{name}={value}" for name, value in flags.items()]
                start([sys.executable, str(ROOT / "grpo_arca.py"), *words], folder)
            evaluations[temperature] = read_metrics(folder)[0]["eval"]
        rows.append(
            {
                "operations": operations,
                "greedy": evaluations[1.0]["greedy_accuracy"],
                "temperature_0.3": evaluations[0.3]["sampled_accuracy"],
                "sampled": evaluations[1.0]["sampled_accuracy"],
                "pass_at_8": evaluations[1.0]["pass@8"],
            }
        )
    return rows


# ---- Tables --------------------------------------------------------------------------------------
def evaluation_rows(run: Run) -> list[dict[str, Any]]:
    """Returns a line for each evaluation of a run in its folder.

    Reward, entropy, the share of groups whose rewards are all equal, the gradient's norm and the KL
    divergence are means over the rollouts since the evaluation before.
    """
    lines: list[dict[str, Any]] = []
    since: list[dict[str, Any]] = []
    for row in run.rows():
        if "reward" in row:
            since.append(row)
        if row.get("eval"):
            line = {
                "method": run.method,
                "rate": run.rate,
                "seed": run.seed,
                "rollout": row["step"] // run.updates_per_rollout,
                "sampled": row["eval"]["sampled_accuracy"],
                "greedy": row["eval"]["greedy_accuracy"],
                "pass_at_4": row["eval"]["pass@4"],
            }
            for name in ("reward", "entropy", "zero_std_share", "grad_norm"):
                # An oracle gives every row an advantage, and counts equal rewards by itself.
                own = "constant_groups" if name == "zero_std_share" else name
                values = [update.get(own, update[name]) for update in since]
                line[name] = np.mean(values) if values else ""
            divergences = [update["kl"] for update in since if "kl" in update]
            line["kl"] = np.mean(divergences) if divergences else ""
            lines.append(line)
            since = []
    return lines


def stored_curves(runs: list[dict[str, str]], method: str, rate: str) -> dict[int, np.ndarray]:
    """Returns the held-out sampled accuracies of each seed, one for each evaluation."""
    curves: dict[int, list[float]] = {}
    for row in runs:
        if row["method"] == method and row["rate"] == rate:
            curves.setdefault(int(row["seed"]), []).append(float(row["sampled"]))
    return {seed: np.array(curve) for seed, curve in curves.items()}


def first_place(places: np.ndarray, values: np.ndarray) -> float:
    """Returns the first of the places whose value is 0 or more, infinity if there is none."""
    reached = places[values >= 0]
    return float(reached[0]) if len(reached) else float("inf")


def share_of_rollouts(curves: np.ndarray, others: np.ndarray) -> tuple[float, float, float]:
    """Returns the share of the rollouts after which curves [S, E] reach the end of the others
    [S, O], and its 95% interval over the S paired seeds. Curves may be cut: E may be less than O.

    At every place of the curves, the difference to the others' end has a paired t-interval. The
    share is the first place where the mean is 0, its interval goes from the first place where the
    upper limit is 0 to the first place where the lower one is.
    """
    count = curves.shape[1]
    fine = np.linspace(0, count - 1, 1000 + 1)
    inside = np.array([np.interp(fine, np.arange(count), curve) for curve in curves])
    lead = inside - others[:, -1:]
    limits = np.array([interval(column) for column in lead.T])
    places = fine / (others.shape[1] - 1)
    share = first_place(places, lead.mean(0))
    return share, first_place(places, limits[:, 1]), first_place(places, limits[:, 0])


def reference_curves(runs: list[dict[str, str]], method: str) -> dict[int, np.ndarray]:
    """Returns the curves of GRPO that a method is compared with: whole runs of as many updates."""
    if method in FOUR_UPDATES:
        found = stored_curves(runs, GRPO_FOUR, RATE_FOUR_UPDATES)
    else:
        found = stored_curves(runs, GRPO, RATE)
    return {seed: curve for seed, curve in found.items() if len(curve) == 1 + ROLLOUTS // EVERY}


def whole_pairs(runs: list[dict[str, str]], method: str, rate: str) -> list[int]:
    """Returns the seeds on which a method and GRPO both have a whole run."""
    own = stored_curves(runs, method, rate)
    other = reference_curves(runs, method)
    common_seeds = sorted(own.keys() & other.keys())
    return [seed for seed in common_seeds if len(own[seed]) == len(other[seed])]


def table_row(runs: list[dict[str, str]], method: str, rate: str) -> dict[str, Any]:
    """Returns a method's line of the table: its end, and what it has over GRPO."""
    own = stored_curves(runs, method, rate)
    other = reference_curves(runs, method)
    reached = sorted(own.keys() & other.keys())  # unfinished runs count for the share alone
    seeds = whole_pairs(runs, method, rate)
    curves = np.array([own[seed] for seed in seeds])
    of_method = [row for row in runs if (row["method"], row["rate"]) == (method, rate)]
    paired = [row for row in of_method if int(row["seed"]) in seeds]
    seen = [row for row in paired if row["rollout"] != "0"]
    last = [row for row in paired if row["rollout"] == str(ROLLOUTS)]
    row: dict[str, Any] = {
        "method": method,
        "rate": rate,
        "seeds": len(seeds),
        "greedy_end": np.mean([float(line["greedy"]) for line in last]),
        "pass_at_4_end": np.mean([float(line["pass_at_4"]) for line in last]),
        "end": curves[:, -1].mean(),
        "reward": np.mean([float(line["reward"]) for line in seen]),
        "area": area(curves).mean(),
    }
    for name, difference in seed_differences(runs, method, rate).items():
        low, high = interval(difference)
        row |= {f"{name}_more": difference.mean(), f"{name}_low": low, f"{name}_high": high}
    shortest = min(len(own[seed]) for seed in reached)
    share, share_low, share_high = share_of_rollouts(
        np.array([own[seed][:shortest] for seed in reached]),
        np.array([other[seed] for seed in reached]),
    )
    return row | {
        "share_seeds": len(reached),
        "share": share,
        "share_low": share_low,
        "share_high": share_high,
    }


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def tabulate() -> None:
    """Saves the runs that are done, a line for each method and rate, and the figures."""
    lines: list[dict[str, Any]] = []
    for run in planned_runs():
        published = run.published_lines()
        is_newer = run.has_reached_bar() and (run.is_whole() or not published)
        lines += evaluation_rows(run) if is_newer else published
    if not lines:
        sys.exit("headroom.py: no run is done, so there is nothing to tabulate")
    write_table(lines, DATA / "runs.csv")
    runs = read_csv(DATA / "runs.csv")
    rows = [
        table_row(runs, method, rate)
        for rate in (RATE, *OTHER_RATES)
        for method in COMMANDS
        if method != GRPO_WITH_KL and whole_pairs(runs, method, rate)
    ]
    write_table(rows, DATA / "table.csv")
    at_rate = [row for row in rows if row["rate"] == RATE]
    controls = [row for row in at_rate if row["method"] in (GRPO, *ORACLES)]
    draw_controls(runs, controls, DATA / "control.png")
    draw_methods(runs, rows, DATA / "methods.png")
    for row in rows:
        shown = [f"{k} {x:.3f}" if isinstance(x, float) else f"{x}" for k, x in row.items()]
        print("  ".join(shown))


def seed_differences(runs: list[dict[str, str]], method: str, rate: str) -> dict[str, np.ndarray]:
    """Returns what each finished seed has over GRPO: by "area" and by "end"."""
    own = stored_curves(runs, method, rate)
    other = reference_curves(runs, method)
    seeds = whole_pairs(runs, method, rate)
    curves = np.array([own[seed] for seed in seeds])
    others = np.array([other[seed] for seed in seeds])
    return {"area": area(curves) - area(others), "end": curves[:, -1] - others[:, -1]}


def draw_controls(runs: list[dict[str, str]], rows: list[dict[str, Any]], path: Path) -> None:
    """Saves the controls' figure. Left: held-out curves. Right: the share of GRPO's rollouts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for place, row in enumerate(rows):
        color = COLORS[row["method"]]
        curves = list(stored_curves(runs, row["method"], row["rate"]).values())
        longest = max(map(len, curves))
        rollouts = np.linspace(0, ROLLOUTS, longest)
        mean = np.mean([curve for curve in curves if len(curve) == longest], axis=0)
        label = f"{row['method']} ({row['seeds']} seeds)"
        left.plot(rollouts, mean, color=color, label=label, linewidth=2)
        for curve in curves:
            left.plot(rollouts[: len(curve)], curve, color=color, linewidth=0.5, alpha=0.5)
        if row["method"] != GRPO:
            ends = np.minimum([row["share_low"], row["share_high"]], 1.2)  # some never reach it
            if row["share_seeds"] >= FEWEST_SEEDS:
                right.plot(ends, [place, place], color=color, linewidth=3, alpha=0.5)
            right.plot(min(row["share"], 1.2), place, "o", color=color, markersize=8)
    left.set_title("Sampled accuracy, held-out chains of 8 operations", loc="left")
    left.set_xlabel("rollouts of 16 completions")
    left.set_ylim(0, 1)
    left.legend(frameon=False, fontsize=9)
    right.axvline(1, color="black", linewidth=1)
    right.axvline(BAR, color="#888888", linewidth=1, linestyle="--")
    right.set_yticks(range(len(rows)), [row["method"] for row in rows])
    right.set_ylim(len(rows) - 0.5, 0.5)
    right.set_xlim(0, 1.3)
    right.set_title("Share of GRPO's rollouts to reach GRPO's end", loc="left")
    right.set_xlabel("bars: 95% intervals; dashed line: 0.8; at 1.2: not reached")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def order_on_the_page(row: dict[str, Any]) -> tuple[int, str]:
    """Returns a key that sorts rows by method, as in COMMANDS, and then by rate."""
    return list(COMMANDS).index(row["method"]), row["rate"]


def draw_methods(runs: list[dict[str, str]], rows: list[dict[str, Any]], path: Path) -> None:
    """Saves the forest plot: what each method and rate has over GRPO, a dot for a seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    references = ((GRPO, RATE), (GRPO_FOUR, RATE_FOUR_UPDATES))
    shown = sorted(
        (row for row in rows if (row["method"], row["rate"]) not in references),
        key=order_on_the_page,
    )
    size = (12, 1.6 + 0.3 * len(shown))
    figure, panels = plt.subplots(1, 2, figsize=size, layout="constrained", sharey=True)
    titles = {"area": "Mean height of the learning curve", "end": "Accuracy at the end"}
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        for place, row in enumerate(shown):
            color = COLORS[row["method"]]
            values = seed_differences(runs, row["method"], row["rate"])[name]
            panel.plot(values, [place] * len(values), "o", color=color, markersize=5, alpha=0.5)
            if row["seeds"] >= FEWEST_SEEDS:
                limits = [row[f"{name}_low"], row[f"{name}_high"]]
                panel.plot(limits, [place, place], color=color, linewidth=3, alpha=0.6)
            mean = row[f"{name}_more"]
            panel.plot(mean, place, "D", color=color, markersize=8, markeredgecolor="white")
        panel.axvline(0, color="black", linewidth=1)
        panel.set_title(f"{title}, less GRPO's", loc="left")
        panel.set_xlabel("difference in sampled accuracy")
    labels = [f"{row['method']}, rate {row['rate']}" for row in shown]
    panels[0].set_yticks(range(len(shown)), labels)
    panels[0].set_ylim(len(shown) - 0.5, -0.5)
    figure.supxlabel("Rows with four updates: less those of GRPO with four updates", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=1, help="runs at once, a core each")
    parser.add_argument("--list", action="store_true", help="say which runs are done, and stop")
    parser.add_argument("--tabulate", action="store_true", help="make no more runs")
    parser.add_argument("--methods", nargs="+", choices=COMMANDS, help="default: all")
    args = parser.parse_args()
    if args.list:
        for run in planned_runs():
            print("done" if run.is_done() else "    ", run.folder.name)
        return
    runs = [run for run in planned_runs() if run.method in (args.methods or COMMANDS)]
    if not args.tabulate:
        if not (DATA / "untrained.csv").exists():
            write_table(evaluate_untrained(), DATA / "untrained.csv")
        train(runs, args.processes)
    tabulate()


if __name__ == "__main__":
    main()
