"""``robustdist bench comm``: what averaging gradients costs on a slow network, compressed and not."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from robustdist.bench.codec_speed import codec_speed
from robustdist.bench.comm_rows import PLAIN, ROWS, Row, chosen_rows, gradient_shapes, low_rank_numbers
from robustdist.bench.links import LINKS, Link, Links, open_links
from robustdist.bench.machine import describe_machine
from robustdist.bench.measure import spread
from robustdist.bench.output import check_out, make_console, write_json
from robustdist.bench.ranks import RanksError, run_task
from robustdist.comm import PowerSGD
from robustdist.comm.cost import choose, dense_bytes, sent_bytes
from robustdist.errors import UsageError
from robustdist.types import check_count

__all__ = ["bench_comm"]

#: Bits per second that a rank can count on, for time limits.
_RATES = {"100mbit": 1e8, "1gbit": 5e8, "none": 5e8}


def bench_comm(
    world_size: int = 2,
    numel: int = 25_000_000,
    link: Link = "100mbit",
    rows: list[str] | None = None,
    rounds: int = 3,
    repeats: int = 1,
    out: str | None = None,
) -> dict[str, Any]:
    """Average the same gradients over processes in several ways, on links with a rate limit.

    Every process is a rank with a network namespace of its own, joined to the others by a bridge; each link lets the
    rate through in both directions. Without the rights for that, or without the tools, the loopback device is used and
    the output says so. The rate is measured in each run by a plain TCP transfer.

    Gradients are Gaussian noise in buckets as DDP makes them. Rows take turns, ``rounds`` times; a row is set up anew
    for every visit and warmed up by one step, or by two where residuals are kept. Ratios are to the fp32 all-reduce of
    the same round. Codecs are also timed alone, in processor time of one core.

    Args:
        world_size: Number of ranks.
        numel: Number of gradients.
        link: "100mbit", "1gbit", or "none" for the loopback device without a limit.
        rows: Rows, by key; default all: fp32, torch_fp16, torch_powersgd, torch_powersgd_one_bucket, identity, bf16,
            int8, natural, qsgd4, qsgd4_random, qsgd2, terngrad, sign, topk, powersgd. The reference, fp32, is always
            there.
        rounds: Number of rounds.
        repeats: Timed steps per visit.
        out: JSON file for the figures; its folder must exist.

    Returns:
        ``benchmark``, ``settings``, ``machine``, ``link`` (with the measured ``bits_per_second``), ``load`` (the load
        averages before and after), ``rows`` and ``visits``, as in the file.

    Raises:
        UsageError: If an argument is out of range, before anything is measured.
    """
    if link not in LINKS:
        raise UsageError(f"link={link!r} must be one of {', '.join(LINKS)}")
    keys = chosen_rows(rows)
    for option, value in (("numel", numel), ("rounds", rounds), ("repeats", repeats)):
        check_count(value, option)
    if not 2 <= check_count(world_size, "world_size") <= 200:
        raise UsageError(f"world_size={world_size} must be from 2 to 200")
    path = check_out(out)
    settings = {
        "world_size": world_size, "numel": numel, "link": link, "rounds": rounds, "repeats": repeats,
    }  # fmt: skip
    console = make_console()
    load = [os.getloadavg()]
    speeds = {key: codec_speed(ROWS[key].codec()) for key in keys if ROWS[key].kind == "engine"}
    with open_links(world_size, link) as links:
        if links.note:
            console.print(Text(links.note))
        results, failures = _measure(keys, settings, links)
    load.append(os.getloadavg())
    visits = [visit for result in results for visit in _over_ranks(result)]
    rate = next((result[0]["rate"] for result in results), None)
    found = {
        "benchmark": "comm",
        "settings": settings,
        "machine": describe_machine(torch.device("cpu")),
        "link": {"limit": links.limit, "bits_per_second": rate, "note": links.note},
        "load": load,
        "rows": [_row(key, settings, visits, results, speeds.get(key), failures.get(key), rate) for key in keys],
        "visits": visits,
    }
    _print(console, found)
    if path is not None:
        write_json(path, found)
    return found


def _measure(
    keys: Sequence[str], settings: Mapping[str, Any], links: Links
) -> tuple[list[list[dict[str, Any]]], dict[str, str]]:
    """Run all rows that are safe together, and each of the others alone beside the reference; return failures too."""
    arguments = {name: settings[name] for name in ("numel", "rounds", "repeats")}
    world_size = settings["world_size"]
    seconds = dense_bytes(settings["numel"], world_size) * 8 / _RATES[links.limit] + 1
    per_row = 2 * seconds * (1 + settings["rounds"] * (1 + settings["repeats"]))

    def run(names: list[str], timeout: float) -> list[dict[str, Any]]:
        task = {**arguments, "rows": names}
        return run_task("reduce", task, links=links, world_size=world_size, timeout=timeout)

    safe = [key for key in keys if not ROWS[key].may_hang]
    results, failures = [run(safe, 600 + 10 * per_row * len(safe))], {}
    for key in keys:
        if ROWS[key].may_hang:
            try:
                results.append(run([PLAIN, key], 60 + 2 * per_row))
            except RanksError as error:
                failures[key] = str(error)
    return results, failures


def _over_ranks(result: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join the visits of all ranks: the slowest one counts; bytes are means."""
    joined = []
    for parts in zip(*(rank["visits"] for rank in result), strict=True):
        visit = dict(parts[0])
        visit["seconds"] = max(part["seconds"] for part in parts)
        for name in ("cpu_seconds", "nic_bytes", "payload_bytes"):
            values = [part[name] for part in parts]
            visit[name] = None if None in values else sum(values) / len(values)
        joined.append(visit)
    return joined


def _row(
    key: str,
    settings: Mapping[str, Any],
    visits: Sequence[Mapping[str, Any]],
    results: Sequence[Sequence[Mapping[str, Any]]],
    speed: Mapping[str, float] | None,
    failure: str | None,
    rate: float | None,
) -> dict[str, Any]:
    row = ROWS[key]
    found: dict[str, Any] = {"row": key, "name": row.name, "failure": failure, "codec_ns_per_element": speed}
    own = [visit for visit in visits if visit["row"] == key]
    if not own:
        return found
    firsts = next(result for result in results if key in result[0]["firsts"])
    seconds = spread([visit["seconds"] for visit in own])
    formula = _formula(row, settings["numel"], settings["world_size"])
    payload = own[0]["payload_bytes"]
    wire = formula if payload is None else payload
    return {
        **found,
        "seconds": asdict(seconds),
        "cpu_seconds": spread([visit["cpu_seconds"] for visit in own]).median,
        "times_faster": asdict(spread(_speedups(own, visits))),
        "payload_bytes": payload,
        "formula_bytes": formula,
        "ratio": dense_bytes(settings["numel"], settings["world_size"]) / wire,
        "nic_bytes": None if own[0]["nic_bytes"] is None else spread([visit["nic_bytes"] for visit in own]).median,
        "times_wire": None if rate is None else seconds.median * rate / (8 * wire),
        "least_times_wire": None if rate is None else seconds.min * rate / (8 * wire),
        "error": firsts[0]["firsts"][key]["error"],
        "identical": all(rank["firsts"][key]["identical"] for rank in firsts),
    }


def _speedups(own: Sequence[Mapping[str, Any]], visits: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of the reference over those of every visit, in the same round."""
    plain: dict[int, list[float]] = {}
    for visit in visits:
        if visit["row"] == PLAIN:
            plain.setdefault(visit["round"], []).append(visit["seconds"])
    return [spread(plain[visit["round"]]).median / visit["seconds"] for visit in own]


def _formula(row: Row, numel: int, world_size: int) -> float:
    """Payload bytes per rank; for PowerSGD those of the factors, and of what is sent as it is."""
    if row.kind == "plain":
        return dense_bytes(numel, world_size)
    if row.kind == "fp16":
        return dense_bytes(numel, world_size) / 2
    codec = None if row.kind == "powersgd" else row.codec()
    if codec is None or isinstance(codec, PowerSGD):
        numbers = sum(low_rank_numbers(codec, shape) for shape in gradient_shapes(numel))
        return dense_bytes(numbers, world_size)
    return sent_bytes(codec, numel, world_size, choose(codec, numel, world_size))


def _print(console: Console, found: Mapping[str, Any]) -> None:
    settings, link = found["settings"], found["link"]
    title = f"Mean of {settings['numel']:,} gradients over {settings['world_size']} ranks, link {link['limit']}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("row")
    for heading in (
        "s", "min-max", "faster", "NIC MB\nper rank", "payload MB\nper rank", "formula\nMB", "ratio", "s over\nwire s",
        "error", "GB/s\nenc/dec",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in found["rows"]:
        table.add_row(Text(row["name"]), *(Text(cell) for cell in _cells(row)))
    console.print(table)
    for row in found["rows"]:
        if row["failure"] is not None:
            console.print(Text(f"{row['name']} failed: {row['failure']}"))
        elif not row["identical"]:
            console.print(Text(f"{row['name']}: the ranks disagree"))
    machine = found["machine"]
    rate = "unknown" if link["bits_per_second"] is None else f"{link['bits_per_second'] / 1e6:.1f} Mbit/s"
    console.print(
        Text(
            f"measured rate {rate}; load {found['load'][0][0]:.1f} before, {found['load'][1][0]:.1f} after; "
            f"{machine['processor']}, {machine['num_cpus']} CPUs, torch {machine['torch']}"
        )
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "seconds" not in row:
        return ["failed"]
    seconds, speed = row["seconds"], row["codec_ns_per_element"]
    return [
        f"{seconds['median']:.2f}",
        f"{seconds['min']:.2f}-{seconds['max']:.2f}",
        f"{row['times_faster']['median']:.2f}",
        *("-" if row[name] is None else f"{row[name] / 1e6:.2f}" for name in ("nic_bytes", "payload_bytes")),
        f"{row['formula_bytes'] / 1e6:.2f}",
        f"{row['ratio']:.1f}",
        "-" if row["times_wire"] is None else f"{row['times_wire']:.2f}",
        f"{row['error']:.2g}",
        "-" if speed is None else f"{4 / speed['encode']:.1f}/{4 / speed['decode']:.1f}",
    ]
