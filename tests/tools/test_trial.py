"""tools/trial.py: what it trains and what it makes again, and a page that claims what was shown."""

import subprocess
import sys
import time

import pytest
import trial
from support import RATIO, ROOT, TINY_RUN, VARIETY, command_line
from test_compare import fake_run
from test_readme import METHOD

START = (  # a program that writes into the working directory
    f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import pathlib, trial; "
    "trial.FOLDER = pathlib.Path('trials').absolute(); trial.main()"
)


def test_a_method_has_a_control_where_that_changes_something_and_new_runs_where_it_changed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(trial, "FOLDER", tmp_path)
    mine = tmp_path / "mine.py"
    folders = []
    for text in (METHOD, METHOD.replace("float()", "float().sqrt()")):
        mine.write_text(text)
        for own, setting in (("", "model"), (" --floor 1", "model"), ("", "other"), ("", "model")):
            folders += {run.parent for run in trial.runs_of("x", f"{mine}{own}", [], setting, 2)}
    assert len(folders) == 8 and len(set(folders)) == 6
    assert list(trial.methods_of(f"{mine} -x 1")) == ["GRPO", "mine -x 1, shuffled", "mine -x 1"]
    assert list(trial.methods_of(f"{mine} --credit=random")) == ["GRPO", "mine --credit=random"]


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ((0.8, 0.9), "ends above GRPO: +0.200 (+0.200 to +0.200)."),
        ((0.5, 0.6), "ends below GRPO: -0.100 (-0.100 to"),
        ((0.9, 0.8), "cannot be told from GRPO: +0.200 (-1.071 to"),
        ((0.2, 0.9), "cannot be compared with GRPO, because these runs failed: mine-1."),
    ],
)
def test_the_page_claims_what_was_shown(tmp_path, ends, words):
    runs = {"GRPO": {fake_run(tmp_path, "GRPO", seed): ["python"] for seed in (1, 2)}}
    runs["mine"] = {fake_run(tmp_path, "mine", i, end=end): [] for i, end in enumerate(ends, 1)}
    trial.write_page("worth", runs)
    assert f"<b>mine</b> {words}" in " ".join((tmp_path / "trial.html").read_text().split())


@pytest.mark.slow
def test_a_trial_of_a_method_a_flag_and_a_reward_of_ones_own_outlives_a_kill(
    run_tool, tmp_path, monkeypatch
):
    """On prompts without answers, so that the reward is what is compared."""
    flag = (
        'class Flags:\n# === CREDIT ===\n    share: float = flag(0.5, "")\n# === END CREDIT ===\n'
    )
    method = RATIO.replace("# ===", f"{flag}# ===", 1).replace("/ 2", "* args.share")
    (tmp_path / "ratio.py").write_text(method)
    (tmp_path / "variety.py").write_text(VARIETY)
    rows = "".join(f'{{"prompt": "Start with {number}."}}\n' for number in range(20))
    (tmp_path / "prompts.jsonl").write_text(rows)
    flags = TINY_RUN | {"dataset_name": "prompts.jsonl", "reward_funcs": "variety.pay"}
    words = ["ratio.py --share 0.2", "--seeds", "2", "--batches", "0", "--", *command_line(flags)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial, "FOLDER", tmp_path / "trials")
    killed = subprocess.Popen([sys.executable, "-c", START, *words])
    while not list(tmp_path.glob("trials/*/*/metrics.jsonl")):
        time.sleep(0.1)
    killed.kill()
    run_tool(trial, *words)
    assert len(list(tmp_path.glob("trials/*/*/summary.json"))) == 4  # it has no control
    (page,) = tmp_path.glob("trials/ratio*/trial.html")
    assert "<code>rewards/pay</code>" in page.read_text()
