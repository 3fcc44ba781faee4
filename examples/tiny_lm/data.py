"""Bytes to learn from, split into training and held-out, and the losses of two simple models to compare with.

Without a path, the text is what every CPython brings: the topics of its help and the sources of its standard library.
"""

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CORPUS_LIMIT = 8_000_000  # bytes
HELD_OUT = 0.05
# Tests, an application, other people's packages, tables, and the help topics that are read as text instead.
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "site-packages", "dist-packages", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Corpus:
    training: np.ndarray  # uint8
    held_out: np.ndarray  # uint8


def load_corpus(path: str | None, context: int) -> Corpus:
    """The split is the same wherever the same files are read."""
    corpus = split_by_document(up_to(CORPUS_LIMIT, python_texts())) if path is None else read_path(Path(path))
    for name, data in (("training", corpus.training), ("held-out", corpus.held_out)):
        if len(data) <= context:
            raise ValueError(
                f"{path or 'the standard library'} leaves {len(data)} bytes of {name} text, "
                f"and a context of {context} needs at least {context + 1}: give more text or a smaller context"
            )
    return corpus


def read_path(path: Path) -> Corpus:
    if path.is_dir():
        return split_by_document(file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file())
    if not path.is_file():
        raise FileNotFoundError(f"no text to train on: {path} is neither a file nor a folder")
    data = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    boundary = len(data) - int(len(data) * HELD_OUT)
    return Corpus(data[:boundary], data[boundary:])


def python_texts() -> Iterator[bytes]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name].encode()
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        if not SKIPPED_FOLDERS.intersection(file.relative_to(root).parts):
            yield file.read_bytes()


def up_to(limit: int, documents: Iterable[bytes]) -> Iterator[bytes]:
    for text in documents:
        yield text[:limit]
        limit -= len(text)
        if limit <= 0:
            return


def split_by_document(documents: Iterable[bytes]) -> Corpus:
    """A document's content alone decides on which side it is, so equal documents are on the same side."""
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for text in documents:
        sides[is_held_out(text)].append(text)
    training, held_out = (np.frombuffer(b"".join(side), dtype=np.uint8) for side in sides)
    return Corpus(training, held_out)


def is_held_out(text: bytes) -> bool:
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") < HELD_OUT * 2**64


def random_crops(data: np.ndarray, batch: int, context: int, seed: int) -> Iterator[np.ndarray]:
    """Without end: `batch` sequences of `context` bytes and the byte that follows, at random places."""
    generator = np.random.default_rng(seed)
    while True:
        yield crops(data, generator.integers(len(data) - context, size=batch), context)


def even_crops(data: np.ndarray, count: int, context: int) -> np.ndarray:
    """The same for ever: sequences at places evenly spread."""
    return crops(data, np.linspace(0, len(data) - context - 1, count).astype(np.int64), context)


def crops(data: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return data[starts[:, None] + np.arange(context + 1)].astype(np.int64)


def unigram_loss(training: np.ndarray, sequences: np.ndarray) -> float:
    """Nats per byte of `sequences[:, 1:]` by the frequencies of single bytes."""
    counts = np.bincount(training, minlength=256) + 1.0
    return float(-np.log(counts / counts.sum())[sequences[:, 1:]].mean())


def bigram_loss(training: np.ndarray, sequences: np.ndarray) -> float:
    """Nats per byte of `sequences[:, 1:]` by the frequencies of pairs of bytes."""
    pairs = training[:-1].astype(np.int64) * 256 + training[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256) + 0.1
    losses = -np.log(counts / counts.sum(axis=1, keepdims=True))
    return float(losses[sequences[:, :-1], sequences[:, 1:]].mean())
