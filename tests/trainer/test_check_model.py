"""What is found before the first step: mistakes in one's own method, models that are not what they
seem, and layers that cannot be trained."""

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from support import ROOT, TINY

import grpo_arca as trainer

TOKENIZER = transformers.AutoTokenizer.from_pretrained(TINY)
PROBLEM = trainer.Problem("What is 3 + 4?", "7")
TRAIN_SET = ([PROBLEM], [TOKENIZER.encode("What is 3 + 4? Go step by step, and check it.")])
SIZES: dict[str, Any] = {
    "vocab_size": 448, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip


def save_model(folder: Path, config: transformers.PretrainedConfig) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A model that is not an embedded one."""
    return save_model(tmp_path_factory.mktemp("llama"), transformers.LlamaConfig(**SIZES))


@pytest.fixture
def copied(llama, tmp_path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


@pytest.fixture
def fork_script(tmp_path, monkeypatch) -> Iterator[Callable[..., ModuleType]]:
    """fork_script({old: new, ...}) -> a changed copy of grpo_arca.py, as somebody's own script."""
    (tmp_path / "common").symlink_to(ROOT / "common")

    def fork(changes: dict[str, str] | None = None) -> ModuleType:
        source = (ROOT / "grpo_arca.py").read_text()
        for old, new in (changes or {}).items():
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        path = tmp_path / "grpo_mine.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("grpo_mine", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "grpo_mine", module)
        spec.loader.exec_module(module)
        return module

    return fork


def check(folder: Path, module: ModuleType = trainer, **flags) -> trainer.Run:
    """Does what a run does before its first step, and returns the run."""
    argv = ["--model_name_or_path", str(folder), "--max_completion_length", "16"]
    argv += ["--gradient_checkpointing", "False"]
    for name, value in flags.items():
        argv += [f"--{name}", *(value if isinstance(value, list) else [str(value)])]
    AcceleratorState._reset_state()
    run = module.build_run(module.parse_args(argv), TOKENIZER)
    module.check_model(run, TRAIN_SET)
    return run


def refused(capsys, act: Callable[..., object], *given, **flags) -> str:
    """Returns the one sentence with which act(*given, **flags) ends the run."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        act(*given, **flags)
    out, err = capsys.readouterr()
    sentences = [line for line in err.splitlines() if ": error: " in line]
    assert stop.value.code == 2 and not out and len(sentences) == 1, err
    assert "Traceback" not in err
    return sentences[0]


# ---- Mistakes in one's own method ----------------------------------------------------------------
SURPRISAL = '    if credit == "surprisal":\n        return -micro.sampled_logp\n'
ASSIGNED = "        micro.credit = weights\n        micro.weights = weights\n"


def scores(expression: str) -> dict[str, str]:
    """Returns the change of a script whose `surprisal` is this expression."""
    return {SURPRISAL: f'    if credit == "surprisal":\n        return {expression}\n'}


def test_a_method_without_mistakes_passes(fork_script, llama):
    run = check(llama, fork_script(scores("micro.entropy + 1")), credit="surprisal")
    assert all(parameter.grad is None for parameter in run.model.parameters())


@pytest.mark.parametrize(
    "expression, error, words",
    [
        ("micro.masks", AttributeError, "masks"),
        ("micro.problems[0].columns['level']", KeyError, "level"),
        ("micro.entropy + torch.ones(3)", RuntimeError, "must match the size"),
        ("micro.entropy[:, 1:]", RuntimeError, "must match the size"),
        ("micro.entropy.view(3, 5)", RuntimeError, "invalid for input"),
        ("None", TypeError, "NoneType"),
        ("[1.0, 2.0]", TypeError, "only integer tensors"),
    ],
)
def test_a_mistake_in_token_scores_shows_its_stack(fork_script, llama, expression, error, words):
    """Which a sentence that blames the model would hide."""
    module = fork_script(scores(expression))
    with pytest.raises(error, match=words) as raised:
        check(llama, module, credit="surprisal")
    assert any(Path(str(entry.path)).name == "grpo_mine.py" for entry in raised.traceback)


def test_a_credit_of_another_shape_shows_its_stack(fork_script, llama):
    module = fork_script({ASSIGNED: ASSIGNED.replace("= weights", "= weights[:, 1:]", 1)})
    with pytest.raises(RuntimeError, match="must match the size"):
        check(llama, module, credit="surprisal")


@pytest.mark.parametrize(
    "changes, words",
    [
        (scores("-1 - micro.entropy"), ["assign_credit made weights below 0", "at least -"]),
        (scores("micro.entropy * torch.nan"), ["token_scores returned a score", "not a finite"]),
        (scores("micro.entropy / 0"), ["token_scores returned a score", "not a finite number"]),
        (
            {ASSIGNED: ASSIGNED.replace("= weights", "= weights - 2")},
            ["assign_credit made weights below 0"],
        ),
        (
            {ASSIGNED: ASSIGNED.replace("= weights", "= weights * torch.nan", 1)},
            ["assign_credit made weights below 0 or NaN"],
        ),
    ],
)
def test_impossible_numbers_are_named_with_their_function(
    fork_script, llama, capsys, changes, words
):
    module = fork_script(changes)
    sentence = refused(capsys, check, llama, module, credit="surprisal")
    assert sentence.startswith("grpo_mine.py: error: ")
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize("credit", ["uniform", "arca"])
def test_a_fault_of_the_models_own_code_is_a_sentence(fork_script, llama, capsys, credit):
    """Also where only the forward pass of the method's own, without an adapter, meets it."""
    module = fork_script()
    argv = ["--model_name_or_path", str(llama), "--credit", credit]
    AcceleratorState._reset_state()
    run = module.build_run(module.parse_args(argv), TOKENIZER)
    layer = run.model.get_base_model().model.layers[1]
    forward = layer.forward
    q_proj = layer.self_attn.q_proj

    def broken(*inputs, **how):
        if credit == "uniform" or q_proj.disable_adapters:
            raise IndexError("no such head")
        return forward(*inputs, **how)

    layer.forward = broken
    sentence = refused(capsys, module.check_model, run, TRAIN_SET)
    assert f"{llama} does not run here: IndexError: no such head" in sentence


def test_a_reward_function_that_raises_is_found_before_the_first_evaluation(
    run_main, step_on_trial, monkeypatch, tmp_path
):
    def evaluate(*_):
        raise AssertionError("an evaluation came first")

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = "def pay(completions, **columns):\n    return [len(x) for x in columns['levels']]\n"
    (tmp_path / "pays_by_level.py").write_text(code)
    code, out, err = run_main(reward_funcs="pays_by_level.pay")
    sentences = [line for line in err.splitlines() if "error: " in line]
    assert code == 2 and not out and "Traceback" not in err and len(sentences) == 1, err
    assert "reward function pay" in sentences[0] and "KeyError('levels')" in sentences[0]
    assert "in line 2 of" in sentences[0] and "pays_by_level.py" in sentences[0]


# ---- Weights -------------------------------------------------------------------------------------
def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rename_a_layer(weights):
    for name in [name for name in weights if ".layers.1." in name]:
        weights[name.replace(".layers.", ".layer.")] = weights.pop(name)


def drop_the_final_norm(weights):
    del weights["model.norm.weight"]


def drop_the_embeddings(weights):
    del weights["model.embed_tokens.weight"]


def drop_a_head_that_is_not_tied(weights):
    del weights["lm_head.weight"]


def cut_the_embeddings(weights):
    name = "model.embed_tokens.weight"
    weights[name] = weights[name][:400].clone()


def cut_a_layer(weights):
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name][:32].clone()


MISSING = {
    rename_a_layer: "model.layers.1.input_layernorm.weight",
    drop_the_final_norm: "model.norm.weight",
    drop_the_embeddings: "model.embed_tokens.weight",
    drop_a_head_that_is_not_tied: "lm_head.weight",
    cut_the_embeddings: "model.embed_tokens.weight",
}


@pytest.mark.parametrize("change", MISSING)
def test_missing_and_mismatched_weights_are_refused_by_name(copied, capsys, change):
    """Transformers would fill in random numbers."""
    change_weights(copied, change)
    sentence = refused(capsys, check, copied)
    assert str(copied) in sentence and MISSING[change] in sentence


def test_a_layer_of_another_shape_is_refused(copied, capsys):
    """Into 4 bits transformers takes it as it is, so that the first forward pass fails."""
    change_weights(copied, cut_a_layer)
    name = "model.layers.0.mlp.up_proj.weight"
    assert name in refused(capsys, check, copied, load_in_4bit=False)
    assert f"{copied} does not run here" in refused(capsys, check, copied)


def test_weights_that_the_class_leaves_out_are_refused_by_name(tmp_path, capsys):
    """Llama's layers have no norms of queries and keys, and would compute without Qwen3's."""
    folder = Path(shutil.copytree(TINY, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    sentence = refused(capsys, check, folder)
    assert "LlamaForCausalLM leaves out" in sentence
    assert "model.layers.0.self_attn.k_norm.weight" in sentence


@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize("number", [2, 11])
def test_layers_beyond_those_of_the_configuration_are_refused(copied, capsys, prefix, number):
    """The model would compute without them. Some files name weights without the `model.`."""

    def add_a_layer(weights):
        for name in [name for name in weights if ".layers.1." in name]:
            weights[name.replace(".layers.1.", f".layers.{number}.")] = weights[name].clone()
        if prefix == "":
            for name in [name for name in weights if name.startswith("model.")]:
                weights[name.removeprefix("model.")] = weights.pop(name)
            del weights["lm_head.weight"]
            edit_config(copied, tie_word_embeddings=True)

    change_weights(copied, add_a_layer)
    sentence = refused(capsys, check, copied)
    assert "LlamaForCausalLM leaves out" in sentence
    assert f"{prefix}layers.{number}.input_layernorm.weight" in sentence


def test_layers_that_predict_further_tokens_may_be_left_out(copied, capsys):
    """As DeepSeek-V3's, which are counted apart. One more than that count is refused."""

    def add_layers(*numbers):
        def add(weights):
            for number in numbers:
                weights[f"model.layers.{number}.eh_proj.weight"] = torch.zeros(2, 2)

        return add

    edit_config(copied, num_nextn_predict_layers=2)
    change_weights(copied, add_layers(2, 3))
    check(copied)
    change_weights(copied, add_layers(4))
    assert "model.layers.4.eh_proj.weight" in refused(capsys, check, copied)


def test_a_tied_head_is_not_missing(tmp_path):
    """In a file with it, and in one without."""
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    folder = save_model(tmp_path / "tied", config)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    check(folder)

    def add_the_head(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    change_weights(folder, add_the_head)
    check(folder)


def test_weights_of_modules_that_the_model_does_not_have_may_be_left_out(copied):
    """A vision tower, other heads, and what old checkpoints of Llama hold beside weights."""

    def add(weights):
        weights["vision_tower.blocks.0.attention.q.weight"] = torch.zeros(2, 2)
        weights["multi_modal_projector.linear.weight"] = torch.zeros(2, 2)
        weights["v_head.summary.weight"] = torch.zeros(2, 2)
        weights["score.weight"] = torch.zeros(2, 2)
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    change_weights(copied, add)
    check(copied)


# ---- Layers that get an adapter ------------------------------------------------------------------
@pytest.mark.parametrize(
    "names, culprit",
    [
        (["q_proj", "query"], "query"),
        (["query", "key"], "query"),
        (["all-linear", "q_proj"], "all-linear"),
        (["q_proj", "all-linear"], "all-linear"),
        (["q_proj", "proj"], "proj"),  # part of a name is not the name
    ],
)
def test_targets_that_match_nothing_or_stand_beside_all_linear_are_refused(
    llama, capsys, names, culprit
):
    sentence = refused(capsys, check, llama, lora_target_modules=names)
    assert f" {culprit} " in sentence and str(llama) in sentence


def trained_layers(run: trainer.Run) -> set[str]:
    return {name for name, module in run.model.named_modules() if hasattr(module, "lora_A")}


def test_targets_that_match_are_accepted(llama):
    run = check(llama, lora_target_modules=["q_proj", "1.mlp.up_proj"])
    ends = {name.partition(".layers.")[2] for name in trained_layers(run)}
    assert ends == {"0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj"}


def test_a_model_that_reads_images_gets_adapters_in_its_language_model_alone(tmp_path):
    """Others would get no gradient, which DDP does not accept."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    images = {"mm_tokens_per_image": 4, "image_token_id": 400}
    images |= {"boi_token_id": 401, "eoi_token_id": 402}
    config = transformers.Gemma3Config(text_config=SIZES, vision_config=vision, **images)
    config.eos_token_id = 2
    folder = save_model(tmp_path / "gemma3", config)
    run = check(folder)
    linear = [
        name
        for name, module in run.model.named_modules()
        if isinstance(module, torch.nn.Linear) and ("vision" in name or "projector" in name)
    ]
    assert linear and trained_layers(run)
    assert not [name for name in trained_layers(run) if "vision" in name or "projector" in name]

    ids = torch.randint(8, 200, (2, 9))
    hidden = trainer.hidden_states(run.model.get_base_model(), ids, torch.ones_like(ids))
    hidden.sum().backward()
    trained = [p for p in run.model.parameters() if p.requires_grad]
    assert trained and all(parameter.grad is not None for parameter in trained)


# ---- The default precision -----------------------------------------------------------------------
@pytest.mark.parametrize("has_bf16, dtype", [(True, "bfloat16"), (False, "float32")])
def test_a_card_that_only_emulates_bf16_computes_in_float32(
    fork_script, monkeypatch, has_bf16, dtype
):
    """A T4 says that it has bf16 unless it is asked about emulation."""

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return has_bf16 or including_emulation

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    module = fork_script()
    assert module.parse_args([]).dtype == dtype


def test_without_a_gpu_the_default_is_float32(fork_script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fork_script().parse_args([]).dtype == "float32"
