"""Writes the tables of the pages in PAGES from results/data/, and draws figures.

    python results/tables.py

It trains nothing. A table stands between its marks, <!-- table: name --> and <!-- end -->, and the
function of that name makes it. In results/data/tables/ the program leaves

    differences.csv  what each method has over GRPO, and over its own credits in random order, in
                     each study, with the p-values of a paired t-test and of sign flips, and with
                     Holm's correction for all tests of the file. `could_pass` is the smallest mean
                     that would have passed the first step of that correction
    differences.png  the same at the end of training for the main methods, with a dot for each seed.
                     All panels have one scale
    curves.png       the mean learning curves of the main methods none of whose runs failed
    weights.png      how far each weight of wrong answers ends above weight 1, which is GRPO

A method is compared with runs of GRPO on the same seeds, with as many updates a rollout and the
same learning rate. The *area* is the mean height of a learning curve, the *end* its last point.
There is no interval and no test where a run failed, because a mean would describe no run. On
SmolLM2 a run failed if it ends at or below 0.5; elsewhere, if it ends below where it began.
"""

import itertools
import math
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import numpy as np
import pandas
from compare import draw_dots, plt
from paired import area, comparison, holm, mean_interval, smallest_to_pass
from studies import DATA as STUDY_DATA
from studies import GRPO, MAIN, METHODS, ORACLES, STUDIES, key_of, read_csv, write_csv

DATA = ROOT / "results/data"
OUTPUT = DATA / "tables"
PAGES = [
    ROOT / page
    for page in (
        "README.md",
        "methods/README.md",
        "results/README.md",
        "results/gradients.md",
        "results/three_policies.md",
        "results/wrong_answers.md",
    )
]
TITLES = {
    "wrong_policy": "wrong policy",
    "wrong_policy_2": "second wrong policy",
    "wrong_policy_3": "third wrong policy",
    "nearly_right_policy": "nearly right policy",
    "smollm2": "SmolLM2",
    "smollm2_float32": "SmolLM2 in float32",
    "default_command": "default command",
    "small_rollouts": "small rollouts",
}
SHOWN = {  # in figures, from top to bottom
    "least variance": "#CC79A7",
    "right answers only": "#E69F00",
    "ARCA": "#0072B2",
    "OAR-G": "#D55E00",
    "S-trace": "#009E73",
}
COLORS = SHOWN | {GRPO: "black", "step values": "#56B4E9"}
GRPO_AGAIN = "GRPO, groups drawn again"
AGAIN = [name for name in METHODS if name.endswith(("drawn again", "72 completions"))]
SHUFFLED = {  # methods -> their own credits in random order, where these have another name
    "ARCA": "ARCA's weights, shuffled",
    "ARCA, groups drawn again": "ARCA's weights, shuffled, groups drawn again",
    "methods/entropy_mask.py": "methods/entropy_mask.py --credit random",
}
OAR_ON_RIGHT = "OAR-G, right answers only"
PLANNED = (*MAIN, *ORACLES, "ARCA, p = 2", OAR_ON_RIGHT)  # rows on the wrong policy
RIVAL = "methods/"  # how the names of methods begin whose figures have a page of their own
FEWEST_SEEDS = 3  # for an interval
WEIGHT = "grpo_arca.py --credit uniform --negative_weight"  # and a number
RIGHT_ONLY = f"{WEIGHT} 0"
JUDGED = {  # ways to judge an end -> temperature, figure of ends.csv, and color
    "sampled": (1.0, "sampled_accuracy", "black"),
    "at temperature 0.3": (0.3, "sampled_accuracy", "#0072B2"),
    "greedy": (1.0, "greedy_accuracy", "#009E73"),
    "pass@4": (1.0, "pass@4", "#E69F00"),
    "pass@16": (1.0, "pass@16", "#D55E00"),
}
NAMES = {  # a method in the tables of worth and of tokens -> on the page
    "arca": "ARCA",
    "entropy_reduction": "entropy reduction",
    "oar_g": "OAR-G",
    "oar_p": "OAR-P",
    "s_trace": "S-trace",
    "grpo_strace.py": "S-trace",
    "right alone": "right answers only",
    RIGHT_ONLY: "right answers only",
    "oar_g, right alone": OAR_ON_RIGHT,
    "right alone, by probability": "right answers only, by probability",
    "grpo_arca.py --credit probability --negative_weight 0": "right answers only, by probability",
    "oracle: step values": "step values",
    "oracle: least variance": "least variance",
    "other samples": "null: other problems",
}
WORTH = [  # the rows of the table of worth
    "surprisal", "entropy reduction", "OAR-G", "OAR-P", "S-trace", "right answers only",
    OAR_ON_RIGHT, "right answers only, by probability", "step values", "least variance",
    "null: other problems",
]  # fmt: skip
WORTH_POLICIES = {  # how the names of the data's files begin -> columns of that table
    "nearly_right_policy": "nearly right policy",
    "wrong_policy": "wrong policy",
    "smollm2_start": "SmolLM2",
}
RIVAL_POLICIES = WORTH_POLICIES | {"after_3_updates": "wrong policy after 3 updates"}
Row = dict[str, Any]
Table = list[list[str]]  # the header, and then the rows


# ---- Statistics ----------------------------------------------------------------------------------
def has_failed(study: str, curves: np.ndarray) -> np.ndarray:
    """Returns which curves [..., points] are of runs that failed."""
    if study.startswith("smollm2"):
        return curves[..., -1] <= 0.5
    return curves[..., -1] < curves[..., 0]


# ---- Runs that differ in their seeds alone -------------------------------------------------------
class Group(NamedTuple):
    """Runs that differ only in their seeds."""

    study: str
    updates: int  # of a rollout
    rate: str
    method: str

    def of(self, method: str) -> "Group":
        """Returns the runs of another method, with as many updates and the same rate."""
        return self._replace(method=method)

    def baseline(self) -> "Group":
        """Returns the runs of GRPO that this group is compared with."""
        if self.method.startswith(WEIGHT) and "--max_resample" not in self.method:
            return self.of(f"{WEIGHT} 1")
        return self.of(
            GRPO_AGAIN if self.method in AGAIN or "--max_resample" in self.method else GRPO
        )

    def beside(self, method: str) -> "Group":
        """Returns the runs of another method that are compared with this group, of GRPO."""
        return self.of(self.method.replace(GRPO, method, 1))

    def control(self) -> "Group":
        """Returns the runs with this method's own credits in random order."""
        return self.of(SHUFFLED.get(self.method, f"{self.method} --credit shuffled"))

    def lines(self) -> dict[int, list[Row]]:
        """Returns each run's lines of the data, by its seed in order."""
        return dict(sorted(whole_runs().get(self, {}).items()))

    def curves(self) -> dict[int, np.ndarray]:
        """Returns the learning curve of each seed."""
        curves = {}
        for seed, lines in self.lines().items():
            curves[seed] = np.array([float(line["sampled"]) for line in lines])
        return curves

    def failed_seeds(self) -> str:
        """Returns the seeds of the runs that failed: "2, 7"."""
        curves = self.curves().items()
        return ", ".join(str(seed) for seed, curve in curves if has_failed(self.study, curve))

    def title(self) -> str:
        """Returns the study and, where its runs differ in that, the number of updates a rollout."""
        count = {1: "one update", 4: "four updates"}[self.updates]
        has_both = len(STUDIES[self.study].rates) > 1
        return f"{TITLES[self.study]}, {count}" if has_both else TITLES[self.study]

    def over(self, other: "Group", figure: str) -> str:
        """Returns how far it is above another group or, for that group itself, its figure."""
        if not (self.lines() and other.lines()):
            return "not run"
        row = compared(self, other, figure)
        if row["failed"]:
            return f"none: {row['failed']} of {row['seeds']} failed"
        if self == other:
            return f"{figure_of(pairs_of(self, self)[0], figure).mean():.3f}"
        return shown([row["more"], row["low"], row["high"]], "+.3f")

    def end(self) -> str:
        """Returns how far it ends above GRPO."""
        return self.over(self.baseline(), "end")

    def above_grpo(self) -> str:
        """Returns on how many seeds the method ends above GRPO."""
        own, others = pairs_of(self, self.baseline())
        return "" if self == self.baseline() else f"{(own > others)[:, -1].sum()} of {len(own)}"

    def cut(self) -> str:
        """Returns the share of updates whose gradient was cut, or "?" if it was not counted.

        The first runs lack this figure, but costs.csv has its mean over all of them.
        """
        costs = pandas.read_csv(STUDY_DATA / "costs.csv", dtype=str).set_index(list(self._fields))
        key = (self.study, str(self.updates), self.rate, self.method)
        return self.mean_of_updates("clipped", 3, costs["clipped"].get(key, ""))

    def mean_of_updates(self, name: str, places: int, otherwise: str) -> str:
        """Returns the mean of a figure over all updates, or "?" if it was not counted.

        `otherwise`, if it is not empty, stands in where a line lacks the figure.
        """
        lines = [line for run in self.lines().values() for line in run[1:]]  # with updates
        values = [line.get(name) or otherwise for line in lines]
        numbers = [float(value) for value in values if value]
        return f"{np.mean(numbers):.{places}f}" if numbers else "?"

    def cells(self) -> dict[str, str]:
        """Returns all that tables may say of its runs."""
        lasts = [lines[-1] for lines in self.lines().values()]
        greedy, sampled, pass_at_4 = [
            np.array([float(line[name]) for line in lasts])
            for name in ("greedy", "sampled", "pass_at_4")
        ]
        heights = [str((sampled > height).sum()) for height in (0.3, 0.5, 0.8)]
        return {
            "title": self.title(),
            "method": self.method,
            "updates": str(self.updates),
            "rate": self.rate,
            "seeds": str(len(lasts)),
            "failed seeds": self.failed_seeds(),
            "greedy": f"{greedy.mean():.2f}",
            "sampled": f"{sampled.mean():.2f}",
            "pass@4": f"{pass_at_4.mean():.2f}",
            "range": f"{sampled.min():.3f} to {sampled.max():.3f}",
            "median": f"{np.median(sampled):.3f}",
            "heights": f"{', '.join(heights)} of {len(lasts)}",
            "area": self.over(self.baseline(), "area"),
            "end": self.end(),
            "seeds of both": str(len(pairs_of(self, self.control())[0])),
            "end over the control": self.over(self.control(), "end"),
            "above GRPO": self.above_grpo(),
            "cut": self.cut(),
            "completions": self.mean_of_updates(
                "completions", 0, str(STUDIES[self.study].completions)
            ),
        }


SMOLLM2_AGAIN = Group("smollm2", 1, "4e-4", GRPO_AGAIN)


@cache
def whole_runs() -> dict[Group, dict[int, list[Row]]]:
    """Returns the lines of each run, by its group and its seed."""
    runs: dict[Group, dict[int, list[Row]]] = {}
    for study in STUDIES:
        all_lines = read_csv(STUDY_DATA / f"{study}.csv")
        for (method, updates, rate, seed), lines in itertools.groupby(all_lines, key_of):
            runs.setdefault(Group(study, updates, rate, method), {})[seed] = list(lines)
    return {group: runs[group] for group in sorted(runs, key=place_of)}


def place_of(group: Group) -> tuple[int, int, str, int]:
    """Returns the key by which groups are sorted: study, updates, rate, and method."""
    known = list(METHODS)
    place = known.index(group.method) if group.method in known else len(known)
    return list(STUDIES).index(group.study), group.updates, group.rate, place


def groups_of(study: str) -> list[Group]:
    """Returns the groups of a study that have runs of GRPO to compare with, and GRPO's own."""
    return [g for g in whole_runs() if g.study == study and g.baseline().lines()]


def pairs_of(group: Group, other: Group) -> tuple[np.ndarray, np.ndarray]:
    """Returns the curves [S, points] of two groups on the seeds that both have."""
    own = group.curves()
    others = other.curves()
    seeds = sorted(own.keys() & others.keys())
    return np.array([own[seed] for seed in seeds]), np.array([others[seed] for seed in seeds])


def at_grpos_rate(study: str) -> list[Group]:
    """Returns the groups of a study at the learning rates that GRPO has there."""
    rates = STUDIES[study].rates
    return [group for group in groups_of(study) if group.rate == rates.get(group.updates)]


def figure_of(curves: np.ndarray, figure: str) -> np.ndarray:
    """Returns the "area" or the "end" of each curve."""
    return area(curves, range(curves.shape[1])) if figure == "area" else curves[:, -1]


@cache
def compared(group: Group, other: Group, figure: str) -> Row:
    """Returns how far a group is above another: mean, interval and p-values ("" without tests)."""
    own, others = pairs_of(group, other)
    more = figure_of(own, figure) - figure_of(others, figure)
    row = {"seeds": len(more), "more": more.mean(), "low": "", "high": "", "p": "", "p_flips": ""}
    row["failed"] = (has_failed(group.study, own) | has_failed(group.study, others)).sum()
    if len(more) >= FEWEST_SEEDS and not row["failed"] and group != other:
        row |= comparison(more)
    return row


@cache
def differences() -> list[Row]:
    """Returns a row for each study, method and figure, with its corrected p-values."""
    rows: list[Row] = []
    for study in STUDIES:
        for group in groups_of(study):
            keeps_curves = min(map(len, group.lines().values())) > 3
            for figure in ("area", "end") if keeps_curves else ("end",):
                others = {group.method: group.baseline()}
                if group.control().lines():
                    others[f"{group.method}, over its credits shuffled"] = group.control()
                if group.method == OAR_ON_RIGHT:
                    others[f"{OAR_ON_RIGHT}, over GRPO's"] = group.of("right answers only")
                for method, other in others.items():
                    row: Row = {"study": group.title(), "rate": group.rate, "method": method}
                    if group != other:
                        rows.append(row | {"figure": figure} | compared(group, other, figure))
    tested = [row for row in rows if row["p"] != ""]
    for row in tested:
        half_interval = (row["high"] - row["low"]) / 2
        row["could_pass"] = smallest_to_pass(half_interval, row["seeds"], len(tested))
    for name in ("p", "p_flips"):
        for row, corrected in zip(tested, holm([row[name] for row in tested]), strict=True):
            row[f"{name}_holm"] = corrected
    return rows


# ---- Tables --------------------------------------------------------------------------------------
def shown(numbers: list[float], form: str = ".2f") -> str:
    """Returns "1.37 (1.22 to 1.53)"."""
    value, low, high = [f"{x:{form}}" for x in numbers]
    return f"{value} ({low} to {high})"


def measured(row: Row, name: str) -> list[float]:
    """Returns a figure of a table of worth, with its interval. A cosine is kept within -1 and 1."""
    most = 1.0 if name == "direction" else math.inf
    return [max(-most, min(float(row[name + end]), most)) for end in ("", "_low", "_high")]


def table_of(groups: list[Group], columns: dict[str, str]) -> Table:
    """Returns a table with a row for each group. Columns map headers to what fills them."""
    cells = [group.cells() for group in groups]
    return [list(columns), *([own[name] for name in columns.values()] for own in cells)]


def result() -> Table:
    """The result in six rows, at GRPO's own learning rates."""
    grpos = {
        "wrong policy": Group("wrong_policy", 1, "0.002", GRPO),
        "nearly right policy": Group("nearly_right_policy", 1, "0.002", GRPO),
        "SmolLM2, --max_resample_times 4": SMOLLM2_AGAIN,
    }
    table = [["method", *grpos]]
    for method in (GRPO, "right answers only", "ARCA", "OAR-G", "S-trace", "least variance"):
        name = "the best of three oracles" if method == "least variance" else method
        table.append([name, *(grpo.beside(method).end() for grpo in grpos.values())])
    return table


def tests() -> Table:
    """The differences that remain significant after Holm's correction, by either test."""
    tested = [row for row in differences() if row["p"] != ""]
    table = [[f"study (of {len(tested)} differences)", "rate", "method", "figure", "seeds",
              "over GRPO", "p of t, corrected", "of sign flips, corrected"]]  # fmt: skip
    for row in tested:
        if row["method"].startswith(RIVAL) or not min(row["p_holm"], row["p_flips_holm"]) < 0.05:
            continue
        cells = [row[name] for name in ("study", "rate", "method", "figure")]
        more = shown([row["more"], row["low"], row["high"]], "+.3f")
        ps = [f"{row[name]:.2g}" for name in ("p_holm", "p_flips_holm")]
        table.append([*cells, str(row["seeds"]), more, *ps])
    return table


def wrong_policy() -> Table:
    """The methods of the study's plan on the wrong policy. `three_policies` has the lowest rate."""
    groups = [
        group
        for group in groups_of("wrong_policy")
        if group.method in PLANNED and (group.updates, group.rate) != (1, "0.001")
    ]
    return table_of(groups, {
        "method": "method", "updates": "updates", "rate": "rate", "seeds": "seeds",
        "greedy": "greedy", "sampled": "sampled", "pass@4": "pass@4", "area over GRPO": "area",
        "end over GRPO": "end", "failed seeds": "failed seeds",
    })  # fmt: skip


def nearly_right_policy() -> Table:
    """All methods on the nearly right policy with GRPO's completions, at rates of GRPO there."""
    groups = [
        group
        for group in groups_of("nearly_right_policy")
        if not group.method.startswith(("GRPO, 8 completions", WEIGHT))
    ]
    return table_of(groups, {
        "method": "method", "updates": "updates", "rate": "rate", "seeds": "seeds",
        "failed seeds": "failed seeds", "area": "area", "end": "end", "greedy": "greedy",
        "cut": "cut",
    })  # fmt: skip


def smollm2() -> Table:
    """GRPO's runs on SmolLM2, and those that draw groups again, compared with GRPO's that do."""
    names = (GRPO, *AGAIN)
    return table_of([group for group in at_grpos_rate("smollm2") if group.method in names], {
        "method": "method", "rate": "rate", "seeds": "seeds", "failed seeds": "failed seeds",
        "area": "area", "end": "end", "end, lowest to highest": "range",
        "median": "median", "cut": "cut", "completions a rollout": "completions",
    })  # fmt: skip


def controls() -> Table:
    """How far methods are above their own credits in random order."""
    return table_of([group for group in whole_runs() if group.control().lines()], {
        "study": "title", "method": "method", "rate": "rate", "seeds": "seeds of both",
        "end over the control": "end over the control",
    })  # fmt: skip


@cache
def ends() -> pandas.DataFrame:
    """Returns what results/ends.py found, by study, method, rate, temperature and seed."""
    table = pandas.read_csv(DATA / "ends.csv", dtype={"rate": str}).fillna({"rate": "", "seed": 0})
    return table.set_index(["study", "method", "rate", "temperature", "seed"]).sort_index()


def judged(group: Group, way: str) -> pandas.Series:
    """Returns a figure of each seed's saved adapter, by a way of JUDGED."""
    temperature, figure, _ = JUDGED[way]
    return ends().loc[(group.study, group.method, group.rate, temperature), figure]


def lead(group: Group, way: str) -> np.ndarray:
    """Returns how far each seed's saved adapter is above the one of weight 1."""
    return (judged(group, way) - judged(group.baseline(), way)).dropna().to_numpy()


def weighted_groups(study: str) -> list[Group]:
    """Returns the groups with weights of wrong answers, by rate, the smallest weight first."""
    groups = [
        group
        for group in groups_of(study)
        if group.baseline().method == f"{WEIGHT} 1" and len(group.lines()) >= FEWEST_SEEDS
    ]
    return sorted(groups, key=lambda group: (group.rate, float(group.method.split()[-1])))


def weights() -> Table:
    """What the weight of wrong answers changes, by several ways to judge the end."""
    table = [["policy", "rate", "weight", "seeds", "Adam's worth", *JUDGED, "cut", "failed seeds"]]
    for study in ("wrong_policy", "nearly_right_policy"):
        untrained = Group(study, 1, "", "untrained")
        means = [f"{judged(untrained, way).mean():.3f}" for way in JUDGED]
        table.append([TITLES[study], "", "untrained", "", "", *means, "", ""])
        for group in weighted_groups(study):
            worth = worth_of(f"weights_{study}").get(NAMES.get(group.method, group.method))
            cells = [TITLES[study], group.rate, group.method.split()[-1]]
            cells += [str(len(group.lines())), shown(measured(worth, "adam")) if worth else "1"]
            for way in JUDGED:
                if group.failed_seeds() or group.baseline().failed_seeds():  # not judged again
                    cells.append(group.cells().get(way, ""))
                elif group == group.baseline():
                    cells.append(f"{judged(group, way).mean():.3f}")
                else:
                    cells.append(shown(list(mean_interval(lead(group, way))), "+.3f"))
            table.append([*cells, group.cut(), group.failed_seeds()])
    return table


def three_policies() -> Table:
    """How far the main methods are above GRPO on each of three wrong policies, and on average."""
    studies = ("wrong_policy", "wrong_policy_2", "wrong_policy_3")
    grpos = [Group(study, 1, "0.001", GRPO) for study in studies]
    table = [["end at the rate 0.001, seeds above GRPO", *(TITLES[study] for study in studies),
              "mean of the three", "mean of the areas"]]  # fmt: skip
    for method in MAIN:
        groups = [grpo.of(method) for grpo in grpos]
        ends = [f"{group.end()}, {group.above_grpo()}".removesuffix(", ") for group in groups]
        means = [over_policies(groups, figure) for figure in ("end", "area")]
        table.append([method, *ends, *means])
    return table


def over_policies(groups: list[Group], figure: str) -> str:
    """Returns the mean over policies of a method's lead over GRPO, with its interval."""
    if groups[0].method == GRPO or not all(group.lines() for group in groups):
        return ""
    rows = [compared(group, group.baseline(), figure) for group in groups]
    if any(row["low"] == "" for row in rows):
        return "none"
    return shown(list(mean_interval(np.array([row["more"] for row in rows]))), "+.3f")


@cache
def worth_of(policy: str) -> dict[str, Row]:
    """Returns the rows of all tables of worth of an untrained policy, by the page's names."""
    rows = {}
    for path in sorted((DATA / "worth").glob(f"{policy}*.csv"), reverse=True):
        for row in read_csv(path):
            rows[NAMES.get(row["method"], row["method"])] = row
    return rows


def worth_rows(methods: list[str], policies: dict[str, str]) -> Table:
    """Returns a table with Adam's worth and direction of methods for each of the policies."""
    table = [["method"]]
    for title in policies.values():
        table[0] += [f"Adam's worth, {title}", "direction"]
    for method in methods:
        cells = [method]
        for policy in policies:
            row = worth_of(policy).get(method)
            cells += [shown(measured(row, name)) if row else "" for name in ("adam", "direction")]
        table.append(cells)
    return table


def worth() -> Table:
    """How good a gradient each method gives to untrained policies, and its direction."""
    return worth_rows(WORTH, WORTH_POLICIES)


def rivals() -> Table:
    """What training with files of methods/ gave."""
    ends = [row for row in differences() if row["figure"] == "end"]
    p_values = {(row["study"], row["rate"], row["method"]): row.get("p_holm") for row in ends}
    groups = [group for group in at_grpos_rate("wrong_policy") if group.method.startswith(RIVAL)]
    table = table_of(sorted(groups), {
        "method": "method", "updates": "updates", "rate": "rate", "seeds": "seeds",
        "area over GRPO": "area", "end over GRPO": "end", "cut": "cut",
    })  # fmt: skip
    table[0].insert(-1, "p of the end, corrected")
    for group, cells in zip(sorted(groups), table[1:], strict=True):
        p = p_values[group.title(), group.rate, group.method]
        cells.insert(-1, f"{p:.2}" if p else "")
    return table


def smollm2_float32() -> Table:
    """Eight runs or more of a method on SmolLM2 in float32, without groups drawn again."""
    groups = [
        group
        for group in at_grpos_rate("smollm2_float32")
        if len(group.lines()) >= 8 and group.method not in AGAIN
    ]
    return table_of(groups, {
        "method": "method", "rate": "rate", "above 0.3, 0.5, 0.8": "heights",
        "ends above GRPO": "above GRPO", "end, lowest to highest": "range",
        "median": "median", "cut": "cut", "completions a rollout": "completions",
    })  # fmt: skip


def smollm2_weights() -> Table:
    """What the weight of wrong answers changes on SmolLM2 in float32, with groups drawn again."""
    groups = [group for group in groups_of("smollm2_float32") if group.method in AGAIN]
    return table_of(groups, {
        "method": "method", "seeds": "seeds", "failed seeds": "failed seeds", "end": "end",
        "ends above GRPO": "above GRPO", "end, lowest to highest": "range", "greedy": "greedy",
        "pass@4": "pass@4", "cut": "cut",
        "completions a rollout": "completions",
    })  # fmt: skip


def rivals_worth() -> Table:
    """The same as `worth` for files of methods/."""
    names = set().union(*map(worth_of, RIVAL_POLICIES))
    return worth_rows(sorted(name for name in names if name.startswith(RIVAL)), RIVAL_POLICIES)


def tokens() -> Table:
    """Where each method puts its weight, before and after training."""
    rows = read_csv(DATA / "decisive_tokens/table.csv")
    wrong = f"{rows[0]['wrong']} / {rows[-1]['wrong']} wrong completions"
    table = [["method", "weight of a result digit", "of the first wrong token",
              f"its AUROC ({wrong})", "its AUROC among result digits", "EffN/T"]]  # fmt: skip
    for before, after in zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True):
        names = ("result", "first_wrong", "auroc", "auroc_among_results", "effn")
        pairs = [f"{float(before[name]):.2f} / {float(after[name]):.2f}" for name in names]
        table.append([NAMES.get(before["credit"], before["credit"]), *pairs])
    return table


TABLES: dict[str, Callable[[], Table]] = {
    function.__name__: function
    for function in (
        result, tests, wrong_policy, nearly_right_policy,
        smollm2, controls, three_policies, weights, worth, rivals, smollm2_float32,
        smollm2_weights, rivals_worth, tokens,
    )
}  # fmt: skip
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown(table: Table) -> str:
    """Returns a table as Markdown."""
    rule = ["---"] * len(table[0])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [table[0], rule, *table[1:]])


def rewritten(page: str) -> str:
    """Returns a page with its tables as they are now."""

    def current(match: re.Match) -> str:
        return match[1] + markdown(TABLES[match[2]]()) + match[3]

    return MARKED.sub(current, page)


# ---- Figures -------------------------------------------------------------------------------------
def title_of(grpo: Group) -> str:
    """Returns the title of a panel: what all its runs have in common."""
    return f"{grpo.title()}{grpo.method.removeprefix(GRPO)}\nrate {grpo.rate}"


def draw_differences(path: Path, studies: list[Group]) -> None:
    """Saves how far the main methods end above GRPO, with a panel a study and a dot a seed."""
    figure, grid = plt.subplots(
        2, 3, figsize=(10, 6), layout="constrained", sharex=True, sharey=True
    )
    for panel, grpo in zip(grid.flat, studies, strict=False):
        panel.axvline(0, color="black", linewidth=1)
        panel.tick_params(labelbottom=True)
        for place, (method, color) in enumerate(SHOWN.items()):
            group = grpo.beside(method)
            if not group.lines():
                panel.text(0, place, " not run", color="#666666", va="center")
                continue
            own, others = pairs_of(group, grpo)
            row = compared(group, grpo, "end")
            interval = [row[name] for name in ("more", "low", "high") if row["low"] != ""]
            draw_dots(panel, place, color, own[:, -1] - others[:, -1], interval)
        panel.set_title(title_of(grpo), fontsize=10)
        panel.grid(axis="x", alpha=0.3)
    for panel in list(grid.flat)[len(studies) :]:
        panel.remove()
    labels = [f"{name} (oracle)" if name == "least variance" else name for name in SHOWN]
    grid[0, 0].set_yticks(range(len(SHOWN)), labels)
    grid[0, 0].invert_yaxis()
    figure.supxlabel("difference from GRPO in held-out sampled accuracy at the end", fontsize=10)
    figure.savefig(path, dpi=110)


def draw_weights(path: Path) -> None:
    """Saves how far each weight of wrong answers ends above weight 1, with a dot a seed."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 5), layout="constrained", sharex=True)
    for panel, study in zip(panels, ("wrong_policy", "nearly_right_policy"), strict=True):
        groups = [
            group
            for group in weighted_groups(study)
            if group != group.baseline()
            and group.rate == STUDIES[study].rates[1]
            and not group.failed_seeds()
        ]
        panel.axvline(0, color="black", linewidth=1)
        for row, group in enumerate(groups):
            for place, (way, (_, _, color)) in enumerate(JUDGED.items()):
                more = lead(group, way)
                draw_dots(panel, row + 0.15 * (place - 2), color, more, list(mean_interval(more)))
        panel.set_yticks(range(len(groups)), [group.method.split()[-1] for group in groups])
        panel.invert_yaxis()
        panel.set(title=TITLES[study], ylabel="weight of wrong answers")
        panel.grid(axis="x", alpha=0.3)
    for way, (_, _, color) in JUDGED.items():
        panels[0].plot([], [], "D", color=color, label=way)
    figure.legend(loc="outside upper center", ncols=len(JUDGED), frameon=False)
    figure.supxlabel("difference from weight 1 at the end", fontsize=10)
    figure.savefig(path, dpi=110)


def draw_curves(path: Path, studies: list[Group]) -> None:
    """Saves mean learning curves over the seeds that all methods without failed runs have."""
    figure, panels = plt.subplots(1, len(studies), figsize=(14, 4.2), layout="constrained")
    for panel, grpo in zip(panels, studies, strict=True):
        study = STUDIES[grpo.study]
        rollouts = np.arange(0, study.rollouts + 1, study.every)
        curves_of = {}  # method -> seed -> curve
        for method in (*SHOWN, GRPO):
            group = grpo.beside(method)
            if len(group.lines()) >= FEWEST_SEEDS and not group.failed_seeds():
                curves_of[method] = group.curves()
        seeds = set.intersection(*map(set, curves_of.values()))
        for method, curves in curves_of.items():
            mean = np.mean([curves[seed] for seed in seeds], 0)
            panel.plot(rollouts, mean, color=COLORS[method], linewidth=2, label=method)
        panel.set(title=title_of(grpo), xticks=rollouts, xlabel="rollouts")
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=8, title=f"{len(seeds)} seeds", title_fontsize=8)
    panels[0].set_ylabel("held-out sampled accuracy, mean over seeds")
    figure.savefig(path, dpi=110)


def main() -> None:
    for page in PAGES:
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
    write_csv(differences(), OUTPUT / "differences.csv")
    grpos = [
        Group("wrong_policy", 1, "0.002", GRPO),
        Group("nearly_right_policy", 1, "0.002", GRPO),
        Group("wrong_policy", 4, "0.001", GRPO),
        Group("nearly_right_policy", 4, "0.001", GRPO),
    ]
    draw_differences(OUTPUT / "differences.png", [*grpos, SMOLLM2_AGAIN])
    draw_curves(OUTPUT / "curves.png", [*grpos[:2], SMOLLM2_AGAIN])
    draw_weights(OUTPUT / "weights.png")


if __name__ == "__main__":
    main()
