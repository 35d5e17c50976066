"""The random numbers: published vectors, and that offsets cut nothing."""

import pytest
import torch

from thinwire.random import CHUNK, OWNER_STREAM, Key, parameter_key, philox_4x32_10, uniform

# Counter, key and output: `kat_vectors` of Random123 (Salmon and others, 2011), philox4x32 with 10 rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    got = philox_4x32_10(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(word) for word in got) == words


@pytest.mark.parametrize("offset", [0, 1, 15, 16, 127, 128, 129, 1000, 65536, (1 << 35) + 5])
@pytest.mark.parametrize("cut", [0, 1, 100, 128, 299])
def test_a_cut_changes_no_uniform(offset: int, cut: int) -> None:
    whole = uniform(Key(7, 3, 2, offset), 300)
    assert torch.equal(whole[cut:], uniform(Key(7, 3, 2, offset + cut), 300 - cut))


def test_element_takes_the_halfword_it_is_said_to_take() -> None:
    key, step, stream = 0xA4093822_299F31D0, 9, OWNER_STREAM
    u = uniform(Key(key, step, stream), 3 * CHUNK)
    for i in (0, 17, 127, 128, 200, 383):
        e = i % 128
        counter = tuple(torch.tensor([c]) for c in (16 * (i // 128) + e % 16, 0, step, stream))
        word = int(philox_4x32_10(counter, (key & 0xFFFFFFFF, key >> 32))[e // 32])
        half = word >> 16 if (e // 16) % 2 else word & 0xFFFF
        assert float(u[i]) == (half + 0.5) / 65536


def test_uniforms_lie_inside_the_unit_interval_and_have_its_moments() -> None:
    u = uniform(Key(parameter_key(0, "weight")), 1 << 18).double()
    assert float(u.min()) > 0.0
    assert float(u.max()) < 1.0
    # Standard errors: 0.00056 for the mean, 0.00015 for the variance.
    assert abs(float(u.mean()) - 0.5) < 0.003
    assert abs(float(u.var()) - 1 / 12) < 0.001


def test_every_field_of_a_key_matters() -> None:
    keys = [Key(1), Key(2), Key(1 + (1 << 32)), Key(1, step=1), Key(1, stream=1), Key(1, offset=128)]
    assert len({tuple(uniform(key, 16).tolist()) for key in keys}) == len(keys)
    assert parameter_key(0, "a") != parameter_key(1, "a") != parameter_key(1, "b")
