"""The picture of a replay: error against bits per element, one point per recipe, a colour per family."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.bench.plots import STYLE, require_matplotlib

# Colours that colour-blind readers can tell apart, with markers for when there are more families than colours.
_COLOURS = ("#0969da", "#d1495b", "#1a9f77", "#8250df", "#e0812b", "#17a2b8", "#b08800", "#1f2328")
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")
_GREY = "#b6bec7"
_EXACT = 1e-12  # below it only float32's rounding of sums is left

_PANELS = (
    ("encode_error", "one encode, without feedback"),
    ("sum_error", "mean over {num_ranks} ranks, summed over {num_steps} steps, with feedback where it has it"),
)

Point = tuple[float, float]


def draw(document: Mapping[str, Any], path: Path, *, family: str | None = None) -> None:
    """Write the picture of a replay's document.

    Args:
        document: as ``thinwire replay --json`` writes it.
        path: a .png or .svg file.
        family: name this one's points, show where they lie, and leave the others grey; None shows and names all.
    """
    matplotlib = require_matplotlib()
    style = {**STYLE, "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "thinwire", "axes.titlesize": 10}
    with matplotlib.rc_context(style):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(13, 5.4) if family else (14, 8), layout="constrained")
        conditions = document["conditions"]
        for axes, (key, title) in zip(figure.subplots(1, 2), _PANELS, strict=True):
            _panel(axes, document["rows"], key, family)
            axes.set_title(
                title.format(num_ranks=conditions["num_ranks"], num_steps=len(conditions["steps"])), loc="left"
            )
        figure.axes[0].set_ylabel("squared error / squared norm")
        handles = [
            figure.axes[0].scatter([], [], s=36, color=colour, marker=marker, label=name.replace("_", " "))
            for name, (colour, marker) in _marks(document["rows"]).items()
            if family in (None, name)
        ]
        if family is not None:
            handles.append(figure.axes[0].scatter([], [], s=20, color=_GREY, label="other families"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
        figure.draw_without_rendering()  # places the axes, which labels need
        for axes, (key, _) in zip(figure.axes, _PANELS, strict=True):
            named = [row for row in document["rows"] if family in (None, row["family"])]
            _name(axes, _points(document["rows"], key), _points(named, key))
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=110, metadata=metadata)


def _panel(axes: Any, rows: Sequence[Mapping[str, Any]], key: str, family: str | None) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for name, (colour, marker) in _marks(rows).items():
        points = list(_points([row for row in rows if row["family"] == name], key).values())
        if not points:
            continue
        shown = family in (None, name)
        axes.scatter(
            *zip(*points, strict=True),
            s=36 if shown else 20,
            color=colour if shown else _GREY,
            marker=marker if shown else "o",
            zorder=3 if shown else 2,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.15, y=0.08)
    near = list(_points([row for row in rows if row["family"] == family], key).values())
    if near:  # else the whole picture
        (left, bottom), (right, top) = map(min, zip(*near, strict=True)), map(max, zip(*near, strict=True))
        axes.set_xlim(left / 2.5, right * 2.5)
        axes.set_ylim(bottom / 8, top * 8)
    axes.set_xlabel("bits per element that a rank sends")


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, Point]:
    """Where each recipe lies; exact ones have no place on a logarithmic axis."""
    return {
        row["recipe"]: (row["bits_per_element"], row[key]) for row in rows if row[key] is not None and row[key] > _EXACT
    }


def _marks(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    families = dict.fromkeys(row["family"] for row in rows)
    return {name: (_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)]) for i, name in enumerate(families)}


# Where a label may stand, in points from its own point: the nearest free place is taken.
_OFFSETS = [
    (x * far, y * far)
    for far in (1.0, 1.8, 2.8, 4.0, 5.5, 7.5)
    for x, y in ((7, 0), (-7, 0), (5, 7), (5, -7), (-5, 7), (-5, -7), (0, 9), (0, -9))
]
_APART = 6.0  # points between which two marks are told apart, in 1/72 inch


def _name(axes: Any, everyone: Mapping[str, Point], named: Mapping[str, Point]) -> None:
    """Write names beside their points, where they cover neither points nor each other.

    Points that lie on one another have their names one below the other.
    """
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    pixels = axes.figure.dpi / 72
    inside = axes.get_window_extent()
    places = {recipe: axes.transData.transform(point) for recipe, point in everyone.items()}
    half = 4 * pixels
    taken = [Bbox.from_bounds(x - half, y - half, 2 * half, 2 * half) for x, y in places.values()]
    for recipes in _clusters({recipe: places[recipe] for recipe in named}, _APART * pixels):
        for x, y in _OFFSETS:
            label = axes.annotate(
                "\n".join(recipes),
                named[recipes[0]],
                xytext=(x, y),
                textcoords="offset points",
                ha="left" if x > 0 else "right" if x < 0 else "center",
                va="center" if y == 0 else "bottom" if y > 0 else "top",
                fontsize=8,
                linespacing=1.1,
                arrowprops={"arrowstyle": "-", "color": "#8c959f", "lw": 0.8, "shrinkA": 1, "shrinkB": 4},
            )
            if abs(x) + abs(y) < 15:  # near enough to need no line
                label.arrow_patch.set_visible(False)
            label.get_window_extent()  # places it
            box = Text.get_window_extent(label).padded(pixels)  # without its line
            if inside.contains(*box.min) and inside.contains(*box.max) and not any(map(box.overlaps, taken)):
                taken.append(box)
                break
            label.remove()


def _clusters(places: Mapping[str, Sequence[float]], apart: float) -> list[list[str]]:
    """Put points that nearly coincide together, the lowest first."""
    clusters: list[list[str]] = []
    for recipe, (x, y) in sorted(places.items(), key=lambda item: (item[1][1], item[0])):
        for cluster in clusters:
            first = places[cluster[0]]
            if abs(first[0] - x) < apart and abs(first[1] - y) < apart:
                cluster.append(recipe)
                break
        else:
            clusters.append([recipe])
    return clusters
