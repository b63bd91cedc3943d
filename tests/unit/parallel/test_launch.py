"""Starting ranks: what they get, where their output goes, and how they end. The ranks are small programs."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from traceforge.errors import RankError
from traceforge.parallel.launch import start_ranks

SHOW_ENVIRONMENT = """
import json, os, pathlib, sys
folder = pathlib.Path(os.environ["FOLDER"])
names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"]
(folder / f"{os.environ['RANK']}.json").write_text(json.dumps({name: os.environ[name] for name in names}))
print("result", os.environ["RANK"]); print("said by", os.environ["RANK"], file=sys.stderr)
"""

NOTE_PID = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(os.environ["FOLDER"]), os.environ["RANK"]
def note(name, text=""):
    (folder / f".{name}{rank}").write_text(text); (folder / f".{name}{rank}").rename(folder / f"{name}{rank}")
"""

SAVE_WHEN_ASKED = (
    NOTE_PID
    + """
def stop(number, frame):
    note("saved", str(number)); sys.exit(128 + number)
signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGINT, stop)
note("pid", str(os.getpid()))
time.sleep(60)
"""
)

FAIL_ON_RANK_1 = NOTE_PID + "\nnote('pid', str(os.getpid()))\nif rank == '1': sys.exit(7)\ntime.sleep(60)"

DEAF = NOTE_PID + "\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nnote('pid', str(os.getpid()))\ntime.sleep(60)"


def started(program: str, folder: Path, *, devices=("", ""), **options):
    command = [sys.executable, "-S", "-c", program]
    return start_ranks(command, devices=devices, logs=folder / "logs", environment={"FOLDER": str(folder)}, **options)


def pids(folder: Path, num_ranks: int = 2, within_s: float = 20) -> list[int]:
    """Wait until each rank has noted its process id, and return them."""
    deadline = time.monotonic() + within_s
    files = [folder / f"pid{rank}" for rank in range(num_ranks)]
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def all_gone(found: list[int], within_s: float = 5) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in found):
            return True
        time.sleep(0.05)
    return False


def test_each_rank_learns_its_place_and_sees_only_its_own_card_though_port_29500_is_taken(tmp_path, capfd):
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # then somebody else has it
            listener.bind(("0.0.0.0", 29500))
            listener.listen()
        ended = started(SHOW_ENVIRONMENT, tmp_path, devices=("7", "GPU-1234"))
    assert (ended.failures, ended.signal_number) == ((), None)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [each["RANK"] for each in found] == ["0", "1"]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["7", "GPU-1234"]
    assert {each["WORLD_SIZE"] for each in found} == {"2"}
    assert {each["MASTER_ADDR"] for each in found} == {"127.0.0.1"}
    assert {each["MASTER_PORT"] for each in found}.isdisjoint({"29500", "0"})
    shown = capfd.readouterr()
    assert "result 0" in shown.out
    assert shown.err == "[rank 0] said by 0\n"
    assert (tmp_path / "logs/rank0.log").read_text() == "said by 0\n"
    assert (tmp_path / "logs/rank1.log").read_text().endswith("said by 1\n")


def test_a_rank_that_fails_ends_the_others_and_is_told_from_them(tmp_path):
    ended = started(FAIL_ON_RANK_1, tmp_path)
    assert [(each.rank, each.exit_code, each.first) for each in ended.failures] == [(0, -15, False), (1, 7, True)]
    assert [each.pid for each in ended.failures] == pids(tmp_path)
    assert [each.cause for each in ended.failures] == ["killed by SIGTERM", "exit code 7"]
    assert all_gone(pids(tmp_path))


def test_a_rank_that_answers_no_signal_is_killed_after_the_grace(tmp_path):
    threading.Thread(target=lambda: os.kill(pids(tmp_path)[1], signal.SIGKILL)).start()
    begun = time.monotonic()
    ended = started(DEAF, tmp_path, grace_s=0.5)
    assert time.monotonic() - begun < 25  # torch's agent alone would wait for 30
    assert [(each.exit_code, each.first) for each in ended.failures] == [(-9, False), (-9, True)]
    assert all_gone(pids(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_starter_reaches_every_rank_and_waits_for_them_to_save(tmp_path, number):
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    def ask() -> None:
        pids(tmp_path)
        os.kill(os.getpid(), number)

    threading.Thread(target=ask).start()
    ended = started(SAVE_WHEN_ASKED, tmp_path)
    assert ended.signal_number == number
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == [str(int(number))] * 2
    assert all_gone(pids(tmp_path))
    assert handlers == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


def test_a_program_that_does_not_exist_is_a_named_error(tmp_path):
    with pytest.raises(RankError, match="the ranks could not be started"):
        start_ranks([str(tmp_path / "nothing")], devices=("", ""), logs=tmp_path / "logs")


ORPHAN = (
    """
import os, sys, time
sys.path[:0] = {path!r}
from traceforge.parallel.child import settle_in
settle_in(os.environ)
print("on stdout", os.environ["RANK"], flush=True)
"""
    + NOTE_PID.replace("{", "{{").replace("}", "}}")
    + "\nnote('pid', str(os.getpid()))\ntime.sleep(60)"
)


def _start_orphans(folder: str) -> None:
    os.setsid()
    started(ORPHAN.format(path=[p for p in sys.path if p]), Path(folder))


def test_a_rank_does_not_outlive_a_starter_that_was_killed(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.ranks", "torch"])
    starter = context.Process(target=_start_orphans, args=(str(tmp_path),))
    starter.start()
    found = pids(tmp_path)
    starter.kill()
    starter.join()
    assert all_gone(found, within_s=10)
    # stdout of any rank but the first belongs to its log.
    assert "on stdout 1" in (tmp_path / "logs/rank1.log").read_text()
    assert "on stdout" not in (tmp_path / "logs/rank0.log").read_text()
