"""Training as in the CLAN paper: 4 emulated hosts with 2 parameter servers each, and the paper's settings.

    python benchmarks/clan.py measure table --folder clan
    python benchmarks/clan.py measure table --folder clan --parts digits

The byte-level GPT trains with LANS, the digits ResNet with NAG, whose momentum the workers apply. Learning rates are
those of the workloads, times what the paper's released runs multiply theirs by: for BERT 0.84 with top-k and 1.19 with
one-bit, for ResNet-50 0.5 with one-bit, top-k and random-k. They rise for a tenth of the steps, then fall, linearly or
by a cosine.
Cells are files in the folder: what was ended goes on from the first that is missing.
"""

import argparse
import dataclasses as dc
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from cells import conditions, is_kept, kept, measured

from thinwire.bench.settings import Settings

SERVERS = "servers:2/"


@dc.dataclass(frozen=True, slots=True)
class Setting:
    """A method of one part.

    Attributes:
        recipe: through servers; None is DDP without them.
        rate: of the learning rate of DDP.
        claim: what the paper reports of it, on models and clusters of another size.
    """

    recipe: str | None
    rate: float
    claim: str = ""

    @property
    def method(self) -> str:
        """Its name in the bench."""
        return "ddp" if self.recipe is None else SERVERS + self.recipe


PARTS: Mapping[str, tuple[Mapping[str, Any], float, tuple[Setting, ...]]] = {
    "gpt": (
        {"workload": "gpt", "optimizer": "lans", "decay": "linear", "steps": 300},
        0.01,
        (
            Setting(None, 1.0),
            Setting(
                "topk:0.001", 0.84, "the best for BERT: base trains in 23.3 % less time, with 30.9 % more throughput"
            ),
            Setting("onebit", 1.19, "behind top-k"),
            Setting("linear:7", 1.0, "behind top-k"),
        ),
    ),
    "digits": (
        {"workload": "digits", "optimizer": "nag", "decay": "cosine", "steps": 120},
        0.05,
        (
            Setting(None, 1.0),
            Setting("fp16@nag", 1.0, "ResNet-50: communication takes longer"),
            Setting("linear:5@nag", 1.0),
            Setting("natural:3@nag", 1.0),
            Setting("onebit@nag", 0.5),
            Setting("topk:0.001@nag", 0.5, "VGG16: 58.1 % less time, 1.91 points more accuracy"),
            Setting("randomk:0.03125@nag", 0.5, "VGG16: the fastest, and misses the accuracy"),
        ),
    ),
}


def main() -> None:
    """Do what is named, in this order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("measure", "table"))
    parser.add_argument("--folder", type=Path, default=Path("clan"), help="of the cells")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", default="1gbit", help="of each host's link")
    parser.add_argument("--limit", type=int, help="end after measuring so many cells")
    parser.add_argument("--json", type=Path, help="of table: numbers")
    args = parser.parse_args()
    if "measure" in args.what:
        new = 0
        for part in args.parts:
            for seed in range(args.seeds):
                for setting in PARTS[part][2]:
                    if is_kept(args.folder, _name(part, setting, seed)):
                        continue
                    if new == args.limit:
                        return
                    measure(args.folder, part, setting, seed, args.rate)
                    new += 1
    if "table" in args.what:
        documents = {part: document(args.folder, part, args.seeds, args.rate) for part in args.parts}
        for part, rows in documents.items():
            print("\n".join([f"{part}:", "", *markdown(rows), ""]))
        if args.json is not None:
            args.json.write_text(json.dumps({"schema": 1, "parts": documents}, indent=1) + "\n")


def _name(part: str, setting: Setting, seed: int) -> str:
    return f"{part}-{setting.method}-{seed}"


def measure(folder: Path, part: str, setting: Setting, seed: int, rate: str) -> dict[str, Any]:
    """Train with one setting and seed, unless that was done."""
    return measured(folder, _name(part, setting, seed), _settings(part, setting, seed, rate))


def _settings(part: str, setting: Setting, seed: int, rate: str) -> Settings:
    values, learning_rate, _ = PARTS[part]
    own = {"methods": (setting.method,), "first_seed": seed, "learning_rate": learning_rate * setting.rate}
    return Settings(**values, **own, nodes=4, rate=rate)


def document(folder: Path, part: str, num_seeds: int, rate: str) -> dict[str, Any]:
    """Return a row per setting, with the seeds that were measured."""
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for setting in PARTS[part][2]:
        cells = {
            seed: cell
            for seed in range(num_seeds)
            if (cell := kept(folder, _name(part, setting, seed), _settings(part, setting, seed, rate)))
        }
        if not cells:
            continue
        facts = conditions(next(iter(cells.values())))
        runs = [cell["runs"][0] for cell in cells.values()]
        rows.append(
            {
                "method": setting.method,
                "learning_rate": _settings(part, setting, 0, rate).learning_rate,
                "seeds": list(cells),
                "step_s": [run["step_s"] for run in runs],
                "seconds": [sum(run["curve"]["step_s"]) for run in runs],
                "sent_nbytes_per_step": mean(run["sent_nbytes_per_step"] for run in runs),
                "compression_ratio": runs[0]["compression_ratio"],
                "val_loss": [run["val_loss"] for run in runs],
                "accuracy": [run["accuracy"] for run in runs],
                "claim": setting.claim,
            }
        )
    return {"conditions": {**facts, "rate": rate, "steps": PARTS[part][0]["steps"]}, "rows": rows}


def markdown(document: Mapping[str, Any]) -> list[str]:
    """Return the table: every seed's step and accuracy, the seconds of the fastest, means of all else."""
    headings = ["method", "learning rate", "step s by seed", "seconds", "sent MB", "ratio", "accuracy by seed", "mean"]
    headings += ["validation loss, mean", "in the paper"]
    lines = [f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
    for row in document["rows"]:
        cells = [
            "DDP fp32" if row["method"] == "ddp" else f"`{row['method']}`",
            f"{row['learning_rate']:g}",
            ", ".join(f"{step_s:.3f}" for step_s in row["step_s"]),
            f"{min(row['seconds']):.1f}",
            f"{row['sent_nbytes_per_step'] / 1e6:.3f}",
            f"{row['compression_ratio']:.1f}",
            ", ".join(f"{accuracy:.3f}" for accuracy in row["accuracy"]),
            f"{_mean(row['accuracy']):.3f}",
            f"{_mean(row['val_loss']):.3f}",
            row["claim"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _mean(values: Sequence[float | None]) -> float:
    """Mean over seeds; nan where one diverged."""
    return mean(float("nan") if value is None else value for value in values)


if __name__ == "__main__":
    main()
