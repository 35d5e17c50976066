"""Sweeps as pictures and as a page."""

import base64
import html
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.advisor.whatif import BASELINE, Sweep
from thinwire.bench.plots import STYLE, require_matplotlib
from thinwire.bench.report import page

_GREYS = {"dense": "#1f2328", BASELINE: "#7d8590", "DDP, 16 bits": "#7d8590"}
_COLOURS = ("#0969da", "#1a9f77", "#d1495b", "#8250df", "#e0812b", "#17a2b8")
_LABELS = {"dense": "DDP, 32 bits", BASELINE: "DDP, 16 bits"}


def draw(sweep: Sweep) -> bytes:
    """Return one sweep as a PNG image."""
    matplotlib = require_matplotlib()
    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.subplots()
        colours = iter(_COLOURS * (len(sweep.curves) // len(_COLOURS) + 1))
        for curve in sweep.curves:
            grey = _GREYS.get(curve.label)
            points = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                "--" if grey else "-",
                color=grey or next(colours),
                linewidth=1.8,
                label=_LABELS.get(curve.label, curve.label),
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        if sweep.marked is not None:
            axes.axvline(sweep.marked, color="#b08800", linewidth=1.6, linestyle=":", zorder=1)
        x = [x for curve in sweep.curves for x in curve.x]
        whole = all(value == int(value) for value in x) and len(set(x)) <= 12
        if whole:
            axes.xaxis.set_major_locator(matplotlib.ticker.FixedLocator(sorted(set(x))))
            axes.xaxis.set_minor_locator(NullLocator())
        else:
            narrow = max(x) / min(x) < 100
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,), numticks=12))
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, sweep.x_name)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel(sweep.x_name)
        axes.set_ylabel(sweep.y_name)
        figure.legend(loc="outside lower center", ncols=min(len(sweep.curves), 5))
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=160)
        return buffer.getvalue()


def number(value: float, name: str) -> str:
    """Return a number of an axis as people write it.

    >>> number(2.5e9, "bit/s of each host"), number(0.002, "seconds one way"), number(3.0, "hosts")
    ('2.5 G', '2 ms', '3')
    """
    if name.startswith("bit/s"):
        unit, size = next((u, s) for u, s in (("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0)) if value >= s or s == 1.0)
        return f"{value / size:.3g} {unit}".rstrip()
    if name.startswith("seconds"):
        unit, size = next((u, s) for u, s in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if value >= s or s == 1e-6)
        return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def quantity(value: float, name: str) -> str:
    """Return a number with the name of its axis.

    >>> quantity(2.5e9, "bit/s of each host"), quantity(0.002, "seconds one way"), quantity(3.0, "hosts")
    ('2.5 Gbit/s of each host', '2 ms one way', '3 hosts')
    """
    if name.startswith("bit/s"):
        return number(value, name) + name
    return f"{number(value, name)} {name.removeprefix('seconds ')}"


def write_page(document: Mapping[str, Any], sweeps: Sequence[Sweep], lines: Sequence[str], folder: Path) -> Path:
    """Write ``whatif.html``, its pictures as PNG files and ``results.json`` into `folder`; return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    figures: list[str] = []
    for sweep in sweeps:
        image = draw(sweep)
        (folder / f"{sweep.name}.png").write_bytes(image)
        data = base64.b64encode(image).decode()
        figures.append(
            f'<figure class="half"><h2>{html.escape(sweep.title)}</h2><figcaption class="soft">'
            f'{html.escape(sweep.note)}</figcaption><img alt="{html.escape(sweep.title)}" '
            f'src="data:image/png;base64,{data}"></figure>'
        )
    title = f"What if: {document['conditions']['model']}"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        "<p class='soft'>Predicted, not measured. The dotted line is the profile itself.</p>",
        "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>",
        '<div class="plots">',
        *figures,
        "</div>",
        "<footer>Numbers: results.json.</footer>",
    ]
    (folder / "results.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    written = folder / "whatif.html"
    written.write_text(page(title, body), encoding="utf-8")
    return written
