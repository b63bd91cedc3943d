"""`inspect`: the numbers, the mask with and without colour, and text of logs that never acts."""

from __future__ import annotations

import html
import io
import itertools
import json
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console
from tests.dataset_stubs import ByteRenderer, ByteTokenizer, assistant, built, run_of, settings_for, trajectory, user

from traceforge.errors import InputError, StorageError
from traceforge.samples import dataset, inspection, sources
from traceforge.samples.inspection import inspect_dataset, inspection_settings, length_histogram, run_inspect
from traceforge.samples.inspection_views import print_inspection, raw_text, visible, write_inspection_html


@pytest.fixture(autouse=True)
def _bytes_for_tokens(monkeypatch):
    monkeypatch.setattr(sources, "TurnRenderer", ByteRenderer)
    monkeypatch.setattr(inspection, "load_tokenizer", lambda name, **_: ByteTokenizer())
    monkeypatch.setattr(dataset, "default_system_prompt", lambda tokenizer: None)


def look(path, *, sample=None, **fields):
    return inspect_dataset(path, model="bytes", settings=settings_for("elsewhere", **fields), sample=sample)


def printed(found, **console):
    out = io.StringIO()
    print_inspection(found, Console(file=out, width=80, **console))
    return out.getvalue()


class Page(HTMLParser):
    """Collects the elements of a page and the text of its `pre`."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.addresses, self.pre, self.marked, self._open = [], [], "", "", []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.addresses += [value for name, value in attributes if name in {"src", "href", "action", "data"}]
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, text):
        if "pre" in self._open:
            self.pre += text
            self.marked += text if "mark" in self._open else ""


def page_of(found, tmp_path):
    write_inspection_html(found, tmp_path / "deep/page.html")
    text = (tmp_path / "deep/page.html").read_text(encoding="utf-8")
    return text, Page(text)


def test_the_numbers_of_the_whole_set_are_shown(tmp_path) -> None:
    folder = built(tmp_path, run_of("a", 3), trajectory("c", user("cut me"), assistant("ok")))
    text = printed(look(folder, max_tokens=30))
    assert "3 of 2 tasks in 2 trajectories" in text
    # "a: task." 8 + "act 0." 6 + end 1 = 15 tokens, 7 of them trained; the second turn 28; c: 9 tokens, 3 trained.
    assert "min 9, median 15, p95 28, max 28; 52 in all" in text
    assert "17 tokens, 32.7%" in text
    assert "26.9% of all tokens repeat" in text  # the two turns of a share 14 tokens
    assert "too_long 1" in text
    assert "first: a#2: 41 tokens, data.max_tokens is 30" in text
    assert "observations_shortened 1" in text


def test_rows_of_a_file_are_called_rows(tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "a", "completion": "b"}\n{"prompt": "a long one", "completion": "b"}'
    )
    assert "1 of 2 prompt-completion rows" in printed(look(tmp_path / "rows.jsonl", max_tokens=5))


def test_without_colour_brackets_show_the_mask(tmp_path) -> None:
    folder = built(tmp_path, run_of("a", 2))
    text = printed(look(folder, sample=1))
    assert text.endswith("a: task.act 0.seen 0.⟦act 1.</s>⟧\n")
    assert "\x1b" not in text
    assert "trained (between ⟦ and ⟧): 7" in text


def test_on_a_terminal_colour_shows_the_mask(tmp_path) -> None:
    folder = built(tmp_path, run_of("a", 2))
    text = printed(look(folder, sample="a#1"), force_terminal=True, color_system="standard")
    assert "a: task.act 0.seen 0.\x1b[1;32mact 1.</s>\x1b[0m" in text
    assert "⟦" not in text.splitlines()[-1]
    assert "⟦act" in printed(look(folder, sample=1), force_terminal=True, no_color=True)


def test_long_context_is_shortened_unless_a_sample_is_asked_for(tmp_path) -> None:
    lines = "".join(f"line {number}\n" for number in range(1000))
    folder = built(tmp_path, trajectory("a", user(lines), assistant("act")))
    short, whole = look(folder, max_tokens=99_999), look(folder, max_tokens=99_999, sample=0)
    note = re.search(r"\n… ([\d,]+) characters of context not shown; `--sample 0` shows all …\n", printed(short))
    shown = printed(short).split("\n\n")[-1]
    assert note is not None
    kept = shown.replace(note.group().lstrip("\n"), "").replace("⟦act</s>⟧\n", "")
    assert len(kept) + int(note.group(1).replace(",", "")) == len(lines)
    assert all(re.fullmatch(r"line \d+", line) for line in kept.splitlines())
    assert printed(whole).endswith(lines + "⟦act</s>⟧\n")


def test_long_lines_and_trailing_spaces_are_not_changed(tmp_path) -> None:
    odd = "x" * 300 + "  \n\n  [bold]no markup[/bold] :smile: https://example.org 123  \n"
    folder = built(tmp_path, trajectory("a", user(odd), assistant("act")))
    assert odd + "⟦act</s>⟧" in printed(look(folder, sample=0))


def test_raw_text_is_the_sample_and_nothing_else(tmp_path, capfd) -> None:
    odd = "tab\there \x1b[31mred\x1b[0m <b> \r\n⟦ größe 🙂"
    folder = built(tmp_path, trajectory("a", user(odd), assistant("act")))
    assert raw_text(look(folder)) == f"{odd}act</s>"
    run_inspect(str(folder), inspection_settings(str(folder), model="bytes"), raw=True)
    out, err = capfd.readouterr()
    assert out == f"{odd}act</s>"
    assert err == ""


def test_json_output_is_one_document_with_the_runs(tmp_path, capsys) -> None:
    folder = built(tmp_path, run_of("a", 2))
    run_inspect(
        str(folder),
        inspection_settings(str(folder), model="bytes"),
        sample="1",
        as_json=True,
        html=tmp_path / "page.html",
    )
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["sample"]["segments"] == [
        {"text": "a: task.act 0.seen 0.", "trained": False, "weight": 0.0},
        {"text": "act 1.</s>", "trained": True, "weight": 1.0},
    ]
    assert document["statistics"]["train"]["samples"] == 2
    assert sum(each["samples"] for each in document["histogram"]) == 2
    assert "page.html" in captured.err


def test_the_trees_of_a_data_set_are_shown_with_why_sharing_breaks(tmp_path) -> None:
    folder = built(tmp_path, run_of("a", 3), run_of("b", 2))
    # A turn of the stand-in ends with a token that its history does not have: each forks from the next, one token late.
    found = look(folder, sample="b#1", max_tokens=50)
    text = printed(found)
    assert "prefix trees          127 tokens one by one, 72 in 2 trees with 3 forks\n" in text
    assert "72 tokens in 2 rows of at most 100, none twice\n" in text
    assert "3 of 3 turns do not continue the one before: template renders the last turn differently 3\n" in text
    assert "a#0 and #1 after 14 tokens, behind …a: task.act 0.\n    here  </s>\n    next  seen 0.act 1.</s>\n" in text
    assert "b: 2 turns, 43 tokens one by one, 29 in the tree, 1 fork\n" in text
    trees = found.as_dict()["trees"]
    assert trees["continuity"]["causes"][0]["cause"] == "last_turn_differs"
    assert trees["total"]["token_factor"] == 127 / 72
    assert trees["drawn"]["group_id"] == "b"
    assert look(folder, sample="a#1", max_tokens=50).trees.drawn.group_id == "a"


def test_rows_are_as_long_as_the_run_has_them(tmp_path, capsys) -> None:
    folder = built(tmp_path, run_of("a", 3))
    for size, rows, tokens in ((42, 2, 29 + 41), (43, 1, 43)):
        settings = ["data.max_tokens=41", f"training.tokens_per_row={size}"]
        run_inspect(str(folder), inspection_settings(str(folder), model="bytes", overrides=settings), as_json=True)
        total = json.loads(capsys.readouterr().out)["trees"]["total"]
        assert (total["tree_tokens"], total["rows"], total["row_tokens"]) == (43, rows, tokens)
        assert total["repeated_tokens"] == tokens - 43


def test_settings_under_which_nothing_is_shared_are_said(tmp_path, capsys) -> None:
    folder = built(tmp_path, run_of("a", 2))
    run_inspect(str(folder), inspection_settings(str(folder), model="bytes"))
    assert "  but " not in capsys.readouterr().out
    for setting in ('data.group="none"', "adapter.dropout=0.1", 'model.attention="plain"'):
        run_inspect(
            str(folder),
            inspection_settings(str(folder), model="bytes", overrides=[setting]),
            html=tmp_path / "page.html",
        )
        out = capsys.readouterr().out
        assert f"  but                 {setting.replace('=', ' = ')}: " in out
        assert "43 tokens one by one, 29 in 1 tree with 1 fork" in out  # whatever the run does with them
        assert "samples cannot share" in out or "share less" in out or "run apart" in out
    assert "run apart" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_rows_of_a_file_have_no_trees(tmp_path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": "c"}')
    found = look(rows)
    assert "prefix trees          none: each sample is a group of its own" in printed(found)
    text, page = page_of(found, tmp_path)
    assert "svg" not in page.elements
    assert "Why sharing breaks" not in text


def test_the_page_draws_the_tree_and_shows_hostile_text_as_text(tmp_path) -> None:
    attack = "<script>alert(1)</script>"
    messages = [user("go"), assistant("x"), user(attack), assistant(attack), user("on"), assistant("done")]
    text, page = page_of(look(built(tmp_path, trajectory(f"a{attack}", *messages)), sample=0), tmp_path)
    assert page.elements.count("rect") == 3 + 3 + 2  # three paths; the trunk trains three turns, each fork an end token
    assert page.elements.count("line") == 2
    assert {"script"}.isdisjoint(page.elements)
    assert "&lt;script&gt;alert(1)" in text[text.index("Why sharing breaks") : text.index("<figure>")]
    assert 'role="img" aria-label="a&lt;script&gt;' in text
    assert page.elements.count("title") == 1 + 3


def test_settings_come_from_a_run_file_and_from_overrides(tmp_path, capsys) -> None:
    folder = built(tmp_path, run_of("a", 2))
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        '[model]\nname_or_path = "m"\n[data]\ntrain = "x"\nevaluation_fraction = 0.5\nmax_tokens = 20\n'
    )
    run_inspect(str(folder), inspection_settings(str(folder), model="bytes", run_file=run_file), as_json=True)
    assert json.loads(capsys.readouterr().out)["statistics"]["refusals"]["too_long"]["count"] == 1
    with pytest.raises(InputError, match="every one of 2 samples was refused"):
        run_inspect(str(folder), inspection_settings(str(folder), model="bytes", overrides=["data.max_tokens=14"]))


def test_a_script_in_an_observation_is_shown_and_not_run(tmp_path) -> None:
    attack = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>&amp;"
    folder = built(tmp_path, trajectory("a<script>", user(attack), assistant("<b>ok</b>"), task="<i>t"))
    text, page = page_of(look(folder), tmp_path)
    assert page.pre.strip("\n") == attack + "<b>ok</b></s>"
    assert page.marked == "<b>ok</b></s>"
    assert {"script", "img", "b", "i"}.isdisjoint(page.elements)
    assert html.escape("<script>alert(1)") in text


def test_a_page_requests_nothing(tmp_path) -> None:
    folder = built(tmp_path, trajectory("a", user("see https://example.org/x.css"), assistant("ok")))
    text, page = page_of(look(folder), tmp_path)
    assert [address for address in page.addresses if not address.startswith("data:")] == []
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


@pytest.mark.parametrize("content", ["\n\nstarts with lines", "  spaces ", "ends with a line\n", "a\tb"])
def test_the_page_holds_the_text_to_the_letter(tmp_path, content) -> None:
    folder = built(tmp_path, trajectory("a", user(content), assistant(f"{content}.")))
    _, page = page_of(look(folder), tmp_path)
    # A browser drops the one newline that follows <pre>, and the template ends with one after the last run.
    assert page.pre.removeprefix("\n").removesuffix("\n") == f"{content}{content}.</s>"


def test_characters_that_act_are_shown_as_symbols(tmp_path) -> None:
    assert visible("a\x1b[2J\x07\x00b\x7f\r\n\tc") == "a␛[2J␇␀b␡␍\n\tc"
    assert visible("x\u202ey\u200bz\ufeff") == "x<U+202E>y<U+200B>z<U+FEFF>"
    assert visible("größe 👩‍💻") == "größe 👩‍💻"
    folder = built(tmp_path, trajectory("a\x1b", user("\x1b[2J\u202e"), assistant("\x1b]0;x\x07")))
    found = look(folder, sample=0)
    assert "\x1b" not in printed(found)
    text, _ = page_of(found, tmp_path)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", text)


def test_a_weight_that_is_not_one_is_shown(tmp_path, monkeypatch) -> None:
    folder = built(tmp_path, run_of("a", 1))
    render = ByteRenderer.render

    def doubled(self, *args, **kwargs):
        made = render(self, *args, **kwargs)
        made.weights_S[:] *= 2
        return made

    monkeypatch.setattr(ByteRenderer, "render", doubled)
    found = look(folder)
    assert "⟦×2:act 0.</s>⟧" in printed(found)
    assert "<sup>×2</sup>" in page_of(found, tmp_path)[0]


def test_an_unknown_sample_is_named_with_what_there_is(tmp_path) -> None:
    folder = built(tmp_path, run_of("a", 2))
    for wanted in ("b#0", 2, -1, "7"):
        with pytest.raises(InputError, match=r"no sample .*; there are 2, from 0 \(a#0\) to 1 \(a#1\)"):
            look(folder, sample=wanted)
    assert look(folder, sample="1").sample.sample_id == "a#1"


def test_a_page_that_cannot_be_written_is_named(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot write the page"):
        write_inspection_html(look(built(tmp_path, run_of("a", 1))), tmp_path / "file/page.html")


def test_a_histogram_counts_every_length_once() -> None:
    assert length_histogram([5]) == ((5, 5, 1),)
    assert length_histogram([1, 2, 2, 12]) == ((1, 2, 3), (3, 4, 0), (5, 6, 0), (7, 8, 0), (9, 10, 0), (11, 12, 1))
    bins = length_histogram(list(range(7, 1007, 3)))
    assert len(bins) <= 10
    assert sum(count for _, _, count in bins) == len(range(7, 1007, 3))
    assert bins[0][0] == 7
    assert all(left[1] + 1 == right[0] for left, right in itertools.pairwise(bins))
