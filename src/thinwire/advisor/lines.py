"""Advice as lines of a table, and what is said besides."""

from collections.abc import Sequence

from thinwire.advisor.advise import Advice, Report
from thinwire.advisor.findings import time_text

HEADINGS = ("plan", "bucket MB", "step", "x DDP", "x 16 bit", "exposed", "sent MB", "memory MB", "risk", "why")


def sections(report: Report) -> Sequence[tuple[str, Sequence[str]]]:
    """Return what is said besides the table."""
    return (
        ("left out", [f"{recipe}: {why}" for recipe, why in report.left_out.items()]),
        ("assumed", report.assumptions),
        ("first", report.free),
    )


def cells(plan: Advice) -> list[str]:
    """Return one line of the table."""
    return [
        plan.recipe,
        "-" if plan.sync_every > 1 else "default" if plan.bucket_cap_mb is None else f"{plan.bucket_cap_mb:g}",
        time_text(plan.step_s),
        f"{plan.speedup_vs_ddp:.2f}",
        f"{plan.speedup_vs_16bit:.2f}",
        time_text(plan.exposed_comm_s),
        f"{plan.wire_nbytes / 1e6:.1f}",
        f"{plan.extra_memory_nbytes / 1e6:.0f}",
        plan.risk,
        plan.reason,
    ]
