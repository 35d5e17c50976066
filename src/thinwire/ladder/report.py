"""What a selfcheck found."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "failed", "not applicable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One rung of the ladder.

    Attributes:
        name: dense, replicas, conservation, bytes, parity, resume or kill.
        verdict: ok, failed or not applicable.
        sentence: what was found, or why the rung says nothing of this recipe.
        seconds: wall time.
        numbers: what the sentence rests on.
    """

    name: str
    verdict: Verdict
    sentence: str
    seconds: float = 0.0
    numbers: dict[str, float] = field(default_factory=lambda: {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All rungs of one recipe; equal on all ranks."""

    recipe: str
    world_size: int
    rungs: tuple[Rung, ...]

    @property
    def ok(self) -> bool:
        """Whether no rung failed."""
        return all(rung.verdict != "failed" for rung in self.rungs)

    @property
    def verdict(self) -> str:
        """One sentence for who asked."""
        failed, held, silent = (
            [rung.name for rung in self.rungs if rung.verdict == verdict]
            for verdict in ("failed", "ok", "not applicable")
        )
        what = f"{self.recipe} on {self.world_size} ranks"
        if failed:
            return (
                f"{what} does NOT do what it promises here: {', '.join(failed)} failed; do not train with it before "
                "that is understood"
            )
        if not held:
            return f"{what}: nothing of it could be checked"
        rest = f"; {', '.join(silent)}: not applicable, as said above" if silent else ""
        return f"{what} does what it promises here: {', '.join(held)} hold{'s' if len(held) == 1 else ''}{rest}"

    def as_dict(self) -> dict[str, Any]:
        """Return what `thinwire selfcheck --json` writes of one recipe."""
        return {"recipe": self.recipe, "ok": self.ok, "rungs": [asdict(rung) for rung in self.rungs]}

    def __str__(self) -> str:
        lines = [f"{rung.name:<13} {rung.verdict:<15} {rung.sentence}" for rung in self.rungs]
        return "\n".join([*lines, self.verdict])
