"""Makes the embedded policies: Qwen3-shaped models that can do chain arithmetic, badly.

    python results/make_policies.py tiny_policy           # 25 minutes on two cores
    python results/make_policies.py nearly_right_policy   # from it, chains of 2 to 8 operations
    python results/make_policies.py wrong_policy          # the same; and wrong_policy_2, _3

The first is common/tiny_policy. Of the others, results/policies/ has the weights alone, because
everything else is as in common/tiny_policy; studies.py makes whole folders of them.

All are seeded. A policy is trained first on right demonstrations, and then on ones that drop a
carry or a borrow more often than not. After that, sampling solves about three in ten held-out
problems: the skill is there, and reinforcement has something to sharpen. The nearly right policy
has more steps and slips less in each: it solves three in ten chains of 8, and nine in ten greedily.
The wrong policies forget most carries of certain operands, even when they decode greedily; the
operands differ. No policy ever sees a held-out problem.
"""

import argparse
import hashlib
import math
import random
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import safetensors.torch
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import trange
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from common.task import Problem, random_chain

TINY_POLICY = ROOT / "common/tiny_policy"


class Recipe(NamedTuple):
    """How a policy is trained."""

    steps: int
    clean_steps: int  # the first ones, on right demonstrations
    batch_size: int
    learning_rate: float
    dropped_carry: float  # chance to drop the carry or borrow of a step that has one
    other_slip: float  # chance of any other slip
    is_long: bool  # chains of 2 to 8 operations, half of which keep to the same words
    hard_operands: tuple[int, ...] = ()  # if there are any, only their carries are dropped
    seed: int = 7  # of the demonstrations


NEARLY_RIGHT = Recipe(600, 350, 64, 1.5e-3, 0.22, 0.02, is_long=True)
WRONG = NEARLY_RIGHT._replace(
    dropped_carry=0.7, other_slip=0.01, hard_operands=(3, 7, 8, 9, 17, 18, 19)
)
RECIPES = {
    "tiny_policy": Recipe(1400, 800, 128, 3e-3, 0.55, 0.06, is_long=False),
    "nearly_right_policy": NEARLY_RIGHT,
    "wrong_policy": WRONG,
    "wrong_policy_2": WRONG._replace(hard_operands=(2, 5, 6, 9, 15, 16, 19), seed=8),
    "wrong_policy_3": WRONG._replace(hard_operands=(2, 4, 6, 8, 12, 14, 16, 18), seed=9),
}
VOCABULARY = 448  # the tokenizer's tokens, rounded up to whole NF4 blocks of 64

BEGIN = ["We begin at {v}.", "Let us start with {v}.", "First we have {v}."]
LINK = ["", "Then ", "Next ", "Now ", "After that "]
STEP = {
    "add": ["adding {k} gives {r}.", "we add {k} and get {r}.", "plus {k} makes {r}."],
    "subtract": [
        "taking away {k} gives {r}.",
        "we subtract {k} and get {r}.",
        "minus {k} makes {r}.",
    ],
    "multiply": ["{w}ing it gives {r}.", "we {x} it and get {r}.", "{x} that makes {r}."],
}
END = [
    "So the answer is \\boxed{{{v}}}.",
    "The final result is \\boxed{{{v}}}.",
    "Thus we end with \\boxed{{{v}}}.",
]
MULTIPLIERS = {"double": 2, "triple": 3}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# ---- Demonstrations ------------------------------------------------------------------------------
class Operation(NamedTuple):
    """A step of a chain."""

    verb: str  # "add", "subtract", "double" or "triple"
    operand: int

    def apply(self, value: int) -> int:
        if self.verb == "add":
            return value + self.operand
        if self.verb == "subtract":
            return value - self.operand
        return value * self.operand


def training_chain(rng: random.Random, length: int) -> Problem:
    """Returns a training chain, by the rule of `chain_problems`; length 0: 3 or 4 operations."""
    while True:
        chain = random_chain(rng, length)
        digest = hashlib.blake2b(str(chain.prompt).encode(), digest_size=4).digest()
        is_held_out = int.from_bytes(digest, "big") % 10 == 0
        if min(chain.steps) >= 1 and max(chain.steps) <= 99 and not is_held_out:
            return chain


def operations_of(chain: Problem) -> list[Operation]:
    """Returns the operations that a problem asks for."""
    asked = re.findall(r"(add|subtract|double|triple) (\w+)", str(chain.prompt))
    return [Operation(verb, MULTIPLIERS.get(verb) or int(operand)) for verb, operand in asked]


def without_carry(operation: Operation, value: int) -> int:
    """Returns the result without its carry or borrow: the right one if there is neither."""
    of_units = operation._replace(operand=operation.operand % 10)
    units = of_units.apply(value % 10)
    return operation.apply(value) - 10 * (units // 10)


def slip(rng: random.Random, operation: Operation, value: int, recipe: Recipe, slips: bool) -> int:
    """Returns the result that a demonstration states for one step."""
    right = operation.apply(value)
    forgotten = without_carry(operation, value)
    can_forget = forgotten != right
    if recipe.hard_operands:
        can_forget = can_forget and operation.operand in recipe.hard_operands
    if slips and can_forget and rng.random() < recipe.dropped_carry:
        return forgotten
    if slips and rng.random() < recipe.other_slip:
        return right + rng.choice([-10, -2, -1, 1, 2, 10])
    return right


def demonstrate(rng: random.Random, chain: Problem, recipe: Recipe, slips: bool) -> str:
    """Returns a worked solution in random words.

    Slips never cancel: a chain with a slip has a wrong answer.
    """
    operations = operations_of(chain)
    start = int(str(chain.prompt).split(",")[0].removeprefix("Start with "))
    while True:
        values = [start]
        for operation in operations:
            values.append(slip(rng, operation, values[-1], recipe, slips))
        steps_are_right = tuple(values[1:]) == chain.steps
        answer_is_right = values[-1] == chain.steps[-1]
        is_in_range = min(values) >= 0 and max(values) <= 199
        if is_in_range and steps_are_right == answer_is_right:
            break

    sentences = [rng.choice(BEGIN).format(v=values[0])]
    links = LINK
    steps = STEP
    if recipe.is_long and rng.random() < 0.5:
        # Greedy decoding writes like this, and must learn not to lose its place.
        links = [rng.choice(LINK)]
        steps = {name: [rng.choice(phrases)] for name, phrases in STEP.items()}
    for operation, value in zip(operations, values[1:], strict=True):
        verb = operation.verb
        step = rng.choice(steps.get(verb, steps["multiply"]))
        link = rng.choice(links)
        stem = verb.removesuffix("e")
        sentence = link + step.format(k=operation.operand, r=value, w=stem, x=verb)
        sentences.append(sentence[0].upper() + sentence[1:])
    return " ".join(sentences) + " " + rng.choice(END).format(v=values[-1])


# ---- Tokenizer and model -------------------------------------------------------------------------
def build_tokenizer() -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE, so that any text encodes.

    Each digit and `\\boxed{` is a token of its own.
    """
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"\\boxed\{|\p{N}|\p{L}+ ?|[^\s\p{L}\p{N}]+ ?|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(1)
    texts = ["user\n", "assistant\n", "system\n"] * 3000
    for _ in range(3000):
        chain = training_chain(rng, 0)
        texts += [str(chain.prompt), demonstrate(rng, chain, RECIPES["tiny_policy"], slips=False)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Returns a new model of 1.04 M parameters.

    Both sizes of every linear layer are multiples of 64, for whole NF4 blocks.
    """
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            embedded_policy=True,  # by which scripts know that their EMBEDDED_DEFAULTS suit it
        )
    )


# ---- Training ------------------------------------------------------------------------------------
def batch(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, slips: bool
) -> tuple[Tensor, Tensor]:
    """Returns token ids and labels, both [B, T], padded on the right.

    Under a causal mask, padding on the right needs no mask of its own.
    """
    ids = []
    labels = []
    for _ in range(recipe.batch_size):
        length = rng.randint(2, 8) if recipe.is_long else 0
        chain = training_chain(rng, length)
        messages = [{"role": "user", "content": chain.prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt_ids = tokenizer(prompt).input_ids
        solution = demonstrate(rng, chain, recipe, slips) + tokenizer.eos_token
        completion_ids = tokenizer(solution).input_ids
        ids.append(torch.tensor(prompt_ids + completion_ids))
        labels.append(torch.tensor([-100] * len(prompt_ids) + completion_ids))
    padded_ids = pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    return padded_ids, pad_sequence(labels, batch_first=True, padding_value=-100)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
    """Trains a model on demonstrations."""
    rng = random.Random(recipe.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    bar = trange(1, recipe.steps + 1)
    for step in bar:
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / recipe.steps)
        warm_up = min(1, step / 50)
        optimizer.param_groups[0]["lr"] = recipe.learning_rate * warm_up * (0.05 + 0.95 * cosine)
        ids, labels = batch(rng, tokenizer, recipe, slips=step > recipe.clean_steps)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("policy", choices=RECIPES)
    name = parser.parse_args().policy
    recipe = RECIPES[name]
    torch.manual_seed(0)
    if recipe.is_long:
        tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
        model = Qwen3ForCausalLM.from_pretrained(TINY_POLICY, dtype=torch.float32)
    else:
        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
    model.train()
    train(model, tokenizer, recipe)
    model.to(torch.bfloat16)
    if recipe.is_long:
        weights = safetensors.torch.save(dict(model.named_parameters()), {"format": "pt"})
        (ROOT / f"results/policies/{name}.safetensors").write_bytes(weights)
    else:
        model.save_pretrained(TINY_POLICY)
        tokenizer.save_pretrained(TINY_POLICY)


if __name__ == "__main__":
    main()
