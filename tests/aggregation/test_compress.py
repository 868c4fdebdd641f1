"""Compression: decode inverts encode, one encoding each, hostile bytes, and the sizes that the presets promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.aggregation.compress import (
    PRESETS,
    Compression,
    decode,
    encode,
    max_payload_bytes,
    parse_compression,
)
from shoal.protocol.errors import PeerFault, ShoalError

settings = st.builds(
    Compression,
    density=st.sampled_from([1.0, 0.5, 0.1, 0.05, 0.02, 64 / 4096]),
    bits=st.sampled_from([1, 2, 4, 8, 16, 32]),
    chunk=st.sampled_from([1, 7, 64, 4096]),
)


def vector(d: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_t(3, d) * 1e-2).astype(np.float32)


@given(settings, st.integers(1, 9000), st.integers(0, 2**32 - 1))
def test_decoded_coordinates_are_the_largest_of_each_chunk(setting: Compression, d: int, seed: int) -> None:
    dense = vector(d, seed)
    payload = encode(dense, setting)
    assert len(payload) <= max_payload_bytes(d, setting)
    sparse = decode(payload, d, setting)
    assert sparse.indices.dtype == np.int64 and sparse.values.dtype == np.float32
    assert (np.diff(sparse.indices) > 0).all() and sparse.indices[0] >= 0 and sparse.indices[-1] < d
    for start in range(0, d, setting.chunk):
        chunk = np.abs(dense[start : start + setting.chunk])
        mine = sparse.indices[(sparse.indices >= start) & (sparse.indices < start + setting.chunk)] - start
        assert len(mine) == setting.kept(len(chunk))
        left = np.delete(chunk, mine)
        assert not left.size or left.max() <= chunk[mine].min()


@given(st.integers(1, 3000), st.integers(0, 2**32 - 1), st.sampled_from([1.0, 0.1]))
def test_fp32_values_travel_unchanged(d: int, seed: int, density: float) -> None:
    dense = vector(d, seed)
    sparse = decode(encode(dense, Compression(density, 32)), d, Compression(density, 32))
    assert np.array_equal(sparse.values, dense[sparse.indices])


@given(settings, st.integers(1, 5000), st.integers(0, 2**32 - 1))
def test_quantization_keeps_signs_and_stays_within_the_range(setting: Compression, d: int, seed: int) -> None:
    dense = vector(d, seed)
    sparse = decode(encode(dense, setting), d, setting)
    original = dense[sparse.indices]
    assert not ((np.sign(sparse.values) * np.sign(original)) < 0).any()
    assert np.abs(sparse.values).max() <= 1.01 * np.abs(dense).max() + 1e-7


@given(st.integers(10, 4000), st.integers(0, 2**32 - 1), st.sampled_from(sorted(PRESETS)))
def test_an_update_never_grows_the_residual(d: int, seed: int, preset: str) -> None:
    dense = vector(d, seed)
    sparse = decode(encode(dense, PRESETS[preset]), d, PRESETS[preset])
    left = dense.astype(np.float64)
    left[sparse.indices] -= sparse.values
    assert np.sum(left * left) <= np.sum(dense.astype(np.float64) ** 2) * (1 + 1e-6)


@given(st.binary(max_size=300), settings, st.integers(1, 2000))
def test_fuzz_any_bytes(data: bytes, setting: Compression, d: int) -> None:
    try:
        sparse = decode(data, d, setting)
    except PeerFault as fault:
        assert fault.kind == "bad_payload"
    else:
        assert sparse.indices[-1] < d and np.isfinite(sparse.values).all()


@given(settings, st.integers(1, 3000), st.integers(0, 2**32 - 1), st.data())
def test_fuzz_mutated_payloads(setting: Compression, d: int, seed: int, data: st.DataObject) -> None:
    payload = bytearray(encode(vector(d, seed), setting))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(payload)))
    mutated = bytes(payload[:cut]) if data.draw(st.booleans()) else bytes(payload) + data.draw(st.binary(max_size=2))
    try:
        sparse = decode(mutated, d, setting)
    except PeerFault as fault:
        assert fault.kind == "bad_payload"
    else:
        assert (np.diff(sparse.indices) > 0).all() and sparse.indices[-1] < d and np.isfinite(sparse.values).all()


def test_indices_have_exactly_one_encoding() -> None:
    setting = PRESETS["sparseloco"]
    payload = encode(vector(5000, 1), setting)
    for tail in (b"\0", b"\x80", b"\0\0"):
        with pytest.raises(PeerFault):
            decode(payload + tail, 5000, setting)
    with pytest.raises(PeerFault):
        decode(payload[:-1], 5000, setting)


def test_each_kind_of_damage_is_named() -> None:
    setting = Compression(0.25, 4, chunk=16)
    good = bytearray(encode(vector(40, 3), setting))
    form = setting.form(40)

    def fault(change: dict[int, int]) -> str:
        damaged = bytearray(good)
        for at, value in change.items():
            damaged[at] = value
        with pytest.raises(PeerFault) as caught:
            decode(bytes(damaged), 40, setting)
        return caught.value.detail

    assert "version" in fault({0: 9})
    assert "scale" in fault({2: 0x80})  # sign bit of the first fp16
    assert "scale" in fault({1: 0x00, 2: 0x7C})  # infinity
    unary = form.fixed_bytes
    assert "indices" in fault({unary: 0})
    few = Compression(0.25, 4, chunk=6)
    payload = bytearray(encode(vector(6, 3), few))  # two kept of six: padding in codes and remainders
    assert few.form(6).total == 2
    payload_32 = bytearray(encode(vector(6, 3), Compression(1.0, 32)))
    payload_32[1:5] = np.array([np.inf], "<f4").tobytes()
    with pytest.raises(PeerFault, match="not finite"):
        decode(bytes(payload_32), 6, Compression(1.0, 32))
    odd = Compression(0.5, 4, chunk=6)
    payload = bytearray(encode(vector(6, 3), odd))  # three codes of four bits: half a byte of padding
    payload[1 + 4 + 1] |= 0xF0
    with pytest.raises(PeerFault, match="padding after the last code"):
        decode(bytes(payload), 6, odd)


def test_padding_after_the_remainders_must_be_zero() -> None:
    setting = Compression(0.25, 8, chunk=12)
    payload = bytearray(encode(vector(12, 3), setting))
    form = setting.form(12)
    assert form.rice == 1 and form.remainder_bytes == 1
    payload[form.fixed_bytes - 1] |= 1
    with pytest.raises(PeerFault, match="padding after the last remainder"):
        decode(bytes(payload), 12, setting)


def test_a_chunk_with_too_many_indices_is_refused() -> None:
    """Both payloads are well formed; the second one's indices all lie in the first chunk."""
    from shoal.aggregation import codec

    setting = Compression(0.25, 8, chunk=8)
    form = setting.form(16)
    scales = np.ones((2, 2), np.float16)
    codes = np.zeros(4, np.uint8)
    fine = codec.write(form, scales, codes, np.array([0, 1, 8, 9]))
    assert decode(fine, 16, setting).indices.tolist() == [0, 1, 8, 9]
    with pytest.raises(PeerFault, match="another number"):
        decode(codec.write(form, scales, codes, np.array([0, 1, 2, 3])), 16, setting)
    with pytest.raises(PeerFault, match="index 16"):
        decode(codec.write(form, scales, codes, np.array([0, 1, 8, 16])), 16, setting)


def test_a_quadratic_blow_up_is_not_possible() -> None:
    """A few bytes that announce a huge dimension are refused by their length."""
    with pytest.raises(PeerFault):
        decode(b"\1" * 100, 2**34, PRESETS["short"])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39])
def test_values_beyond_fp32_are_not_encoded(bad: float) -> None:
    values = np.zeros(10)
    values[3] = bad
    with pytest.raises(ValueError):
        encode(values, PRESETS["short"])


@pytest.mark.parametrize("shape", [(0,), (2, 2)])
def test_only_vectors_are_encoded(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        encode(np.zeros(shape, np.float32), PRESETS["short"])


def test_huge_values_are_clipped_to_what_fp16_holds() -> None:
    values = np.full(8, 1e30, np.float32)
    assert decode(encode(values, PRESETS["dense-fp16"]), 8, PRESETS["dense-fp16"]).values.max() == 65504
    assert np.isfinite(decode(encode(values, PRESETS["short"]), 8, PRESETS["short"]).values).all()


def test_sizes_keep_their_promise() -> None:
    """Bits per parameter at d = 2^20, beside the bound of the indices plus the values."""
    d = 2**20
    bits = {name: 8 * len(encode(vector(d, 5), setting)) / d for name, setting in PRESETS.items()}
    assert bits["sparseloco"] < 0.158 < 0.219
    assert bits["demo"] < 0.50 and bits["long"] < 0.232 and bits["short"] < 0.89
    for name, setting in PRESETS.items():
        if not setting.dense:
            choose = math.lgamma(4097) - math.lgamma(setting.kept(4096) + 1) - math.lgamma(4097 - setting.kept(4096))
            bound = (choose / math.log(2) + setting.bits * setting.kept(4096)) / 4096
            assert bound < bits[name] < 1.08 * bound


def test_golden_bytes() -> None:
    """What peers of another version would read: never change without a new codec version."""
    values = np.array([0.5, -0.25, 0.0, 1.0, -2.0, 0.125, 0.0, 3.0], np.float32)
    assert encode(values, Compression(0.5, 4, chunk=8)).hex() == "010038b73520e999"
    assert encode(values, Compression(1.0, 1, chunk=8)).hex() == "01e03a000012"


def test_settings_are_checked() -> None:
    for bad in ({"density": 0.0}, {"density": 1.1}, {"bits": 3}, {"chunk": 0}, {"chunk": 2**21}):
        with pytest.raises(ValueError):
            Compression(**{"density": 0.1, "bits": 4, **bad})  # type: ignore[arg-type]


def test_names_are_parsed() -> None:
    assert parse_compression("long") is PRESETS["long"]
    assert parse_compression("0.05/4") == Compression(0.05, 4)
    assert parse_compression("0.05/4/64") == Compression(0.05, 4, 64)
    for text, hint in (("shrt", "'short'"), ("7/4", "density"), ("a/b", "convert")):
        with pytest.raises(ShoalError) as caught:
            parse_compression(text)
        assert hint in caught.value.values
