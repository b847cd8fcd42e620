"""A run on two processes is the run on one: the same samples, gradients and adapter.

Updates of every script are split over processes and micro-batches by process_worker.py. Samples and
advantages must be equal, and so must be the gradients of both processes. A gradient may differ from
the one of a single process by 1e-5 of its largest entry. For OAR it is 3e-4: its scores are
differences of nearly equal distributions, where rounding counts for more.
"""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from process_worker import CASES, LOSSES
from safetensors.torch import load_file
from support import (
    ROOT,
    TINY_RUN,
    VARIETY,
    command_line,
    metrics_of,
    read_jsonl,
    refusal,
    run_forks,
    stderr_of,
)

import grpo_arca

# Times, memory, and tokens computed, of which some are padding: beginnings of names
UNEQUAL = ("seconds", "tokens_per_second", "peak_memory", "reward_timeouts", "credit_")
WORKER = str(ROOT / "tests/process_worker")
TRAINING = TINY_RUN | {
    "max_steps": 2, "max_completion_length": 48, "reward_funcs": "variety.pay",
    "max_eval_samples": 1, "beta": 0.05, "output_dir": "../out",
}  # fmt: skip

# Each machine is a network namespace, with a copy of the repository in its own folder 0 or 1. A
# single process trains after them. $0 is Python, $1 the repository.
TWO_MACHINES = """
end() { for i in 0 1; do ip netns pids $PPID-$i | xargs -r kill; ip netns delete $PPID-$i; done; }
trap end EXIT
for i in 0 1; do ip netns add $PPID-$i || exit 77; done
ip link add eth0 netns $PPID-0 type veth peer name eth0 netns $PPID-1 || exit 77
for i in 0 1; do
    ip -n $PPID-$i address add 10.99.0.1$i/24 dev eth0
    ip -n $PPID-$i link set eth0 up
    ip -n $PPID-$i link set lo up
    mkdir $i && cp -r $1/common $1/grpo_arca.py variety.py $i
done
shift
for i in 0 1; do
    (cd $i && GLOO_SOCKET_IFNAME=eth0 ip netns exec $PPID-$i $0 -m accelerate.commands.launch \\
        --multi_gpu --num_machines 2 --num_processes 2 --machine_rank $i \\
        --main_process_ip 10.99.0.10 --main_process_port 29500 grpo_arca.py "$@") &
done
wait
cd 0 && $0 grpo_arca.py "$@" --gradient_accumulation_steps 2 --output_dir whole
"""


def processes_of(folder: Path, count: int, script: str, flags: dict) -> list[dict]:
    """Returns the cases of a script on so many processes, as `accelerate launch` starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    cases = []
    for rank in map(str, range(count)):
        (folder / rank).mkdir(parents=True)
        (folder / rank / "variety.py").write_text(VARIETY)
        case = {"folder": str(folder / rank), "script": script, "argv": command_line(flags)}
        if count > 1:
            case["env"] = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
        cases.append(case)
    return cases


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    """The folder of both scripts' runs on one process and on two, which use gloo."""
    at = tmp_path_factory.mktemp("processes")
    cases = []
    for count, size, accumulation in ((1, 4, 4), (2, 8, 1)):
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        cases += processes_of(at / f"worker-{count}", count, WORKER, {})
        cases += processes_of(at / f"run-{count}", count, "grpo_arca", TRAINING | sizes)
    for case, code in zip(cases, run_forks(at, cases), strict=True):
        assert code == "0", stderr_of(Path(case["folder"]))
    return at


def check_is_telling(name: str, record: dict) -> None:
    """Checks that a record has what a wrong split would change."""
    lengths = {len(ids) for _, ids, _ in record["samples"]}
    signs = {float(advantage.sign()) for *_, advantage in record["samples"]}
    assert len(lengths) > 4, name
    assert signs >= {-1.0, 1.0}, name
    assert all(gradient.abs().max() > 1e-4 for gradient in record["gradients"]), name
    assert len(record["gradients"]) == 2 * len(LOSSES)
    assert any(row["clip_fraction"] > 0 for row in record["rows"][1:]) or "gspo" in name, name
    sampled = record["rows"][0]["sampled_completions"]
    assert sampled == (20 if "resample" in name else 16), name  # one group was drawn again


@pytest.mark.slow
def test_two_processes_make_the_updates_of_one(ran):
    one, two = (torch.load(ran / f"worker-{count}/0/records.pt") for count in (1, 2))
    assert len(one) == sum(map(len, CASES.values()))
    for name, whole in one.items():
        check_is_telling(name, whole)
        split = two[name]
        assert split["samples"] == whole["samples"], name
        bound = 3e-4 if name.startswith("grpo_oar") else 1e-5
        for ours, theirs in zip(split["gradients"], whole["gradients"], strict=True):
            assert torch.equal(ours[0], ours[1]), name  # both processes step alike
            assert (ours - theirs).abs().max() <= bound * theirs.abs().max(), name
        for ours, theirs in zip(split["rows"], whole["rows"], strict=True):
            for key in theirs:
                if not key.startswith(UNEQUAL):
                    assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), (name, key)


@pytest.mark.slow
def test_a_run_on_two_processes_is_the_run_on_one(ran):
    """The same samples and evaluations, and after two updates nearly the same adapter.

    There is one held-out problem, so the second process has none to evaluate.
    """
    outs = (ran / "run-1/out", ran / "run-2/out")
    one, two = (read_jsonl(out / "metrics.jsonl") for out in outs)
    adapters = [load_file(out / "adapter/adapter_model.safetensors") for out in outs]
    assert all(row["grad_norm"] > 0 for row in one if "reward" in row)
    for ours, theirs in zip(two, one, strict=True):
        for name in theirs:
            if not name.startswith(UNEQUAL):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
    saved = load_file(outs[1] / "checkpoint-2/adapter_model.safetensors")
    for name, weight in adapters[0].items():
        assert torch.allclose(adapters[1][name], weight, atol=2e-4), name
        assert torch.equal(saved[name], adapters[1][name]), name


@pytest.mark.parametrize("place", [0, 1, 2])
def test_processes_with_other_problems_steps_or_flags_do_not_train_together(
    run_main, monkeypatch, place
):
    """What the other process has differs in the problems or weights, in the step or in a flag."""

    def gather(own):
        assert own[0][1] == 7
        return [own[0], (*own[0][:place], "another", *own[0][place + 1 :])]

    monkeypatch.setattr(grpo_arca, "gather_object", gather)
    monkeypatch.setattr(grpo_arca, "resume", lambda run: setattr(run, "step", 7))
    code, _, said = run_main(max_steps=0)
    assert code == 1 and "different steps: put --output_dir where all can read it" in said


@pytest.mark.slow
def test_two_machines_train_as_one_process_does(tmp_path):
    (tmp_path / "variety.py").write_text(VARIETY)
    flags = command_line(TRAINING | {"output_dir": "out", "negative_weight": 0})
    command = ["bash", "-c", TWO_MACHINES, sys.executable, str(ROOT), *flags]
    if subprocess.run(command, cwd=tmp_path).returncode == 77:
        pytest.skip("no network namespaces can be made here")
    two, one = (metrics_of(out) for out in (tmp_path / "0/out", tmp_path / "0/whole"))
    for name in ("loss", "grad_norm", "entropy", "reward"):
        expected = [row[name] for row in one if name in row]
        assert [row[name] for row in two if name in row] == pytest.approx(expected, rel=1e-5), name


def test_half_a_group_on_a_process_is_refused(make_run, monkeypatch):
    """A reward or credit over a group would see half of it."""
    make_run(per_device_train_batch_size=12)  # three groups, which one process may hold
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    sentence = "--num_generations must divide a process's 6 completions"
    assert sentence in refusal(make_run, per_device_train_batch_size=6)
