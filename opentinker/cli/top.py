"""`opentinker top`: the cluster at a glance."""

import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from opentinker.cli.common import (
    DEFAULT_STATE_DIR,
    JsonOption,
    KeyOption,
    StateDirOption,
    UrlOption,
    ago,
    amount,
    connected,
    out,
    plain_table,
    print_json,
    state_text,
)
from opentinker.cli.live import repeat, show

PERIOD_S = 2.0
GIB = 2**30
BARS = "▁▂▃▄▅▆▇█"
WIDE = 100


def top(
    once: Annotated[bool, typer.Option("--once", help="Show it once and return.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = PERIOD_S,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Show nodes, what is free, who holds what, how busy the GPUs are, and who waits for what. Ctrl-C ends it.

    Of other users' jobs only the owner and the amounts are shown, unless you are an administrator. --json prints one
    document per look.
    """
    with connected(url, key, state_dir) as client:
        height = None if once or not out.is_terminal else out.height
        period_s = None if once else every
        if as_json:
            repeat(client.cluster, lambda cluster: print_json({"at": time.time(), **cluster}), period_s)
        else:
            show(client.cluster, lambda c: cluster_screen(c, client.url, time.time(), out.width, height), period_s)


def cluster_screen(cluster: dict[str, Any], url: str, now: float, width: int, height: int | None) -> RenderableType:
    """All of it in `width` columns; with a `height`, the lists are cut to fit."""
    nodes = cluster["nodes"]
    held = [(node, entry) for node in nodes for entry in node["held"]]
    queue = cluster["queue"]
    room = None if height is None else max(2, height - 10 - len(nodes))
    shown = len(held) if room is None else min(len(held), max(1, room - min(len(queue), room // 2)))
    waiting = len(queue) if room is None else max(0, room - shown)
    parts: list[RenderableType] = [_summary(cluster, url, now), Text(), _nodes(nodes, width)]
    if held:
        parts += [Text(), _held(held[:shown], len(nodes) > 1, now, width), *_more(len(held) - shown)]
    if queue:
        parts += [Text(), _queue(queue[:waiting], now, width), *_more(cluster["queued"] - min(waiting, len(queue)))]
    return Group(*parts)


def _summary(cluster: dict[str, Any], url: str, now: float) -> Text:
    text = Text()
    for noun, total in (("GPUs", "gpus"), ("CPU slots", "cpu_slots")):
        has = sum(node[total] for node in cluster["nodes"])
        if has:
            free = sum(node[f"free_{total}"] for node in cluster["nodes"])
            text.append(f"{has - free:g}/{has:g} {noun} held   ", "bold")
    text.append(f"{cluster['running']} running", "green" if cluster["running"] else "")
    text.append("   ")
    text.append(f"{cluster['queued']} waiting", "yellow" if cluster["queued"] else "")
    text.append(f"   {url}   {time.strftime('%H:%M:%S', time.localtime(now))}", "dim")
    return text


def _nodes(nodes: Sequence[dict[str, Any]], width: int) -> Table:
    told = any(node["gpu_use"] for node in nodes)
    columns: list[tuple[str, dict[str, Any]]] = [("node", {"max_width": width // 4})]
    kinds = [(noun, key) for noun, key in (("GPUs", "gpus"), ("slots", "cpu_slots")) if any(n[key] for n in nodes)]
    columns += [(noun, {}) for noun, _ in kinds]
    if told:
        columns += [("busy", {}), ("GPU memory", {})]
    table = plain_table(*columns)
    for node in nodes:
        cells = [Text(_short(node))]
        cells += [_gauge(node[key] - node[f"free_{key}"], node[key]) for _, key in kinds]
        if told:
            cells += _use(node["gpu_use"])
        table.add_row(*cells)
    return table


def _gauge(held: float, has: float) -> Text:
    if not has:
        return Text("-", "dim")
    length = min(8, max(1, int(has)))
    full = round(length * held / has)
    return Text.assemble(("■" * full, "green"), ("□" * (length - full), "dim"), f" {held:g}/{has:g}")


def _use(gpus: Sequence[dict[str, Any]]) -> list[Text]:
    if not gpus:
        return [Text("-", "dim"), Text("-", "dim")]
    each = "".join(BARS[min(len(BARS) - 1, int(gpu["busy"] * len(BARS)))] for gpu in gpus)
    mean = sum(gpu["busy"] for gpu in gpus) / len(gpus)
    used, has = (sum(gpu[key] for gpu in gpus) / GIB for key in ("memory_used_bytes", "memory_bytes"))
    return [Text(f"{mean:4.0%} {each}"), Text(f"{used:.0f}/{has:.0f} GiB")]


def _held(held: Iterable[tuple[dict[str, Any], dict[str, Any]]], many_nodes: bool, now: float, width: int) -> Table:
    wide = width >= WIDE
    columns: list[tuple[str, dict[str, Any]]] = [("holds", {}), ("job", {}), ("state", {}), ("owner", {"max_width": 10})]
    columns += [("kind", {})] if wide else []
    columns += [("for", {"justify": "right"}), ("name", {"max_width": width // 6})]
    columns += [("node", {"max_width": width // 6})] if many_nodes else []
    table = plain_table(*columns)
    for node, entry in held:
        stopping = entry["server_state"] == "STOPPING"
        state = Text("UNHEALTHY" if entry["unhealthy"] else "STOPPING", "magenta") if stopping else state_text(entry)
        cells = [Text(amount(entry["gpus"], entry["cpu_slots"])), _job(entry), state, Text(entry["owner"])]
        cells += [Text(entry["kind"])] if wide else []
        cells += [Text(ago(entry["since"], now)), Text(entry["name"])]
        cells += [Text(_short(node))] if many_nodes else []
        table.add_row(*cells)
    return table


def _queue(queue: Iterable[dict[str, Any]], now: float, width: int) -> Table:
    table = plain_table(
        ("needs", {}),
        ("job", {}),
        ("owner", {"max_width": 10}),
        ("for", {"justify": "right"}),
        *([("name", {"max_width": width // 5})] if width >= WIDE else []),
        ("waits for", {"no_wrap": False, "overflow": "fold"}),
    )
    for entry in queue:
        cells = [Text(amount(entry["gpus"], entry["cpu_slots"])), _job(entry), Text(entry["owner"])]
        cells += [Text(ago(entry["since"], now))]
        cells += [Text(entry["name"])] if width >= WIDE else []
        table.add_row(*cells, Text(entry["waiting_for"]))
    return table


def _short(node: dict[str, Any]) -> str:
    """A host's name without its domain; an address as it is."""
    name = str(node["name"] or node["id"][:12])
    return name if name[:1].isdigit() else name.partition(".")[0]


def _job(entry: dict[str, Any]) -> Text:
    return Text(entry["job"]) if entry["job"] else Text("-", "dim")


def _more(number: int) -> list[Text]:
    return [Text(f"and {number} more", "dim")] if number > 0 else []
