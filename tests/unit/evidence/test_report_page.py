"""report.html as a reader, a sceptic and a hostile log meet it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from example_runs import config, dry_run, evidence, failed_run, finished_run, sample_views, update_line

from traceforge.errors import InputError
from traceforge.evidence.recorder import RunRecorder
from traceforge.evidence.report import write_report
from traceforge.evidence.schema import Candidate, Failure, Losses, Packing, Techniques
from traceforge.evidence.views import technique_facts

VOID = {"meta", "link", "br", "hr", "img", "input", "path", "use", "circle", "rect"}
LOADING = {"src", "href", "xlink:href", "srcset", "data", "action", "poster", "background"}


class Page(HTMLParser):
    """Tags, attributes and visible text of a page, with the tags checked for balance."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "title"} & set(self.open):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def page(run: Path) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("make", "title"),
    [
        (finished_run, "Accepted: training did what it should"),
        (failed_run, "Failed while training"),
        (dry_run, "Dry run: nothing was measured"),
    ],
)
def test_the_decision_comes_before_anything_else(make: Any, title: str, tmp_path: Path) -> None:
    found = page(make(tmp_path))
    assert found.words.removeprefix("✓ ").removeprefix("✕ ").removeprefix("○ ").startswith(title)
    assert next(tag for tag, _ in found.tags if tag in {"h1", "h2", "h3", "table", "p"}) == "h1"


@pytest.mark.parametrize("make", [finished_run, failed_run, dry_run])
def test_the_page_loads_nothing_and_runs_nothing(make: Any, tmp_path: Path) -> None:
    html = write_report(make(tmp_path)).read_text(encoding="utf-8")
    found = Page(html)
    assert not {tag for tag, _ in found.tags} & {"script", "iframe", "object", "embed", "img", "base", "form"}
    for tag, attributes in found.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in LOADING or value.startswith(("#", "data:,")), (tag, name, value)
    style = html[html.index("<style>") : html.index("</style>")]
    assert "@import" not in style
    assert not [target for target in re.findall(r"url\(([^)]*)\)", html) if not target.startswith("#")]
    targets = {attributes["id"] for _, attributes in found.tags if "id" in attributes}
    assert {a["href"][1:] for _, a in found.tags if a.get("href", "").startswith("#")} <= targets
    policy = next(a["content"] for _, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert len(re.findall(r'\sid="', html)) == len(set(re.findall(r'\sid="([^"]+)"', html)))


HOSTILE = "<script>alert(1)</script></pre></style><img src=x onerror=alert(2)>\"' {{ 7 * 7 }}"


def test_a_script_in_an_observation_is_shown_and_not_run(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    samples = sample_views()
    samples[0]["segments"] = [
        {"text": HOSTILE + "\n" + "x" * 2000, "trained": False, "weight": 0.0},
        {"text": HOSTILE, "trained": True, "weight": 1.0},
        {"text": HOSTILE, "trained": False, "weight": 0.0},
    ]
    samples[0]["sample_id"] = samples[0]["set"] = HOSTILE
    with RunRecorder(run) as recorder:
        recorder.write_samples(samples)
    html = write_report(run).read_text(encoding="utf-8")
    assert "<script" not in html
    assert "<img" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 5
    assert "".join(Page(html).text).count(HOSTILE) == 4  # whole in the texts and the id, clipped as a set's name


def test_hostile_text_is_escaped_wherever_it_comes_from(tmp_path: Path) -> None:
    run = failed_run(tmp_path)
    failure = Failure(stage="saving", error_type=HOSTILE, message=HOSTILE, hint=HOSTILE)
    bad = evidence(
        config(evidence={"label": HOSTILE}),
        failure=failure,
        baseline=Losses(name=HOSTILE),
        candidate=Candidate(name=HOSTILE),
    ).model_copy(update={"notes": (HOSTILE,)})
    manifest = {
        "dataset": {
            "train": {"samples": 1, "cuts": {HOSTILE: 1}},
            "refusals": {HOSTILE: {"count": 1, "examples": [HOSTILE], "detail": HOSTILE}},
            "sources": [{"path": HOSTILE, "role": HOSTILE}],
            "default_system_prompt": HOSTILE,
        }
    }
    with RunRecorder(run) as recorder:
        recorder.write_config({"model": {HOSTILE: HOSTILE}, HOSTILE: {HOSTILE: [HOSTILE]}})
        recorder.write_manifest(manifest)
        recorder.write_evidence(bad)
    html = write_report(run).read_text(encoding="utf-8")
    assert "<script" not in html
    assert "<img" not in html
    assert html.count("&lt;script&gt;alert(1)") >= 15
    assert "{{ 7 * 7 }}" in Page(html).words


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("run.json", "the settings are not recorded"),
        ("manifest.json", "Data statistics are not recorded"),
        ("updates.jsonl", "No update was made"),
        ("evaluations.jsonl", "Not in the run’s folder: evaluations.jsonl"),
        ("samples.json", "No sample was recorded"),
        ("evidence.json", "No decision: there is no evidence file"),
    ],
)
def test_each_file_may_be_missing_and_the_page_says_so(name: str, words: str, tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    (run / name).unlink()
    found = page(run)
    assert words in found.words
    assert name in found.words


@pytest.mark.parametrize(
    "kept", ["run.json", "manifest.json", "updates.jsonl", "evaluations.jsonl", "samples.json", "evidence.json"]
)
def test_one_file_alone_is_enough_for_a_page(kept: str, tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    for path in run.iterdir():
        if path.is_file() and path.name != kept:
            path.unlink()
    assert page(run).words


def test_a_folder_that_is_no_run_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none of the files of a run"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_the_numbers_of_the_run_stand_in_the_page(tmp_path: Path) -> None:
    words = page(finished_run(tmp_path)).words
    for expected in ("2.1034", "0.9871", "−1.1163 (−53.1%)", "at most +0.0500", "60 of 60", "1 skipped", "2.31 GiB"):
        assert expected in words, expected
    assert "too_long 24" in words
    assert "observation_shortened Training 41" in words
    assert "5f2c1e0b7a9d4c3e8f6a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60" in words
    assert "not recorded" not in words.split("Made by TraceForge")[0]


def test_the_page_says_what_shared_prefixes_save_and_what_was_computed(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    words = page(run).words
    assert (
        "Shared prefixes of the training samples: 214,870 tokens one by one, 21,036 in trees (10.2-fold), 83 forks, "
        "a tree for each trajectory."
    ) in words
    assert "shared prefixes 5,139,000 tokens one by one, 571,000 in trees (9.0-fold), 402 forks" in words
    assert "171 rows, 571,000 tokens computed, 1.61 samples a row" in words
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["dataset"]["train_trees"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "Shared prefixes of" not in page(run).words


def test_a_run_that_shares_nothing_says_so() -> None:
    packing = Packing(rows=7, row_tokens=900, sample_tokens=900, forks=0)
    facts = dict(technique_facts(Techniques(packing=packing)))
    assert facts["shared prefixes"] == "nothing shared: 900 tokens"
    older = dict(technique_facts(Techniques(packing=Packing(rows=7, row_tokens=900))))
    assert older == {"packing": "7 rows, 900 tokens computed"}


def test_a_failed_run_shows_stage_error_and_way_out_first(tmp_path: Path) -> None:
    words = page(failed_run(tmp_path)).words
    start = words[:700]
    assert "TrainingError at stage effective_updates" in start
    assert "10 updates in a row" in start
    assert "Way out: lower optimizer.learning_rate" in start


def test_an_interrupted_run_is_not_called_broken(tmp_path: Path) -> None:
    run = dry_run(tmp_path)
    failure = Failure(stage="effective_updates", error_type="Interrupted", message="stopped after update 3; saved")
    with RunRecorder(run) as recorder:
        recorder.write_evidence(evidence(config(), failure=failure))
    assert "Interrupted while training" in page(run).words


def test_a_dry_run_shows_its_protocol_and_no_empty_charts(tmp_path: Path) -> None:
    found = page(dry_run(tmp_path))
    assert "Protocol" in found.words
    assert "samples per update 4" in found.words
    assert "at most 0.05 nats per token above its baseline" in found.words
    assert not [tag for tag, _ in found.tags if tag == "figure"]


def test_a_loss_that_is_not_finite_reads_so_and_not_as_missing(tmp_path: Path) -> None:
    run = dry_run(tmp_path)
    broken = evidence(
        config(),
        baseline=Losses(name="base", train_loss=2.0, evaluation_loss=2.0),
        candidate=Candidate(name="after", train_loss=1.0, evaluation_loss=float("nan")),
    )
    with RunRecorder(run) as recorder:
        recorder.write_evidence(broken)
    words = page(run).words
    assert "Rejected: a gate failed" in words
    assert words.count("not finite (nan)") == 4  # the reason, two checks and the table of losses


def test_trained_text_is_marked_and_context_is_not(tmp_path: Path) -> None:
    html = write_report(finished_run(tmp_path)).read_text(encoding="utf-8")
    marked = re.findall(r"<mark>(.*?)</mark>", html, flags=re.S)
    assert len(marked) == 1 + 2 * 3  # one in the legend, two trained runs in each of three samples
    assert not [text for text in marked if "returncode" in text]
    assert "<sup>×2</sup>" in html


def test_torn_lines_and_notes_are_said(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    with (run / "updates.jsonl").open("ab") as handle:
        handle.write(b'{"update": 61')
    assert "updates.jsonl ended in the middle of a line" in page(run).words


def test_a_hundred_thousand_updates_and_huge_texts_stay_under_3_mb(tmp_path: Path) -> None:
    import random

    run = finished_run(tmp_path)
    noise = random.Random(1)
    lines = []
    for update in range(61, 100_001):
        line = update_line(update, 100_000, noise=noise)
        line["loss"] = round(line["loss"], 6)
        lines.append(json.dumps(line))
    with (run / "updates.jsonl").open("a") as handle:
        handle.write("\n".join(lines) + "\n")
    with (run / "evaluations.jsonl").open("a") as handle:
        for update in range(61, 20_000):
            for name in ("train", "evaluation"):
                record = {"update": update, "set": name, "loss": 1.0, "trained_tokens": 9, "rows": 3}
                handle.write(json.dumps({**record, "rows_without_targets": 0}) + "\n")
    samples = sample_views() * 4
    for sample in samples:
        for segment in sample["segments"]:
            segment["text"] = "\"&<é'" * 200_000
    with RunRecorder(run) as recorder:
        recorder.write_samples(samples)
    path = write_report(run)
    assert path.stat().st_size < 3_000_000
    words = Page(path.read_text(encoding="utf-8")).words
    assert "Each point averages 200 updates; the band spans their lowest and highest value." in words
    assert "characters not shown" in words
    assert "40 of 19,947 evaluations" in words


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colours as WCAG 2.2 defines it."""

    def luminance(colour: str) -> float:
        channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_and_lines_have_the_contrast_of_wcag_aa_in_light_and_dark(tmp_path: Path) -> None:
    html = write_report(dry_run(tmp_path)).read_text(encoding="utf-8")
    light_part, dark_part = html.split("@media screen and (prefers-color-scheme: dark)")
    for part in (light_part, dark_part.split("* { box-sizing")[0]):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part))
        for text in ("ink", "quiet", "good", "caution", "bad", "chart-text", "chart-train"):
            for ground in ("page", "sheet"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for tone in ("good", "caution", "bad", "plain"):
            assert contrast(colours[tone], colours[f"{tone}-wash"]) >= 4.5, tone
            assert contrast(colours["ink"], colours[f"{tone}-wash"]) >= 4.5, tone
        for line in ("chart-held-out", "chart-update", "chart-limit"):
            assert contrast(colours[line], colours["page"]) >= 3, line
