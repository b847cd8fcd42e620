"""The policy's log-probabilities, hidden states and gradients, against the stock model's."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import fixed_uniforms, prompts_of, random_batch, randomize_adapter, sample
from transformers import GPT2Config, GPT2LMHeadModel

import grpo_arca as trainer


def packed(module: torch.nn.Module) -> bool:
    return hasattr(getattr(module, "weight", None), "quant_state")


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_and_hidden_states(make_run, monkeypatch, temperature):
    """Trained log-probs are log_softmax(logits / temperature), as sampled ones are, and hidden
    state t is the one whose logits predict token t."""
    monkeypatch.setattr(trainer, "LOGITS_PER_CHUNK", 448 * 5)  # chunks of 5 tokens
    run, batch = make_run(temperature=temperature), random_batch()
    base = run.model.get_base_model()
    run.policy.eval()
    with torch.no_grad():
        stats = run.policy(batch)
        for row in range(len(batch.rows)):
            ids = batch.ids[row][batch.attention[row]][None]  # unpadded
            length = int(batch.mask[row].sum())
            out = base(input_ids=ids, output_hidden_states=True)
            logp = (out.logits[0, -length - 1 : -1] / temperature).log_softmax(-1)
            expected = (
                logp.gather(1, ids[0, -length:, None])[:, 0],
                out.hidden_states[-1][0, -length - 1 : -1],
            )
            for ours, theirs in zip(stats, expected, strict=True):
                assert torch.allclose(ours[row, :length], theirs, atol=1e-4)
    assert (stats[0][~batch.mask] == 0).all()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_rollouts_log_probs_and_entropies(make_run, temperature):
    """As the stock model has them, one row at a time, without padding or a cache."""
    run = make_run(temperature=temperature)
    batch, base = sample(run, prompts_of(run, 8), fixed_uniforms(8, 24)), run.model.get_base_model()
    for row, (ids, real) in enumerate(zip(batch.ids, batch.attention, strict=True)):
        length = int(batch.mask[row].sum())
        with torch.no_grad():
            logits = base(input_ids=ids[real][None]).logits[0, -length - 1 : -1]
        every = torch.distributions.Categorical(logits=logits / temperature)
        exact = every.log_prob(ids[real][-length:]), every.entropy()
        for ours, theirs in zip((batch.sampled_logp, batch.entropy), exact, strict=True):
            assert torch.allclose(ours[row, :length], theirs, atol=1e-4)
            assert (ours[row, length:] == 0).all()


def test_padding_with_learned_positions(make_run):
    """Padding on the left shifts no positions, in the training forward and in the decode loop.

    Rotary embeddings would hide a shift of all positions; GPT-2's learned ones do not."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=448, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    model = get_peft_model(GPT2LMHeadModel(config), LoraConfig(task_type="CAUSAL_LM"))
    randomize_adapter(model)
    run, batch = make_run(), random_batch()
    run = replace(run, model=model, policy=trainer.Policy(model, 1.0), eos_ids=run.eos_ids[:0])
    run.policy.eval()
    with torch.no_grad():
        padded, _ = run.policy(batch)
        for row in range(len(batch.rows)):
            alone = batch.select(torch.tensor([row]))
            length = alone.mask.shape[1]
            assert alone.attention.all()
            assert torch.allclose(padded[row, :length], run.policy(alone)[0][0], atol=1e-5)
    prompts, u = [[5, 6, 7, 8, 9], [5, 6], [11]], fixed_uniforms(3, 20)
    together = sample(run, prompts, u)
    for row, prompt in enumerate(prompts):
        alone = sample(run, [prompt], u[row : row + 1])
        assert torch.equal(together.ids[row, together.prompt_width :], alone.ids[0, len(prompt) :])


def test_each_prompt_is_read_once_for_all_its_samples(make_run):
    """Of 8 completions of 4 prompts, the forward reads the 4 prompts without their last tokens, and
    then the rest of the 8 rows. Checkpointed layers take no cache, so they read everything at once,
    and a prompt of one token has nothing to read beforehand."""
    for checkpointing, training, cut, expected in (
        (False, True, 0, [(4, 5), (8, 12)]),
        (True, True, 0, [(8, 17)]),
        (True, False, 0, [(4, 5), (8, 12)]),
        (False, True, 5, [(8, 12)]),
    ):
        run, batch, shapes = make_run(gradient_checkpointing=checkpointing), random_batch(), []
        batch.ids, batch.attention = batch.ids[:, cut:], batch.attention[:, cut:]
        batch.prompt_width -= cut
        base = run.model.get_base_model().base_model

        def watch(_, args, inputs, shapes=shapes):
            shapes.append(tuple(inputs["input_ids"].shape))

        base.register_forward_pre_hook(watch, with_kwargs=True)
        run.policy.train(training)(batch)
        assert shapes == expected


def test_gradient_checkpointing_gives_the_same_gradients(make_run):
    gradients = []
    for checkpointing in (False, True):
        run, batch = make_run(gradient_checkpointing=checkpointing), random_batch()
        trainer.training_forward(run, batch)[batch.mask].sum().backward()
        gradients.append([p.grad.clone() for p in run.model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 10
    for plain, recomputed in zip(*gradients, strict=True):
        assert (plain - recomputed).norm() < 1e-5 * plain.norm()


@pytest.mark.parametrize("weights", ["dense", "quantized"])
def test_gradients_are_the_same_before_and_after_a_rollout(make_run, weights):
    """On a CPU with AVX512-BF16, bitsandbytes would repack the 4-bit weights in the first forward
    without gradients, and later gradients would be wrong without an error. The flag that prevents
    it is set on every layer. On another CPU only that flag is tested."""
    run, batch = make_run(rollout_weights=weights), random_batch()

    def gradients():
        run.optimizer.zero_grad()
        trainer.training_forward(run, batch)[batch.mask].sum().backward()
        return [p.grad.clone() for p in run.model.parameters() if p.grad is not None]

    before = gradients()
    sample(run, prompts_of(run), fixed_uniforms(4, 24))
    trainer.score(run, batch, [batch], {})
    for old, new in zip(before, gradients(), strict=True):
        assert torch.equal(old, new)
    flags = [getattr(m, "support_avx512bf16_for_cpu", None) for m in run.model.modules()]
    assert flags.count(False) == 28 and True not in flags


def test_the_base_is_nf4_and_only_the_adapter_trains(make_run):
    run = make_run()
    trained = [n for n, p in run.model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    states = {id(m.weight): m.weight.quant_state for m in run.model.modules() if packed(m)}
    assert len(states) == 28 and all(s.quant_type == "nf4" and s.nested for s in states.values())


@pytest.mark.slow  # the C++ compiler takes a minute and more
def test_compiled_layers_compute_the_same_without_graph_breaks_or_recompiles(make_run):
    """Log-probs, entropies, those of the base, gradients and samples; batches of many lengths.
    With the adapter, without it, in training the first layer (its inputs have no gradient) and
    the others: all layers share their graphs, and rollouts use none."""
    results, graphs = [], []
    for compiled in (False, True):
        run, found = make_run(torch_compile=compiled), []
        torch._dynamo.utils.counters.clear()
        for seed, (prompt, length) in enumerate([(6, 12), (9, 20), (4, 15), (8, 33)]):
            batch = random_batch(prompt=prompt, length=length, seed=seed)
            run.policy.eval()
            with torch.no_grad():
                found += run.policy(batch)
                with run.model.disable_adapter():
                    found.append(run.policy(batch)[0])
            run.policy.zero_grad()
            logp = trainer.training_forward(run, batch)
            logp[batch.mask].sum().backward()
            found += [logp.detach()] + [p.grad for p in run.model.parameters() if p.requires_grad]
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        randomize_adapter(run.model, 0.0)  # it stops in time, so that rows are dropped
        for run.args.rollout_weights in ("merged", "adapter"):
            found.append(sample(run, prompts_of(run, 16), fixed_uniforms(16, 80)).ids)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        results.append(found)
    assert graphs == [0] * 5 + [4] * 5
    assert not torch._dynamo.utils.counters["graph_break"]
    for plain, same in zip(*results, strict=True):
        assert (plain - same).abs().max() <= 1e-4 * max(1.0, float(plain.abs().max()))


@pytest.mark.slow  # importing the compiler alone takes ten seconds
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_keep_no_dequantized_weight(make_run, checkpointing):
    """For backward they keep activations and packed weights, with checkpointing little but the
    layer's input. The backend divides forward from backward as the default one does, and leaves
    out the minute of the C++ compiler."""
    run = make_run(gradient_checkpointing=checkpointing)
    base, kept = run.model.get_base_model().base_model, []
    layer = base.layers[0].train()
    layer.compile(dynamic=True, backend="aot_eager_decomp_partition")
    hidden = torch.randn(8, 33, base.config.hidden_size, requires_grad=True)
    positions = base.rotary_emb(hidden, torch.arange(33)[None])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(hidden, attention_mask=None, position_embeddings=positions)
    sizes = {m.weight.quant_state.shape.numel() for m in layer.modules() if packed(m)}
    assert len(sizes) > 2 and any(t.dtype == torch.uint8 for t in kept)
    own = {p.data_ptr() for p in layer.parameters()}
    floats = [t for t in kept if t.is_floating_point() and t.data_ptr() not in own]
    assert not [t.shape for t in floats if t.dim() == 2 and t.numel() in sizes]
    activations = sum(t.nbytes for t in floats)
    if checkpointing:
        assert hidden.nbytes <= activations < 1.5 * hidden.nbytes
    else:
        assert activations > 8 * hidden.nbytes
