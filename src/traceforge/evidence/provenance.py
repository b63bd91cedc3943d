"""What a run ran on: versions, hardware, source revision, content hashes. Reads only what is local; imports no torch.

Facts that only torch knows (CUDA version, cards) are passed in by the caller. Nothing here names the machine or its
owner: no host name, no user, no path outside what the run file says.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import psutil

import traceforge
from traceforge.errors import InputError
from traceforge.evidence.schema import Framework, Gpu, Hardware
from traceforge.hashes import file_sha256, folder_sha256

_DISTRIBUTIONS = (
    "torch",
    "transformers",
    "tokenizers",
    "peft",
    "accelerate",
    "bitsandbytes",
    "safetensors",
    "liger-kernel",
    "trl",
    "numpy",
    "pydantic",
)


class SourceRevision(NamedTuple):
    """A commit, and whether tracked files differ from it."""

    commit: str
    modified: bool


def framework_versions(*, cuda: str | None = None, cudnn: str | None = None) -> Framework:
    """Return the versions of python, of this package and of the libraries that are installed beside it."""
    revision = source_revision()
    return Framework(
        python=platform.python_version(),
        traceforge=traceforge.__version__,
        traceforge_commit=None if revision is None else revision.commit,
        traceforge_modified=None if revision is None else revision.modified,
        cuda=cuda,
        cudnn=cudnn,
        **{name.replace("-", "_"): _version(name) for name in _DISTRIBUTIONS},
    )


def describe_hardware(*, device: str = "cpu", gpus: Sequence[Gpu] = (), world: int = 1) -> Hardware:
    """Return what this machine is; `gpus` are the cards that the run uses, as torch reports them."""
    return Hardware(
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_model=_cpu_model(),
        cpu_cores=psutil.cpu_count(logical=False),
        cpu_threads=_usable_threads(),
        memory_bytes=psutil.virtual_memory().total,
        device=device,
        gpus=tuple(gpus),
        world=world,
    )


def source_revision(package_folder: Path | None = None) -> SourceRevision | None:
    """Return the git revision of the checkout this package runs from; None when it is installed from a package.

    A virtual environment inside somebody else's repository is not a checkout: git must track this package's files.
    """
    folder = package_folder or Path(traceforge.__file__).parent
    git = shutil.which("git")
    if git is None or _git(git, folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(git, folder, "rev-parse", "HEAD")
    changes = _git(git, folder, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None or changes is None else SourceRevision(commit.strip(), bool(changes.strip()))


def content_hash(path: Path) -> str:
    """Return the hex sha256 of a file, or of a folder's names and contents (hidden ones left out), streamed.

    Raises:
        InputError: there is no such file or folder, or it cannot be read.
    """
    try:
        if path.is_dir():
            return folder_sha256(path)
        return file_sha256(path)
    except OSError as error:
        raise InputError(f"{error.filename or path}: cannot read for its hash: {error.strerror}") from error


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() in {"model name", "Model"} and value.strip():
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or None


def _usable_threads() -> int | None:
    # An affinity mask (containers, job schedulers) is what the run really had.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _git(git: str, folder: Path, *arguments: str) -> str | None:
    # Inside a git hook, GIT_DIR and its like would point at another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(  # noqa: S603 - fixed arguments, no shell
            [git, "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
