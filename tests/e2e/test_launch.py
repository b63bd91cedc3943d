"""Runs on two ranks, started by the command line and by torchrun: what they end with, and how they end before time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from tests.e2e.conftest import start

LONG = ["--set", "training.updates=100000"]


def evidence_of(folder: Path):
    return json.loads((folder / "evidence.json").read_text())


def rank_pids(folder: Path) -> list[int]:
    return [json.loads((folder / "logs" / f"rank{rank}.json").read_text())["pid"] for rank in (0, 1)]


def wait_for_updates(process: subprocess.Popen[str], folder: Path, number: int = 3) -> None:
    """Wait until the run has made some updates."""
    lines = folder / "updates.jsonl"
    deadline = time.monotonic() + 120
    while not lines.is_file() or len(lines.read_bytes().splitlines()) < number:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def gone(pids: list[int], within_s: float = 5) -> bool:
    deadline = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def trained(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def test_two_runs_on_two_ranks_at_once_end_like_the_run_of_one_process(tmp_path, traceforge, run_file):
    common = ["train", str(run_file), "--set", "parallel.exchange_timeout_s=60"]
    ours = start([*common, "--set", "run_name=ranks", "--ranks", "2", "--json"], tmp_path)
    torchrun_command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun = subprocess.Popen(
        [*torchrun_command, "-m", "traceforge", *common, "--set", "run_name=torchrun"],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert traceforge(*common, "--set", "run_name=alone").code == 0
    (out, err), (_, torchrun_err) = ours.communicate(timeout=200), torchrun.communicate(timeout=200)
    assert (ours.returncode, torchrun.returncode) == (0, 0), err + torchrun_err
    assert json.loads(out)["decision"] == "accept_mechanism"
    assert "[rank 0] update 6/6" in err

    one = tmp_path / "runs" / "alone"
    start_weights = {name: np.zeros_like(each) for name, each in trained(one).items() if "lora_B" in name}
    for name in ("ranks", "torchrun"):
        folder = tmp_path / "runs" / name
        found, wanted = trained(folder), trained(one)
        for tensor in start_weights:  # B starts at zero, so it is its own change
            assert np.linalg.norm(found[tensor] - wanted[tensor]) <= 1e-3 * np.linalg.norm(wanted[tensor]), tensor
        evidence, alone = evidence_of(folder), evidence_of(one)
        assert evidence["candidate"]["update_losses"] == pytest.approx(alone["candidate"]["update_losses"], rel=1e-5)
        for which in ("train_loss", "evaluation_loss"):
            assert evidence["candidate"][which] == pytest.approx(alone["candidate"][which], rel=1e-4)
        assert (evidence["hardware"]["world"], alone["hardware"]["world"]) == (2, 1)
        assert evidence["techniques"]["ranks"] == {"data": 2, "branch": 1, "backend": "gloo"}
        counted = ("micro_batches", "row_tokens", "samples", "trained_tokens")
        lines = [json.loads(line) for line in (folder / "updates.jsonl").read_text().splitlines()]
        assert len(lines) == 6, "only rank 0 writes"
        assert all(line[key] > 0 for line in lines for key in counted)
        assert "update 6/6" in (folder / "logs" / "rank1.log").read_text()
        assert not list(folder.rglob(".*"))


def test_a_killed_rank_ends_its_run_with_true_evidence_and_a_signal_saves_the_other_run(tmp_path, traceforge, run_file):
    runs = {
        name: start(["train", str(run_file), "--set", f"run_name={name}", *LONG, "--ranks", "2"], tmp_path)
        for name in ("killed", "stopped")
    }
    killed, stopped = (tmp_path / "runs" / name for name in runs)
    for name, process in runs.items():
        wait_for_updates(process, tmp_path / "runs" / name)

    pids = rank_pids(killed)
    begun = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    _, err = runs["killed"].communicate(timeout=60)
    assert time.monotonic() - begun < 30
    assert runs["killed"].returncode == 1
    assert f"rank 1 (process {pids[1]}) ended at effective_updates: killed by SIGKILL" in err
    assert "Traceback" not in err
    evidence = evidence_of(killed)
    failure = evidence["failure"]
    assert (failure["rank"], failure["exit_code"], failure["stage"]) == (1, -9, "effective_updates")
    assert "killed by SIGKILL" in failure["message"]
    assert evidence["decision"] == "reject_until_fixed"
    assert len(evidence["candidate"]["update_losses"]) >= 3
    assert evidence["hardware"]["world"] == 2
    assert "killed by SIGKILL" in (killed / "report.html").read_text()
    assert gone(pids)

    assert runs["stopped"].poll() is None, "another run is none of its business"
    pids = rank_pids(stopped)
    runs["stopped"].send_signal(signal.SIGTERM)
    _, err = runs["stopped"].communicate(timeout=60)
    assert runs["stopped"].returncode == 143, err
    assert gone(pids)
    evidence = evidence_of(stopped)
    assert evidence["failure"]["error_type"] == "Interrupted"
    done = len(evidence["candidate"]["update_losses"])
    assert (stopped / "checkpoints" / f"update-{done:06d}" / "state.json").is_file()
    more = traceforge("train", run_file, "--extend", stopped, "--set", f"training.updates={done + 1}", "--json")
    assert more.code == 0, "a run of two ranks goes on in one process: " + more.err


def test_settings_that_no_ranks_can_honour_are_refused_before_any_starts(traceforge, run_file, monkeypatch):
    for arguments, message in (
        (["--gpus", "0"], "--gpus 0: no GPU can be seen"),
        (["--ranks", "2", "--dry-run"], "--dry-run registers the protocol in one process"),
        (["--ranks", "2", "--set", "parallel.pairs=branch_parallel"], "needs a preference objective"),
        (["--ranks", "2", "--set", "parallel.backend=mpi"], "parallel.backend"),
    ):
        monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
        ended = traceforge("train", run_file, *arguments)
        assert ended.code == 2
        assert message in ended.err
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    ended = traceforge("train", run_file, "--ranks", "2")
    assert (ended.code, "this process is one already" in ended.err) == (2, True)
