"""credit.html: completions whose tokens are tinted by their credit."""

from __future__ import annotations

import math
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from common.data import token_texts, whole_prompt
from common.problems import token_roles
from common.reward import ACCURACY
from common.run_log import finite_or_nan, format_number

if TYPE_CHECKING:
    # Each script has its own classes of these names, alike in what is read here.
    Batch = Any
    Run = Any

TEMPLATE = Path(__file__).with_name("credit_page.html")
UNIFORM = "All weights are 1: the adapter has not moved yet, or the method is uniform."
STRONGEST_TINT = 12  # the tints are numbered from 0
FULL_TINT = 3.0  # the weight from which on a tint is the strongest

Member = tuple["Batch", int]  # a completion: its micro-batch, and its row there


# ---- The page ------------------------------------------------------------------------------------
def write_credit_page(path: str, title: str, samples: list[dict[str, Any]]) -> None:
    """Writes credit.html, a page without scripts, from groups of completions.

    A group is a dict of

        prompt, answer   texts
        earlier          optional: the messages before the prompt, as dicts with role and content
        step             the number of updates before it
        completions      dicts with reward, advantage, truncated and tokens, which are dicts with
                         text, weight (1 is the completion's mean), entropy (nats), logp and
                         optionally role ("decisive" or "first_wrong")
        size             optional: the completions in the group, if these are not all
        correct          optional: how many of the group are right; None: that is not known
        note             optional: a sentence
        heading          optional: instead of the step

    Texts may be hostile: the template escapes all of them. Numbers may be NaN or None.
    """
    environment = jinja2.Environment(
        autoescape=True,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["real"] = finite_or_nan
    environment.filters["number"] = format_number
    environment.filters["tints"] = tints
    environment.filters["falls"] = entropy_falls
    environment.tests["above"] = has_positive_advantage
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    all_uniform = bool(samples)
    for group in samples:
        all_uniform = all_uniform and has_uniform_weights(group["completions"])
    page = template.render(title=title, groups=samples, all_uniform=all_uniform)
    Path(path).write_text(page, encoding="utf-8", newline="\n")


def has_positive_advantage(completion: dict[str, Any]) -> bool:
    return finite_or_nan(completion["advantage"]) > 0


def tints(tokens: list[dict[str, Any]]) -> list[str]:
    """Returns the style classes of each token of a completion: how strong its tints are.

    "k4 u0 h12" stands for a tint of 4 twelfths by its weight, of none by its surprisal, and for the
    strongest by the fall of its entropy. These are the weights of `--credit surprisal` and
    `--credit entropy_reduction`.
    """
    surprisals = as_weights([-finite_or_nan(token["logp"]) for token in tokens])
    falls = as_weights(entropy_falls(tokens))
    classes = []
    for token, surprisal, fall in zip(tokens, surprisals, falls, strict=True):
        weight = finite_or_nan(token["weight"])
        classes.append(f"k{tint(weight)} u{tint(surprisal)} h{tint(fall)}")
    return classes


def tint(weight: float) -> int:
    """Returns the number of the tint of a weight; that of NaN is 0."""
    if math.isnan(weight):
        return 0
    number = round(weight / FULL_TINT * STRONGEST_TINT)
    return max(0, min(number, STRONGEST_TINT))


def entropy_falls(tokens: list[dict[str, Any]]) -> list[float]:
    """Returns how much lower the entropy of the next token is: 0 where it is not, and at the end.

    NaN if one of the two is unknown.
    """
    entropies = [finite_or_nan(token["entropy"]) for token in tokens]
    falls = []
    for i in range(len(entropies)):
        is_last = i == len(entropies) - 1
        fall = 0.0 if is_last else entropies[i] - entropies[i + 1]
        falls.append(0.0 if fall < 0 else fall)
    return falls


def as_weights(scores: list[float]) -> list[float]:
    """Returns the scores of a completion over their mean, as `normalize` in grpo_arca.py does.

    NaN counts as 0.
    """
    known = [0.0 if math.isnan(score) else score + 1e-8 for score in scores]
    mean = sum(known) / max(1, len(known))
    if mean <= 0:
        return known
    return [score / mean for score in known]


def visible(value: object) -> str:
    """Returns hostile text as the reader shall see it.

    Control, bidirectional and zero-width characters and lone surrogates become <U+....>. The
    control characters below U+0020 become their pictures, from U+2400 on. Newlines stay.
    """
    text = str(value)
    replacements = {}
    for character in set(text) - {"\n"}:
        if character.isprintable() or unicodedata.category(character) == "Zs":
            continue
        code = ord(character)
        replacements[code] = chr(0x2400 + code) if character < " " else f"<U+{code:04X}>"
    return text.translate(replacements)


# ---- What stands on it ---------------------------------------------------------------------------
def credit_group(run: Run, micros: list[Batch]) -> list[dict]:
    """Returns a group of a scored rollout as `write_credit_page` wants it, in a list.

    That is the first group with an advantage, with its two best and two worst completions of those
    on this process. The list is empty if there is none.
    """
    member_of_row: dict[int, Member] = {}
    for batch in micros:
        for i, row in enumerate(batch.rows.tolist()):
            member_of_row[row] = (batch, i)
    useful = [row for row, (batch, i) in member_of_row.items() if batch.advantages[i] != 0]
    if not useful:
        return []

    # Find the members of its group that are here, and sort them by their rewards.
    size = run.args.num_generations
    first_row = min(useful) // size * size
    rows = [row for row in range(first_row, first_row + size) if row in member_of_row]
    members = [member_of_row[row] for row in rows]
    members.sort(key=reward_of, reverse=True)
    shown = members[:2] + members[2:][-2:]
    completions = [describe_completion(run, batch, i) for batch, i in shown]

    # A reward above 0 is a right answer if there is no other reward function.
    num_right = None
    if list(run.reward_funcs) == [ACCURACY] and len(members) == size:
        num_right = sum(reward_of(member) > 0 for member in members)
    batch, i = members[0]
    problem = batch.problems[i]
    messages = whole_prompt(problem.prompt, run.args.system_prompt)
    # Texts alone: a message may hold more, such as a date, which no checkpoint could load.
    earlier = [{"role": m["role"], "content": m["content"]} for m in messages[:-1]]
    group = {
        "prompt": messages[-1]["content"],
        "earlier": earlier,
        "answer": problem.answer,
        "step": run.step,
        "size": size,
        "note": UNIFORM if has_uniform_weights(completions) else "",
        "correct": num_right,
        "completions": completions,
    }
    return [group]


def reward_of(member: Member) -> float:
    """Returns the reward of a completion, the smallest number if no function judged it."""
    batch, i = member
    reward = batch.rewards[i].item()
    return -math.inf if math.isnan(reward) else reward


def has_uniform_weights(completions: list[dict[str, Any]]) -> bool:
    """Returns whether all tokens have the weight 1."""
    for completion in completions:
        for token in completion["tokens"]:
            if not abs(finite_or_nan(token["weight"]) - 1) <= 1e-6:  # true for NaN
                return False
    return True


def describe_completion(run: Run, batch: Batch, row: int) -> dict[str, Any]:
    """Returns a completion as `write_credit_page` wants it."""
    completion = batch.ids[row, batch.prompt_width :]  # [T]
    ids = completion[batch.mask[row]].tolist()
    texts = token_texts(run.tokenizer, ids)
    problem = batch.problems[row]
    roles = token_roles(texts, problem) if problem.steps else [""] * len(ids)
    weights = batch.weights[row].tolist()
    entropies = batch.entropy[row].tolist()
    logps = batch.sampled_logp[row].tolist()
    tokens = []
    for i in range(len(ids)):
        token = {
            "text": texts[i] or "\N{MIDDLE DOT}",  # where a token ends within a character
            "role": roles[i],
            "weight": weights[i],
            "entropy": entropies[i],
            "logp": logps[i],
        }
        tokens.append(token)
    return {
        "reward": batch.rewards[row].item(),
        "advantage": batch.advantages[row].item(),
        "truncated": batch.truncated[row].item(),
        "tokens": tokens,
    }
