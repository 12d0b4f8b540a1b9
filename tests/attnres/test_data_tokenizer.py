"""Byte-level tokens and bits per byte."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnres.data import tokenizer
from attnres.data.tokenizer import END_OF_DOCUMENT, VOCABULARY


@given(st.text())
def test_decoding_undoes_encoding(text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text.encode())) == text


def test_tokens_are_bytes_and_the_end_of_the_document() -> None:
    (body, end) = tokenizer.encode_document(b"a\xff")
    assert body.tolist() == [97, 255] and end.tolist() == [END_OF_DOCUMENT]
    assert END_OF_DOCUMENT == VOCABULARY - 1


def test_a_long_document_is_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_PIECE_BYTES", 4)
    pieces = list(tokenizer.encode_document(b"0123456789"))
    assert [len(piece) for piece in pieces] == [4, 4, 2, 1]
    assert np.concatenate(pieces)[:-1].astype(np.uint8).tobytes() == b"0123456789"


def test_decode_parts_documents_and_shows_broken_bytes() -> None:
    tokens = np.array([104, 105, END_OF_DOCUMENT, 0xFF, 33, END_OF_DOCUMENT])
    assert tokenizer.decode(tokens) == "hi\n\n\ufffd!"


def test_bits_per_byte_charges_for_the_end_of_documents_but_counts_no_byte_for_them() -> None:
    targets = np.array([[97, 98, 99, END_OF_DOCUMENT]])
    uniform_loss_nats = targets.size * math.log(VOCABULARY)
    assert tokenizer.count_bytes(targets) == 3
    found = tokenizer.bits_per_byte(uniform_loss_nats, tokenizer.count_bytes(targets))
    assert found == pytest.approx(4 / 3 * math.log2(257))
