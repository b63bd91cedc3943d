"""How fast `ingest` reads: MB/s of real logs, beside the standard library's json over the very same files.

    python benchmarks/ingest.py [--megabytes 200] [--repeats 5] [--logs FOLDER] [--json FILE]

The corpus is real logs repeated under new instance ids, with the number of the copy in one message of each, so that
nothing is a duplicate. Both sides run in this process, on one thread, in turns: the standard library reads the bytes
and parses them; ingest also hashes, converts, and writes the trajectories and the manifest. Medians are compared. A
core's speed is bytes by the processor time of this process; the time on the wall, which other work on the machine
lengthens, is saved too.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

import traceforge
from traceforge.trajectories.ingest import ingest

_HERE = Path(__file__).resolve().parent
_LOGS = _HERE.parent / "tests" / "data" / "trajectories"
_RESULT = _HERE / "results" / "ingest-cpu.json"
_MEGABYTE = 1_000_000


def main() -> None:
    """Build the corpus, measure both readers, print and save the figures."""
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="traceforge-ingest-"))
    try:
        logs = folder / "logs"
        num_bytes, num_files = write_corpus(options.logs, logs, options.megabytes * _MEGABYTE)
        sides: dict[str, Callable[[], None]] = {
            "standard_library": lambda: read_with_json(logs),
            "traceforge": lambda: ingest_into_new_folder(logs, folder / "out"),
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for repeat in range(options.repeats + 1):
            for name, side in sides.items():
                began = time.process_time(), time.perf_counter()
                side()
                if repeat:  # The first round fills the page cache and is not counted.
                    seconds[name].append((time.process_time() - began[0], time.perf_counter() - began[1]))
        record = _record(options, seconds, num_bytes, num_files)
        counts = json.loads((folder / "out" / "manifest.json").read_bytes())["counts"]
        record["corpus"] |= {key: counts[key] for key in ("trajectories", "turns", "refused")}
    finally:
        shutil.rmtree(folder)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(record, indent=2) + "\n")
    for name, speed in record["median_megabytes_per_core_s"].items():
        wall = record["median_megabytes_per_wall_s"][name]
        print(f"{name:>18}: {speed:8.1f} MB/s a core ({wall:.1f} MB/s by the clock on the wall)")
    print(f"{'ratio':>18}: {record['ratio_to_standard_library']:8.2f}")


def write_corpus(source: Path, target: Path, num_bytes: int) -> tuple[int, int]:
    """Write copies of the logs in `source` until they hold `num_bytes`; return bytes and files written."""
    logs = [path for path in sorted(source.rglob("*.json*")) if "report" not in path.name]
    parsed = [(path, _values(path)) for path in logs]
    written = num_files = copy = 0
    while written < num_bytes:
        copy += 1
        for path, values in parsed:
            pieces = [json.dumps(_renamed(value, copy), indent=2 if len(values) == 1 else None) for value in values]
            copied = target / f"{copy:06d}" / path.name
            copied.parent.mkdir(parents=True, exist_ok=True)
            written += copied.write_bytes("\n".join(pieces).encode())
            num_files += 1
    return written, num_files


def read_with_json(folder: Path) -> None:
    """Parse every file with the standard library: lines of `.jsonl`, anything else whole."""
    for path in sorted(folder.rglob("*.json*")):
        raw = path.read_bytes()
        for text in raw.splitlines() if path.suffix == ".jsonl" else [raw]:
            json.loads(text)


def ingest_into_new_folder(logs: Path, output: Path) -> None:
    """Ingest the logs, without an older ingest in the way."""
    shutil.rmtree(output, ignore_errors=True)
    ingest([str(logs)], output)


def _values(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else [json.loads(text)]


def _renamed(value: Any, copy: int) -> Any:
    messages = value if isinstance(value, list) else value["messages"]
    first = {**messages[0], "content": f"Run {copy}. {messages[0]['content']}"}
    renamed = [first, *messages[1:]]
    if isinstance(value, list):
        return renamed
    held = {**value, "messages": renamed}
    return {**held, "instance_id": f"{value['instance_id']}-{copy}"} if "instance_id" in value else held


def _record(
    options: argparse.Namespace, seconds: dict[str, list[tuple[float, float]]], num_bytes: int, num_files: int
) -> dict[str, Any]:
    core = {name: statistics.median(each for each, _ in times) for name, times in seconds.items()}
    wall = {name: statistics.median(each for _, each in times) for name, times in seconds.items()}
    return {
        "what": "ingest of agent logs on one core, against json.loads of the same files",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"processor": _processor(), "system": platform.platform()},
        "versions": {
            "python": platform.python_version(),
            "traceforge": traceforge.__version__,
            "msgspec": msgspec.__version__,
        },
        "corpus": {"bytes": num_bytes, "files": num_files, "logs": options.logs.name},
        "repeats": options.repeats,
        "median_megabytes_per_core_s": {name: round(num_bytes / _MEGABYTE / each, 1) for name, each in core.items()},
        "median_megabytes_per_wall_s": {name: round(num_bytes / _MEGABYTE / each, 1) for name, each in wall.items()},
        "core_seconds": {name: [round(each, 4) for each, _ in times] for name, times in seconds.items()},
        "wall_seconds": {name: [round(each, 4) for _, each in times] for name, times in seconds.items()},
        "ratio_to_standard_library": round(core["standard_library"] / core["traceforge"], 3),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="size of the corpus")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds")
    parser.add_argument(
        "--logs", type=Path, default=_LOGS, help="folder of mini-swe-agent logs and chat rows to repeat"
    )
    parser.add_argument("--json", type=Path, default=_RESULT, help="where to save the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
