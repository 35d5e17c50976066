"""The page of `thinwire advise`: the ranked table, where time goes, and step times against the network's rate."""

import base64
import html
import io
import itertools
from pathlib import Path
from typing import Any

from thinwire.advisor.advise import DENSE, Report, describe_profile, sweep
from thinwire.advisor.lines import HEADINGS, cells, sections
from thinwire.advisor.profile import Profile
from thinwire.bench.plots import STYLE, require_matplotlib
from thinwire.bench.report import CSS

FACTORS = tuple(2.0**exponent for exponent in range(-5, 6))
_GREYS = ("#1f2328", "#7d8590", "#b08800")
_COLOURS = ("#0969da", "#1a9f77", "#d1495b", "#8250df", "#e0812b", "#17a2b8", "#bf3989")


def write_page(report: Report, profile: Profile, path: Path) -> None:
    """Write one HTML file that needs nothing else."""
    matplotlib = require_matplotlib()
    with matplotlib.rc_context(STYLE):
        plots = {
            "Where a step's time goes": _bars(report, profile),
            "Step time against the network's rate": _against_rate(report, profile),
        }
    path.write_text(_page(report, profile, plots), encoding="utf-8")


def _colours(report: Report) -> dict[str, str]:
    greys, bright = itertools.cycle(_GREYS), itertools.cycle(_COLOURS)
    exact = {plan.recipe for plan in report.plans if plan.recipe.startswith(DENSE) or plan.recipe == "fp16"}
    return {plan.recipe: next(greys) if plan.recipe in exact else next(bright) for plan in report.plans}


def _bars(report: Report, profile: Profile) -> bytes:
    figure, axes = _figure(7.6, 0.36 * len(report.plans) + 1.3)
    names = [plan.recipe for plan in report.plans]
    computing = [1e3 * (plan.step_s - plan.exposed_comm_s) for plan in report.plans]
    exposed = [1e3 * plan.exposed_comm_s for plan in report.plans]
    axes.barh(names, computing, color="#8c959f", label="computing")
    axes.barh(names, exposed, left=computing, color="#d1495b", label="exposed exchange")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("predicted step, ms")
    axes.legend(loc="lower right")
    return _png(figure)


def _against_rate(report: Report, profile: Profile) -> bytes:
    figure, axes = _figure(7.6, 4.4)
    colours = _colours(report)
    lines = sweep(profile, [plan.recipe for plan in report.every_step], FACTORS)
    for recipe, points in lines.items():
        rates, seconds = [8e-6 * rate for rate, _ in points], [1e3 * step_s for _, step_s in points]
        axes.plot(rates, seconds, color=colours[recipe], label=recipe, linewidth=1.6)
    axes.axvline(8e-6 * profile.cluster.between.beta, color="#8c959f", linestyle=":", label="this network")
    axes.axhline(1e3 * profile.computation.compute_s, color="#8c959f", linestyle="--", label="computing alone")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("between hosts, Mbit/s of payload")
    axes.set_ylabel("predicted step, ms")
    axes.legend(loc="upper right", fontsize=8, ncols=2)
    return _png(figure)


def _page(report: Report, profile: Profile, plots: dict[str, bytes]) -> str:
    rows = "".join(
        f"<tr{' class=own' if plan.recipe == report.best.recipe else ''}>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(plan))
        + "</tr>"
        for plan in report.plans
    )
    headings = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
    titles = {"left out": "Left out", "assumed": "What is assumed", "first": "Before compressing"}
    lists = "".join(
        f"<h2>{titles[name]}</h2><ul>{''.join(f'<li>{html.escape(text)}</li>' for text in sentences)}</ul>"
        for name, sentences in sections(report)
        if sentences
    )
    figures = "".join(
        f'<figure><h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{base64.b64encode(image).decode()}">'
        "</figure>"
        for title, image in plots.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Does compression pay?</title>'
        f"<style>{CSS} td:last-child, th:last-child {{ text-align: left; }}</style></head><body>"
        f"<h1>{html.escape(report.verdict)}</h1><p class=soft>{html.escape(describe_profile(profile))}</p>"
        f"<div class=wide><table><tr>{headings}</tr>{rows}</table></div>{figures}{lists}"
        "<footer>Predicted by simulating a step, not measured. x DDP and x 16 bit: how many times as fast as plain "
        "DDP, and as the faster of two ways to send 16 bits, each with the bucket size that suits it.</footer>"
        "</body></html>"
    )


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _png(figure: Any) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, dpi=160)
    return image.getvalue()
