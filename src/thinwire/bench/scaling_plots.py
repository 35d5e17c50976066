"""Both figures of `thinwire bench scaling`, and its page."""

import base64
import html
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.bench.plots import STYLE, colours, require_matplotlib
from thinwire.bench.report import page
from thinwire.bench.scaling import BASE, less_communication, remarks
from thinwire.bench.table import label, rate_text

Row = Mapping[str, Any]

PAPER = (
    "ideal efficiency without compression on 8 hosts: 100 % for ResNet-50, 40.4 % for VGG16",
    "VGG16: random-k takes 79.0 % off the communication",
    "ResNet-50: compression takes at most 11.1 % off the communication, and 16 bits add to it",
    "BERT-large: 56.1 % more throughput with top-k than without compression (BERT-base: 30.9 %)",
)
"""What the paper reports, on hosts of 8 V100s with 25 Gbit/s each."""

HEADINGS = ("workload", "hosts", "method", "step s", "communication s", "less", "efficiency", "ideal", "limit")

_CAPTIONS = {
    "breakdown": (
        "What a step is made of",
        "Computing is the step on one host. Communication is what more hosts add to it, compression included. Its "
        "hatched part is there without any exchange, as the hosts share this machine's cores. Black: the ideal step, "
        "which hides as much of its bytes' time on the wire behind backward as fits.",
    ),
    "efficiency": (
        "Scaling efficiency",
        "Solid: time on one host over time on several. Dotted: the ideal of the same method, from its bytes and the "
        "measured rate. Hollow: this machine's cores were the limit, not the wire.",
    ),
}


def cells(rows: Sequence[Row], row: Row) -> list[str]:
    """Return a row of the table, under `HEADINGS`."""
    less = less_communication(rows, row)
    return [
        row["workload"],
        str(row["nodes"]),
        row["method"],
        f"{row['step_s']:.3f}",
        f"{row['communication_s']:.3f}" if row["nodes"] > 1 else "–",
        "–" if less is None else f"{100 * less:.1f} %",
        f"{100 * row['efficiency']:.1f} %",
        f"{100 * row['ideal_efficiency']:.1f} %",
        row["bound"],
    ]


def draw(document: Mapping[str, Any]) -> dict[str, bytes]:
    """Return both figures as PNG images, by name."""
    matplotlib = require_matplotlib()
    with matplotlib.rc_context(STYLE):
        return {"breakdown": _breakdown(document["rows"]), "efficiency": _efficiency(document["rows"])}


def write_page(document: Mapping[str, Any], folder: Path) -> Path:
    """Write ``scaling.html``, the figures as PNG files and ``results.json`` into `folder`; return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    figures: list[str] = []
    for name, image in draw(document).items():
        (folder / f"{name}.png").write_bytes(image)
        heading, caption = _CAPTIONS[name]
        data = base64.b64encode(image).decode()
        figures.append(
            f'<figure class="full"><h2>{heading}</h2><figcaption class="soft">{caption}</figcaption>'
            f'<img alt="{heading}" src="data:image/png;base64,{data}"></figure>'
        )
    (folder / "results.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    heads = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
    lines = "".join(
        f'<tr class="{"peer" if row["method"] == BASE else "own"}">'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(document["rows"], row))
        + "</tr>"
        for row in document["rows"]
    )
    body = [
        "<h1>Scaling</h1>",
        f'<p class="soft">{html.escape(network_line(document))}</p>',
        '<div class="plots">',
        *figures,
        "</div>",
        f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>',
        f"<p class='soft'>Less: of the communication of {BASE} on as many hosts. Limit: what decides the step.</p>",
        "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in remarks(document)) + "</ul>",
        "<h2>In the paper</h2>",
        "<p class='soft'>Zhong, Xie, Zheng and Lin 2021, on hosts of 8 V100s with 25 Gbit/s each:</p>",
        "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in PAPER) + "</ul>",
        "<footer>Numbers: results.json.</footer>",
    ]
    written = folder / "scaling.html"
    written.write_text(page("Scaling", body), encoding="utf-8")
    return written


def network_line(document: Mapping[str, Any]) -> str:
    """One sentence about the network and the machine."""
    conditions = document["conditions"]
    rate = "no limit" if conditions["rate_bps"] is None else f"{rate_text(conditions['rate_bps'])} each way"
    latency = f", {conditions['latency_s'] * 1e3:g} ms one way" if conditions["latency_s"] else ""
    return (
        f"Emulated hosts, {rate}{latency}, on {conditions['cores']} cores of {conditions['processor']}; computing is "
        f"slept, gradients are made up. Medians of {conditions['steps']} steps."
    )


def _panels(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for workload, some in itertools.groupby(rows, lambda row: row["workload"]):
        yield workload, list(some)


def _most_compared(nodes: Sequence[int]) -> int:
    """Return the number of hosts that comes most often; of several, the largest."""
    counts = Counter(nodes)
    return max(counts, key=lambda number: (counts[number], number))


def _breakdown(rows: Sequence[Row]) -> bytes:
    """A panel per workload, with the hosts on which most methods were measured; a bar per method."""
    panels = [
        (f"{workload.removeprefix('replay:')}, {nodes} hosts", [row for row in some if row["nodes"] == nodes])
        for workload, some in _panels(rows)
        if (nodes := _most_compared([row["nodes"] for row in some])) > 1
    ]
    if not panels:
        return _empty("only one host was measured")
    figure, all_axes = _figure(11, 1.1 + sum(0.7 + 0.32 * len(some) for _, some in panels), len(panels), 1)
    for axes, (title, some) in zip(all_axes, panels, strict=True):
        names = [label(row) for row in some]
        computing = [row["one_host_s"] for row in some]
        communication = [max(0.0, row["communication_s"]) for row in some]
        shared = [
            min(whole, max(0.0, row["compute_s"] - row["one_host_s"]))
            for row, whole in zip(some, communication, strict=True)
        ]
        rest = [whole - part for whole, part in zip(communication, shared, strict=True)]
        starts = [a + b for a, b in zip(computing, shared, strict=True)]
        axes.barh(names, computing, height=0.62, color="#4f93ce", label="computing, as on one host")
        axes.barh(
            names, shared, left=computing, height=0.62, color="#d1495b", hatch="////", edgecolor="#ffffff", linewidth=0,
            label="communication: there without exchange, cores being shared",
        )  # fmt: skip
        axes.barh(names, rest, left=starts, height=0.62, color="#d1495b", label="communication")
        ideal = [(row["forward_s"] + row["backward_s"]) / row["ideal_efficiency"] for row in some]
        axes.plot(ideal, range(len(some)), "|", color="#1f2328", markersize=15, markeredgewidth=2, label="ideal step")
        ends = [max(a, row["step_s"]) for a, row in zip(ideal, some, strict=True)]
        for index, row in enumerate(some):
            limit = ", cores are the limit" if row["bound"] == "cores" else ""
            axes.text(ends[index], index, f"  {row['step_s']:.2f} s{limit}", va="center", fontsize=9, color="#1f2328")
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, max(ends) * 1.25)
        axes.set_title(title, loc="left", fontsize=10)
    all_axes[-1].set_xlabel("seconds of a step")
    handles, names = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4)
    return _png(figure)


def _efficiency(rows: Sequence[Row]) -> bytes:
    """A panel per workload: efficiency against hosts, measured and ideal."""
    panels = list(_panels(rows))
    figure, all_axes = _figure(max(5.0, 3.9 * len(panels)), 4.4, 1, len(panels))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    shown = colours([{"method": method} for method in methods])
    for axes, (workload, some) in zip(all_axes, panels, strict=True):
        for method, colour in zip(methods, shown, strict=True):
            points = [row for row in some if row["method"] == method or row["nodes"] == 1]
            if not any(row["method"] == method for row in points):
                continue
            hosts = [row["nodes"] for row in points]
            axes.plot(hosts, [100 * row["efficiency"] for row in points], "-", color=colour, label=label(points[-1]))
            axes.plot(hosts, [100 * row["ideal_efficiency"] for row in points], ":", color=colour)
            for row in points:
                fill = "#ffffff" if row["bound"] == "cores" else colour
                axes.plot(row["nodes"], 100 * row["efficiency"], "o", color=colour, markerfacecolor=fill, markersize=6)
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            sorted({row["nodes"] for row in some}), labels=sorted({str(row["nodes"]) for row in some}, key=int)
        )
        axes.set_ylim(0, 105)
        axes.set_xlabel("hosts")
        axes.set_title(workload.removeprefix("replay:"), loc="left", fontsize=10)
    all_axes[0].set_ylabel("scaling efficiency, % (dotted: ideal)")
    fullest = max(all_axes, key=lambda axes: len(axes.get_legend_handles_labels()[0]))
    handles, names = fullest.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 2 * len(panels)))
    return _png(figure)


def _figure(width: float, height: float, rows: int, columns: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _empty(why: str) -> bytes:
    figure, (axes,) = _figure(6, 1.5, 1, 1)
    axes.set_axis_off()
    axes.text(0.5, 0.5, why, ha="center")
    return _png(figure)


def _png(figure: Any) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=160)
    return image.getvalue()
