"""How tokens are written: tolerances that are stated, lengths that are exact, numbers that are extreme."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ls_edge.core.errors import ConfigError, WireError
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.protocol import codecs

TOLERANCE = {"raw": 0.0, "fp16": 2.0**-11, "int8": 1 / 254}
BYTES_A_VALUE = {"raw": 4, "fp16": 2, "int8": 1}

shapes = st.tuples(st.integers(1, 9), st.integers(1, 33))


def there_and_back(name, tokens):
    frame = codecs.encode(name, tokens)
    return codecs.decode(name, bytes(frame), tokens.shape[1], tokens.shape[2])


def drawn(shape, seed, scale=1.0):
    return (np.random.default_rng(seed).standard_normal((1, *shape)) * scale).astype(np.float32)


@pytest.mark.parametrize("name", codecs.CODECS)
@given(shape=shapes, seed=st.integers(0, 2**32 - 1), power=st.integers(-12, 13))
def test_stays_within_its_tolerance(name, shape, seed, power):
    tokens = drawn(shape, seed)
    tokens *= np.float32(2.0**power) / np.abs(tokens).max(axis=-1, keepdims=True)
    back = there_and_back(name, tokens)
    assert back.dtype == np.float32
    assert back.shape == tokens.shape
    error = np.abs(back - tokens).max(axis=-1) / np.abs(tokens).max(axis=-1)
    assert error.max() <= TOLERANCE[name] * (1 + 1e-5)


@pytest.mark.parametrize("name", codecs.CODECS)
@given(shape=shapes)
def test_the_length_is_as_announced(name, shape):
    count, dim = shape
    frame = codecs.encode(name, drawn(shape, 0))
    scales = 4 * count if name == "int8" else 0
    assert len(frame) == codecs.codec_of(name).wire_bytes(count, dim) == count * dim * BYTES_A_VALUE[name] + scales


@pytest.mark.parametrize("name", codecs.CODECS)
@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"\0", lambda b: b"", lambda b: b * 2])
def test_another_length_is_refused(name, change):
    frame = bytes(codecs.encode(name, drawn((3, 5), 0)))
    with pytest.raises(WireError, match=r"tokens frame of .* bytes, .* expected"):
        codecs.decode(name, change(frame), 3, 5)


def test_unknown_codec_is_refused_everywhere():
    for attempt in (
        lambda: codecs.codec_of("zip").wire_bytes(1, 1),
        lambda: codecs.encode("zip", drawn((1, 1), 0)),
        lambda: codecs.decode("zip", b"", 1, 1),
    ):
        with pytest.raises(WireError, match="unknown codec 'zip'; known here: raw, fp16, int8"):
            attempt()


def test_bytes_match_the_specification():
    tokens = np.array([[[1.0, -2.0], [0.5, 0.0]]], np.float32)
    assert bytes(codecs.encode("raw", tokens)).hex() == "0000803f000000c00000003f00000000"
    assert bytes(codecs.encode("fp16", tokens)).hex() == "003c00c000380000"
    frame = bytes(codecs.encode("int8", tokens))
    assert np.frombuffer(frame[:8], "<f4") == pytest.approx([2 / 127, 0.5 / 127])
    assert list(np.frombuffer(frame[8:], np.int8)) == [64, -127, 127, 0]


def test_raw_copies_neither_way():
    tokens = drawn((4, 8), 1)
    frame = codecs.encode("raw", tokens)
    assert np.shares_memory(np.frombuffer(frame, np.float32), tokens)
    back = codecs.decode("raw", frame, 4, 8)
    assert np.shares_memory(back, tokens)


@pytest.mark.parametrize("name", codecs.CODECS)
def test_a_frame_at_any_address_is_read(name):
    tokens = drawn((4, 8), 2)
    frame = bytes(codecs.encode(name, tokens))
    for offset in range(4):
        moved = memoryview(b"x" * offset + frame)[offset:]
        np.testing.assert_array_equal(codecs.decode(name, moved, 4, 8), there_and_back(name, tokens))


@pytest.mark.parametrize("name", codecs.CODECS)
def test_zeros_stay_zeros(name):
    np.testing.assert_array_equal(there_and_back(name, np.zeros((1, 3, 7), np.float32)), 0)


def test_raw_keeps_every_bit():
    odd = np.array([[[np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4e38]]], np.float32)
    assert there_and_back("raw", odd).tobytes() == odd.tobytes()


def test_fp16_ends_at_its_largest_number_and_keeps_nan():
    odd = np.array([[[np.nan, np.inf, -np.inf, 1e38, -70000.0, 65504.0, 1e-9]]], np.float32)
    expected = [np.nan, 65504, -65504, 65504, -65504, 65504, 0]
    np.testing.assert_array_equal(there_and_back("fp16", odd)[0, 0], expected)


def test_int8_marks_a_token_that_is_not_finite_and_leaves_the_others():
    odd = np.array([[[np.nan, 1.0], [np.inf, 1.0], [2.0, -1.0], [-np.inf, np.nan], [3.4e38, 0.0]]], np.float32)
    back = there_and_back("int8", odd)[0]
    assert np.isnan(back[[0, 1, 3]]).all()
    np.testing.assert_allclose(back[2], [2.0, -1.0], atol=2 / 254)
    np.testing.assert_allclose(back[4], [3.4e38, 0.0], rtol=1e-5)


@pytest.mark.parametrize("name", ["fp16", "int8"])
@given(data=st.binary(min_size=36, max_size=36))
def test_any_bytes_of_the_right_length_are_numbers(name, data):
    count, dim = (3, 6) if name == "fp16" else (3, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        back = codecs.decode(name, data, count, dim)
    assert back.shape == (1, count, dim)
    assert not caught


def test_every_half_is_read_as_numpy_reads_it():
    patterns = np.arange(2**16, dtype="<u2")
    back = codecs.decode("fp16", patterns.tobytes(), 256, 256)
    np.testing.assert_array_equal(back.ravel(), patterns.view("<f2").astype(np.float32))


@pytest.mark.parametrize("name", codecs.CODECS)
def test_many_hops_do_not_add_up_where_nothing_is_computed(name):
    once = there_and_back(name, drawn((5, 16), 3))
    many = once
    for _ in range(20):
        many = there_and_back(name, many)
    np.testing.assert_allclose(many, once, rtol=0, atol=1e-6 * np.abs(once).max())


@pytest.mark.parametrize("name", codecs.CODECS)
def test_peers_may_name_every_codec(write_peers, name):
    file = load_peers(write_peers({"a": [0]}, codec=name))
    file.check_codecs(codecs.codec_of)
    assert file.peer("a").codec == name


def test_a_codec_that_does_not_exist_is_refused_with_its_place(write_peers):
    file = load_peers(write_peers({"a": [0]}, codec="zip"))
    with pytest.raises(ConfigError, match=r"peers.yaml:\d+:\d+: unknown codec 'zip'; known here: raw, fp16, int8$"):
        file.check_codecs(codecs.codec_of)


def test_a_codec_of_another_package_works_where_codecs_are_named(write_peers, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples" / "plugin")
    monkeypatch.setattr("ls_edge.core.plugins.registered", lambda _: {"top-half": "ls_edge_example.top_half:TopHalf"})
    monkeypatch.setattr(codecs, "CODECS", dict(codecs.CODECS))
    file = load_peers(write_peers({"a": [0]}, codec="top-half"))
    file.check_codecs(codecs.codec_of)
    tokens = drawn((5, 16), 3)
    np.testing.assert_allclose(there_and_back("top-half", tokens), tokens, rtol=2**-7)
    assert codecs.codec_of("top-half").wire_bytes(5, 16) == 5 * 16 * 2


BAD = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(1, 17, 32), (3, 5), (1,)], ids=str)
def test_one_value_that_is_not_finite_is_found_at_any_place(dtype, shape):
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal(shape).astype(dtype)
    assert codecs.is_finite(tokens)
    for bad in BAD:
        for at in rng.integers(0, tokens.size, 20):
            spoiled = tokens.copy()
            spoiled.flat[at] = bad
            assert not codecs.is_finite(spoiled)
            assert not codecs.is_finite(np.repeat(spoiled, 2, axis=-1)[..., ::2])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_large_and_tiny_values_are_finite(dtype):
    limits = np.finfo(dtype)
    values = [limits.max, limits.min, limits.smallest_subnormal, limits.tiny, -0.0, 0.0]
    assert codecs.is_finite(np.full((1, 197, 192), limits.max, dtype))
    assert codecs.is_finite(np.array(values, dtype))
    assert codecs.is_finite(np.empty((0, 3), dtype))
