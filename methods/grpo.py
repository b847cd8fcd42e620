"""GRPO itself: every token gets the advantage of its completion.

    A_t = A_i

Where the file of a method leaves out token_scores, assign_credit or surrogate_terms, tools/fork.py
takes this one's. So they also serve methods that score tokens and leave the rest to GRPO:

    A_t = A_i * T_i * s_t / sum_k s_k              s_t >= 0: the score of token t

Below them is what several methods call. The source is arXiv 2402.03300. The credit is that of
grpo_arca.py --credit uniform.
"""

import json
from dataclasses import replace

import torch
from torch import Tensor

from common import fail
from common.credit import control_weights
from grpo_arca import Args, Batch, Run, credit_draws, key_seed, normalize


# === CREDIT ===
def token_scores(run: Run, micro: Batch, metrics: dict) -> Tensor:
    """Returns 1 for every token [B, T]."""
    return micro.mask.float()


def assign_credit(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Turns scores into `weights`, or into those of a control. They are also the `credit`."""
    for micro in micros:
        micro.weights = normalize(micro.scores, micro.mask, power=1.0)
        if run.args.credit in ("random", "shuffled"):
            draws = credit_draws(run, micro)
            micro.weights = control_weights(run.args.credit, micro.weights, micro.mask, draws)
        micro.credit = micro.weights


def surrogate_terms(args: Args, micro: Batch, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log-ratio of each token, and its advantage, both [B, T]."""
    return log_ratio, micro.advantages[:, None] * micro.credit


def set_credit(run: Run, micro: Batch, credit: Tensor) -> None:
    """Sets `credit` [B, T] or, with --credit shuffled, the same in random order, and `weights`.

    `weights`, for reports, are the absolute credit over its mean in the completion.
    """
    if run.args.credit == "shuffled":
        credit = control_weights("shuffled", credit, micro.mask, credit_draws(run, micro))
    micro.credit = credit
    # `normalize` alone would give a completion without any credit weights of 1.
    micro.weights = normalize(credit.abs(), micro.mask, power=1.0) * (credit != 0)


def after_prompts(micro: Batch, prompts: list[tuple[int, ...]]) -> Batch:
    """Returns the same completions after other prompts, which are token ids."""
    tensors = [torch.tensor(prompt, device=micro.ids.device) for prompt in prompts]
    padded = torch.nn.utils.rnn.pad_sequence(tensors, True, padding_value=-1, padding_side="left")
    return replace(
        micro,
        prompt_width=padded.shape[1],
        ids=torch.cat((padded.clamp(min=0), micro.ids[:, micro.prompt_width :]), 1),
        attention=torch.cat((padded >= 0, micro.mask), 1),
    )


def informed(run: Run, micro: Batch) -> Batch:
    """Returns the same completions, after prompts that tell the right answer or, with --told wrong,
    that of another problem.
    """
    from common.data import encode_prompts, whole_prompt  # here, as few forks need them

    prompts: list[tuple[int, ...]] = []
    for problem in micro.problems:
        answer = problem.answer
        if answer == "":
            fail("a problem has no answer that the policy could be told")
        if run.args.told == "wrong":  # that of another problem, the same one for a whole group
            others = [p.answer for p in run.train_set if p.answer not in ("", answer)]
            answer = others[key_seed(run.args.seed, "told", problem.prompt_ids) % len(others)]
        messages = whole_prompt(problem.prompt, run.args.system_prompt)
        last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
        content = messages[last_user]["content"] + f" The answer is {answer}."
        messages[last_user] = messages[last_user] | {"content": content}
        template_kwargs = json.loads(run.args.chat_template_kwargs)
        prompts += encode_prompts(run.tokenizer, [messages], template_kwargs)
    return after_prompts(micro, prompts)


# === END CREDIT ===
