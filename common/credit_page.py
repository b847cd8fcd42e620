"""credit.html: completions whose tokens are tinted by their credit."""

from __future__ import annotations

import math
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from common.problems import token_roles
from common.reward import ACCURACY
from common.run_log import finite_or_nan, format_number

if TYPE_CHECKING:
    # Each script has its own classes of these names, alike in what is read here.
    Batch = Any
    Run = Any

TEMPLATE = Path(__file__).with_name("credit_page.html")
UNIFORM = "All weights are 1: the adapter has not moved yet, or the method is uniform."

Member = tuple["Batch", int]  # a completion: its micro-batch, and its row there


# ---- The page ------------------------------------------------------------------------------------
def write_credit_page(path: str, title: str, samples: list[dict[str, Any]]) -> None:
    """Writes credit.html, a page without scripts, from groups of completions.

    A group is a dict of

        prompt, answer   texts
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
    environment.tests["above"] = has_positive_advantage
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    page = template.render(title=title, groups=samples)
    Path(path).write_text(page, encoding="utf-8", newline="\n")


def has_positive_advantage(completion: dict[str, Any]) -> bool:
    return finite_or_nan(completion["advantage"]) > 0


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
    prompt = problem.prompt
    if not isinstance(prompt, str):
        prompt = prompt[-1]["content"]
    group = {
        "prompt": prompt,
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
        if any(abs(token["weight"] - 1) > 1e-6 for token in completion["tokens"]):
            return False
    return True


def describe_completion(run: Run, batch: Batch, row: int) -> dict[str, Any]:
    """Returns a completion as `write_credit_page` wants it."""
    completion = batch.ids[row, batch.prompt_width :]  # [T]
    ids = completion[batch.mask[row]].tolist()
    texts = [run.tokenizer.decode([token_id]) for token_id in ids]
    problem = batch.problems[row]
    roles = token_roles(texts, problem) if problem.steps else [""] * len(ids)
    weights = batch.weights[row].tolist()
    entropies = batch.entropy[row].tolist()
    logps = batch.sampled_logp[row].tolist()
    tokens = []
    for i in range(len(ids)):
        token = {
            "text": texts[i],
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
