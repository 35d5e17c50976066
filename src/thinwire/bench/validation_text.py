"""The figures of `thinwire bench validate` as sentences, and as tables in Markdown."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from thinwire.advisor.findings import rate_text, time_text
from thinwire.bench.validation_figures import CROSSOVER, LOSS, MEDIAN, P90

_LIMITS = {
    "median_error": f"median error at most {100 * MEDIAN:g} % or the floor",
    "p90_error": f"90th percentile at most {100 * P90:g} % or twice the floor",
    "winners": f"the predicted winner at most {100 * LOSS:g} % or the floor slower than the measured one",
    "crossovers": f"cross-over bandwidths within {100 * CROSSOVER:g} %",
}


def summary(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the figures say together."""
    yield (
        f"error: median {_percent(document['median_error'])}, 90th percentile {_percent(document['p90_error'])}; "
        f"floor: median {_percent(document['median_floor'])}"
    )
    for one in document["winners"]:
        if one["predicted"] != one["measured"]:
            yield (
                f"{one['workload']}, {one['nodes']} hosts, {rate_text(one['rate_bps'] / 8)}: predicted "
                f"{one['predicted']}, {_percent(one['loss'])} slower than {one['measured']}"
            )
    for one in document["crossovers"]:
        yield (
            f"{one['workload']}, {one['nodes']} hosts: {one['recipe']} and {one['baseline']} take equally long at "
            f"{rate_text(one['measured_bps'] / 8)}, predicted {_crossing(one)}"
        )
    for name, holds in document["held"].items():
        yield f"{'holds' if holds else 'DOES NOT HOLD'}: {_LIMITS[name]}"


def markdown(document: Mapping[str, Any]) -> str:
    """Return a table of errors by cell and method, one of cross-overs, and the summary."""
    methods = list(dict.fromkeys(row["recipe"] for row in document["cells"]))
    table = [["workload", "hosts", "rate", *methods, "floor", "fastest", "predicted to be"]]
    cells = itertools.groupby(document["cells"], lambda row: (row["workload"], row["nodes"], row["rate_bps"]))
    for ((workload, nodes, rate), rows), winner in zip(cells, document["winners"], strict=True):
        found = {row["recipe"]: row for row in rows}
        floor = next(iter(found.values()))["floor"]
        place = [f"`{workload}`", str(nodes), rate_text(rate / 8)]
        both = [f"`{winner[key]}`" for key in ("measured", "predicted")]
        table.append([*place, *(_both(found.get(method)) for method in methods), _percent(floor), *both])
    parts = ["Measured step, and how far the prediction is from it:", _table(table)]
    if document["crossovers"]:
        crossings = [["workload", "hosts", "equally fast", "measured at", "predicted at"]]
        for one in document["crossovers"]:
            place = [f"`{one['workload']}`", str(one["nodes"]), f"`{one['recipe']}`, `{one['baseline']}`"]
            crossings.append([*place, rate_text(one["measured_bps"] / 8), _crossing(one)])
        parts.append(_table(crossings))
    parts.append("\n".join(f"- {line}" for line in summary(document) if "take equally long" not in line))
    return "\n\n".join(parts) + "\n"


def _both(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{time_text(row['measured_s'])}, {100 * (row['predicted_s'] / row['measured_s'] - 1):+.0f} %"


def _crossing(one: Mapping[str, Any]) -> str:
    predicted = one["predicted_bps"]
    return "nowhere" if predicted is None else rate_text(predicted / 8)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"|{' --- |' * len(rows[0])}", *body])
