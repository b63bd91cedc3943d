"""What is said of a run on several ranks that ended before its time: which rank, where, why, with which exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from traceforge.config import RunConfig
from traceforge.errors import ConfigError, RankError
from traceforge.evidence.rank_record import RankRecord, read_rank_record, write_rank_record
from traceforge.evidence.recorder import RunRecorder
from traceforge.evidence.schema import Evidence, Failure
from traceforge.parallel.launch import RankEnd, RanksEnded
from traceforge.parallel.world import World
from traceforge.training.attempt import Attempt
from traceforge.training.interrupts import Interrupted
from traceforge.training.joining import join
from traceforge.training.ranks import conclude

CONFIG = RunConfig.model_validate({"model": {"name_or_path": "tiny"}, "data": {"train": "samples"}})


class SecondOfTwo(World):
    rank, size = 1, 2


class FirstOfTwo(World):
    rank, size = 0, 2


def failure(error_type: str, message: str, *, stage="effective_updates", rank=0, code=1) -> Failure:
    return Failure(stage=stage, error_type=error_type, message=message, rank=rank, exit_code=code)


def leave(folder: Path, rank: int, said: Failure | None, *, stage="effective_updates") -> None:
    write_rank_record(folder, RankRecord(rank=rank, pid=100 + rank, device="cpu", stage=stage, failure=said))


def leave_evidence(folder: Path, said: Failure) -> None:
    attempt = Attempt(CONFIG, folder, "real", torch.device("cpu"), world=FirstOfTwo(torch.device("cpu")))
    with RunRecorder(folder) as recorder:
        recorder.write_config(CONFIG.model_dump_json())
        recorder.write_evidence(attempt.evidence(said))


def evidence(folder: Path) -> Evidence:
    return Evidence.model_validate_json((folder / "evidence.json").read_bytes())


def ended(*ends: tuple[int, int, bool]) -> RanksEnded:
    return RanksEnded(tuple(RankEnd(rank, 100 + rank, code, first) for rank, code, first in ends))


def test_a_killed_rank_is_the_cause_though_rank_0_says_it_lost_somebody(tmp_path):
    lost = failure("RankLostError", "rank 0 lost the others")
    leave(tmp_path, 0, lost)
    leave(tmp_path, 1, None)
    leave_evidence(tmp_path, lost)
    with pytest.raises(
        RankError, match=r"rank 1 \(process 101\) ended at effective_updates: killed by SIGKILL"
    ) as found:
        conclude(CONFIG, tmp_path, ended((0, 1, False), (1, -9, True)))
    assert found.value.exit_code == 1
    said = evidence(tmp_path)
    assert (said.failure.rank, said.failure.exit_code, said.failure.stage) == (1, -9, "effective_updates")
    assert said.hardware.world == 2
    assert any("rank 0 then ended" in note and "lost the others" in note for note in said.notes)
    assert "killed by SIGKILL" in said.decision_reasons[0]
    assert "killed by SIGKILL" in (tmp_path / "report.html").read_text()


def test_a_rank_that_failed_by_name_gives_its_error_and_its_exit_code(tmp_path):
    interrupted = failure("Interrupted", "stopped at once", code=143)
    leave(tmp_path, 0, interrupted)
    leave(tmp_path, 1, failure("InputError", "row 7 is no JSON", stage="dataset_and_supervision", rank=1, code=2))
    leave_evidence(tmp_path, interrupted)
    with pytest.raises(RankError, match="rank 1: row 7 is no JSON") as found:
        conclude(CONFIG, tmp_path, ended((0, 143, False), (1, 2, True)))
    assert found.value.exit_code == 2
    said = evidence(tmp_path).failure
    assert (said.rank, said.error_type, said.stage) == (1, "InputError", "dataset_and_supervision")


def test_of_ranks_that_end_in_the_same_moment_a_consequence_is_not_the_cause(tmp_path):
    leave(tmp_path, 0, failure("RankLostError", "rank 0 lost the others"))
    leave(tmp_path, 1, failure("TrainingError", "out of GPU memory", rank=1))
    with pytest.raises(RankError, match="rank 1: out of GPU memory"):
        conclude(CONFIG, tmp_path, ended((0, 1, True), (1, 1, True)))


def test_when_all_ranks_fail_alike_the_words_of_rank_0_stand(tmp_path):
    for rank in (0, 1):
        leave(tmp_path, rank, failure("ModelError", "no such model", rank=rank, code=2))
    leave_evidence(tmp_path, failure("ModelError", "no such model", code=2))
    before = (tmp_path / "evidence.json").read_bytes()
    with pytest.raises(RankError, match="no such model") as found:
        conclude(CONFIG, tmp_path, ended((0, 2, True), (1, 2, True)))
    assert found.value.exit_code == 2
    assert (tmp_path / "evidence.json").read_bytes() == before


def test_the_only_rank_of_a_run_speaks_by_its_evidence_alone(tmp_path):
    alone = Failure(stage="dataset_and_supervision", error_type="InputError", message="no such data")
    leave_evidence(tmp_path, alone)
    with pytest.raises(RankError, match="no such data") as found:
        conclude(CONFIG, tmp_path, ended((0, 2, True)))
    assert found.value.exit_code == 2
    assert evidence(tmp_path).failure == alone


def test_without_rank_0_the_evidence_is_made_from_the_files_of_the_run(tmp_path):
    with RunRecorder(tmp_path) as recorder:
        recorder.write_config(CONFIG.model_dump_json())
        recorder.write_manifest({"model": {"id": "tiny", "content_hash": "abc"}})
        line = dict.fromkeys(["micro_batches", "samples", "trained_tokens", "row_tokens", "peak_bytes"], 1)
        line |= dict.fromkeys(["learning_rate", "gradient_norm", "seconds", "tokens_per_s"], 1.0)
        for number, loss in enumerate((3.5, 2.5), start=1):
            recorder.update({**line, "update": number, "loss": loss, "skipped": False})
        for update, loss in ((0, 4.0), (2, 2.0)):
            recorder.evaluation(
                {"update": update, "set": "train", "loss": loss, "trained_tokens": 1, "rows": 1}
                | {"rows_without_targets": 0}
            )
    for rank in (0, 1):
        leave(tmp_path, rank, None)
        (tmp_path / "logs" / f"rank{rank}.log").touch()
    with pytest.raises(RankError, match="rank 0"):
        conclude(CONFIG, tmp_path, ended((0, -9, True), (1, -9, False)))
    said = evidence(tmp_path)
    assert said.candidate.update_losses == (3.5, 2.5)
    assert (said.baseline.train_loss, said.candidate.train_loss) == (4.0, 2.0)
    assert (said.model.content_hash, said.hardware.world) == ("abc", 2)
    assert said.failure.rank == 0
    assert "out of memory" in said.failure.hint


def test_a_rank_that_dies_before_its_first_word_is_filed_under_the_preflight(tmp_path):
    with pytest.raises(RankError, match=r"rank 1 \(process 101\) ended at environment_preflight: exit code 5"):
        conclude(CONFIG, tmp_path, ended((0, -15, False), (1, 5, True)))
    assert evidence(tmp_path).failure.stage == "environment_preflight"


def test_a_signal_keeps_the_words_of_rank_0_and_the_exit_code_of_the_signal(tmp_path):
    leave_evidence(tmp_path, failure("Interrupted", "stopped after update 3; the state is saved", code=143))
    with pytest.raises(Interrupted, match="after update 3") as found:
        conclude(CONFIG, tmp_path, RanksEnded(signal_number=15))
    assert found.value.exit_code == 143


def test_a_signal_before_rank_0_could_write_leaves_evidence_too(tmp_path):
    with pytest.raises(Interrupted) as found:
        conclude(CONFIG, tmp_path, RanksEnded(signal_number=2))
    assert found.value.exit_code == 130
    assert evidence(tmp_path).failure.error_type == "Interrupted"


def test_a_rank_leaves_word_at_every_stage_and_one_process_does_not(tmp_path):
    attempt = Attempt(CONFIG, tmp_path, "real", torch.device("cpu"), world=SecondOfTwo(torch.device("cpu")))
    attempt.enter("saving")
    assert read_rank_record(tmp_path, 1).stage == "saving"
    attempt.leave_word(attempt.failure(ConfigError("no")))
    said = json.loads((tmp_path / "logs" / "rank1.json").read_text())["failure"]
    assert (said["rank"], said["exit_code"], said["message"]) == (1, 2, "no")
    Attempt(CONFIG, tmp_path / "alone", "real", torch.device("cpu")).enter("saving")
    assert not (tmp_path / "alone").exists()


def test_dropout_on_several_ranks_is_refused_by_name_and_leaves_word(tmp_path, monkeypatch):
    config = CONFIG.model_copy(update={"adapter": CONFIG.adapter.model_copy(update={"dropout": 0.1})})
    monkeypatch.setattr("traceforge.training.joining.meet", lambda *_, **__: SecondOfTwo(torch.device("cpu")))
    monkeypatch.setenv("TRACEFORGE_RUN_FOLDER", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"adapter\.dropout = 0\.1 cannot be honoured on 2 ranks"):
        join(config)
    assert read_rank_record(tmp_path, 1).failure.error_type == "ConfigError"
