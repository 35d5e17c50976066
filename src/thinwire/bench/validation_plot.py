"""The scatter plot of `thinwire bench validate`: predicted against measured step times."""

import io
from collections.abc import Mapping
from typing import Any

from thinwire.bench.plots import STYLE, require_matplotlib

_COLOURS = ("#1f2328", "#7d8590", "#0969da", "#1a9f77", "#d1495b", "#8250df", "#e0812b")
_MARKERS = ("o", "s", "^", "D", "v")


def scatter(document: Mapping[str, Any]) -> bytes:
    """Return a PNG: a point per method and cell; colours are methods, shapes workloads."""
    matplotlib = require_matplotlib()
    rows = document["cells"]
    names, workloads = (list(dict.fromkeys(row[key] for row in rows)) for key in ("recipe", "workload"))
    times = [1e3 * row[key] for row in rows for key in ("predicted_s", "measured_s")]
    ends = [0.8 * min(times), 1.25 * max(times)]
    with matplotlib.rc_context(STYLE):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 6.0), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(ends, ends, color="#8c959f", linewidth=1)
        axes.fill_between(ends, [0.85 * x for x in ends], [1.15 * x for x in ends], color="#e6e9ec", linewidth=0)
        for name, colour in zip(names, _COLOURS * len(names), strict=False):
            for workload, marker in zip(workloads, _MARKERS * len(workloads), strict=False):
                some = [row for row in rows if (row["recipe"], row["workload"]) == (name, workload)]
                x, y = ([1e3 * row[key] for row in some] for key in ("measured_s", "predicted_s"))
                axes.scatter(x, y, s=26, color=colour, marker=marker, alpha=0.85, label=f"{name}, {workload}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(*ends)
        axes.set_ylim(*ends)
        axes.set_xlabel("measured step, ms (grey: 15 % either way)")
        axes.set_ylabel("predicted step, ms")
        axes.legend(fontsize=7, loc="upper left")
        image = io.BytesIO()
        figure.savefig(image, dpi=160)
    return image.getvalue()
