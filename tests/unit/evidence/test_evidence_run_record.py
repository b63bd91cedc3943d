"""Reading a run folder: what is refused, and how it is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from example_runs import finished_run

from traceforge.errors import InputError
from traceforge.evidence.run_record import load_run


def test_a_folder_that_is_missing_or_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(InputError, match="none of the files of a run"):
        load_run(tmp_path)


def test_a_bad_line_inside_a_file_is_named_by_its_number(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    lines = (run / "updates.jsonl").read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"loss": ', b'"loss": "x')
    (run / "updates.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(InputError, match=r"updates\.jsonl:3: "):
        load_run(run)
    lines[2] = lines[1].replace(b'"samples": ', b'"samples": "many", "s": ')
    (run / "updates.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(InputError, match=r"updates\.jsonl:3: .*samples"):
        load_run(run)


@pytest.mark.parametrize("name", ["run.json", "manifest.json", "samples.json", "evidence.json"])
def test_a_file_that_is_no_json_is_named(name: str, tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    (run / name).write_bytes(b'{"half":')
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        load_run(run)


def test_evidence_of_another_version_or_with_a_wrong_field_is_named(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    written = json.loads((run / "evidence.json").read_text())
    (run / "evidence.json").write_text(json.dumps({**written, "schema_version": "traceforge-evidence/9"}))
    with pytest.raises(InputError, match="traceforge-evidence/9"):
        load_run(run)
    written["workload"]["updates"] = "sixty"
    (run / "evidence.json").write_text(json.dumps(written))
    with pytest.raises(InputError, match=r"workload\.updates"):
        load_run(run)
