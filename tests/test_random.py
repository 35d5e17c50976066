"""Counter-based uniforms: any cut, any place, any key; the published vectors are among the kernels' tests."""

import hashlib

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.random import CHUNK, Key, parameter_key, uniform

keys = st.builds(
    Key, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**45)
)


@given(keys, st.integers(0, 500), st.data())
@settings(max_examples=200)
def test_an_element_has_one_uniform_however_it_is_cut(key: Key, numel: int, data: st.DataObject) -> None:
    whole = uniform(key, numel)
    cut = data.draw(st.integers(0, numel))
    tail = uniform(Key(key.key, key.step, key.stream, key.offset + cut), numel - cut)
    assert torch.equal(whole[cut:], tail)
    assert torch.equal(whole[:cut], uniform(key, cut))
    assert whole.shape == (numel,)
    assert whole.dtype == torch.float32
    assert bool(((whole > 0) & (whole < 1)).all())


def test_values_are_the_65536_midpoints() -> None:
    u = uniform(Key(3), 1 << 20)
    steps = u.double() * 65536 - 0.5
    assert torch.equal(steps, steps.round())
    assert steps.unique().numel() > 65000


def test_no_two_elements_share_bits_by_construction() -> None:
    """Neighbouring elements, chunks, steps and streams are uncorrelated."""
    n = 1 << 16
    base = uniform(Key(9), n + CHUNK).double() - 0.5
    others = {
        "next element": base[1 : n + 1],
        "next lane of 16": base[16 : n + 16],
        "next chunk": base[CHUNK:],
        "next step": uniform(Key(9, step=1), n).double() - 0.5,
        "other stream": uniform(Key(9, stream=1), n).double() - 0.5,
        "other key": uniform(Key(10), n).double() - 0.5,
    }
    for what, other in others.items():
        correlation = float((base[:n] * other[:n]).mean() * 12)
        assert abs(correlation) < 5 / n**0.5, what


def test_keys_depend_on_seed_and_name_and_on_nothing_else() -> None:
    names = [f"{seed}:{name}" for seed in range(3) for name in ("a", "b", "a.b", "")]
    found = {parameter_key(seed, name) for seed in range(3) for name in ("a", "b", "a.b", "")}
    assert len(found) == len(names)
    expected = int.from_bytes(hashlib.blake2b(b"7:layer.weight", digest_size=8).digest(), "little")
    assert parameter_key(7, "layer.weight") == expected
