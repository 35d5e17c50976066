r"""What the rows of `thinwire bench validate` say together, and whether that is good enough.

Over all methods of all cells, with p predicted and m measured seconds of a step:

    error  = |p / m - 1|
    floor  = |m / m' - 1| of one method that runs twice in a cell, as two methods: what no prediction can be better than
    loss   = how much slower than the fastest method of a cell the one is that was predicted to be
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from thinwire.bench.measure import median

SCHEMA = 2
MEDIAN, P90, LOSS, CROSSOVER = 0.07, 0.15, 0.05, 0.15
BASELINES = ("ddp", "ddp-fp16")

Row = Mapping[str, Any]


def make_document(cells: Sequence[Row], failed: Mapping[str, str]) -> dict[str, Any]:
    """Return the document of all rows; see docs/advise.md."""
    errors = sorted(abs(row["predicted_s"] / row["measured_s"] - 1) for row in cells)
    floors = [row["floor"] for row in cells]
    document = {
        "schema": SCHEMA,
        "cells": [dict(row) for row in cells],
        "median_error": median(errors) if errors else None,
        "p90_error": errors[min(len(errors) - 1, int(0.9 * len(errors)))] if errors else None,
        "median_floor": median(floors) if floors else None,
        "winners": winners(cells),
        "crossovers": list(crossovers(cells)),
        "failed": dict(failed),
    }
    return {**document, "held": held(document) if errors else {}}


def winners(cells: Sequence[Row]) -> list[dict[str, Any]]:
    """Return, by cell, which method was fastest, which was predicted to be, and what its choice costs."""
    found: list[dict[str, Any]] = []
    for key, rows in itertools.groupby(cells, lambda row: (row["workload"], row["nodes"], row["rate_bps"])):
        rows = list(rows)
        best, predicted = (min(rows, key=lambda row: row[name]) for name in ("measured_s", "predicted_s"))
        found.append(
            {
                **dict(zip(("workload", "nodes", "rate_bps"), key, strict=True)),
                "measured": best["recipe"],
                "predicted": predicted["recipe"],
                "loss": predicted["measured_s"] / best["measured_s"] - 1,
                "floor": best["floor"],
            }
        )
    return found


def crossovers(cells: Sequence[Row]) -> Iterator[dict[str, Any]]:
    r"""Yield where a method and a baseline take equally long, by what was measured and by what was predicted.

    Between two neighbouring rates of a grid, at which the one and the other is faster by more than the floor: where
    log(t_a / t_b), linear in log(rate), is 0. Predictions are treated alike, over all rates; None where their curves do
    not cross.
    """
    for (workload, nodes), rows in _grouped(cells, "workload", "nodes"):
        by_rate = {rate: {row["recipe"]: row for row in some} for (rate,), some in _grouped(rows, "rate_bps")}
        rates = sorted(by_rate)
        methods = list(dict.fromkeys(row["recipe"] for row in rows))
        for baseline, method in itertools.product(BASELINES, methods):
            if method in BASELINES[: BASELINES.index(baseline) + 1] or baseline not in methods:
                continue
            both = [rate for rate in rates if {baseline, method} <= by_rate[rate].keys()]
            measured, predicted = (
                [math.log(by_rate[rate][method][key] / by_rate[rate][baseline][key]) for rate in both]
                for key in ("measured_s", "predicted_s")
            )
            floors = [by_rate[rate][method]["floor"] for rate in both]
            for place in range(len(both) - 1):
                here, there = measured[place : place + 2]
                if here * there < 0 and min(abs(here) - floors[place], abs(there) - floors[place + 1]) > 0:
                    at = _zero(both[place : place + 2], (here, there))
                    also = [
                        _zero(both[i : i + 2], predicted[i : i + 2])
                        for i in range(len(both) - 1)
                        if predicted[i] * predicted[i + 1] < 0
                    ]
                    guess = min(also, key=lambda rate, at=at: abs(math.log(rate / at)), default=None)
                    yield {
                        **{"workload": workload, "nodes": nodes, "baseline": baseline, "recipe": method},
                        **{"measured_bps": at, "predicted_bps": guess},
                    }


def held(document: Mapping[str, Any]) -> dict[str, bool]:
    """Return what was promised, and whether it holds: see docs/advise.md."""
    floor = document["median_floor"]
    return {
        "median_error": document["median_error"] <= max(MEDIAN, floor),
        "p90_error": document["p90_error"] <= max(P90, 2 * floor),
        "winners": all(one["loss"] <= max(LOSS, one["floor"]) for one in document["winners"]),
        "crossovers": all(
            one["predicted_bps"] is not None and abs(one["predicted_bps"] / one["measured_bps"] - 1) <= CROSSOVER
            for one in document["crossovers"]
        ),
    }


def _zero(rates: Sequence[float], values: Sequence[float]) -> float:
    """Return the rate at which a line through two points, over log(rate), is 0."""
    share = values[0] / (values[0] - values[1])
    return rates[0] * (rates[1] / rates[0]) ** share


def _grouped(rows: Sequence[Row], *keys: str) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    """Yield rows with the same values of `keys`, in order of their first."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    yield from groups.items()
