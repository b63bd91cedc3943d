"""What the environment says to a rank: whether it is one, and which card it may see. Imports no torch.

CUDA_VISIBLE_DEVICES holds indices or UUIDs, and its order counts. CUDA reads it once, when it is first used, so a rank
gets its own value before that. What `--gpus` names by number is a *place in that list*, as everywhere in CUDA: with
CUDA_VISIBLE_DEVICES=5,7 the cards are 0 (that is 5) and 1 (that is 7).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping

from traceforge.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_INDEX = re.compile(r"\d+")
_UUID = re.compile(r"(GPU|MIG)-\S+")
_SHARE = "for a trial on one card allow it by name: --set parallel.shared_device=true"


def check_rank_environment(environment: Mapping[str, str]) -> None:
    """Refuse an environment that half says this process is one of several ranks: it would silently train alone.

    Raises:
        ConfigError: it names the variable that is missing or is no number, and what to do.
    """
    size = environment.get("WORLD_SIZE")
    if not size or size == "1":
        return
    start = "start ranks with --ranks, --gpus or torchrun, or unset WORLD_SIZE to train in one process"
    missing = [name for name in _RANK_VARIABLES if not environment.get(name)]
    if missing:
        raise ConfigError(f"WORLD_SIZE is {size}, but {' and '.join(missing)} is not set", hint=start)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        if name in environment and not _INDEX.fullmatch(environment[name]):
            raise ConfigError(f"{name} is {environment[name]!r}, not a number", hint=start)
    if int(size) < 1 or int(environment["RANK"]) >= int(size):
        raise ConfigError(
            f"RANK is {environment['RANK']}, WORLD_SIZE is {size}: ranks count from 0 below it", hint=start
        )


def is_rank(environment: Mapping[str, str]) -> bool:
    """Return whether this process was started as one of several ranks (by us, torchrun or by hand)."""
    return all(environment.get(name) for name in _RANK_VARIABLES) and environment["WORLD_SIZE"] != "1"


def visible_devices(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES in order, or None if it is not set and hides nothing.

    As CUDA reads it: an entry that is neither an index nor a UUID (such as -1) hides itself and all after it.
    """
    value = environment.get(VARIABLE)
    if value is None:
        return None
    entries: list[str] = []
    for entry in value.split(","):
        name = entry.strip()
        if not _INDEX.fullmatch(name) and not _UUID.fullmatch(name):
            break
        entries.append(name)
    return tuple(entries)


def choose_devices(
    *, num_ranks: int | None, gpus: str | None, visible: tuple[str, ...] | None, num_gpus: int, shared: bool
) -> tuple[str, ...]:
    """Return the CUDA_VISIBLE_DEVICES of each rank; an empty one means the CPU.

    Args:
        num_ranks: ranks asked for; None = one for each of `gpus`.
        gpus: cards asked for, by place among the visible ones or by UUID, such as `1,0`; None = the first ones.
        visible: see `visible_devices`.
        num_gpus: cards that CUDA offers to this process.
        shared: allow several ranks on one card.

    Raises:
        ConfigError: a card does not exist, is named twice, or the two counts contradict each other.
    """
    assert num_ranks is not None or gpus is not None
    names = tuple(str(index) for index in range(num_gpus)) if visible is None else visible[:num_gpus]
    if gpus is None:
        chosen = names
        asked = f"--ranks {num_ranks}"
        if not names:
            return ("",) * (num_ranks or 0)
    else:
        asked = f"--gpus {gpus}"
        chosen = tuple(_named(entry.strip(), asked, names, visible) for entry in gpus.split(","))
        if num_ranks is not None and num_ranks != len(chosen) and not (shared and num_ranks > len(chosen)):
            raise ConfigError(f"{asked} and --ranks {num_ranks} contradict each other", hint="leave out --ranks")
        twice = sorted({name for name in chosen if chosen.count(name) > 1})
        if twice and not shared:
            raise ConfigError(f"{asked}: two ranks on one card ({', '.join(twice)})", hint=_SHARE)
    wanted = len(chosen) if num_ranks is None else num_ranks
    if wanted > len(chosen) and not shared:
        raise ConfigError(
            f"{asked}: {wanted} ranks need {wanted} GPUs, {len(names)} can be seen{_because(visible)}",
            hint=f"ask for fewer ranks; {_SHARE}",
        )
    return tuple(chosen[number % len(chosen)] for number in range(wanted))


def claim_device(
    environment: MutableMapping[str, str],
    *,
    local_rank: int,
    local_size: int,
    shared: bool,
    count_gpus: Callable[[], int],
) -> None:
    """Leave only this rank's own card visible, for ranks that were started with all cards (plain torchrun).

    It is number 0 then, and so LOCAL_RANK becomes 0, by which libraries choose a card.

    Args:
        local_rank: number of the rank on its host.
        local_size: ranks on its host.
        count_gpus: how many cards CUDA offers; only called if ranks may share and nothing is hidden.

    Raises:
        ConfigError: the rank's own card does not exist.
    """
    visible = visible_devices(environment)
    if local_size == 1 or (visible is not None and len(visible) <= 1):
        return  # one rank, no card, or already narrowed (torchrun --virtual-local-rank)
    if visible is None:
        place = local_rank % max(1, count_gpus()) if shared else local_rank
        environment.update({VARIABLE: str(place), "LOCAL_RANK": "0"})
        return
    if local_rank >= len(visible) and not shared:
        raise ConfigError(
            f"rank {local_rank} of this host has no card of its own: {len(visible)} can be seen{_because(visible)}",
            hint=f"start fewer ranks; {_SHARE}",
        )
    environment.update({VARIABLE: visible[local_rank % len(visible)], "LOCAL_RANK": "0"})


def _named(entry: str, asked: str, names: tuple[str, ...], visible: tuple[str, ...] | None) -> str:
    """Return the CUDA name of one entry of --gpus."""
    seen = f"{len(names)} can be seen{_because(visible)}"
    if not names:
        raise ConfigError(
            f"{asked}: no GPU can be seen{_because(visible)}",
            hint="see `nvidia-smi -L` and `traceforge doctor`; --ranks N without --gpus runs on the CPU",
        )
    if _INDEX.fullmatch(entry):
        if int(entry) >= len(names):
            raise ConfigError(f"{asked}: there is no GPU {entry}, {seen}", hint="GPUs are counted from 0")
        return names[int(entry)]
    if not _UUID.fullmatch(entry):
        raise ConfigError(f"{asked}: {entry!r} is neither a number nor a UUID", hint="--gpus 0,1 or --gpus GPU-1f2e...")
    if visible is None:
        return entry
    if any(_INDEX.fullmatch(name) for name in names):
        raise ConfigError(
            f"{asked} names a card by UUID, {VARIABLE}={','.join(visible)} by number",
            hint=f"name it by its place in that list (0 to {len(names) - 1}), or unset {VARIABLE}",
        )
    matches = [name for name in names if name.startswith(entry) or entry.startswith(name)]
    if len(matches) != 1:
        what = "there is no such GPU" if not matches else f"{len(matches)} GPUs begin so"
        raise ConfigError(f"{asked}: {entry}: {what}, {seen}", hint="see `nvidia-smi -L`")
    return matches[0]


def _because(visible: tuple[str, ...] | None) -> str:
    return "" if visible is None else f" ({VARIABLE}={','.join(visible)})"
