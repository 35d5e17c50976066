"""Lines of a log that whoever sends frames could fill."""

import math
from collections import Counter


class FewLines:
    """Lets a few lines of each kind pass in every period.

    Args:
        most: lines of a kind in a period.
        period_s: seconds, from the first line of a kind.
    """

    def __init__(self, most: int = 10, period_s: float = 10.0) -> None:
        self._most, self._period_s = most, period_s
        self._began_s: dict[str, float] = {}
        self._seen: Counter[str] = Counter()

    def admit(self, kind: str, now_s: float) -> int | None:
        """Return how many lines were left out since the last period began; None if this one is left out, too.

        >>> lines = FewLines(most=1, period_s=10.0)
        >>> [lines.admit("late", now_s) for now_s in (0.0, 1.0, 2.0, 10.0)]
        [0, None, None, 2]
        """
        if now_s - self._began_s.get(kind, -math.inf) >= self._period_s:
            left_out = max(0, self._seen[kind] - self._most)
            self._began_s[kind], self._seen[kind] = now_s, 1
            return left_out
        self._seen[kind] += 1
        return 0 if self._seen[kind] <= self._most else None
