"""A benchmark's report: one HTML page that needs nothing else, and the same plots and numbers as files."""

import base64
import html
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from thinwire.bench.plots import make_plots
from thinwire.bench.table import Run, columns, is_baseline, label, network_line, notes, rate_text, rows

_CAPTIONS = {
    "loss-against-time": (
        "Loss against time",
        "Every method gets the same seconds; time for evaluation is not counted.",
    ),
    "loss-against-steps": ("Loss against steps", "What compression costs in accuracy, step for step."),
    "loss-against-bytes": ("Loss against bytes", "How far each method gets for what one host has sent."),
    "step-time": (
        "Where the step's time goes",
        "Forward, backward and optimizer are measured with all hosts running and nothing exchanged, right after each "
        "method's training. Exposed exchange is what the step takes beyond that. The ideal step hides the exchange as "
        "far as wire and cores allow.",
    ),
    "bytes-per-step": ("Bytes of a step", "Payload that one host sends in a step."),
}

_FULL_WIDTH = ("step-time", "bytes-per-step")

CSS = """
:root { color-scheme: light; --ink: #1f2328; --soft: #57606a; --line: #d8dee4; --blue: #0969da; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.5rem 3rem; max-width: 76rem; color: var(--ink); background: #fff;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .3rem; }
.lead { margin-top: 1.2rem; }
p { margin: .4rem 0; max-width: 52rem; } .soft { color: var(--soft); }
.banner { background: #fff8c5; border: 1px solid #d4a72c; border-radius: 6px; padding: .7rem 1rem; margin: 0 0 1.4rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.4rem 0 .4rem; }
.tile { border: 1px solid var(--line); border-radius: 8px; padding: .7rem 1.1rem; min-width: 11rem; flex: 1; }
.tile b { display: block; font-size: 1.7rem; line-height: 1.25; color: var(--blue); }
.tile span { color: var(--soft); font-size: .9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; margin: .8rem 0; width: 100%;
  font-variant-numeric: tabular-nums; }
th, td { padding: .38rem .5rem; text-align: right; border-bottom: 1px solid var(--line); }
td:first-child { white-space: nowrap; }
th { vertical-align: bottom; font-weight: 600; border-bottom: 2px solid var(--ink); }
th:first-child, td:first-child { text-align: left; }
tr.own td:first-child { font-weight: 600; color: var(--blue); }
.plots { display: grid; gap: 1rem 2rem; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); }
figure { margin: 0; } figure.full { grid-column: 1 / -1; } figure img { width: 100%; height: auto; margin-top: .5rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; font-size: .9rem; }
dt { color: var(--soft); } dd { margin: 0; }
ul { padding-left: 1.2rem; } footer { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: .8rem;
  font-size: .9rem; color: var(--soft); }
"""


def write_report(document: Mapping[str, Any], folder: Path) -> Path:
    """Write ``report.html``, the plots as PNG files and ``results.json`` into ``folder``; return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    plots = make_plots(document)
    for name, image in plots.items():
        (folder / f"{name}.png").write_bytes(image)
    (folder / "results.json").write_text(json.dumps(document, indent=1))
    page = folder / "report.html"
    page.write_text(make_page(document, plots), encoding="utf-8")
    return page


def make_page(document: Mapping[str, Any], plots: Mapping[str, bytes]) -> str:
    """The page as text, with its images inside."""
    conditions = document["conditions"]
    title = _title(conditions)
    banner = ""
    if not conditions["emulated"]:
        banner = f'<div class="banner"><b>No network was emulated.</b> {html.escape(network_line(conditions))}</div>'
    body = [
        banner,
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="soft">{html.escape(_subtitle(conditions))}</p>',
        _tiles(document),
        "<h2>All methods</h2>",
        _table(document),
        "".join(f'<p class="soft">{html.escape(line)}</p>' for line in notes(document)),
        '<div class="plots">',
        *(_figure(name, image) for name, image in plots.items()),
        "</div>",
        "<h2>How to read the columns</h2>",
        _definitions({column.heading: column.meaning for column in columns(document)}),
        "<h2>Conditions</h2>",
        _definitions(
            {name.replace("_", " "): _plain(value) for name, value in conditions.items() if value not in (None, "")}
        ),
        f"<footer>{html.escape(network_line(conditions))} Numbers: results.json.</footer>",
    ]
    return page(title, body)


def page(title: str, body: Iterable[str]) -> str:
    """Return a page that needs nothing else, in the reports' style."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{CSS}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _title(conditions: Mapping[str, Any]) -> str:
    if not conditions["emulated"]:
        return f"Gradient exchange on {conditions['nodes']} processes over loopback"
    rate = f" at {rate_text(conditions['rate_bps'])}" if conditions["rate_bps"] else ""
    return f"Gradient exchange on {conditions['nodes']} hosts{rate}"


def _subtitle(conditions: Mapping[str, Any]) -> str:
    text = f"{conditions['model']}, {conditions['num_parameters'] / 1e6:.1f} M parameters, on {conditions['data']}"
    if "data_nbytes" in conditions:
        text += (
            f" ({conditions['data_nbytes'] / 1e6:.1f} MB, {conditions['held_out_nbytes'] / 1e6:.2f} MB of it held out)"
        )
    if conditions["seconds_per_method"] is not None:
        text += f"; {conditions['seconds_per_method']:g} seconds of training for each method"
    return text + ". " + (network_line(conditions) if conditions["emulated"] else "")


def _tiles(document: Mapping[str, Any]) -> str:
    """The result in a few numbers: thinwire's best run beside plain DDP."""
    runs = document["runs"]
    dense = next((run for run in runs if run["method"] in ("ddp", "fsdp")), None)
    best = best_run(runs)
    if dense is None or best is None:
        return ""
    fewer = dense["planned_nbytes_per_step"] / best["planned_nbytes_per_step"]
    tiles = [(f"{fewer:.1f}×", f"fewer bytes than {label(dense)}")]
    if document["conditions"]["emulated"]:
        tiles.insert(
            0,
            (
                f"{dense['step_s'] / best['step_s']:.1f}×",
                f"steps per second: {dense['step_s']:.2f} s → {best['step_s']:.2f} s",
            ),
        )
        if best["val_loss"] is not None and dense["val_loss"] is not None:
            when = "the same steps" if document["conditions"]["seconds_per_method"] is None else "the same seconds"
            tiles.append(
                (f"{best['val_loss']:.2f}", f"validation loss after {when}; {label(dense)}: {dense['val_loss']:.2f}")
            )
    elif best["val_loss"] is not None and dense["loss_at_equal_steps"] is not None:
        tiles.append(
            (
                f"{best['loss_at_equal_steps']:.2f}",
                f"loss after {best['equal_steps']} steps; {label(dense)}: {dense['loss_at_equal_steps']:.2f}",
            )
        )
    cells = "".join(
        f'<div class="tile"><b>{html.escape(big)}</b><span>{html.escape(small)}</span></div>' for big, small in tiles
    )
    lead = f'<p class="lead">Best of thinwire here: <b>{html.escape(label(best))}</b></p>'
    return f'{lead}<div class="tiles">{cells}</div>'


def best_run(runs: list[Run]) -> Run | None:
    """The thinwire run with the lowest validation loss; where nothing learns, with the shortest step."""
    own = [run for run in runs if not is_baseline(run) and run["seed"] == runs[0]["seed"]]
    learned = [run for run in own if run["val_loss"] is not None]
    if learned:
        return min(learned, key=lambda run: run["val_loss"])
    return min(own, key=lambda run: run["step_s"], default=None)


def _table(document: Mapping[str, Any]) -> str:
    heads = "".join(
        f'<th title="{html.escape(column.meaning)}">{html.escape(column.heading)}</th>' for column in columns(document)
    )
    lines = []
    for run, row in zip(document["runs"], rows(document), strict=True):
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        lines.append(f'<tr class="{"peer" if is_baseline(run) else "own"}">{cells}</tr>')
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _figure(name: str, image: bytes) -> str:
    heading, caption = _CAPTIONS[name]
    width = "full" if name in _FULL_WIDTH else "half"
    data = base64.b64encode(image).decode()
    return (
        f'<figure class="{width}"><h2>{heading}</h2><figcaption class="soft">{caption}</figcaption>'
        f'<img alt="{heading}" src="data:image/png;base64,{data}"></figure>'
    )


def _definitions(items: Mapping[str, object]) -> str:
    entries = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(str(text))}</dd>" for name, text in items.items())
    return f"<dl>{entries}</dl>"


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
