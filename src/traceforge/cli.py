"""The command line: verbs, arguments, exit codes. Each verb imports what it needs when it runs, so help is fast."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from traceforge import __version__
from traceforge.console import prepare_terminal, print_result, print_run, show_failure
from traceforge.errors import UsageError

_VERBS = ("demo", "ingest", "build", "inspect", "plan", "doctor", "train", "evaluate", "compare", "report", "version")


class _VerbsInOrder(typer.core.TyperGroup):
    """Lists the commands in the order in which a user needs them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=_VERBS.index)


app = typer.Typer(
    name="traceforge",
    cls=_VerbsInOrder,
    help="Agent logs in, a LoRA adapter with evidence and a report out.",
    epilog="Exit codes: 0 done; 1 a named failure; 2 wrong usage, config or input; 3 it does not fit, a gate failed, "
    "or two ways of computing disagree; 130/143 interrupted, state saved. Start with `traceforge demo`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
build_app = typer.Typer(help="Build samples from ingested trajectories.", no_args_is_help=True)
app.add_typer(build_app, name="build")

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; messages go to stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Change a setting; may be repeated.")
]
_state = {"debug": False}


@app.callback()
def _settings() -> None:
    """Agent logs in, a LoRA adapter with evidence and a report out."""


@app.command()
def version(as_json: Json = False, debug: Debug = False) -> None:
    """Print the version."""
    _state["debug"] = debug
    print_result({"version": __version__}, as_json=as_json, text=f"traceforge {__version__}")


@app.command()
def ingest(
    inputs: Annotated[list[str], typer.Argument(metavar="LOGS...", help="Files, folders or globs of agent logs.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for trajectories.jsonl and manifest.json.")],
    labels: Annotated[
        list[str] | None, typer.Option("--labels", help="SWE-bench report.json: files, folders or globs; repeatable.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Read agent logs of any known format into trajectories."""
    _state["debug"] = debug
    from traceforge.trajectories.ingest import ingest as run_ingest

    summary = run_ingest(inputs, output, labels=tuple(labels or ()))
    print_result(summary.as_dict(), as_json=as_json, text=summary.describe())


@build_app.command("sft")
def build_sft(
    source: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder made by `traceforge ingest`.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for sft.jsonl and manifest.json.")],
    only_resolved: Annotated[bool, typer.Option("--only-resolved", help="Only runs that solved their task.")] = False,
    expand: Annotated[
        str | None, typer.Option("--as", metavar="trl", help="Also write standard prompt-completion rows.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Build one sample per assistant turn."""
    _state["debug"] = debug
    from traceforge.samples.build import build_sft as run_build

    if expand not in {None, "trl"}:
        raise UsageError(f"--as {expand}: the only other form is trl")
    summary = run_build(source, output, only_resolved=only_resolved, as_trl=expand == "trl")
    print_result(summary.as_dict(), as_json=as_json, text=summary.describe())


@build_app.command("pairs")
def build_pairs(  # noqa: PLR0913 - one parameter per option
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for pairs.jsonl and manifest.json.")],
    source: Annotated[
        Path | None,
        typer.Argument(metavar="[ROWS]", help="Preference rows (.jsonl, .json); with --pair, the ingest folder."),
    ] = None,
    explicit: Annotated[
        list[str] | None,
        typer.Option(
            "--pair",
            metavar="A|B",
            help="Prefer trajectory or turn (ID#TURN) A to B; or a .jsonl of {chosen, rejected}. Repeatable.",
        ),
    ] = None,
    expand: Annotated[
        str | None, typer.Option("--as", metavar="trl", help="Also write standard preference rows.")
    ] = None,
    synthetic: Annotated[
        int | None, typer.Option("--synthetic", metavar="N", min=1, help="Make N pairs of random words for trials.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Of synthetic pairs.")] = 1536,
    reply_tokens: Annotated[int, typer.Option("--reply-tokens", help="Of synthetic pairs.")] = 128,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Make synthetic lengths exact for its tokenizer.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of synthetic words.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Build preference pairs from rows, or from pairs of trajectories or turns."""
    _state["debug"] = debug
    from traceforge.samples.pair_build import build_pairs as run_build
    from traceforge.samples.synthetic_pairs import build_synthetic_pairs
    from traceforge.samples.tokenizer import load_tokenizer

    if expand not in {None, "trl"}:
        raise UsageError(f"--as {expand}: the only other form is trl")
    if (source is None) == (synthetic is None):
        raise UsageError("build pairs needs ROWS, or --synthetic N, and not both")
    if source is not None:
        if model is not None:
            raise UsageError("--model is for --synthetic: pairs of real rows are built without a model")
        summary = run_build(source, output, explicit=tuple(explicit or ()), as_trl=expand == "trl")
    else:
        assert synthetic is not None
        if explicit or expand:
            raise UsageError("--pair and --as are for real pairs, not for --synthetic")
        summary = build_synthetic_pairs(
            output,
            pairs=synthetic,
            prompt_tokens=prompt_tokens,
            reply_tokens=reply_tokens,
            seed=seed,
            tokenizer=None if model is None else load_tokenizer(model),
        )
    print_result(summary.as_dict(), as_json=as_json, text=summary.describe())


@app.command()
def inspect(  # noqa: PLR0913 - one parameter per option
    dataset: Annotated[
        str, typer.Argument(metavar="DATASET", help="A folder made by `build`, a file of rows, or a hub id.")
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Folder or hub id whose tokenizer and template count."),
    ] = None,
    run_file: Annotated[
        Path | None,
        typer.Option("--config", metavar="RUN.toml", help="Take data and model settings from this run file."),
    ] = None,
    overrides: Overrides = None,
    sample: Annotated[
        str | None, typer.Option("--sample", metavar="K", help="Show this sample whole: its number or id.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Print only the sample's text, as the model sees it.")] = False,
    scores: Annotated[bool, typer.Option("--scores", help="Pairs: run the model; show mean log-probs.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show lengths, masks, drops and cuts of a data set as a model will see it."""
    _state["debug"] = debug
    from traceforge.run_files import load_run_file
    from traceforge.samples.inspection import inspection_settings, run_inspect

    if raw and as_json:
        raise UsageError("--raw and --json exclude each other: one prints text, the other a document")
    if model is None:
        if run_file is None:
            raise UsageError("inspect needs --model, or --config with a run file that names one")
        model = load_run_file(run_file, overrides or []).model.name_or_path
    config = inspection_settings(dataset, model=model, run_file=run_file, overrides=overrides or [])
    scored = None
    if scores:
        from traceforge.training.pair_scores import score_pairs

        scored = score_pairs(dataset, config)
    run_inspect(dataset, config, sample=sample, html=html, raw=raw, as_json=as_json, scores=scored)


@app.command()
def plan(  # noqa: PLR0913 - one parameter per option
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Run file; see examples/.")],
    gpu_gib: Annotated[
        float | None, typer.Option("--gpu-gib", metavar="GIB", min=0.1, help="Memory of the card; without it: the CPU.")
    ] = None,
    host_gib: Annotated[float | None, typer.Option("--host-gib", metavar="GIB", min=0.1, help="Of the host.")] = None,
    row_tokens: Annotated[
        int | None,
        typer.Option("--row-tokens", metavar="N", min=2, help="Plan a row of N tokens, not the longest allowed."),
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option("--model-config", metavar="FILE", help="The model's config.json, if it is not here.")
    ] = None,
    card: Annotated[
        str | None, typer.Option("--card", metavar="NAME", help="Also time and energy on a card that was measured.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page.")] = None,
    overrides: Overrides = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict memory by part, with and without each technique; exit code 3 if it does not fit. Needs no GPU."""
    _state["debug"] = debug
    from traceforge.planning.budget import Budget
    from traceforge.planning.command import plan_file
    from traceforge.run_files import load_run_file

    answer = plan_file(
        load_run_file(run_file, overrides or []),
        title=str(run_file),
        budget=Budget.of_gib(gpu_gib, host_gib),
        device="cpu" if gpu_gib is None else "cuda",
        model_config=model_config,
        row_tokens=row_tokens,
        card=card,
    )
    if html is not None:
        answer.write_html(html)
    print_result(answer.as_dict(), as_json=as_json, text=answer.describe())
    if not answer.plan.fits:
        raise typer.Exit(3)


@app.command()
def doctor(
    short: Annotated[
        bool, typer.Option("--short", help="Only what decides whether a run can start, as `train` does first.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Look at the machine: what works, what does not, and the way out; exit code 1 if something fails."""
    _state["debug"] = debug
    from traceforge.doctor.examination import examine

    found = examine(short=short)
    print_result(found.as_dict(), as_json=as_json, text=found.describe())
    if found.failures:
        raise typer.Exit(1)


@app.command()
def train(  # noqa: PLR0913 - one parameter per option
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Run file; see examples/.")],
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Register the protocol; touch no weights.")] = False,
    extend: Annotated[
        Path | None, typer.Option("--extend", metavar="RUN", help="Go on from the newest checkpoint of this run.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", min=1, help="Share the work: N processes, one GPU each.")
    ] = None,
    gpus: Annotated[
        str | None, typer.Option("--gpus", metavar="0,1", help="One rank on each of these GPUs (numbers or UUIDs).")
    ] = None,
    allow_shared_device: Annotated[bool, typer.Option("--allow-shared-device", hidden=True)] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train, evaluate before and after, and leave adapter, evidence and report."""
    _state["debug"] = debug
    from traceforge.parallel.devices import is_rank
    from traceforge.run_files import load_run_file

    changes = [*(overrides or []), *(["parallel.shared_device=true"] if allow_shared_device else [])]
    config = load_run_file(run_file, changes)
    if gpus is None and ranks in {None, 1}:
        from traceforge.training.run import run

        outcome = run(config, dry_run=dry_run, extend=extend)
        print_run(outcome, as_json=as_json)
        if outcome.evidence.decision == "reject":
            raise typer.Exit(3)
        return
    if is_rank(os.environ):
        raise UsageError("--ranks and --gpus start ranks, and this process is one already (RANK is set)")
    if dry_run:
        raise UsageError("--dry-run registers the protocol in one process; leave out --ranks and --gpus")
    from traceforge.training.ranks import run_on_ranks

    options = [*(f"--set={change}" for change in changes), *([] if extend is None else [f"--extend={extend}"])]
    options += [*(["--json"] if as_json else []), *(["--debug"] if debug else [])]
    evidence = run_on_ranks(config, ["train", str(run_file), *options], num_ranks=ranks, gpus=gpus)
    if evidence.decision == "reject":
        raise typer.Exit(3)


@app.command()
def evaluate(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure a run's adapter again on the run's own fixed sets, beside what the run recorded."""
    _state["debug"] = debug
    from traceforge.training.again import evaluate_again

    result = evaluate_again(run_folder)
    print_result(result.as_dict(), as_json=as_json, text=result.describe())


@app.command()
def compare(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Run file; see examples/.")],
    oracle: Annotated[str, typer.Option("--with", metavar="trl|accelerate", help="The standard trainer.")],
    updates: Annotated[int, typer.Option("--updates", min=1, help="Updates that both sides make.")] = 2,
    overrides: Overrides = None,
    oracle_overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--oracle-set",
            metavar="SECTION.FIELD=VALUE",
            help="Change a setting for the standard trainer alone, to see the comparison fail: objective.beta=3",
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make the same updates with a standard trainer and compare; exit code 3 if they disagree."""
    _state["debug"] = debug
    from traceforge.oracles.compare import compare as run_comparison

    comparison = run_comparison(
        run_file,
        oracle=oracle,
        updates=updates,
        overrides=overrides or [],
        oracle_overrides=oracle_overrides or [],
    )
    print_result(comparison.as_dict(), as_json=as_json, text=comparison.describe())
    comparison.require_agreement()


@app.command()
def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, finished or failed.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write report.html of a run again."""
    _state["debug"] = debug
    from traceforge.evidence.report import write_report

    path = write_report(run_folder)
    print_result({"report": str(path)}, as_json=as_json, text=f"report: {path}")


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for everything the demo makes.")] = Path(
        "runs/demo"
    ),
    updates: Annotated[int | None, typer.Option("--updates", min=1, help="Fewer or more updates.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a real small model on bundled real trajectories on the CPU, from raw logs to the report."""
    _state["debug"] = debug
    from traceforge.demo.tour import run_demo

    result = run_demo(output, updates=updates)
    print_result(result.as_dict(), as_json=as_json, text=result.describe())
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def main() -> NoReturn:
    """Run the command line and exit with the documented code; an error is a few lines, without a traceback."""
    prepare_terminal()
    try:
        result = app(standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except (Exception, KeyboardInterrupt) as error:
        code = show_failure(error, debug=_state["debug"])
    sys.exit(code)
