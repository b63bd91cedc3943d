"""`inspect` on pairs: both sides with masks and lengths, numbers, scores, and text of logs that never acts."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.fixtures_tokenizers import CHATML, tiny_tokenizer

from traceforge.config import DataSettings
from traceforge.errors import InputError, StorageError, UsageError
from traceforge.samples import pair_inspection
from traceforge.samples.inspection import inspection_settings, run_inspect
from traceforge.samples.pair_build import build_pairs
from traceforge.samples.pair_inspection import PairInspection, inspect_pairs
from traceforge.samples.pair_inspection_views import print_pair_inspection, write_pair_inspection_html
from traceforge.samples.synthetic_pairs import build_synthetic_pairs

TINY = tiny_tokenizer(CHATML)
HELLO = {"prompt": "hello", "chosen": "Yes. No.", "rejected": "Yes. Go."}
TWO_TURNS = {
    "prompt": "hello",
    "chosen": [
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "seen"},
        {"role": "assistant", "content": "two"},
    ],
    "rejected": "no",
}


@pytest.fixture(autouse=True)
def _tiny_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_inspection, "load_tokenizer", lambda name, **_: TINY)


def build(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    build_pairs(tmp_path / "pairs.jsonl", tmp_path / "pairs")
    return tmp_path / "pairs"


def look(folder: Path, *, sample: int | str | None = None, scores: Any = None, **given: Any) -> PairInspection:
    settings = DataSettings.model_validate(
        {"train": "elsewhere", "evaluation_fraction": 0.5, "max_tokens": 500, **given}
    )
    return inspect_pairs(folder, model="tiny", settings=settings, sample=sample, scores=scores)


def printed(found: PairInspection, **console: Any) -> str:
    out = io.StringIO()
    print_pair_inspection(found, Console(file=out, width=80, **console))
    return out.getvalue()


def test_the_prompt_stands_once_and_both_endings_with_their_masks(tmp_path: Path) -> None:
    text = printed(look(build(tmp_path, HELLO), sample=0))
    assert text.count("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n") == 1
    assert "⟦Yes. No.<|im_end|>⟧\n" in text
    assert "⟦Yes. Go.<|im_end|>⟧\n" in text
    assert text.index("── chosen") < text.index("⟦Yes. No.") < text.index("── rejected") < text.index("⟦Yes. Go.")
    assert "\x1b" not in text


def test_on_a_terminal_colour_shows_the_mask(tmp_path: Path) -> None:
    text = printed(look(build(tmp_path, HELLO)), force_terminal=True, color_system="standard")
    assert "\x1b[1;32mYes. Go.<|im_end|>\x1b[0m" in text
    assert "⟦" not in text


def test_the_numbers_of_set_and_pair_are_shown(tmp_path: Path) -> None:
    def num_tokens(text: str) -> int:
        return len(TINY(text, add_special_tokens=False)["input_ids"])

    prompt = num_tokens("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    chosen, rejected = num_tokens("Yes. No.<|im_end|>"), num_tokens("Yes. Go.<|im_end|>")
    shared = prompt + num_tokens("Yes.")
    one_by_one = 2 * prompt + chosen + rejected + 2  # and a newline behind each turn
    found = look(build(tmp_path, HELLO, {**HELLO, "rejected": "w" * 2000}))
    line = found.pair.line
    assert (line.chosen_tokens, line.rejected_tokens) == (chosen, rejected)
    assert (line.sequence_tokens, line.tree_tokens) == (one_by_one, one_by_one - line.shared_prefix_tokens)
    assert line.shared_prefix_tokens >= shared
    text = printed(found)
    assert "1 of 2, 1 tasks, 1 groups; 0 with an ending of several turns" in text
    assert f"{one_by_one:,} tokens one by one, {line.tree_tokens:,} with each pair as one tree" in text
    assert "too_long 1" in text
    assert "first: pairs:2.chosen|pairs:2.rejected: rejected: " in text
    assert f"chosen, trained       min {chosen}, median {chosen}, p95 {chosen}, max {chosen} tokens a pair" in text


def test_turns_that_continue_each_other_are_one_text_with_both_trained(tmp_path: Path) -> None:
    found = look(build(tmp_path, TWO_TURNS))
    (sequence,) = found.pair.chosen.sequences
    assert sequence.sample_ids == ("pairs:1.chosen#0", "pairs:1.chosen#1")
    assert [(segment["text"], segment["trained"]) for segment in sequence.segments] == [
        ("one<|im_end|>", True),
        ("\n<|im_start|>user\nseen<|im_end|>\n<|im_start|>assistant\n", False),
        ("two<|im_end|>", True),
        ("\n", False),
    ]
    assert found.pair.prompt.endswith("<|im_start|>assistant\n")
    assert "1 with an ending of several turns" in printed(found)


def test_scores_are_shown_where_they_are_given(tmp_path: Path) -> None:
    folder = build(tmp_path, HELLO, {**HELLO, "rejected": "Never."}, {**HELLO, "rejected": "w"})
    assert not look(folder).is_scored
    ids = [line.pair_id for line in look(folder).lines]
    found = look(folder, scores={ids[0]: (-1.25, -2.0), ids[1]: (-3.0, -1.0)})
    assert [(line.chosen_logp, line.rejected_logp) for line in found.lines] == [
        (-1.25, -2.0),
        (-3.0, -1.0),
        (None, None),
    ]
    text = printed(found)
    assert "mean log-probability -1.2500" in text
    # One of two is right; (0.75 - 2.0) / 2 = -0.625.
    assert "higher mean log-probability in 1 of 2 pairs; mean difference -0.6250 nats a token" in text
    assert found.as_dict()["pair"]["chosen"]["mean_logp"] == -1.25


def test_synthetic_pairs_are_called_so(tmp_path: Path) -> None:
    build_synthetic_pairs(tmp_path / "s", pairs=2, prompt_tokens=20, reply_tokens=5)
    assert "2 of 2 of random words, made for trials" in printed(look(tmp_path / "s"))


def test_one_document_holds_both_sides_and_every_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = build(tmp_path, HELLO, TWO_TURNS)
    run_inspect(
        str(folder),
        inspection_settings(str(folder), model="tiny"),
        sample="1",
        as_json=True,
        html=tmp_path / "page.html",
    )
    document = json.loads(capsys.readouterr().out)
    assert document["pair"]["pair_id"] == "pairs:2.chosen|pairs:2.rejected"
    whole = document["pair"]["prompt"] + "".join(
        segment["text"] for segment in document["pair"]["rejected"]["sequences"][0]["segments"]
    )
    assert whole == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n"
    assert [line["pair_id"] for line in document["pairs"]] == [
        "pairs:1.chosen|pairs:1.rejected",
        "pairs:2.chosen|pairs:2.rejected",
    ]
    assert document["statistics"]["train"]["pairs"]["multi_turn"] == 1
    assert sum(each["sequences"] for each in document["histogram"]) == 5
    assert (tmp_path / "page.html").exists()


def test_settings_under_which_nothing_is_shared_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = build(tmp_path, HELLO)
    run_inspect(
        str(folder),
        inspection_settings(str(folder), model="tiny", overrides=["adapter.dropout=0.1", 'data.group="none"']),
    )
    out = capsys.readouterr().out
    assert "adapter.dropout = 0.1" in out
    assert "data.group" not in out


def test_raw_text_of_a_pair_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = str(build(tmp_path, HELLO))
    with pytest.raises(UsageError, match="--json"):
        run_inspect(folder, inspection_settings(folder, model="tiny"), raw=True)


def test_a_long_prompt_is_shortened_unless_the_pair_is_asked_for(tmp_path: Path) -> None:
    lines = "".join(f"line {number}\n" for number in range(1000))
    folder = build(tmp_path, {**HELLO, "prompt": lines})
    note = "characters of context not shown; `--sample 0` shows all"
    assert note in printed(look(folder, max_tokens=99_999))
    whole = printed(look(folder, max_tokens=99_999, sample="0"))
    assert note not in whole
    assert lines in whole


def test_a_script_in_a_reply_is_shown_and_not_run(tmp_path: Path) -> None:
    attack = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J\u202e"
    rows = {"prompt": attack, "chosen": attack, "rejected": f"{attack}.", "id": "<b>x", "task_id": "<i>t"}
    found = look(build(tmp_path, rows), sample=0, scores={"<b>x.chosen|<b>x.rejected": (-1.0, -2.0)})
    write_pair_inspection_html(found, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"<(script|img|b|i)[ >]", page)
    assert page.count("&lt;script&gt;alert(1)") == 3
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", page)
    assert not re.search(r'(src|href|action)="(?!data:)', page)
    assert "\x1b" not in printed(found)
    assert "-1.0000" in page


def test_the_page_holds_both_sides_and_every_pair(tmp_path: Path) -> None:
    found = look(build(tmp_path, HELLO, TWO_TURNS))
    write_pair_inspection_html(found, tmp_path / "deep/page.html")
    page = (tmp_path / "deep/page.html").read_text(encoding="utf-8")
    assert "<mark>Yes. No.&lt;|im_end|&gt;</mark>" in page
    assert "<mark>Yes. Go.&lt;|im_end|&gt;</mark>" in page
    assert "pairs:2.chosen|pairs:2.rejected" in page
    assert "prefers-color-scheme: dark" in page
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot write the page"):
        write_pair_inspection_html(found, tmp_path / "file/page.html")


def test_an_unknown_pair_is_named_with_what_there_is(tmp_path: Path) -> None:
    folder = build(tmp_path, HELLO)
    for wanted in ("x", 1, -1):
        with pytest.raises(InputError, match=r"no pair .*; there are 1, from 0 \(pairs:1.chosen\|pairs:1.rejected\)"):
            look(folder, sample=wanted)
    assert look(folder, sample="pairs:1.chosen|pairs:1.rejected").pair.index == 0
