"""Byte-level tokens: the 256 byte values and one id that ends a document. Torch-free.

No merges are learned, so nothing about the tokenizer depends on a corpus, and a loss in nats per token turns
into bits per byte by counting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

TOKENIZER = "bytes"
END_OF_DOCUMENT = 256
VOCABULARY = 257
TOKEN_DTYPE = np.dtype("<u2")  # on disk; the byte order is fixed so that a cache can move between machines

_PIECE_BYTES = 1 << 24  # bounds the memory that a long document takes while it is encoded


def encode(text: bytes | memoryview) -> npt.NDArray[np.uint16]:
    """Tokens of a document's text, one per byte, without the end-of-document token. Shape [bytes]."""
    return np.frombuffer(text, dtype=np.uint8).astype(TOKEN_DTYPE)


def encode_document(text: bytes | memoryview) -> Iterator[npt.NDArray[np.uint16]]:
    """Tokens of a document and its end-of-document token, in pieces of bounded size."""
    view = memoryview(text)
    for start in range(0, len(view), _PIECE_BYTES):
        yield encode(view[start : start + _PIECE_BYTES])
    yield np.array([END_OF_DOCUMENT], dtype=TOKEN_DTYPE)


def decode(tokens: npt.NDArray[np.integer]) -> str:
    """Text of tokens, for people: documents parted by a blank line, bytes that are not UTF-8 as U+FFFD."""
    documents = np.split(tokens, np.flatnonzero(tokens == END_OF_DOCUMENT) + 1)
    texts = [part[part != END_OF_DOCUMENT].astype(np.uint8).tobytes() for part in documents if len(part)]
    return "\n\n".join(text.decode("utf-8", errors="replace") for text in texts)


def count_bytes(tokens: npt.NDArray[np.integer]) -> int:
    """How many bytes of text the tokens stand for; an end-of-document token stands for none."""
    return int(np.count_nonzero(tokens != END_OF_DOCUMENT))


def bits_per_byte(total_loss_nats: float, target_bytes: int) -> float:
    """Bits per byte from the summed loss of all evaluated targets, end-of-document tokens included.

    `target_bytes` is `count_bytes` of the same targets: ending a document costs bits and adds no byte.
    """
    return total_loss_nats / (math.log(2) * target_bytes)
