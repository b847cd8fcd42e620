"""Helpers that several test files share: models, batches, TRL's loss, runs in forks."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may wait for a network
os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # as tensors of tests; see test_gpu.py
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are tiny, so threads would only wait
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo_arca
from common.task import Problem, chain_problems

TINY = str(ROOT / "common/tiny_policy")
TOKENIZER = AutoTokenizer.from_pretrained(TINY)
SCRIPTS = ("grpo_arca", "grpo_oar", "grpo_strace")
TINY_RUN = {  # the flags of a run that takes two seconds
    "max_steps": 3, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "num_generations": 4, "max_completion_length": 8, "max_eval_samples": 2, "warmup_steps": 1,
    "num_generations_eval": 1, "eval_steps": 0,
}  # fmt: skip
TEXTS = ["Start with 5, add 7, double it, subtract 3.", "Start with 40, subtract 12.", "Hello"]


# ---- Models and batches --------------------------------------------------------------------------
def few_chains(count: int, held_out: bool, seed: int = 0, length: int = 0) -> list[Problem]:
    """Returns what `chain_problems` does, but at most 40: the 4,096 of a run take a second."""
    return chain_problems(min(count, 40), held_out, seed, length)


def randomize_adapter(model, scale: float = 0.05) -> None:
    """Makes the adapter act. Its matrices B are 0 at the start, which most tests must not have."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(scale * torch.randn(parameter.shape, generator=generator))


def save_model(folder: Path, config) -> Path:
    """Saves a random model of this config, with the embedded policy's tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def changed_copy(folder: Path, changes: dict[str, dict], model: Path | str = TINY) -> str:
    """Copies a model, by default the embedded one, with some keys of its JSON files changed."""
    shutil.copytree(model, folder)
    for name, changed in changes.items():
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | changed))
    return str(folder)


def pays(*values: float):
    """Returns a reward function that gives these rewards in turn, and logs a figure."""

    def function(completions, log_metric, **_):
        log_metric("letters", len(completions[0]))
        return list(itertools.islice(itertools.cycle(values), len(completions)))

    return function


def fixed_draws(*shape) -> torch.Tensor:
    """Returns draws that are the same in every run."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def problems_of(run, count: int = 4) -> list[Problem]:
    """Returns problems whose prompts have different lengths; the texts repeat after three."""
    texts = [TEXTS[i % 3] + " " * (i % 2) for i in range(count)]
    return [Problem(text, "1", prompt_ids=tuple(run.tokenizer(text).input_ids)) for text in texts]


def sample(run, problems: list[Problem], draws: torch.Tensor, is_greedy: bool = False):
    """Returns a completion of each problem, as rows 0, 1, 2, ... of a rollout."""
    rows = torch.arange(len(problems))
    size = run.args.per_device_rollout_batch_size
    return grpo_arca.sample(run, rows, problems, draws, size, run.reward_funcs, {}, is_greedy)


def stock(run, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log-probs and entropies [B, T] of the completions by transformers' own model.

    It reads one row at a time, without padding and cache, with its plainest attention, and with the
    layers' own functions.
    """
    base = run.model.get_base_model()
    forwards = [vars(layer).pop("forward", None) for layer in run.model.modules()]
    attention = base.config._attn_implementation
    base.set_attn_implementation("eager")
    results: list[list[torch.Tensor]] = [[], []]
    for ids, is_real, mask in zip(batch.ids, batch.attention, batch.mask, strict=True):
        length = int(mask.sum())
        logits = base(ids[is_real][None], use_cache=False).logits[0, -length - 1 : -1].float()
        every = torch.distributions.Categorical(logits=logits / run.args.temperature)
        for result, row in zip(
            results, (every.log_prob(ids[is_real][-length:]), every.entropy()), strict=True
        ):
            result.append(torch.nn.functional.pad(row, (0, len(mask) - length)))
    base.set_attn_implementation(attention)
    for layer, forward in zip(run.model.modules(), forwards, strict=True):
        if forward is not None:
            layer.forward = forward
    return torch.stack(results[0]), torch.stack(results[1])


def greedy_tokens(run, problems: list[Problem], length: int) -> list[list[int]]:
    """Returns the completions that transformers' own `generate` makes of each prompt alone."""
    found = []
    for problem in problems:
        ids = torch.tensor([problem.prompt_ids])
        tokens = run.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length,
            eos_token_id=run.eos_ids.tolist(), pad_token_id=0,
        )  # fmt: skip
        found.append(tokens[0, ids.shape[1] :].tolist())
    return found


def trained(run) -> list[torch.nn.Parameter]:
    """Returns the parameters that are trained."""
    return [parameter for parameter in run.model.parameters() if parameter.requires_grad]


def gradient_of(run, value: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a value in the parameters that are trained, as one vector."""
    found = torch.autograd.grad(value, trained(run), allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in found if gradient is not None])


def gradient_of_update(module, run, micros) -> torch.Tensor:
    """Returns the gradient of an update, as one vector. Its step is not taken."""
    found = []

    def keep() -> None:
        found.append(torch.cat([parameter.grad.flatten() for parameter in trained(run)]))

    run.optimizer.step = keep
    module.update(run, micros)
    return found[0]


def random_batch(module=grpo_arca, rows=8, prompt=6, length=12, seed=0, vocabulary=400):
    """Returns a scored batch of random tokens, with prompts and completions of different lengths.

    Rows 0 and 1 have the same prompt, as have rows 2 and 3, and so on.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    ids = integers(3, vocabulary, rows, prompt + length)
    prompts = integers(2, prompt + 1, rows)  # tokens of each prompt
    lengths = integers(1, length + 1, rows)  # tokens of each completion
    prompts[0] = prompt
    lengths[0] = length
    firsts = slice(0, rows // 2 * 2, 2)
    ids[1::2, :prompt] = ids[firsts, :prompt]
    prompts[1::2] = prompts[firsts]

    column = torch.arange(prompt + length)
    attention = (column >= prompt - prompts[:, None]) & (column < prompt + lengths[:, None])
    noise = torch.randn(rows, length, generator=generator)
    mask = attention[:, prompt:]
    return module.Batch(
        rows=torch.arange(rows),
        prompt_width=prompt,
        ids=torch.where(attention, ids, 0),
        attention=attention,
        truncated=torch.zeros(rows, dtype=torch.bool),
        sampled_logp=torch.zeros(rows, length),
        entropy=torch.where(mask, noise.abs(), 0.0),
        problems=[Problem(f"problem {row}", "1") for row in range(rows)],
        texts=[f"text {row}" for row in range(rows)],
        completion_ids=[[row] for row in range(rows)],
        function_rewards=torch.zeros(rows, 1, dtype=torch.float64),
        rewards=(noise[:, 0] > 0).float(),
        advantages=torch.randn(rows, generator=generator),
        loss_mask=mask,
        tokens_per_update=float(mask.sum()),
        old_logp=torch.where(mask, -noise.abs(), 0.0),
        reference_logp=torch.where(mask, -noise.abs() - 0.1 * noise, 0.0),
        scores=torch.where(mask, noise.abs(), 0.0),
        credit=mask.float(),
        weights=mask.float(),
    )


def unscored(batch):
    """Returns the batch as it is before `score`."""
    names = ("old_logp", "reference_logp", "base_logp", "scores", "credit", "weights")
    return replace(batch, **dict.fromkeys(names))


def loss_and_gradient(args, batch, logp, size=None, module=grpo_arca):
    """Returns the loss, its gradient in the log-probs [B, T], and which tokens are clipped."""
    leaf = logp.clone().requires_grad_()
    run = SimpleNamespace(args=args, update_size=size or len(batch.rows))
    loss, clipped = module.policy_loss(run, batch, leaf, batch.old_logp)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], clipped


def scored(run, *batches, module=grpo_arca):
    """Scores these batches, by default a random one, as one rollout, and returns the first."""
    batches = batches or (unscored(random_batch(module)),)
    module.score(run, batches[0], list(batches), {})
    return batches[0]


def trl_loss(args, batch, logp, level="token", advantages=None):
    """Returns loss, gradient and clip fraction of TRL's own `GRPOTrainer._compute_loss`.

    It runs on a stand-in for TRL's trainer, which holds what the method reads: the flags, and TRL's
    defaults.
    """
    trl = pytest.importorskip("trl.trainer.grpo_trainer", reason="pip install trl")
    leaf = logp.clone().requires_grad_()
    mask = batch.loss_mask.long()

    def same(x, *_, **__):
        return x

    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, torch.zeros_like(leaf), None),
        aux_loss_enabled=False,
        top_entropy_quantile=trl.GRPOConfig.top_entropy_quantile,
        off_policy_mask_threshold=trl.GRPOConfig.off_policy_mask_threshold,
        importance_sampling_level=level,
        beta=args.beta,
        loss_type=args.loss_type,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        use_vllm=False,
        use_liger_kernel=False,
        loss_weight=None,
        max_completion_length=args.max_completion_length,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=same, reduce=same),
        args=SimpleNamespace(
            delta=trl.GRPOConfig.delta,
            steps_per_generation=1,
            use_bias_correction_kl=args.use_bias_correction_kl,
        ),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )
    width = batch.prompt_width
    inputs = {
        "prompt_ids": batch.ids[:, :width],
        "prompt_mask": batch.attention[:, :width].long(),
        "completion_ids": batch.ids[:, width:],
        "completion_mask": mask,
        "advantages": batch.advantages if advantages is None else advantages,
        "old_per_token_logps": batch.old_logp,
        "ref_per_token_logps": batch.reference_logp,
        "num_items_in_batch": mask.sum(),
    }
    loss = trl.GRPOTrainer._compute_loss(stub, None, inputs)
    (gradient,) = torch.autograd.grad(loss, leaf)
    (clip_fraction,) = stub._metrics["train"]["clip_ratio/region_mean"]
    return loss.detach(), gradient, clip_fraction


def refusal(act, *given, error=SystemExit, **flags) -> str:
    """Returns the sentence with which act(*given, **flags) ends the run, or that of an error."""
    with pytest.raises(error) as stopped:
        act(*given, **flags)
    return str(stopped.value)


# ---- Runs in forks, and what they leave ----------------------------------------------------------
# Two updates a rollout and two passes over it, and everything else that a checkpoint might forget.
LONG_RUN = {
    "max_steps": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "steps_per_generation": 2, "num_iterations": 2, "num_generations": 4, "lora_dropout": 0.1,
    "beta": 0.05, "max_eval_samples": 4, "num_generations_eval": 1, "eval_steps": 4,
    "save_steps": 4, "warmup_steps": 1, "output_dir": "out", "max_completion_length": 48,
    "reward_funcs": ["accuracy_reward", "variety.pay"], "shuffle_dataset": False,
    "multi_objective_aggregation": "normalize_then_sum", "max_resample_times": 2,
    "metric_for_best_model": "rewards/pay",
}  # fmt: skip
# A reward that differs within some groups, whatever the model writes.
VARIETY = """
def pay(completion_ids, **_):
    return [len(set(ids)) // 8 for ids in completion_ids]
"""
# A method that changes the ratio alone.
RATIO = '''"""Takes half of the log-ratio."""


# === CREDIT ===
def surrogate_terms(args, micro, log_ratio):
    return log_ratio / 2, micro.advantages[:, None].expand_as(log_ratio)


# === END CREDIT ===
'''
TIMES = ("seconds", "tokens_per_second", "peak_memory")  # beginnings of names
ADAPTER = {"r": 4, "lora_alpha": 12, "lora_dropout": 0.1, "target_modules": ["q_proj", "up_proj"]}


def make_adapter(folder: Path, base_name: str = TINY, **changes) -> str:
    """Writes an adapter that acts, made by PEFT alone, and returns its folder."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(base_name, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **ADAPTER | changes))
    randomize_adapter(model, scale=0.1)
    model.save_pretrained(folder)
    return str(folder)


def command_line(flags: dict) -> list[str]:
    argv = []
    for name, value in flags.items():
        argv += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return argv


def fork_case(folder: Path, script: str = "grpo_arca", stop: dict | None = None, **flags) -> dict:
    """Returns one command for fork_server.py, in a folder of its own, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "variety.py").write_text(VARIETY)
    case = {"folder": str(folder), "script": script, "argv": command_line(LONG_RUN | flags)}
    return case | (stop or {})


def run_forks(folder: Path, cases: list[dict], jobs: int = 2) -> list[str]:
    """Runs the commands, `jobs` at a time, and returns their exit codes."""
    path = folder / "cases.json"
    path.write_text(json.dumps(cases))
    command = [sys.executable, str(ROOT / "tests/fork_server.py"), str(path), str(jobs)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [(Path(case["folder"]) / "code.txt").read_text() for case in cases]


def stderr_of(folder: Path) -> str:
    return (folder / "stderr.txt").read_text()


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def metrics_of(out: Path) -> list[dict]:
    """Returns the rows of a run's metrics.jsonl, without times and memory."""
    rows = read_jsonl(out / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def as_lists(value):
    """Returns a structure of tensors as lists, which can be compared."""
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_lists(item) for item in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def state_file(checkpoint: Path) -> dict:
    """Returns what is in a checkpoint's state.pt, but for its flags, which name folders."""
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    del state["config"], state["run_id"]
    return as_lists(state)


def outcome(folder: Path) -> dict[str, object]:
    """Returns all that a run leaves in folder/out, without times and memory."""
    out = folder / "out"
    result = {
        "metrics": metrics_of(out),
        "summary": json.loads((out / "summary.json").read_text()),
        "completions": (out / "completions.jsonl").read_bytes(),
        "adapter": (out / "adapter/adapter_model.safetensors").read_bytes(),
        "credit": (out / "credit.html").read_bytes(),
    }
    for path in out.glob("checkpoint-*"):
        result[f"state of {path.name}"] = state_file(path)
    return result
