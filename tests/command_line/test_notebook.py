"""Several runs in one process, as in a notebook."""

import gc

from peft import PeftModelForCausalLM

PAY = """
from functools import partial
from scale import SCALE

def scaled(completions, scale, **_):
    return [scale] * len(completions)

pay = partial(scaled, scale=SCALE)
"""


def models_in_memory() -> int:
    gc.collect()
    return sum(type(thing) is PeftModelForCausalLM for thing in gc.get_objects())


def test_each_run_is_a_run_of_its_own(run_main, rows_of, caplog, tmp_path):
    """With a reward one of whose files has changed."""
    before = models_in_memory()
    (tmp_path / "scale.py").write_text("SCALE = 2\n")
    (tmp_path / "mine.py").write_text(PAY)
    flags = {"reward_funcs": "mine.pay", "save_steps": 1, "resume_from_checkpoint": "latest"}
    run_main(max_steps=1, **flags)
    assert "code of " not in run_main(max_steps=2, **flags)[1]
    (tmp_path / "scale.py").write_text("SCALE = 30\n")
    said = run_main(max_steps=3, **flags)[1]
    assert "changed: {'max_steps': 3, 'code of scale': '" in said and "code of mine" not in said
    assert [row["reward"] for row in rows_of()] == [2, 2, 30]
    assert "reward function" not in caplog.text  # a bound keyword is no misspelt column
    assert models_in_memory() == before
