"""Layouts: offsets, sizes, views."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import WireError
from thinwire.wire import Layout, align

WIDEST_FIRST = [torch.float32, torch.int16, torch.uint8]


@given(st.integers(0, 10**9), st.sampled_from([1, 2, 4, 8, 64]))
def test_align(nbytes: int, alignment: int) -> None:
    assert align(nbytes, alignment) % alignment == 0
    assert 0 <= align(nbytes, alignment) - nbytes < alignment


@given(st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_parts_are_disjoint_and_views_share_memory(sizes: list[int]) -> None:
    layout = Layout.of(a=(torch.float32, (sizes[0],)), b=(torch.int16, (sizes[1],)), c=(torch.uint8, (sizes[2], 3)))
    assert layout.nbytes == align(4 * sizes[0] + 2 * sizes[1] + 3 * sizes[2])
    data = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.check(data, "x")
    for name in "abc":
        view = layout.view(data, name)
        assert view.dtype == layout[name].dtype
        assert view.shape == layout[name].shape
        before = int((data != 0).sum())
        view.view(torch.uint8).fill_(1) if view.numel() else None
        assert int((data != 0).sum()) == before + layout[name].nbytes, "parts do not overlap"


def test_misaligned_parts_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="byte 3"):
        Layout.of(codes=(torch.uint8, (3,)), scales=(torch.float32, (1,)))


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(7, dtype=torch.uint8),
        torch.zeros(9, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.int8),
        torch.zeros(2, 4, dtype=torch.uint8),
        torch.zeros(16, dtype=torch.uint8)[::2],
        torch.zeros(12, dtype=torch.uint8)[2:10],
    ],
    ids=["short", "long", "dtype", "shape", "gaps", "off alignment"],
)
def test_check(data: torch.Tensor) -> None:
    with pytest.raises(WireError, match=r"^block: expected .* 8 bytes.*, got "):
        Layout.of(values=(torch.float32, (2,))).check(data, "block")
