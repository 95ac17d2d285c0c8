"""Bodies in chunks, however they arrive."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titogym.gateway.engines.http import _unchunked


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.sampled_from(["", ";name=value", "  "]),
    st.sampled_from([b"", b"x-sum: 1\r\n", b"a: 1\r\nb: 2\r\n"]),
    st.data(),
)
def test_any_cutting_gives_the_same_body(chunks, extension, trailers, data):
    wire = b"".join(b"%x%b\r\n%b\r\n" % (len(chunk), extension.encode(), chunk) for chunk in chunks)
    wire += b"0\r\n" + trailers + b"\r\n"
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8))), len(wire)]
    buffer, body = bytearray(), b""
    for start, end in itertools.pairwise(cuts):
        buffer += wire[start:end]
        piece, ended = _unchunked(buffer)
        body += piece
        assert ended == (end == len(wire))
        if ended:
            break
    assert body == b"".join(chunks)


@pytest.mark.parametrize("wire", [b"-2\r\nab\r\n", b"x\r\n", b"0\r\n\r\nmore", b"1" * 70_000])
def test_what_is_no_chunk_is_an_error(wire):
    with pytest.raises(ValueError, match=r".+"):
        _unchunked(bytearray(wire))
