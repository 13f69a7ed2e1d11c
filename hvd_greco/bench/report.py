"""A record for the eye: a table on the terminal, and the same in Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from .record import Record, Row, Start


def _amount(numel: int) -> str:
    """16 M, 1 M, 10 k, or the number itself where that would round it."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if numel >= size and numel % (size // 10) == 0:
            return f"{numel / size:g} {letter}"
    return f"{numel:,}"


def _case(row: Row) -> str:
    parts = [
        ("density", row.density), ("bits", row.bits), ("ranks", row.ranks),
        ("n", row.length), ("r", row.low_rank),
    ]  # fmt: skip
    texts = [f"{name} {value:,g}" for name, value in parts if value is not None]
    return ", ".join(texts + ([row.inputs] if row.inputs else []))


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _megabytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:.1f}"


def _rivals(row: Row) -> str:
    return ", ".join(f"{k} {seconds / row.seconds:.2f}x" for k, seconds in row.rivals.items())


#: Heading, and what stands under it; the first two are words, the others numbers.
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "operation": lambda row: row.operation,
    "case": _case,
    "elements": lambda row: _amount(row.numel),
    "ms": lambda row: _time(row.seconds),
    "quartiles": lambda row: " to ".join(_time(seconds) for seconds in row.quartiles),
    "counted MB": lambda row: f"{row.counted_bytes / 1e6:.3g}",
    "GB/s": lambda row: f"{row.bytes_per_second / 1e9:.3g}",
    "of copy": lambda row: f"{row.of_copy:.2f}",
    "vs torch": lambda row: f"{row.speedup:.2f}x",
    "launches": lambda row: f"{_or_dash(row.launches)} ({_or_dash(row.chain_launches)})",
    "extra MB": lambda row: f"{_megabytes(row.extra_bytes)} ({_megabytes(row.chain_extra_bytes)})",
    "backend": lambda row: row.served_by,
}
_MORE: dict[str, tuple[Callable[[Row], bool], Callable[[Row], str]]] = {
    "error": (
        lambda row: row.error is not None,
        lambda row: "" if row.error is None else f"{row.error:.1e}",
    ),
    "others": (lambda row: bool(row.rivals), _rivals),
}
_WORDS = 2


def _or_dash(count: int | None) -> str:
    return "-" if count is None else str(count)


def _columns(record: Record) -> dict[str, Callable[[Row], str]]:
    """All columns; those that few rows have only where a row does."""
    more = {name: show for name, (has, show) in _MORE.items() if any(map(has, record.rows))}
    return {**_COLUMNS, **more}


def headline(record: Record) -> str:
    """Machine, versions, threads, date, commit and load in one line."""
    machine = record.machine
    where = machine.gpu or f"{machine.cores} x {machine.cpu}"
    threads = f"{record.threads} thread{'s' if record.threads > 1 else ''}"
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    load = "" if record.load is None else f", load {record.load:.1f} before"
    return (
        f"{where}, {threads}{load}; {versions}; {record.date[:10]}, "
        f"commit {record.commit or 'unknown'}"
    )


#: Load from which medians may say more about the neighbours than about us.
_BUSY = 0.5


def warning(record: Record) -> str | None:
    """What should keep a reader from trusting the times, if there is anything."""
    if record.device != "cpu" or record.load is None or record.load < _BUSY:
        return None
    return (
        f"The machine was busy before (load {record.load:.1f}): with more than one thread, torch's "
        "threads wait for each other, and then a copy or a chain takes many times its time. Wait "
        "until it is quiet, or measure with --threads 1."
    )


def make_table(record: Record) -> Table:
    """For the terminal."""
    columns = _columns(record)
    table = Table(
        title=headline(record),
        caption="ms: median; of copy: counted bytes a second beside a plain copy's in the same "
        "round; vs torch: a chain of torch calls takes so many times our time; launches and extra "
        "MB: ours (the chain's)",
    )
    for place, heading in enumerate(columns):
        words = place < _WORDS
        table.add_column(
            heading, justify="left" if words else "right", no_wrap=heading == "operation"
        )
    last = ""
    for row in record.rows:
        if last and row.operation != last:
            table.add_section()
        last = row.operation
        table.add_row(*(show(row) for show in columns.values()))
    return table


def make_starts(starts: list[Start]) -> Table:
    """Cold and warm start for the terminal."""
    table = Table(title="Seconds until a fresh process has its first results")
    for place, heading in enumerate(_STARTS):
        table.add_column(heading, justify="right" if place else "left")
    for start in starts:
        table.add_row(*_start_cells(start))
    return table


_STARTS = ("cache", "import torch", "first top-k", "then first QSGD", "kernels in all")


def _start_cells(start: Start) -> list[str]:
    seconds = (
        start.import_seconds, start.topk_seconds, start.qsgd_seconds, start.kernel_seconds
    )  # fmt: skip
    return [start.cache, *(f"{value:.2f}" for value in seconds)]


def markdown(record: Record) -> str:
    """The whole record for a page of the documentation."""
    columns = _columns(record)
    lines = [headline(record) + ".", ""]
    lines += _markdown_head(list(columns), _WORDS)
    lines += [_markdown_row([show(row) for show in columns.values()]) for row in record.rows]
    if record.starts:
        lines += ["", *_markdown_head(list(_STARTS), 1)]
        lines += [_markdown_row(_start_cells(start)) for start in record.starts]
    return "\n".join(lines)


def operations_markdown() -> str:
    """What is measured and how its bytes are counted, for the same page."""
    from .operations import OPERATIONS

    lines = _markdown_head(["operation", "calls", "counted bytes", "torch chain"], 4)
    lines += [
        _markdown_row([f"`{o.name}`", f"`{o.entry}`", o.formula, o.chain]) for o in OPERATIONS
    ]
    return "\n".join(lines)


def _markdown_head(headings: list[str], words: int) -> list[str]:
    rule = ["---" if place < words else "---:" for place in range(len(headings))]
    return [_markdown_row(headings), _markdown_row(rule)]


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
