"""The codec's bytes: each says one thing and is the only way to say it; hostile ones are refused, cheaply."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.aggregation import codec
from shoal.aggregation.codec import Symbols
from shoal.aggregation.compress import PRESETS, Compression, decode, encode, max_payload_bytes
from shoal.protocol.errors import PeerFault

settings = st.builds(
    Compression,
    density=st.sampled_from([1.0, 0.5, 0.1, 0.05, 64 / 4096]),
    bits=st.sampled_from([1, 2, 4, 8, 16, 32]),
    chunk=st.sampled_from([1, 7, 64, 4096]),
)
seeds = st.integers(0, 2**32 - 1)


def vector(d: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_t(3, d) * 1e-2).astype(np.float32)


def decode_or_fault(data: bytes, d: int, setting: Compression) -> bool:
    """Whether it was accepted. Nothing but the declared error may come out, nor anything out of bounds."""
    try:
        sparse = decode(data, d, setting)
    except PeerFault as fault:
        assert fault.kind == "bad_payload"
        return False
    assert sparse.indices.size == sparse.values.size == setting.form(d).total
    assert (np.diff(sparse.indices) > 0).all() and sparse.indices[0] >= 0 and sparse.indices[-1] < d
    assert np.isfinite(sparse.values).all()
    form = setting.form(d)
    assert codec.write(form, codec.read(form, data)) == data
    return True


@given(st.binary(max_size=300), settings, st.integers(1, 2000))
def test_fuzz_any_bytes(data: bytes, setting: Compression, d: int) -> None:
    decode_or_fault(data, d, setting)


@given(st.data(), settings, st.integers(1, 300))
def test_fuzz_bytes_of_a_likely_size(data: st.DataObject, setting: Compression, d: int) -> None:
    """Past the checks of size and version, into the streams."""
    form = setting.form(d)
    size = data.draw(st.integers(codec.min_bytes(form), codec.max_bytes(form)))
    zero = bytes([codec.VERSION, 0, 0])
    decode_or_fault((zero + data.draw(st.binary(min_size=size, max_size=size)))[:size], d, setting)


@given(settings, st.integers(1, 3000), seeds, st.data())
def test_fuzz_mutated_payloads(setting: Compression, d: int, seed: int, data: st.DataObject) -> None:
    payload = bytearray(encode(vector(d, seed), setting))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(payload)))
    decode_or_fault(bytes(payload[:cut]) if data.draw(st.booleans()) else bytes(payload), d, setting)


@given(settings, st.integers(1, 3000), seeds, st.binary(min_size=1, max_size=2), st.data())
def test_there_is_one_encoding(setting: Compression, d: int, seed: int, tail: bytes, data: st.DataObject) -> None:
    """What is read is written back to the same bytes, and neither more nor fewer bytes say it."""
    payload = encode(vector(d, seed), setting)
    assert len(payload) <= max_payload_bytes(d, setting)
    assert decode_or_fault(payload, d, setting)
    assert not decode_or_fault(payload + tail, d, setting)
    assert not decode_or_fault(payload[: data.draw(st.integers(0, len(payload) - 1))], d, setting)


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 600), seeds, st.floats(0.3, 60))
def test_any_codes_survive(bits: int, count: int, seed: int, spread: float) -> None:
    """Codes of every skew, so that every number of fine bits and of planes is used."""
    rng = np.random.default_rng(seed)
    setting = Compression(1.0, bits, chunk=600)
    form = setting.form(count)
    levels = np.minimum(rng.exponential(spread, count).astype(np.int64), 2 ** (bits - 1) - 1)
    codes = (levels << 1 | rng.integers(0, 2, count)).astype(np.uint8)
    scales = np.full((1, 2), 7, np.uint16)
    payload = codec.write(form, Symbols(3, scales, codes, None))
    assert codec.min_bytes(form) <= len(payload) <= codec.max_bytes(form)
    back = codec.read(form, payload)
    assert back.exponent == 3 and np.array_equal(back.codes, codes) and np.array_equal(back.scales, scales)


def small(bits: int = 4) -> tuple[Compression, bytes]:
    """d = 40 in chunks of 16, ten kept; three pairs of scales from byte 3, three bytes each; codes from byte 12."""
    setting = Compression(0.25, bits, chunk=16)
    return setting, encode(vector(40, 3), setting)


@pytest.mark.parametrize(
    ("at", "value", "detail"),
    [
        (0, 9, "version 9"),
        (2, 0x7F, "exponent 3"),  # far above what fp32 needs
        (12, 0, "0 fine bits"),
        (12, 5, "5 fine bits"),
    ],
)
def test_each_kind_of_damage_is_named(at: int, value: int, detail: str) -> None:
    setting, payload = small()
    damaged = bytearray(payload)
    damaged[at] = value
    with pytest.raises(PeerFault, match=detail):
        decode(bytes(damaged), 40, setting)


def test_padding_must_be_zero() -> None:
    setting, payload = small()
    damaged = bytearray(payload)
    damaged[14] |= 1  # ten signs take two bytes, the last six bits of which say nothing
    with pytest.raises(PeerFault, match="not the one encoding"):
        decode(bytes(damaged), 40, setting)


def test_a_costlier_form_of_the_same_codes_is_refused() -> None:
    """Raw codes where planes are shorter."""
    setting = Compression(1.0, 4, chunk=64)
    form = setting.form(64)
    codes = np.zeros(64, np.uint8)
    codes[5] = 2
    scales = np.full((1, 2), 2**12 - 1, np.uint16)
    short = codec.write(form, Symbols(0, scales, codes, None))
    raw = short[: form.head_bytes] + b"\4" + codec.write_numbers(codes, 4)
    assert len(short) < len(raw) <= codec.max_bytes(form)
    assert decode(short, 64, setting).values[5] > 0
    with pytest.raises(PeerFault, match="not the one encoding"):
        decode(raw, 64, setting)


def test_more_codes_in_a_plane_than_there_are() -> None:
    setting = Compression(1.0, 2, chunk=64)
    form = setting.form(64)
    codes = np.zeros(64, np.uint8)
    payload = bytearray(codec.write(form, Symbols(0, np.full((1, 2), 2**8 - 1, np.uint16), codes, None)))
    assert payload[form.head_bytes :] == b"\1" + bytes(8) + bytes(codec.COUNT_BYTES)
    payload[form.head_bytes + 9] = 65
    with pytest.raises(PeerFault, match="65 of 64 codes"):
        decode(bytes(payload), 64, setting)


@pytest.mark.parametrize("bits", [16, 32])
def test_values_must_be_finite(bits: int) -> None:
    setting = Compression(1.0, bits)
    payload = bytearray(encode(vector(6, 3), setting))
    payload[-bits // 8 :] = np.array([np.inf], f"<f{bits // 8}").tobytes()
    with pytest.raises(PeerFault, match="not finite"):
        decode(bytes(payload), 6, setting)


def test_the_exponent_must_fit_the_largest_value() -> None:
    """Half the scale at twice the unit would say the same."""
    for bits, codes in ((1, np.zeros(8, np.uint8)), (16, np.full(8, 3, np.float16))):
        form = Compression(1.0, bits).form(8)
        scales = np.full((1, 2), 2**7, np.uint16) if bits == 1 else np.zeros((0, 2), np.uint16)
        with pytest.raises(PeerFault, match="exponent 5 is not the one that fits"):
            decode(codec.write(form, Symbols(5, scales, codes, None)), 8, Compression(1.0, bits))


def test_a_chunk_with_too_many_indices_is_refused() -> None:
    """Both payloads are well formed; the second one's indices all lie in the first chunk."""
    setting = Compression(0.25, 8, chunk=8)
    form = setting.form(16)
    scales = np.full((2, 2), 2**16 - 1, np.uint16)
    codes = np.zeros(4, np.uint8)

    def payload(indices: list[int]) -> bytes:
        return codec.write(form, Symbols(0, scales, codes, np.array(indices)))

    assert decode(payload([0, 1, 8, 9]), 16, setting).indices.tolist() == [0, 1, 8, 9]
    with pytest.raises(PeerFault, match="another number"):
        decode(payload([0, 1, 2, 3]), 16, setting)
    with pytest.raises(PeerFault, match="index 16"):
        decode(payload([0, 1, 8, 16]), 16, setting)


@given(st.sampled_from(["short", "sparseloco", "dense-8bit"]), seeds, st.data())
def test_memory_is_bounded_by_what_was_received(preset: str, seed: int, data: st.DataObject) -> None:
    """Peak while decoding mutated bytes: in proportion to the coordinates that the payload's length vouches for."""
    d, setting = 2_000, PRESETS[preset]
    payload = bytearray(encode(vector(d, seed), setting))
    for _ in range(3):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    tracemalloc.start()
    try:
        decode_or_fault(bytes(payload), d, setting)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 64 * 1024 + 20 * len(payload) + 64 * setting.form(d).total


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_few_bytes_cannot_announce_much(preset: str) -> None:
    """d = 2^34 would be 16 GiB of fp32: refused by the length, before anything is made."""
    tracemalloc.start()
    try:
        with pytest.raises(PeerFault, match="bytes, expected"):
            decode(bytes([codec.VERSION]) * 1000, 2**34, PRESETS[preset])
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()


def test_golden_bytes() -> None:
    """What peers of another version would read: never change without a new codec version."""
    values = np.array([0.5, -0.25, 0.0, 1.0, -2.0, 0.125, 0.0, 3.0], np.float32)
    golden = {
        Compression(0.5, 1, chunk=8): "02dffffd0001200099",
        Compression(0.5, 2, chunk=8): "02dffff4fe0220300099",
        Compression(0.5, 4, chunk=8): "02daff933ff304205010300099",
        Compression(1.0, 8, chunk=8): "02d1ff000017fc0848cd518d51891109",
        Compression(0.25, 16, chunk=8): "02f3ff00f40076010028",
        Compression(0.25, 32, chunk=8): "02000000c000004040010028",
    }
    assert {setting: encode(values, setting).hex() for setting in golden} == golden
    assert decode(
        bytes.fromhex(golden[Compression(0.25, 16, chunk=8)]), 8, Compression(0.25, 16, chunk=8)
    ).values.tolist() == [-2, 3]
