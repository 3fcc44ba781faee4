"""Bases: orthonormal, their integer forms close and within their limits, `random` the same for ever."""

import numpy as np
import pytest

from algorithms.transforms import TRANSFORMS, Transform, basis, basis_digest


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_bases_are_orthonormal_and_their_integers_are_close(transform: Transform) -> None:
    for length in range(1, 129):
        one = basis(transform, length, step=length)
        assert np.abs(one.orthonormal @ one.orthonormal.T - np.eye(length)).max() < 1e-13
        assert np.abs(one.integers.astype(int)).max() == one.limit
        assert np.abs(one.orthonormal * one.scale - one.integers).max() <= 0.5
        assert one.limit == (126 if transform == "dct" or (transform == "random" and length & (length - 1)) else 1)


def test_no_entry_of_a_dct_is_near_a_rounding_tie() -> None:
    for length in range(1, 129):
        scaled = np.abs(basis("dct", length).orthonormal * basis("dct", length).scale)
        assert np.abs(scaled - np.floor(scaled) - 0.5).min() > 1e-6


def test_hadamard_is_exact_at_powers_of_two_and_the_identity_elsewhere() -> None:
    for length in range(1, 129):
        integers = basis("hadamard", length).integers.astype(int)
        if length & (length - 1):
            assert np.array_equal(integers, np.eye(length))
        else:
            assert np.array_equal(integers @ integers.T, length * np.eye(length))
            assert set(integers[0]) == {1}
    assert basis("hadamard", 2).integers.tolist() == [[1, 1], [1, -1]]


def test_random_changes_with_step_and_length_only() -> None:
    integers = [basis("random", length, step).integers for length, step in ((64, 1), (64, 2), (32, 1))]
    assert np.array_equal(integers[0], basis("random", 64, 1).integers)
    assert not np.array_equal(integers[0], integers[1])
    assert not np.array_equal(integers[0][:32, :32], integers[2])
    assert np.array_equal(basis("dct", 64, 1).integers, basis("dct", 64, 2).integers)


@pytest.mark.parametrize(
    ("transform", "digest"),
    [
        ("dct", "74f0ead1394690a04934ef2291c235ffb567e8a6344f2b38aa3846ec3dd9d6a2"),
        ("hadamard", "f78c6f20696e2d42c3f2f04a9fc0c1c7944ae3f12695fb914fa83dee4e7a829e"),
        ("random", "1527b98b1a5ce4bf7e9a186ce1fb10f37bbdbecadd349afa5dd431abe32fb391"),
        ("identity", "b51cdafa370eeaf6802d9564526019755c74d8a1639f251171e8c516b7ae8ade"),
    ],
)
def test_digests_are_pinned(transform: Transform, digest: str) -> None:
    assert basis_digest(transform, [4, 3, 64, 4]) == digest


def test_digest_is_of_the_distinct_lengths() -> None:
    assert basis_digest("dct", [4, 3, 4]) == basis_digest("dct", [3, 4]) != basis_digest("dct", [3])


def test_bases_refuse() -> None:
    with pytest.raises(ValueError, match="1 to 128"):
        basis("dct", 129)
    with pytest.raises(ValueError, match="transform must be one of"):
        basis("fourier", 4)  # type: ignore[arg-type]
