"""When ranks exchange what: arithmetic on the number of optimizer steps, the same on all ranks."""

from dataclasses import dataclass

from thinwire.errors import AttachError


@dataclass(frozen=True, kw_only=True, slots=True)
class Rhythm:
    r"""Begins an exchange of every fragment once in `sync_every` steps, and ends it `overlap` steps later.

    With H = `sync_every`, P = `num_fragments` and steps t = 1, 2, ... counted from `start_after`, fragment p = 0 .. P-1

        begins at t = o_p, o_p + H, o_p + 2 H, ...,   o_p = ceil((p + 1) H / P),   and ends at t + `overlap`.

    One fragment begins at H, 2 H, ...; several are spread as evenly as whole steps allow, even if P does not divide H.

    Args:
        sync_every: H, at least 1.
        num_fragments: P, at most H.
        overlap: below H, so that a fragment's exchange has ended before its next one begins.
        start_after: steps before the first t.

    Raises:
        AttachError: a number out of range.

    Example:
        >>> rhythm = Rhythm(sync_every=10, num_fragments=4)
        >>> [t for t in range(1, 24) if rhythm.begins(t)], rhythm.begins(15)
        ([3, 5, 8, 10, 13, 15, 18, 20, 23], [1])
    """

    sync_every: int
    num_fragments: int = 1
    overlap: int = 0
    start_after: int = 0

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise AttachError(f"sync_every: expected at least 1 step, got {self.sync_every}")
        if not 1 <= self.num_fragments <= self.sync_every:
            raise AttachError(
                f"fragments: expected 1 to sync_every={self.sync_every}, so that each has a step of its own, got "
                f"{self.num_fragments}"
            )
        if not 0 <= self.overlap < self.sync_every:
            raise AttachError(
                f"overlap: expected 0 to {self.sync_every - 1} steps, fewer than sync_every={self.sync_every}, so that "
                f"a fragment has come before it goes again, got {self.overlap}"
            )
        if self.start_after < 0:
            raise AttachError(f"start_after: expected at least 0 steps, got {self.start_after}")

    def offset(self, fragment: int) -> int:
        """Return o_p."""
        return -(-(fragment + 1) * self.sync_every // self.num_fragments)

    def begins(self, step: int) -> list[int]:
        """Return the fragments whose exchange begins once `step` optimizer steps are done."""
        since = [step - self.start_after - self.offset(p) for p in range(self.num_fragments)]
        return [p for p, steps in enumerate(since) if steps >= 0 and steps % self.sync_every == 0]

    def under_way(self, step: int) -> bool:
        """Whether an exchange that began at this step or before ends after it."""
        return any(self.begins(step - since) for since in range(self.overlap))

    def ends(self, step: int) -> list[int]:
        """Return the fragments whose exchange ends once `step` optimizer steps are done."""
        return self.begins(step - self.overlap)
