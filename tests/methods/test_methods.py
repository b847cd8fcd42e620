"""The files of methods/, each against its formula in float64, one completion or token at a time."""

import functools
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import get_args, get_type_hints
from unittest import mock

import fork as fork_tool
import numpy as np
import pytest
import torch
from studies import policy_folder
from support import (
    ROOT,
    TINY,
    fixed_draws,
    fork_case,
    problems_of,
    random_batch,
    refusal,
    run_forks,
    sample,
)

import grpo_arca
from common.data import encode_prompts, whole_prompt

SCRIPTS = {path.stem: fork_tool.fork(path) for path in sorted((ROOT / "methods").glob("*.py"))}


@functools.cache
def load(name: str) -> ModuleType:
    """Returns the script that a method makes, as a module."""
    module = ModuleType(f"grpo_{name}")
    module.__file__ = str(ROOT / f"grpo_{name}.py")
    sys.modules[module.__name__] = module  # dataclasses look there
    exec(SCRIPTS[name], vars(module))
    return module


def credited(name: str, **flags) -> tuple:
    """Returns a run, its rollout of two groups of four, and its micro-batches with their credit.

    Completion 7 has no advantage and is in no micro-batch. The methods that would ask the policy
    for more than log-probs, such as what it does when it knows the answer, get noise instead.
    """
    batch = random_batch(load(name))
    batch.sampled_logp = 3 * batch.old_logp
    batch.scores = 10 * (batch.old_logp - batch.reference_logp)
    batch.old_logp = batch.sampled_logp - 0.4 * batch.scores  # an update has changed the policy
    batch.advantages = torch.tensor([1.5, -0.5, 0.7, -1.2, -0.3, 0.4, -2.0, 0.0])
    batch.hidden = fixed_draws(8, 12, 5) - 0.5
    run = SimpleNamespace(
        args=load(name).Args(num_generations=4, **flags),
        policy=lambda micro: (micro.sampled_logp, micro.hidden[:, : micro.mask.shape[1]]),
        rollout_number=5,
        updates_per_rollout=1,
        update_size=8,
        accelerator=SimpleNamespace(reduce=lambda sums, reduction: sums),
    )
    if name == "otb":
        batch.scores = batch.scores.abs()
    micros = [batch.select(torch.tensor(rows)) for rows in ([0, 2, 5], [1, 3, 4, 6])]
    for micro in micros:
        if name not in ("oppo", "rlsd", "cepo", "otb"):
            micro.scores = load(name).token_scores(run, micro, {}) * micro.mask
    give_credit(name, run, batch, micros)
    return run, batch, micros


def give_credit(name: str, run, batch, micros) -> None:
    """Runs assign_credit. Of CEPO, a policy that is told a wrong answer gives entropies."""
    told = {"new": lambda run, micro, answers: micro.entropy, "create": True}
    with mock.patch.object(load(name), "told_logp", **told):
        load(name).assign_credit(run, batch, micros, {})


def logits_of(run, prompt_ids, tokens: list[int]) -> torch.Tensor:
    """Returns the logits [T, V] of a completion by transformers' model."""
    ids = torch.tensor([[*prompt_ids, *tokens]])
    return run.model(input_ids=ids).logits[0, -len(tokens) - 1 : -1].detach()


def completions_of(*micros) -> list[SimpleNamespace]:
    """Returns what is known of each completion, without padding and in float64."""
    rows = []
    for micro in micros:
        for i, n in enumerate(micro.mask.sum(1).tolist()):
            row = SimpleNamespace(
                group=int(micro.rows[i]) // 4,
                reward=micro.rewards[i].item(),
                advantage=micro.advantages[i].item(),
            )
            for name in ("sampled_logp", "entropy", "scores", "credit", "weights", "hidden"):
                setattr(row, name, getattr(micro, name)[i, :n].double().numpy())
            rows.append(row)
    return rows


# ---- The formulas: a completion and all completions -> credit of its tokens ----------------------
def taco(row, rows):
    risk = -row.sampled_logp - row.entropy + np.log(0.4)
    return 1 - 0.9 * (row.advantage > 0) * (1 - np.exp(-risk.clip(min=0)))


def stare(row, rows):
    logps = np.sort(np.hstack([x.sampled_logp for x in rows if x.advantage * row.advantage > 0]))
    highest = logps[int(np.ceil(0.1 * len(logps))) - 1]
    return np.where(row.sampled_logp <= highest, 1.1 if row.advantage > 0 else 0.9, 1.0)


def rsi(row, rows):
    index = -row.sampled_logp / row.entropy
    return ((index >= 0.5) & (index <= 2)).astype(float)


def entropy_mask(row, rows):
    entropies = np.sort(np.concatenate([x.entropy for x in rows]))
    return (row.entropy >= entropies[-round(0.2 * len(entropies))]).astype(float)


def rlsd(row, rows):
    """After 5 of 10 updates, half of the share .5 is left."""
    return 0.75 + 0.25 * np.exp(np.sign(row.advantage) * row.scores).clip(0.8, 1.2)


def cepo(row, rows):
    return 0.5 + 0.5 * np.exp(np.sign(row.advantage) * (row.scores - row.entropy)).clip(0.8, 1.2)


def gtpo(row, rows):
    return 1 + 0.3 * (row.entropy / np.concatenate([x.entropy for x in rows]).mean() - 1)


def delight(row, rows):
    return 1 / (1 + np.exp(row.advantage * row.sampled_logp / 0.5))


def otb(row, rows):
    credit = []
    for t in range(len(row.scores)):
        alive = [x for x in rows if x.group == row.group and len(x.scores) > t]
        voters = [x for x in alive if x.advantage != 0]  # the others are not trained on
        baseline = np.average(
            [x.advantage for x in voters], weights=[x.scores[: t + 1].sum() for x in voters]
        )
        credit.append(row.advantage - (baseline if len(voters) > 1 else 0))
    return np.array(credit)


def oppo(row, rows):
    mean = np.mean([x.reward for x in rows if x.group == row.group])
    change = np.diff(1 / (1 + np.exp(-np.cumsum([np.log(mean / (1 - mean)), *row.scores]))))
    return np.where(change * row.advantage > 0, change, 0.0)


@pytest.mark.parametrize(
    ("name", "formula", "flags"),
    [
        ("taco", taco, {"tail_alpha": 0.4}),
        ("stare", stare, {"stare_variant": "C2", "target_entropy": 9.0}),
        ("rsi", rsi, {"rsi_low": 0.5, "rsi_high": 2.0}),
        ("entropy_mask", entropy_mask, {}),
        ("rlsd", rlsd, {"rlsd_lambda_decay_steps": 10}),
        ("oppo", oppo, {}),
        ("cepo", cepo, {}),
        ("gtpo", gtpo, {"entropy_weight": 0.3}),
        ("delight", delight, {"delight_eta": 0.5}),
        ("otb", otb, {}),
    ],
)
def test_credit_is_the_formula_and_weights_are_its_shares(name, formula, flags):
    _, batch, micros = credited(name, **flags)
    for row in completions_of(*micros):
        expected = formula(row, completions_of(batch))
        np.testing.assert_allclose(row.credit, expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(row.weights * abs(expected).mean(), abs(expected), atol=1e-4)


def test_delta_weighs_tokens_by_the_side_that_they_belong_to():
    _, batch, micros = credited("delta", delta_high=1.5)
    rows = completions_of(*micros)
    a = np.concatenate([np.full(len(row.credit), row.advantage) for row in rows])
    g = np.concatenate([(1 - np.exp(row.sampled_logp))[:, None] * row.hidden for row in rows])

    def margins(weights):
        right = np.average(g[a > 0], axis=0, weights=weights[a > 0])
        wrong = np.average(g[a < 0], axis=0, weights=weights[a < 0])
        return np.sign(a) * (((g - wrong) ** 2).sum(1) - ((g - right) ** 2).sum(1))

    first = margins(abs(a))
    deviation = np.where(a > 0, first[a > 0].std(), first[a < 0].std())
    second = margins(abs(a) / (1 + np.exp(-first / deviation)))
    weights = 0.8 + 0.7 / (1 + np.exp(-second / deviation))
    weights = np.append(weights, [0.8] * int(batch.mask[7].sum()))  # without an advantage
    weights = (weights / weights.mean())[: len(a)]
    np.testing.assert_allclose(np.concatenate([row.credit for row in rows]), weights, rtol=1e-4)


def test_delta_needs_both_sides_and_stare_a_surprise_and_oppo_a_judgement():
    """Where that is missing, weights are equal: to compare with 0 would be surprisal again."""
    run, batch, micros = credited("delta")
    for micro in micros:
        micro.loss_mask &= (micro.advantages > 0)[:, None]  # the wrong ones are not trained on
        load("delta").token_scores(run, micro, {})
    load("delta").assign_credit(run, batch, micros, {})
    praised = [micro.credit[(micro.advantages > 0)[:, None] & micro.mask] for micro in micros]
    assert len(torch.cat(praised).unique()) == 1
    run.args.delta_low = 0.0
    for micro in micros:
        micro.advantages[:] = 0.0
        load("delta").token_scores(run, micro, {})
    load("delta").assign_credit(run, batch, micros, {})
    assert all((micro.credit == 0).all() for micro in micros)

    run, batch, micros = credited("stare", target_entropy=9.0)
    for micro in micros:
        micro.scores[:, 1:] = 0  # tokens that were certain
    micros[0].loss_mask[0] = False  # not trained on, and more surprising than all others
    micros[0].scores[0] += 9
    load("stare").assign_credit(run, batch, micros, {})
    assert all((micro.credit[:, 1:][micro.mask[:, 1:]] == 1).all() for micro in micros)

    # Another process has as many tokens, and its policy is uncertain.
    run.accelerator.reduce = lambda sums, reduction: sums + sums[1] * torch.tensor([30.0, 1.0])
    metrics: dict = {}
    load("stare").assign_credit(run, batch, micros, metrics)
    assert metrics["stare_is_on"] == 0.0

    run, batch, micros = credited("oppo")
    batch.rewards[4:] = torch.nan
    micros[1].advantages[2:] = 0.0  # of that group
    load("oppo").assign_credit(run, batch, micros, {})
    assert (micros[1].credit[2:] == 0).all() and micros[1].credit[:2].any()
    batch.rewards[0] = 1.5
    assert "from 0 to 1" in refusal(load("oppo").assign_credit, run, batch, micros, {})


def test_otb_has_no_baseline_where_nobody_votes_and_none_that_a_missing_reward_moves():
    run, batch, micros = credited("otb")
    batch.advantages = torch.tensor([1.0, -1, 0, 0, 0, 0, 0, 0])  # the others had no reward, say
    batch.attention[:] = True
    batch.attention[1, -6:] = False  # then the first completion is alone among those that vote
    micros = [batch.select(torch.tensor([0, 1])), batch.select(torch.tensor([2]))]
    micros[0].scores = torch.tensor([0.0, 0.2, 0.0])[:, None].T.repeat(2, 4)  # a token was certain
    micros[0].scores[1] *= 3
    micros[1].scores = torch.ones(1, 12)
    give_credit("otb", run, batch, micros)
    # W is 0 for the first token, and after it .2 to .6 and so on: always 1 to 3.
    expected = torch.tensor([[1.0] + 5 * [1.5] + 6 * [1.0], [-1.0] + 5 * [-0.5] + 6 * [0.0]])
    torch.testing.assert_close(micros[0].credit, expected)
    assert (micros[1].credit == 0).all()
    assert "negative_weight" in refusal(credited, "otb", negative_weight=0.5)


def test_gtpo_leaves_a_rollout_alone_whose_tokens_were_all_certain():
    run, batch, micros = credited("gtpo")
    for part in (batch, *micros):
        part.entropy = torch.zeros_like(part.entropy)
        part.scores = part.entropy
    give_credit("gtpo", run, batch, micros)
    assert all(torch.equal(micro.credit, micro.mask.float()) for micro in micros)


@torch.no_grad()
def test_otb_sums_the_squared_gradient_of_the_log_prob_by_the_logits(make_run):
    run = make_run(load("otb"), temperature=0.7)
    batch = sample(run, problems_of(run), fixed_draws(4, 24))
    energies = load("otb").token_scores(run, batch, {})
    for i, tokens in enumerate(batch.completion_ids):
        logits = logits_of(run, batch.problems[i].prompt_ids, tokens)
        p = (logits.double() / 0.7).softmax(-1)
        expected = 1 - 2 * p[range(len(tokens)), tokens] + p.square().sum(-1)
        torch.testing.assert_close(
            energies[i, : len(tokens)].double(), expected, rtol=1e-4, atol=1e-6
        )


@torch.no_grad()
def test_cepo_compares_with_the_answer_of_the_worst_completion(make_run):
    """The truth is transformers' model. A reward may be missing, a completion without a box."""
    cepo = load("cepo")
    run = make_run(cepo)
    problems = [p._replace(answer="78") for p in problems_of(run, 12)]
    batch = sample(run, problems, fixed_draws(12, 24))
    batch.rewards = torch.tensor([1, torch.nan, 0, 0, 1, 0.4, 0.2, 1, 0, 1, 1, 1])
    batch.advantages = torch.tensor([1.0, 0, -1, -1, 1, -1, -1, 1, -1, 1, 1, 1])
    batch.texts = ["x"] * 12
    batch.texts[2] = r"\boxed{41}. No, it is \boxed{42}"
    batch.texts[3] = r"\boxed{43}"  # no worse than the one before
    batch.texts[6] = "so " * 40  # cut off before its answer
    batch.texts[8] = ""
    wrong = ["42"] * 4 + [("so " * 40)[:50].strip()] * 4 + ["none"] * 4
    micros = [batch.select(torch.tensor(rows)) for rows in ([9, 2, 5, 0, 4], [3, 6, 7, 8, 10, 11])]
    for micro in micros:
        micro.scores = cepo.token_scores(run, micro, {})
    cepo.assign_credit(run, batch, micros, {})

    def logp(row: int, answer: str) -> torch.Tensor:
        tokens = batch.completion_ids[row]
        between = run.tokenizer.encode(f" {answer}", add_special_tokens=False)
        logits = logits_of(run, [*problems[row].prompt_ids, *between], tokens)
        return logits.log_softmax(-1)[range(len(tokens)), tokens]

    for micro in micros:
        for i, row in enumerate(micro.rows.tolist()):
            evidence = logp(row, "78") - logp(row, wrong[row])
            weights = (batch.advantages[row] * evidence).exp().clamp(0.8, 1.2)
            credit = micro.credit[i, : len(evidence)]
            torch.testing.assert_close(credit, 0.5 + 0.5 * weights, rtol=0, atol=2e-4)
    batch.problems = [p._replace(answer="") for p in problems]
    assert "has no answer" in refusal(cepo.token_scores, run, batch, {})


@pytest.mark.parametrize("part", [0, 1], ids=["right", "wrong"])
def test_ctpo_has_the_authors_loss_and_gradient(part):
    run, _, micros = credited("ctpo")
    logp = micros[part].sampled_logp.requires_grad_()
    loss, _ = load("ctpo").policy_loss(run, micros[part], logp, micros[part].old_logp)
    total = torch.zeros(())
    for i, n in enumerate(micros[part].mask.sum(1).tolist()):
        change = (logp - micros[part].old_logp)[i, :n]
        log_r = change.detach().cumsum(0) + change - change.detach()
        root = torch.arange(1, n + 1).sqrt()
        ratios = torch.stack((log_r, log_r.clamp(-0.025 * root, 0.05 * root))).exp()
        values = (-micros[part].advantages[i] * ratios).amax(0)
        if part == 1:  # no advantage is above 0
            values = values.minimum(-micros[part].advantages[i] * (0.05 * root).exp())
        total = total + values.mean() / 8
    expected = torch.autograd.grad(total, logp)
    torch.testing.assert_close(torch.autograd.grad(loss, logp), expected, rtol=1e-4, atol=1e-7)


def test_fipo_weighs_by_the_discounted_future():
    run, _, micros = credited("fipo", fipo_decay_rate=3.0, fipo_low=0.8, fipo_safety_threshold=1.2)
    for micro in micros:
        log_ratio = micro.sampled_logp - micro.old_logp
        _, advantages = load("fipo").surrogate_terms(run.args, micro, log_ratio)
        for i, t in micro.mask.nonzero().tolist():
            future = log_ratio[i, t:].double().numpy()
            highest = 1.0 if micro.advantages[i] < 0 and future[0] > np.log(1.2) else 1.2
            factor = np.exp((0.5 ** (np.arange(len(future)) / 3) * future).sum()).clip(0.8, highest)
            assert advantages[i, t].item() == pytest.approx(micro.advantages[i].item() * factor)


@pytest.mark.parametrize(("name", "clip"), [("oppo", 1.0), ("rlsd", 99.0)])
@pytest.mark.parametrize(("told", "answers"), [("right", "78"), ("wrong", "87")])
def test_evidence_is_what_the_answer_changes(make_run, name, clip, told, answers):
    """The truth is transformers' model. Told wrong, one hears the answer of the other problem."""
    run = make_run(load(name), told=told)  # its adapter is random
    run.train_set = [p._replace(answer="78"[i]) for i, p in enumerate(problems_of(run, 2))]
    batch = sample(run, run.train_set, fixed_draws(2, 24))
    evidence = load(name).token_scores(run, batch, {})
    for i, tokens in enumerate(batch.completion_ids):
        prompt = f"{run.train_set[i].prompt} The answer is {answers[i]}."
        (prompt_ids,) = encode_prompts(run.tokenizer, [whole_prompt(prompt)], {})
        logp = logits_of(run, prompt_ids, tokens).log_softmax(-1)
        gain = logp[range(len(tokens)), tokens] - batch.sampled_logp[i, : len(tokens)]
        torch.testing.assert_close(
            evidence[i, : len(tokens)], gain.clamp(-clip, clip), rtol=0, atol=2e-4
        )
    chat = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "So"}]
    batch.problems = [p._replace(prompt=chat) for p in run.train_set]
    informed = load(name).informed(run, batch)
    heard = run.tokenizer.decode(informed.ids[0, : informed.prompt_width])
    assert f"Add. The answer is {answers[0]}." in heard and heard.endswith("So")
    batch.problems = [p._replace(answer="") for p in run.train_set]
    assert "has no answer" in refusal(load(name).informed, run, batch)


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_hears_what_it_is_told_better_than_the_embedded_policy(make_run, smollm2):
    """By the correlation, over tokens, of the evidence when told a right and a wrong answer.

    Run it with -s for the figures; TOLD=128 makes those of methods/README.md."""
    count = int(os.environ.get("TOLD", "16"))

    def correlation(model: str, **flags) -> float:
        flags |= {"per_device_train_batch_size": count, "num_generations": 8}
        run = make_run(load("oppo"), model, None, dtype="float32", **flags)
        batch = load("oppo").collect(run, {})
        found = []
        for run.args.told in ("right", "wrong"):
            found.append(load("oppo").token_scores(run, batch, {})[batch.mask])
        return torch.stack(found).corrcoef()[0, 1].item()

    wrong_policy = str(policy_folder("wrong_policy"))
    chains = correlation(wrong_policy, dataset_config=8, max_completion_length=170)
    sums = correlation(smollm2, dataset_name=f"{smollm2}/sums.jsonl", max_completion_length=32)
    print(f"wrong policy {chains:.3f}, SmolLM2 {sums:.3f}")
    assert sums < chains - 0.03


# ---- What all have in common ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("taco", {"tail_suppression": 0.0}),
        ("stare", {"target_entropy": 0.0}),
        ("stare", {"amplification": 1.0, "target_entropy": 9.0}),
        ("rlsd", {"rlsd_lambda": 0.0}),
        ("rsi", {"rsi_low": 0.0, "rsi_high": 1e18}),
        ("entropy_mask", {"kept_share": 1.0}),
        ("cepo", {"cepo_lambda": 0.0}),
        ("gtpo", {"entropy_weight": 0.0}),
        ("ctpo", {}),
        ("fipo", {}),
    ],
)
def test_the_first_update_is_grpos_to_the_bit_where_the_docstring_says_so(name, flags):
    run, batch, micros = credited(name, **flags)
    for micro in micros:
        logp = micro.sampled_logp.clone().requires_grad_()
        loss, _ = load(name).policy_loss(run, micro, logp, logp.detach())
        grpo, _ = grpo_arca.policy_loss(run, batch.select(micro.rows), logp, logp.detach())
        assert torch.equal(*(torch.autograd.grad(x, logp)[0] for x in (loss, grpo)))


BUSY = {  # flags with which many credits of this batch differ
    "taco": {"tail_alpha": 0.9}, "stare": {"target_entropy": 9.0, "surprising_share": 0.5},
    "entropy_mask": {"kept_share": 0.5}, "fipo": {"fipo_low": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SCRIPTS.keys() - {"grpo"}))
def test_the_shuffled_control_has_the_same_terms_in_another_order(name):
    terms = []
    for credit in (name, "shuffled"):
        run, _, micros = credited(name, credit=credit, **BUSY.get(name, {}))
        log_ratio = 0.1 * (micros[0].sampled_logp - micros[0].old_logp)
        both = load(name).surrogate_terms(run.args, micros[0], log_ratio)
        of_bound = both[0].exp() / (micros[0].bounds or (1, 1))[1]
        terms.append(torch.stack((*both, of_bound))[:, 0])  # of the first completion
    torch.testing.assert_close(terms[0].sort(1).values, terms[1].sort(1).values)
    assert not torch.equal(*terms)


@pytest.mark.slow
def test_every_fork_trains_and_its_controls_give_other_adapters(tmp_path):
    """In two updates of a rollout. The fork of GRPO gives the adapter of grpo_arca.py."""
    flags = {
        "model_name_or_path": TINY, "max_steps": 2, "max_completion_length": 40, "beta": 0,
        "max_resample_times": 0, "max_eval_samples": 1, "eval_steps": 0, "save_steps": 0,
        "reward_weights": [0.4, 0.1],  # OPPO needs at most 1
    }  # fmt: skip
    cases = [fork_case(tmp_path / "uniform", credit="uniform", **flags)]
    for name in SCRIPTS:
        script = tmp_path / f"grpo_{name}"
        script.with_suffix(".py").write_text(SCRIPTS[name])
        for credit in get_args(get_type_hints(load(name).Args)["credit"]):
            own = BUSY.get(name, {}) | {"credit": credit}
            cases.append(fork_case(tmp_path / name / credit, str(script), **flags, **own))
    assert run_forks(tmp_path, cases) == ["0"] * len(cases)
    adapters = [path.read_bytes() for path in tmp_path.rglob("adapter/*.safetensors")]
    assert len(set(adapters)) == len(adapters) - 1 == len(cases) - 1  # GRPO's is there twice
