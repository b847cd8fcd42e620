"""GRPO with token credit on a QLoRA policy, on one page. Read this first.

    python tools/grpo_on_one_page.py        # minutes, on one core of a CPU

A small language model learns chains of arithmetic: "Start with 34, double it, add 5." Its weights
are stored in 4 bits (NF4) and stay as they are. What is trained is a LoRA adapter beside them.

GRPO (arXiv 2402.03300) is PPO without a value network. It samples a group of completions for each
prompt, and the advantage of a completion comes from comparing its reward with the group's:

    A_i = (reward_i - mean of the group) / (standard deviation of the group + 1e-4)

PPO's clipped loss gives this advantage to every token. Token credit gives more of it to some. ARCA
(arXiv 2606.00257) measures how far the adapter has moved h_t, the hidden state that predicts token
y_t, and weighs the tokens of a completion in proportion:

    alpha_t  = || h_t with the adapter - h_t without it ||_2 + 1e-8
    weight_t = alpha_t / (mean of alpha over the completion)
    ratio_t  = pi(y_t) / pi_old(y_t)
    loss     = -(mean over completions i of the mean over their tokens t of
                 min(ratio_t weight_t A_i, clip(ratio_t, 1 - epsilon, 1 + epsilon) weight_t A_i))

With uniform credit all weights are 1, and that is plain GRPO.

Shapes in comments: B completions; P prompt tokens, padded on the left; T completion tokens, padded
on the right; H hidden units; V words in the vocabulary.
"""

import logging
import sys
from pathlib import Path

# On import bitsandbytes warns about a kernel that is not used here.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DynamicCache,
    PreTrainedTokenizerBase,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.reward import GRADER
from common.task import Problem, chain_problems

MODEL = ROOT / "common/tiny_policy"
CREDIT = "arca"  # or "uniform"
SEED = 1
ROLLOUTS = 45
PROMPTS = 16  # in a rollout
GROUP = 8  # completions of each prompt
LENGTH = 80  # tokens that a completion may have
PASSES = 1  # updates on a rollout; in the first of them every ratio is 1
LEARNING_RATE = 4e-3  # falls to 0
EPSILON = 0.2
HELD_OUT = 200  # problems to evaluate on


def load_policy() -> PeftModel:
    """Returns the model in NF4, with a new adapter on all linear layers but the head."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(
        MODEL, quantization_config=quantization, dtype=torch.float32, device_map="cpu"
    )
    for layer in base.modules():  # else some CPUs repack the weights, and gradients are wrong
        layer.support_avx512bf16_for_cpu = False
    torch.manual_seed(SEED)
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=8, lora_alpha=16)
    return get_peft_model(base, lora)


@torch.no_grad()
def sample(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    draws: Tensor | None = None,
) -> tuple[Tensor, Tensor, int]:
    """Returns a completion of each problem: ids and attention mask [B, P + T], and the width P.

    The tokens follow from uniform random numbers [B, LENGTH]. Without them decoding is greedy.
    """
    chats = [[{"role": "user", "content": problem.prompt}] for problem in problems]
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    ids = prompts["input_ids"]
    attention = prompts["attention_mask"]
    width = ids.shape[1]
    is_open = torch.ones_like(attention[:, :1])  # [B, 1]: 1 until a completion has its end token
    cache = DynamicCache()
    for t in range(LENGTH):
        new = slice(cache.get_seq_length(), None)  # the whole prompt at first, then the last token
        logits = model(
            ids[:, new],
            attention_mask=attention,
            position_ids=(attention.cumsum(1) - 1)[:, new],
            past_key_values=cache,
        ).logits[:, -1]  # [B, V]
        if draws is None:
            token = logits.argmax(1, keepdim=True)  # [B, 1]
        else:  # the first token whose cumulative probability exceeds the draw's share of the total
            cdf = logits.softmax(1).double().cumsum(1)
            token = torch.searchsorted(cdf, draws[:, t, None] * cdf[:, -1:], right=True)
        token = torch.where(is_open > 0, token, tokenizer.pad_token_id)
        ids = torch.cat((ids, token), 1)
        attention = torch.cat((attention, is_open), 1)
        is_open = is_open * (token != tokenizer.eos_token_id)
        if not is_open.any():
            break
    return ids, attention, width


def grade(
    tokenizer: PreTrainedTokenizerBase, completions: Tensor, problems: list[Problem]
) -> Tensor:
    """Returns rewards [B]: 1 where the boxed answer and every step of a completion are right."""
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    return torch.tensor(GRADER.grade(texts, problems))


def forward(model: PeftModel, ids: Tensor, attention: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Returns log-probs [B, T] of the completions, and the hidden states [B, T, H] behind them."""
    output = model(
        ids[:, :-1],
        attention_mask=attention[:, :-1],
        position_ids=(attention.cumsum(1) - 1)[:, :-1],
        output_hidden_states=True,
    )
    # Each token is predicted from the one before it, the first from the prompt's last.
    hidden = output.hidden_states[-1][:, width - 1 :]  # after the final norm
    logp = output.logits[:, width - 1 :].log_softmax(2)  # [B, T, V]
    return logp.gather(2, ids[:, width:, None]).squeeze(2), hidden


def token_weights(hidden: Tensor, base_hidden: Tensor, mask: Tensor) -> Tensor:
    """Returns each token's weight [B, T]: 1 on average over a completion, 0 on padding.

    This is the method. Try scores of your own.
    """
    scores = torch.ones(mask.shape)
    if CREDIT == "arca":
        scores = (hidden - base_hidden).norm(dim=2)
    scores = (scores + 1e-8) * mask
    return scores / scores.sum(1, keepdim=True) * mask.sum(1, keepdim=True)


def evaluate(model: PeftModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Prints the share of held-out problems that the policy solves greedily."""
    problems = chain_problems(HELD_OUT, held_out=True)
    ids, _, width = sample(model, tokenizer, problems)
    rewards = grade(tokenizer, ids[:, width:], problems)
    print(f"held-out problems solved: {rewards.mean():.1%}")


def train() -> None:
    """Trains the adapter, and evaluates the policy before and after."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    model = load_policy()
    adapter = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapter, LEARNING_RATE, weight_decay=0.0)
    problems = chain_problems(ROLLOUTS * PROMPTS, held_out=False, seed=SEED)
    evaluate(model, tokenizer)
    for rollout in range(ROLLOUTS):
        # Sample a group of completions for each of the next prompts, and grade them.
        chosen = problems[rollout * PROMPTS : (rollout + 1) * PROMPTS]
        repeated = [chosen[row // GROUP] for row in range(PROMPTS * GROUP)]
        draws = torch.rand(PROMPTS * GROUP, LENGTH)
        ids, attention, width = sample(model, tokenizer, repeated, draws)
        rewards = grade(tokenizer, ids[:, width:], repeated)
        print(f"rollout {rollout + 1}: {rewards.mean():.1%} right")

        # Compare each reward with those of its group.
        groups = rewards.view(PROMPTS, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)

        # Split the advantage of each completion among its tokens.
        mask = attention[:, width:]  # [B, T]
        with torch.no_grad():
            old_logp, hidden = forward(model, ids, attention, width)
            with model.disable_adapter():
                _, base_hidden = forward(model, ids, attention, width)
        token_advantages = advantages.view(-1, 1) * token_weights(hidden, base_hidden, mask)

        # Update the adapter by PPO's clipped loss.
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - rollout / ROLLOUTS)
        for _ in range(PASSES):
            logp, _ = forward(model, ids, attention, width)
            ratio = ((logp - old_logp) * mask).exp()
            clipped_ratio = ratio.clamp(1 - EPSILON, 1 + EPSILON)
            gains = torch.min(ratio * token_advantages, clipped_ratio * token_advantages)
            loss = -(gains.sum(1) / mask.sum(1)).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(adapter, 1.0)
            optimizer.step()
    evaluate(model, tokenizer)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the policy is so small that threads would only wait
    train()
