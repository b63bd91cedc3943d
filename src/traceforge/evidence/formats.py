"""How the report writes numbers and text. None is always "not recorded": nothing is guessed or left blank."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

NOT_RECORDED = "not recorded"
MOST_CHARACTERS = 4000

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def integer(value: float | None) -> str:
    """`12345` -> `12,345`."""
    return NOT_RECORDED if value is None else f"{value:,.0f}"


def loss(value: float | None) -> str:
    """Nats with four decimals."""
    return NOT_RECORDED if value is None else f"{value:.4f}"


def perplexity(loss_in_nats: float | None) -> str:
    """exp(loss) in three digits, or a dash where there is no loss."""
    if loss_in_nats is None:
        return "–"
    return f"{math.exp(loss_in_nats):.3g}" if loss_in_nats < 20 else "> 1e8"


def change(before: float | None, after: float | None) -> str:
    """Signed difference of two losses, with a real minus sign."""
    if before is None or after is None:
        return NOT_RECORDED
    return f"{after - before:+.4f}".replace("-", "−")


def change_percent(before: float | None, after: float | None) -> str:
    """Signed relative difference, or nothing where it cannot be formed."""
    if before is None or after is None or before == 0:
        return ""
    return f"{(after - before) / before:+.1%}".replace("-", "−")


def share(value: float | None) -> str:
    """`0.1234` -> `12.3 %`; a share that would read as 0 keeps two digits."""
    if value is None:
        return NOT_RECORDED
    return f"{value * 100:.2g} %" if 0 < value < 0.001 else f"{value:.1%}".replace("%", " %")


def size(value: float | None) -> str:
    """Bytes in binary units."""
    if value is None:
        return NOT_RECORDED
    unit = 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:,.0f} B" if unit == 0 else f"{value:,.2f} {_UNITS[unit]}"


def duration(seconds: float | None) -> str:
    """Seconds in the unit that reads best: `850 ms`, `2.39 s`, `12.3 s`, `4 min 05 s`, `3 h 12 min`."""
    if seconds is None or not math.isfinite(seconds):
        return NOT_RECORDED
    if seconds < 1:
        return f"{seconds * 1000:,.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


def moment(value: datetime | None) -> str:
    """A time in UTC, to the second."""
    return NOT_RECORDED if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def compact(value: float | None) -> str:
    """A number in up to six significant digits, such as a learning rate."""
    return NOT_RECORDED if value is None else f"{value:,.6g}"


def plain(value: object) -> str:
    """A setting or a fact, as a reader would write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return compact(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {plain(each)}" for key, each in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return ", ".join(plain(each) for each in value) or "none"
    return clip(str(value))


def clip(text: str, most: int = MOST_CHARACTERS) -> str:
    """Text with its middle left out, and that said, if it is longer than `most` characters."""
    if len(text) <= most:
        return visible(text)
    head, tail = text[: most * 2 // 3], text[len(text) - most // 3 :]
    return f"{visible(head)} […{len(text) - len(head) - len(tail):,} characters not shown…] {visible(tail)}"


def visible(text: str) -> str:
    """Text that HTML can hold: control characters become their pictures, a lone surrogate becomes U+FFFD."""
    shown = _CONTROL.sub(lambda found: chr(0x2400 + ord(found[0])) if found[0] != "\x7f" else "␡", text)
    return _LONE_SURROGATE.sub("�", shown)
