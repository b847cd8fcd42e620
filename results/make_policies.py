"""Makes the tiny policy beside this file: a Qwen3-shaped model that can do chain arithmetic, badly.

    python results/make_policies.py          # seeded; about 25 minutes on 2 CPU cores
    python results/make_policies.py --long   # common/long_policy from it: 2 to 8 operations

It is trained first on right demonstrations and then on ones that drop a carry or a borrow more
often than not, so that sampling solves about three in ten held-out problems: the skill is there,
and reinforcement has something to sharpen. The long policy slips less in a step, as it has more of
them: three in ten of its chains of 8 are right, nine in ten greedily. Neither ever sees a held-out
problem.
"""

import math
import random
import sys
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from common.data import Chain, Operation, random_chain

LONG = "--long" in sys.argv[1:]
STEPS, CLEAN_STEPS, BATCH, LEARNING_RATE = (
    (600, 350, 64, 1.5e-3) if LONG else (1400, 800, 128, 3e-3)
)
# Chance per step, where a step has a carry or borrow; else
DROPPED_CARRY, OTHER_SLIP = (0.22, 0.02) if LONG else (0.55, 0.06)
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
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def without_carry(operation: Operation, value: int) -> int:
    """The result when the carry or the borrow is forgotten (equal to the right one without any)."""
    units = operation.apply(value % 10) if operation.name == "multiply" else None
    if operation.name == "add":
        units = value % 10 + operation.operand % 10
    elif operation.name == "subtract":
        units = value % 10 - operation.operand % 10
    return operation.apply(value) - 10 * (units // 10)


def slip(rng: random.Random, operation: Operation, value: int, slips: bool) -> int:
    """The result a demonstration states for one step."""
    right, forgotten = operation.apply(value), without_carry(operation, value)
    if slips and forgotten != right and rng.random() < DROPPED_CARRY:
        return forgotten
    if slips and rng.random() < OTHER_SLIP:
        return right + rng.choice([-10, -2, -1, 1, 2, 10])
    return right


def demonstrate(rng: random.Random, chain: Chain, slips: bool) -> str:
    """A worked solution in random words. Slips never cancel: a slipped chain has a wrong answer."""
    while True:
        values = [chain.start]
        for operation in chain.operations:
            values.append(slip(rng, operation, values[-1], slips))
        right = tuple(values[1:]) == chain.results()
        if min(values) >= 0 and max(values) <= 199 and right == (values[-1] == chain.results()[-1]):
            break
    sentences, links, steps = [rng.choice(BEGIN).format(v=values[0])], LINK, STEP
    if LONG and rng.random() < 0.5:  # as greedy decoding writes; it must not lose its place there
        links = [rng.choice(LINK)]
        steps = {name: [rng.choice(phrases)] for name, phrases in STEP.items()}
    for operation, value in zip(chain.operations, values[1:], strict=True):
        word = {2: ("doubl", "double"), 3: ("tripl", "triple")}.get(operation.operand, ("", ""))
        step = rng.choice(steps[operation.name])
        step = rng.choice(links) + step.format(k=operation.operand, r=value, w=word[0], x=word[1])
        sentences.append(step[0].upper() + step[1:])
    return " ".join(sentences) + " " + rng.choice(END).format(v=values[-1])


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that any text encodes; each digit and `\\boxed{` is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"\\boxed\{|\p{N}|\p{L}+ ?|[^\s\p{L}\p{N}]+ ?|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng, texts = random.Random(1), ["user\n", "assistant\n", "system\n"] * 3000
    for _ in range(3000):
        chain = random_chain(rng, held_out=False)
        texts += [chain.prompt(), demonstrate(rng, chain, slips=False)]
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
    """1.04 M parameters; every linear layer is a multiple of 64 each way, for whole NF4 blocks."""
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
        )
    )


def batch(rng: random.Random, tokenizer: PreTrainedTokenizerFast, slips: bool):
    """Token ids and labels, right-padded: under a causal mask padding needs no mask of its own."""
    ids, labels = [], []
    for _ in range(BATCH):
        chain = random_chain(rng, held_out=False, length=rng.randint(2, 8) if LONG else None)
        messages = [{"role": "user", "content": chain.prompt()}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt_ids = tokenizer(prompt).input_ids
        completion_ids = tokenizer(demonstrate(rng, chain, slips) + tokenizer.eos_token).input_ids
        ids.append(prompt_ids + completion_ids)
        labels.append([-100] * len(prompt_ids) + completion_ids)
    width = max(map(len, ids))
    return (
        torch.tensor(
            [row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids]
        ),  # [B, T]
        torch.tensor([row + [-100] * (width - len(row)) for row in labels]),  # [B, T]
    )


def main() -> None:
    torch.manual_seed(0)
    rng, start, folder = random.Random(7), time.time(), Path(__file__).parent
    if LONG:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        folder = folder.with_name("long_policy")
    else:
        tokenizer = build_tokenizer()
        model = build_model(tokenizer).train()
    print(f"{len(tokenizer)} tokens, {sum(p.numel() for p in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    for step in range(1, STEPS + 1):
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / STEPS)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, step / 50) * (0.05 + 0.95 * cosine)
        ids, labels = batch(rng, tokenizer, slips=step > CLEAN_STEPS)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            left = (time.time() - start) / step * (STEPS - step) / 60
            print(f"step {step}/{STEPS}  loss {loss.item():.4f}  {left:.1f} min left", flush=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
