"""GRPO whose tokens weigh what the policy would do if it knew the answer: RLSD.

    d_t = log pi(y_t | x and the answer, y_<t) - log pi(y_t | x, y_<t)
    w_t = clip(exp(sign(A_i) * d_t), .8, 1.2)
    A_t = A_i * (1 - l + l * w_t)                       l = .5, or fading to 0

A token that the answer makes likelier gets more credit in a right completion, and less blame in a
wrong one. The source is "Self-Distilled RLVR" (arXiv 2604.03128). There is public code by its
authors (github.com/iie-ycx/RLSD) and in ms-swift (`--advantage_reweight rlsd`). This is as in
ms-swift: the present policy is told the answer, and l does not fade unless
--rlsd_lambda_decay_steps says so. In the authors' script, a copy that is renewed every 20 steps is
told, l fades within 60, and each update computes d_t again. As in that script, the policy is told
the final answer. The words are ours: the user ends with "The answer is ...".

It is GRPO with --rlsd_lambda 0, and where the answer changes nothing. --credit shuffled gives the
weights of each completion to its tokens in random order. --told wrong tells the policy the answer
of another problem: if the weights stay the same, they were never about the answer.
"""

import json
from dataclasses import replace
from typing import Literal

import torch

from common import fail
from common.credit import control_weights
from common.data import encode_prompts, whole_prompt
from grpo_arca import Batch, Run, credit_draws, flag, in_fp32, key_seed, normalize


class Flags:
    # === CREDIT ===
    credit: Literal["rlsd", "shuffled"] = flag("rlsd", "what weighs tokens; shuffled: a control")
    told: Literal["right", "wrong"] = flag("right", "answer that the policy is told; a control")
    rlsd_lambda: float = flag(0.5, "share of the weights in the credit; 0 is GRPO")
    rlsd_lambda_decay_steps: int = flag(0, "updates in which that share fades to 0; 0: never")
    rlsd_reweight_clip_range: float = flag(0.2, "weights are clipped to 1 minus and plus this")
    # === END CREDIT ===


# === CREDIT ===
def informed(run: Run, micro: Batch) -> Batch:
    """Returns the completions after prompts that end with the answer that --told asks for."""
    prompts = []
    for problem in micro.problems:
        answer = problem.answer
        if answer == "":
            fail("a problem has no answer that the policy could be told")
        if run.args.told == "wrong":  # that of another problem, the same one for a whole group
            others = [p.answer for p in run.train_set if p.answer not in ("", answer)]
            answer = others[key_seed(run.args.seed, "told", problem.prompt_ids) % len(others)]
        messages = whole_prompt(problem.prompt, run.args.system_prompt)
        place = max(i for i, message in enumerate(messages) if message["role"] == "user")
        content = messages[place]["content"] + f" The answer is {answer}."
        messages[place] = messages[place] | {"content": content}
        (ids,) = encode_prompts(
            run.tokenizer, [messages], json.loads(run.args.chat_template_kwargs)
        )
        prompts.append(torch.tensor(ids, device=micro.ids.device))
    told = torch.nn.utils.rnn.pad_sequence(prompts, True, padding_value=-1, padding_side="left")
    return replace(
        micro,
        prompt_width=told.shape[1],
        ids=torch.cat((told.clamp(min=0), micro.ids[:, micro.prompt_width :]), 1),
        attention=torch.cat((told >= 0, micro.mask), 1),
    )


def token_scores(run: Run, micro: Batch, metrics: dict) -> torch.Tensor:
    """Returns d_t [B, T]: by how much the answer raises the log-prob of each token."""
    with in_fp32(run) as policy:  # the differences are small
        return policy(informed(run, micro))[0] - policy(micro)[0]


def assign_credit(run: Run, batch: Batch, micros: list[Batch], metrics: dict) -> None:
    """Multiplies advantages by 1 - l + l * w_t, without normalizing it."""
    args = run.args
    share = args.rlsd_lambda
    if args.rlsd_lambda_decay_steps > 0:
        # Updates up to this rollout, not those within it, so that a resumed run has the same.
        done = run.rollout_number * run.updates_per_rollout
        share *= max(0.0, 1 - done / args.rlsd_lambda_decay_steps)
    clip = args.rlsd_reweight_clip_range
    for micro in micros:
        weights = (micro.advantages.sign()[:, None] * micro.scores).exp().clamp(1 - clip, 1 + clip)
        micro.credit = (1 - share + share * weights) * micro.mask
        if args.credit == "shuffled":
            micro.credit = control_weights(
                "shuffled", micro.credit, micro.mask, credit_draws(run, micro)
            )
        micro.weights = normalize(micro.credit, micro.mask, 1.0)


# === END CREDIT ===
