"""Model families: each one is computed right or refused with one sentence before the first step.

What is right is known from transformers' own `generate` and eager forward. Every model here is a
random one of 64 hidden units, whose weights are large enough for errors to show.
"""
# ruff: noqa: C408 (settings read better as keywords)

import shutil
from dataclasses import fields, replace

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from support import TINY, fixed_uniforms, randomize_adapter, refusal
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import grpo_arca
import grpo_oar
import grpo_strace
from common.data import context_length, load_tokenizer
from common.problems import Problem

METHODS = {"arca": grpo_arca, "oar_g": grpo_oar, "oar_p": grpo_oar, "s_trace": grpo_strace}
TOKENIZER = AutoTokenizer.from_pretrained(TINY)
LONG = TOKENIZER.encode("What is 3 + 4 * 2? Go step by step.")
PROMPTS = [LONG, TOKENIZER.encode("12 - 5 ="), LONG]
COMPLETIONS = ["3 + 8 = 11, so \\boxed{11}", "it is \\boxed{-7}", "5: \\boxed{5} or 9 \\boxed{9}"]
LENGTH, WINDOW = 12, 16  # so the window moves: one prompt is longer, one grows longer

# ---- The table: what each family needs to be small, and to show what it adds ---------------------
SMALL = dict(vocab_size=448, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
SMALL |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
SMALL |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
HEAD, WINDOWED = dict(head_dim=16), dict(sliding_window=WINDOW)
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
BOTH = WINDOWED | dict(layer_types=[SLIDING, FULL])
FOUR = WINDOWED | dict(num_hidden_layers=4, layer_types=[SLIDING] * 3 + [FULL])
SOFT_CAP = dict(query_pre_attn_scalar=16, final_logit_softcapping=2.0)
MUP = dict(embedding_multiplier=6.0, residual_multiplier=0.5, attention_multiplier=0.1)
GPT = dict(n_embd=64, n_layer=2, n_head=4, n_positions=512)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_conv_kernel_dim=4)
DELTA |= dict(linear_key_head_dim=16, linear_value_head_dim=16, layer_types=[LINEAR, FULL])
MOE = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
LATENT = dict(kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16)
LATENT |= dict(v_head_dim=16, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1)
LATENT |= dict(first_k_dense_replace=1, n_group=1, topk_group=1)
PER_LAYER = dict(hidden_size_per_layer_input=16, vocab_size_per_layer_input=448)
MAMBA = dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16)
MAMBA2 = dict(num_heads=8, head_dim=16, state_size=16, n_groups=1)
NEO = dict(num_layers=2, num_heads=4, attention_types=[[["local"], 2]], window_size=8)
VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
GEMMA2, GEMMA4 = HEAD | BOTH | SOFT_CAP, HEAD | FOUR | PER_LAYER | dict(global_head_dim=16)
GEMMA4 |= dict(layer_types=[SLIDING, FULL] * 2, num_kv_shared_layers=2)
IMAGE = dict(image_token_index=400, boi_token_index=401, eoi_token_index=402)
IMAGE |= dict(vision_config=VISION | dict(image_size=28, patch_size=14), mm_tokens_per_image=4)

RIGHT = {  # in 4 bits and without
    "bitnet": {},
    "cohere": dict(logit_scale=0.25),
    "cohere2": FOUR | dict(logit_scale=0.25),
    "ernie4_5": HEAD,
    "exaone4": FOUR,
    "falcon": dict(new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=128),
    "gemma": HEAD,
    "gemma2": GEMMA2,
    "gemma3": IMAGE | dict(text_config=SMALL | HEAD | BOTH),  # reads images too
    "gemma3_text": GEMMA2,
    "gemma4_text": GEMMA4,
    "glm4": HEAD,
    "gpt2": GPT,
    "gpt_neox": {},
    "gptj": GPT | dict(rotary_dim=16),
    "granite": MUP | dict(logits_scaling=8.0),
    "lfm2": dict(layer_types=["conv", FULL], block_auto_adjust_ff_dim=False),
    "llama": {},
    "mistral": WINDOWED,
    "nemotron": {},
    "olmo2": {},
    "olmo3": BOTH,
    "opt": dict(ffn_dim=128, word_embed_proj_dim=64),
    "phi": {},
    "phi3": WINDOWED,
    "qwen2": WINDOWED | dict(use_sliding_window=True, layer_types=[SLIDING, FULL]),
    "qwen3": HEAD,
    "qwen3_5_text": HEAD | DELTA,
    "smollm3": dict(no_rope_layers=[1, 0], layer_types=[FULL, FULL], use_sliding_window=False),
    "stablelm": {},
    "starcoder2": WINDOWED,
}
EXPERTS = {  # are no linear layers, so they would not be in 4 bits: right with --load_in_4bit False
    "deepseek_v2": LATENT | HEAD | dict(num_experts_per_tok=2, moe_intermediate_size=64),
    "gpt_oss": HEAD | BOTH | MOE,
    "granitemoe": MUP | MOE | dict(logits_scaling=8.0),
    "mixtral": MOE,
    "qwen3_moe": HEAD | MOE,
    "qwen3_next": HEAD | DELTA | MOE | dict(shared_expert_intermediate_size=64),
}
ROPE = dict(rope_theta=10_000.0, factor=2.0)
FACTORS = dict(short_factor=[1.0] * 8, long_factor=[1.0 + i for i in range(8)])
LONGROPE = dict(rope_parameters=ROPE | FACTORS | dict(rope_type="longrope"))
ROPE_BY_LENGTH = {  # beyond 48 tokens, the longest row of a batch determines all rows' frequencies
    "llama dynamic": dict(
        max_position_embeddings=48, rope_parameters=ROPE | dict(rope_type="dynamic")
    ),
    "phi3 longrope": LONGROPE | dict(original_max_position_embeddings=48),
}
NOT_WITH = {  # a state cannot be cut at a token; per-layer embeddings need ids, OAR-G gives embeds
    "oar_p": ["lfm2", "qwen3_5_text", "qwen3_next"],
    "oar_g": ["gemma4_text"],
}
REFUSED = {  # family: settings, flags, and a word of the sentence
    "bloom": (dict(n_layer=2, n_head=4), [], "does not run here"),  # ALiBi as wide as the prompt
    "falcon_h1": (HEAD | MAMBA, [], "out_proj"),  # by PEFT
    "gemma3n_text": (HEAD | BOTH | PER_LAYER | dict(num_kv_shared_layers=0), [], "unsigned char"),
    "gpt_neo": (NEO, [], "nats off"),
    "mamba2": (MAMBA2, [], "out_proj"),
    "recurrent_gemma": (HEAD | dict(num_hidden_layers=3, lru_width=64), [], "4 bits"),
    # What remains once the user has done what PEFT's sentence asks for: a head with a multiplier
    # that we do not know, and a cached step that is not the whole forward's.
    "falcon_h1 attention": (
        HEAD | MAMBA | dict(lm_head_multiplier=0.5),
        ["q_proj"],
        "does not run here",
    ),
    "mamba2 in_proj": (MAMBA2, ["in_proj"], "nats off"),
}


@pytest.fixture(scope="session")
def save_model(tmp_path_factory):
    """save_model(family) -> folder of a random model of it, with the tiny policy's tokenizer."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folders = {}

    def save(family: str) -> str:
        if family not in folders:
            folder = folders[family] = str(tmp_path_factory.mktemp(family.replace(" ", "_")))
            refused = {name: settings for name, (settings, *_) in REFUSED.items()}
            settings = (RIGHT | EXPERTS | ROPE_BY_LENGTH | refused)[family]
            config = AutoConfig.for_model(family.split()[0], **SMALL | settings)
            config.eos_token_id, config.pad_token_id = 2, 0
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # else 0
                    parameter.data += 0.05 * torch.randn(parameter.shape)
                elif "norm" not in name and not name.endswith(("A_log", ".D", "dt_bias")):
                    parameter.data *= 4
            model.save_pretrained(folder)
            TOKENIZER.save_pretrained(folder)
        return folders[family]

    return save


def arguments(module, folder: str, **flags):
    argv = ["--model_name_or_path", folder, "--max_completion_length", str(LENGTH)]
    argv += ["--per_device_train_batch_size", "4", "--num_generations", "4"]
    argv += ["--gradient_accumulation_steps", "1", "--gradient_checkpointing", "False"]
    for name, value in flags.items():
        argv += [f"--{name}", *(value if isinstance(value, list) else [str(value)])]
    return module.parse_args(argv)


def start(folder: str, module=grpo_arca, **flags):
    """What a run does before its first step; then the adapter is made to act."""
    AcceleratorState._reset_state()  # it would refuse another --dtype than the one before
    run = module.build_run(arguments(module, folder, **flags), TOKENIZER)
    module.check_model(run, ([Problem("x", "7")], [LONG]))
    randomize_adapter(run.model)
    return run


@torch.no_grad()
def stock(run, batch):
    """Log-probs and entropies [B, T] of the completions by the stock model: row by row, eager, no
    cache."""
    base, (result, entropy) = run.model.get_base_model(), torch.zeros(2, *batch.mask.shape)
    attention = base.config._attn_implementation
    base.set_attn_implementation("eager")
    rows = zip(batch.ids, batch.attention, batch.mask, strict=True)
    for row, (ids, real, mask) in enumerate(rows):
        ids, length = ids[real], int(mask.sum())
        logp = base(ids[None], use_cache=False).logits[0, -length - 1 : -1].float().log_softmax(-1)
        result[row, :length] = logp.gather(1, ids[-length:, None]).squeeze(1)
        entropy[row, :length] = -(logp.exp() * logp).sum(-1)
    base.set_attn_implementation(attention)
    return result, entropy


def answered_batch(module, advantages=(0.9, -0.8, 0.7)):
    """Completions that end in a boxed answer, as OAR needs them, of different lengths."""
    done = [[*TOKENIZER.encode(text), 2] for text in COMPLETIONS]
    width, length = len(LONG), max(map(len, done))
    ids = torch.zeros(3, width + length, dtype=torch.long)
    attention = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, done, strict=True)):
        place = slice(width - len(prompt), width + len(completion))
        ids[row, place], attention[row, place] = torch.tensor(prompt + completion), True
    tensors = dict(ids=ids, attention=attention, truncated=torch.zeros(3, dtype=torch.bool))
    tensors |= dict(advantages=torch.tensor(advantages), rewards=torch.ones(3))
    tensors |= dict(loss_mask=attention[:, width:], sampled_logp=torch.zeros(3, length))
    tensors |= dict(entropy=torch.rand(3, length, generator=torch.Generator().manual_seed(0)))
    return module.Batch(rows=torch.arange(3), prompt_width=width, **tensors)


def with_method(run, credit: str):
    """The run, as the script that has this method would have built it."""
    module, args = METHODS[credit], run.args
    same = {name: getattr(args, name) for name in ("load_in_4bit", "rollout_weights", "dtype")}
    args = arguments(module, args.model_name_or_path, credit=credit, **same)
    return module.Run(args, *[getattr(run, field.name) for field in fields(run)][1:])


def check_greedy(run):
    """Greedy tokens are those of transformers' `generate`, prompt by prompt without padding."""
    endless = replace(run, eos_ids=run.eos_ids[:0])
    u = torch.zeros(len(PROMPTS), LENGTH)
    batch = grpo_arca.sample(endless, torch.arange(len(PROMPTS)), PROMPTS, u, is_greedy=True)
    run.model.generation_config.eos_token_id = None
    how = dict(do_sample=False, max_new_tokens=LENGTH, pad_token_id=0)
    own = []
    for prompt in PROMPTS[:2]:
        ids = torch.tensor([prompt])
        own.append(run.model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0])
    for row, tokens in zip(batch.ids, [*own, own[0]], strict=True):
        assert row[batch.prompt_width :].tolist() == tokens[-LENGTH:].tolist()


def check_samples(run):
    """Sampled = trained = stock log-probs, and sampled = stock entropies, where rows stop early
    and `keep` drops them."""
    often = replace(run, eos_ids=torch.arange(3, 70))
    u = grpo_arca.row_uniforms(run.args, "test", 0, torch.arange(3), LENGTH)
    batch = grpo_arca.sample(often, torch.arange(3), PROMPTS, u)
    assert batch.mask.sum(1).unique().numel() > 1  # of different lengths
    run.policy.eval()
    with torch.no_grad():
        trained, _ = run.policy(batch)
    logp, entropy = stock(run, batch)
    for ours, theirs in (batch.sampled_logp, logp), (trained, logp), (batch.entropy, entropy):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def check_credit(run, credit: str):
    """The method's scores and weights are finite and not all alike, and its update moves."""
    module, run = METHODS[credit], with_method(run, credit)
    batch, metrics = answered_batch(module), {}
    module.score(run, batch, [batch], metrics)
    with torch.no_grad():
        trained, _ = run.policy.eval()(batch)
    torch.testing.assert_close(trained, stock(run, batch)[0], atol=1e-4, rtol=0)
    assert batch.scores.isfinite().all() and batch.weights.isfinite().all()
    assert batch.weights[batch.mask].std() > 0.01 and metrics.get("no_answer_share", 0) == 0
    change = module.update(run, [batch])
    assert change["skipped_update"] == 0 and change["grad_norm"] > 1e-3


def check_all(run, family: str):
    check_greedy(run)
    check_samples(run)
    for credit in METHODS:
        if family not in NOT_WITH.get(credit, []):
            check_credit(run, credit)


# ---- The tests -----------------------------------------------------------------------------------
# One of each kind: plain, windows and a soft cap, images, shared and state caches, a scaled head,
# learned positions. All of them, in every way: test_right_in_every_way.
KINDS = [
    "llama",
    "gemma2",
    "gemma3",
    "gemma4_text",
    "cohere2",
    "granite",
    "lfm2",
    "qwen3_5_text",
    "gpt2",
]


@pytest.mark.parametrize("family", KINDS)
def test_right_in_4_bits(save_model, family):
    check_all(start(save_model(family)), family)


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_dropout_of_the_base_is_off_in_training(save_model, family):
    """Rollouts have none. With checkpointing, layers are in training mode for OAR-G, too."""
    folder = save_model(family)
    config = AutoConfig.from_pretrained(folder)
    assert max(x for name, x in vars(config).items() if "drop" in name and x is not None) >= 0.1
    run = start(folder, gradient_checkpointing=True)
    batch = grpo_arca.sample(run, torch.arange(3), PROMPTS, torch.rand(3, LENGTH))
    gap = (grpo_arca.training_forward(run, batch) - batch.sampled_logp).abs() * batch.mask
    assert gap.max() < 1e-4


def test_causal_masks_in_old_files_are_no_weights(save_model, tmp_path):
    """As in those of GPT-J, whose class computes them."""
    folder = shutil.copytree(save_model("gpt2"), tmp_path / "old")
    weights = load_file(folder / "model.safetensors")
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    weights["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert start(str(folder)).step == 0


@pytest.mark.parametrize("family", ["deepseek_v2", "gpt_oss", "qwen3_next"])
def test_experts_are_refused_in_4_bits_and_right_without(save_model, family, capsys):
    """Experts are no linear layers, so bitsandbytes would leave them in 32 bits without a word."""
    folder = save_model(family)
    sentence = refusal(lambda: start(folder), capsys)
    assert folder in sentence and "--load_in_4bit False" in sentence
    check_all(start(folder, load_in_4bit=False), family)


@pytest.mark.parametrize("family", ["falcon", "gemma3", "gpt2", "opt"])
def test_the_layers_to_compile_are_those_with_the_adapter(save_model, family):
    run = start(save_model(family))
    layers = grpo_arca.decoder_layers(run.model.get_base_model())
    compiled = {id(p) for layer in layers for p in layer.parameters()}
    trained = [p for p in run.model.parameters() if p.requires_grad]
    assert trained and all(id(p) in compiled for p in trained)


@pytest.mark.parametrize("family", REFUSED)
def test_refused_with_a_sentence(save_model, family, capsys):
    folder, (_, targets, word) = save_model(family), REFUSED[family]
    sentence = refusal(lambda: start(folder, lora_target_modules=targets or ["all-linear"]), capsys)
    assert folder in sentence and word in sentence


@pytest.mark.parametrize("family", ["granite", "gemma3_text", "qwen3_5_text"])
def test_right_where_rollouts_compute_with_nf4(save_model, family):
    check_greedy(run := start(save_model(family), rollout_weights="quantized"))
    check_samples(run)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["dense", "quantized"])
@pytest.mark.parametrize("bits", [True, False])
@pytest.mark.parametrize("family", RIGHT | EXPERTS)
def test_right_in_every_way(save_model, family, bits, weights, capsys):
    if bits and family in EXPERTS:
        sentence = refusal(lambda: start(save_model(family)), capsys)
        assert save_model(family) in sentence and "--load_in_4bit False" in sentence
    else:
        check_all(start(save_model(family), load_in_4bit=bits, rollout_weights=weights), family)


@pytest.mark.parametrize("family", ROPE_BY_LENGTH)
def test_the_context_ends_where_rope_would_depend_on_the_batch(save_model, family):
    """A short row beside one that fills the context is right. One token more, and it is not."""
    folder = save_model(family)
    _, config = load_tokenizer(folder, "main")
    context = context_length(config)
    run = start(folder, load_in_4bit=False)
    endless = replace(run, eos_ids=run.eos_ids[:0])
    for room, is_right in ((context, True), (context + 1, False), (context, True)):
        prompts = [PROMPTS[1], (LONG * 50)[: room - LENGTH]]
        uniforms = fixed_uniforms(2, LENGTH)
        batch = grpo_arca.sample(endless, torch.arange(2), prompts, uniforms)
        with torch.no_grad():
            trained, _ = run.policy.eval()(batch)
        logp, _ = stock(run, batch)
        gaps = torch.stack([batch.sampled_logp - logp, trained - logp]).abs()
        assert (gaps.max() < 1e-4) == is_right, (room, gaps.max())


# ---- OAR asks by forwards of its own -------------------------------------------------------------
@torch.no_grad()
def plain_oar_p(run, probes, row: int) -> list[float]:
    """OAR-P of one completion: a whole forward for each token, without padding or a cache."""
    base, real = run.model.get_base_model(), probes.attention[row] > 0
    ids, scores = probes.ids[row][real], []

    def answer(ids):
        return base(ids[None], use_cache=False).logits[0, -1].double().log_softmax(-1)

    for place in probes.reasoning[row][real].nonzero().flatten():
        changed = ids.clone()
        changed[place] = 0
        clean = answer(ids)
        scores.append(float((clean.exp() * (clean - answer(changed))).sum()))
    return scores


@pytest.mark.parametrize(
    "credit, family", [(credit, family) for credit in NOT_WITH for family in NOT_WITH[credit]]
)
def test_oar_is_refused_where_it_cannot_ask(save_model, credit, family, capsys):
    """A cache that holds a state instead of keys and values cannot be cut at a token, and a layer's
    own embeddings need token ids. The run ends before the first step, although its samples would be
    right."""
    flags = dict(credit=credit, load_in_4bit=family not in EXPERTS)
    sentence = refusal(
        lambda: start(save_model(family), grpo_oar, **flags), capsys, script="grpo_oar"
    )
    expected = "use oar_g" if credit == "oar_p" else f"{save_model(family)} does not run here"
    assert expected in sentence


@pytest.mark.parametrize("family", ["gemma2", "gemma4_text", "llama"])
def test_oar_p_is_that_of_whole_forwards(save_model, family):
    """Its cut caches, of windows too, give what forwards of the whole text give."""
    run = with_method(start(save_model(family)), "oar_p")
    batch = answered_batch(grpo_oar)
    grpo_oar.score(run, batch, [batch], {})
    probes = grpo_oar.find_probes(run, batch, [0, 1, 2])
    for row in range(3):
        plain = torch.tensor(plain_oar_p(run, probes, row))
        assert plain.max() > 1e-3
        torch.testing.assert_close(batch.scores[row, : len(plain)], plain, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("family", ["gemma", "granite", "llama"])
def test_oar_g_reads_the_same_twice_but_for_the_noise(save_model, family):
    """Also where a family scales embeddings, and in bf16, whose rounding is larger than the noise:
    almost no noise, almost no scores."""
    run = start(save_model(family), load_in_4bit=False, dtype="bfloat16")
    run, means = with_method(run, "oar_g"), []
    for noise in (1e-1, 1e-9):
        run.args.oar_noise_std, batch = noise, answered_batch(grpo_oar)
        grpo_oar.score(run, batch, [batch], {})
        means.append(batch.scores[batch.scores >= 0].mean())
    assert means[0] > 0 and means[1] < 1e-3 * means[0]


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_oar_leaves_out_what_its_question_makes_too_long(save_model, family):
    """Of a model that reads images, the language model has the context."""
    run = with_method(start(save_model(family)), "oar_g")
    batch = answered_batch(grpo_oar)
    probes = grpo_oar.find_probes(run, batch, [0, 1, 2])
    assert probes.rows == [0, 1, 2]
    text_config = run.model.config.get_text_config()
    lengths = probes.attention.sum(1)
    text_config.max_position_embeddings = int(lengths.max()) - 1
    shorter = grpo_oar.find_probes(run, batch, [0, 1, 2])
    assert shorter.rows == (lengths < lengths.max()).nonzero().flatten().tolist()


# ---- check_model itself --------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["cohere", "gemma2", "granite"])
def test_check_sees_a_head_without_its_scaling(save_model, family, capsys, monkeypatch):
    """These families scale or cap their logits, which a head that is called by hand leaves out."""
    folder = save_model(family)

    def unscaled_logits(base, hidden):
        return base.get_output_embeddings()(hidden).float()

    monkeypatch.setattr(grpo_arca, "head_logits", unscaled_logits)
    assert f"{folder} is not supported" in refusal(lambda: start(folder), capsys)


def test_check_sees_attention_without_what_a_family_adds(save_model, capsys, monkeypatch):
    """An attention function of one's own would drop the sinks of gpt-oss. Then sampled and trained
    log-probs agree with each other, but not with the stock model's."""
    folder, build = save_model("gpt_oss"), grpo_arca.build_run

    def build_without_sinks(*args):
        run = build(*args)
        base = run.model.get_base_model()
        for layer in base.base_model.layers:
            layer.self_attn.sinks.requires_grad_(False).fill_(-1e9)
        return run

    def stock(run, batch, logp):
        for layer in run.model.get_base_model().base_model.layers:
            layer.self_attn.sinks.fill_(1.0)
        return gap(run, batch, logp)

    gap = grpo_arca.stock_gap
    monkeypatch.setattr(grpo_arca, "build_run", build_without_sinks)
    monkeypatch.setattr(grpo_arca, "stock_gap", stock)
    sentence = refusal(lambda: start(folder, load_in_4bit=False), capsys)
    assert f"{folder} is not supported" in sentence


@pytest.mark.parametrize("prompt", PROMPTS[:2], ids=["long", "short"])
@pytest.mark.parametrize("broken", ["mask", "positions"])
def test_check_sees_a_wrong_decode_step(save_model, broken, prompt, capsys, monkeypatch):
    """Of the cached steps alone: padding that is attended to, positions that count it."""
    folder, step = save_model("llama"), grpo_arca.Decoder.step
    run = grpo_arca.build_run(arguments(grpo_arca, folder), TOKENIZER)

    def wrong(decoder):
        base, right = decoder.model.base_model, decoder.model.base_model.forward
        if broken == "mask":
            decoder.mask[:, : int(decoder.column)] = 1
        else:
            base.forward = lambda position_ids, **inputs: right(
                position_ids=decoder.column.expand_as(position_ids), **inputs
            )
        step(decoder)
        base.forward = right

    monkeypatch.setattr(grpo_arca.Decoder, "step", wrong)
    sentence = refusal(lambda: grpo_arca.check_model(run, ([Problem("x", "7")], [prompt])), capsys)
    assert f"{folder} is not supported" in sentence


# ---- What a CUDA graph would not see -------------------------------------------------------------
@pytest.mark.parametrize("family", ["cohere2", "gemma4_text", "lfm2", "llama", "qwen3_5_text"])
def test_steps_keep_their_state_in_the_same_tensors(save_model, family):
    """A captured step reads and writes the addresses, and has the Python numbers, of its first run;
    so a cache's must not change (a window that rolls counts in Python)."""

    def state(decoder):
        leaves = tree_leaves([vars(layer) for layer in decoder.cache.layers])
        return [x.data_ptr() if isinstance(x, torch.Tensor) else str(x) for x in leaves]

    model = start(save_model(family)).model.get_base_model()
    with torch.no_grad():
        decoder = grpo_arca.Decoder(model, PROMPTS, torch.zeros(3, LENGTH), (0, 0, 1.0))
        decoder.step()
        before = state(decoder)
        for _ in range(LENGTH - 2):
            decoder.step()
    assert state(decoder) == before
