"""The line alpha + nbytes / beta nearest to what was measured."""

from collections.abc import Sequence

from thinwire.errors import ProfileError

Point = tuple[float, float]
"""Bytes, and the seconds that they took."""

LONG = 0.3  # of the longest time: shorter ones do not show the rate


def telling(points: Sequence[Point]) -> list[Point]:
    """Return the shortest time, which shows the latency, and those that are long enough to show the rate.

    What lies between may be faster than both say, as a token bucket lets some kilobytes through at once; and what takes
    longer than a larger message was disturbed.
    """
    longest = max(seconds for _, seconds in points)
    shortest = min(points, key=lambda point: point[1])
    return [shortest, *(point for point in points if point[1] >= LONG * longest and point[0] > shortest[0])]


def fit_line(points: Sequence[Point]) -> tuple[float, float, float]:
    r"""Return (alpha, beta, residual): the least sum of ((alpha + nbytes / beta - seconds) / seconds)^2.

    Relative errors, so that the small messages, which show alpha, count as much as the large ones, which show beta.
    alpha is at least 0; where short messages are so fast that it would be less, long ones alone give the rate.
    `residual` is the root of the mean of those squares.

    Args:
        points: of two sizes or more.

    Raises:
        ProfileError: fewer sizes, or times that do not grow with them.

    >>> alpha, beta, residual = fit_line([(0, 0.001), (1000, 0.002), (4000, 0.005)])
    >>> round(alpha, 9), round(beta, 3), round(residual, 9)
    (0.001, 1000000.0, 0.0)
    """
    if len({nbytes for nbytes, _ in points}) < 2:
        raise ProfileError(f"expected times of two sizes or more, got {list(points)}")
    # x = 1/t and y = s/t turn relative errors into plain ones: a x + c y = 1.
    rows = [(1 / seconds, nbytes / seconds) for nbytes, seconds in points]
    xx, xy, yy = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = xx * yy - xy * xy
    alpha, slope = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
    if alpha < 0:
        # Absolute errors now: the largest messages say what the rate is.
        alpha = 0.0
        slope = sum(nbytes * seconds for nbytes, seconds in points) / sum(nbytes**2 for nbytes, _ in points)
    if slope <= 0:
        raise ProfileError(f"expected times that grow with the bytes, got {list(points)}: measure on a quieter machine")
    errors = [(alpha + slope * nbytes) / seconds - 1 for nbytes, seconds in points]
    return alpha, 1 / slope, (sum(error**2 for error in errors) / len(errors)) ** 0.5
