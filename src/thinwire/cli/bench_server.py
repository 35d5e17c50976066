"""``thinwire bench server``: how fast a parameter server is alone."""

from collections.abc import Sequence

from thinwire.cli.output import check_outputs, table_file, write_json


def run_server(recipes: Sequence[str], workers: int, nbytes: int, json_file: str | None) -> int:
    """Measure, print a table, and write what was asked for."""
    from thinwire.bench.results import machine
    from thinwire.bench.server import measure_server

    check_outputs(json_file)
    out = table_file(json_file)
    print(
        f"{workers} workers, {nbytes / (1 << 20):g} MiB each; GB/s of float32 gradients summed, on one core", file=out
    )
    print(f"{'recipe':<16}{'pushed by one':>16}{'server':>10}{'memory alone':>14}{'of that':>9}", file=out)
    rows = measure_server(recipes, workers, nbytes)
    for row in rows:
        print(
            f"{row.recipe:<16}{row.pushed_nbytes:>16,}{row.gb_per_s:>10.2f}{row.floor_gb_per_s:>14.2f}"
            f"{row.floor_ratio:>9.2f}",
            file=out,
        )
    write_json({"schema": 1, "conditions": machine(), "rows": [row.as_dict() for row in rows]}, json_file)
    return 0
