import argparse
import itertools
import pydoc_data.topics
from pathlib import Path

import numpy as np
import pytest

from examples.tiny_lm.data import bigram_loss, even_crops, load_corpus, python_texts, random_crops, unigram_loss, up_to


@pytest.fixture(scope="module")
def corpus():
    return load_corpus(None, context=128)


@pytest.fixture
def folder(tmp_path):
    for number in range(200):
        (tmp_path / f"{number:03}.txt").write_text(f"document {number};" * 5)
    return tmp_path


def test_python_brings_enough_text_with_a_twentieth_held_out(corpus):
    total = len(corpus.training) + len(corpus.held_out)
    assert 2_000_000 < total <= 8_000_000
    assert 0.02 < len(corpus.held_out) / total < 0.08


def test_python_text_has_topics_and_sources_each_once():
    texts = list(python_texts())
    assert pydoc_data.topics.topics["assert"].encode() in texts
    assert Path(argparse.__file__).read_bytes() in texts
    assert Path(pydoc_data.topics.__file__).read_bytes() not in texts


def test_up_to_cuts_the_last_document():
    assert list(up_to(5, [b"abc", b"def", b"ghi"])) == [b"abc", b"de"]


def test_split_is_disjoint_complete_and_repeatable(folder):
    corpus = load_corpus(str(folder), context=16)
    training, held_out = (set(data.tobytes().split(b";")) - {b""} for data in (corpus.training, corpus.held_out))
    assert not training & held_out
    assert len(training | held_out) == 200
    assert 1 <= len(held_out) <= 25
    assert np.array_equal(load_corpus(str(folder), context=16).held_out, corpus.held_out)


def test_split_does_not_depend_on_names(folder, tmp_path):
    before = load_corpus(str(folder), context=16).held_out.tobytes().split(b";")
    for number in range(200):
        (tmp_path / f"{number:03}.txt").rename(tmp_path / f"{999 - number}.txt")
    assert sorted(load_corpus(str(folder), context=16).held_out.tobytes().split(b";")) == sorted(before)


def test_single_file_holds_out_its_end(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(range(200)) * 10)
    corpus = load_corpus(str(file), context=16)
    assert len(corpus.held_out) == 100
    assert np.concatenate([corpus.training, corpus.held_out]).tobytes() == file.read_bytes()


def test_missing_path_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is neither a file nor a folder"):
        load_corpus(str(tmp_path / "nowhere"), context=16)


@pytest.mark.parametrize("content", [b"", b"short"])
def test_too_little_text_says_how_much_is_needed(tmp_path, content):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"leaves {len(content)} bytes of training text.*at least 17"):
        load_corpus(str(file), context=16)


def test_empty_folder_is_too_little_text(tmp_path):
    with pytest.raises(ValueError, match="leaves 0 bytes of training text"):
        load_corpus(str(tmp_path), context=16)


def test_random_crops_repeat_with_the_seed_and_stay_inside():
    data = np.arange(40, dtype=np.uint8)
    first, second = (list(itertools.islice(random_crops(data, 4, 16, seed), 50)) for seed in (1, 1))
    assert np.array_equal(first, second)
    assert not np.array_equal(first[0], next(random_crops(data, 4, 16, seed=2)))
    assert first[0].shape == (4, 17)
    assert (np.diff(first, axis=-1) == 1).all()
    assert np.min(first) == 0
    assert np.max(first) == 39


def test_even_crops_reach_from_end_to_end():
    sequences = even_crops(np.arange(100, dtype=np.uint8), count=3, context=9)
    assert sequences[:, 0].tolist() == [0, 45, 90]
    assert sequences[-1, -1] == 99


def test_losses_of_text_that_is_one_byte_or_alternates():
    alternating = np.tile(np.array([65, 66], dtype=np.uint8), 50_000)
    sequences = even_crops(alternating, count=4, context=100)
    assert unigram_loss(alternating, sequences) == pytest.approx(np.log(2), abs=0.01)
    assert bigram_loss(alternating, sequences) == pytest.approx(0, abs=0.01)


def test_bigrams_are_better_than_unigrams_and_both_than_nothing(corpus):
    sequences = even_crops(corpus.held_out, count=32, context=128)
    unigram, bigram = unigram_loss(corpus.training, sequences), bigram_loss(corpus.training, sequences)
    assert 1.5 < bigram < unigram - 0.3
    assert unigram < np.log(256)
