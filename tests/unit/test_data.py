"""The data sets: shapes, ranges, splits, and no framework until one is needed."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from workbench import data
from workbench.errors import DataError


def test_importing_and_arrays_need_no_framework() -> None:
    code = (
        "import sys, workbench.data as d; d.digits('test', arrays=True);"
        "d.synthetic(10, arrays=True);"
        "assert not {'torch', 'tensorflow', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_digits_are_what_scikit_learn_has() -> None:
    from sklearn.datasets import load_digits

    parts = [data.digits(split, arrays=True) for split in ("train", "test")]
    x = np.concatenate([part[0] for part in parts])
    y = np.concatenate([part[1] for part in parts])
    truth = load_digits()
    assert x.shape == (1797, 1, 8, 8)
    assert x.dtype == np.float32
    assert y.dtype == np.int64
    key = sorted(zip((x.reshape(1797, 64) * 16).astype(int).tolist(), y.tolist(), strict=True))
    same = sorted(zip(truth.data.astype(int).tolist(), truth.target.tolist(), strict=True))
    assert key == same


def test_digits_are_scaled_split_once_and_copied() -> None:
    x, y = data.digits("train", arrays=True)
    assert (x.min(), x.max(), len(y)) == (0.0, 1.0, 1437)
    x[:] = 7
    again, labels = data.digits("train", arrays=True)
    assert again.max() == 1.0
    assert (labels == y).all()
    assert set(y) == set(range(10))


def test_digits_can_have_the_size_of_mnist() -> None:
    small, _ = data.digits("test", arrays=True)
    large, _ = data.digits("test", arrays=True, as_mnist=True)
    assert large.shape == (360, 28, 28)  # as keras.datasets.mnist
    assert large.min() >= 0
    assert large.max() <= 1
    assert np.allclose(large[:, ::27, ::27], small[:, 0, ::7, ::7])


def test_the_corpus_is_text_moved_on_by_one_character() -> None:
    x, y = data.corpus("train", block=32, arrays=True)
    assert x.shape == y.shape
    assert x.shape[1] == 32
    assert (x[:, 1:] == y[:, :-1]).all()
    assert x.max() < len(data.VOCABULARY)
    text = "".join(data.VOCABULARY[number] for number in x[:200].ravel())
    assert "import" in text
    assert "def " in text


def test_the_corpus_splits_do_not_overlap() -> None:
    train, test = (data.corpus(split, block=16, arrays=True)[0] for split in ("train", "test"))
    assert 8 < len(train) / len(test) < 10
    assert (len(train) + len(test)) * 16 <= 1 << 20


def test_synthetic_samples_depend_on_their_index_alone() -> None:
    made = data.Synthetic(1000, (3, 4), 5, seed=1)
    x, y = made.everything()
    some = np.array([999, 0, 500])
    assert (made.take(some)[0] == x[some]).all()
    assert (made.take(some)[1] == y[some]).all()
    assert x.shape == (1000, 3, 4)
    assert x.dtype == np.float32
    assert set(y) == set(range(5))
    other = data.synthetic(1000, shape=(3, 4), classes=5, seed=2, arrays=True)
    assert (other[0] != x).mean() > 0.99


def test_synthetic_classes_can_be_learnt() -> None:
    x, y = data.synthetic(2000, shape=(32,), classes=4, arrays=True)
    centres = np.stack([x[:1000][y[:1000] == label].mean(axis=0) for label in range(4)])
    guess = ((x[1000:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
    assert (guess == y[1000:]).mean() > 0.8


def test_ratings_depend_on_their_index_alone_and_the_test_has_others() -> None:
    made = data.Ratings(1000, 50, 0.5, seed=1)
    x, y = made.everything()
    some = np.array([999, 0, 500])
    assert (made.take(some)[0] == x[some]).all()
    assert (made.take(some)[1] == y[some]).all()
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((1000, 2), np.int64, (1000,), np.float32)
    assert x.min() == 0
    assert x.max() == 49
    tests = data.ratings("test", rows=50, samples=1000, seed=1, arrays=True)
    later = data.Ratings(1100, 50, 0.5, seed=1).take(np.arange(1000, 1100))
    assert (tests[0] == later[0]).all()
    assert (tests[1] == later[1]).all()


def test_what_is_said_of_ratings_holds() -> None:
    """The variances, the noise, the popularity: the loss that is reached is judged by them."""
    noisy = data.ratings(rows=400, samples=100_000, noise=0.5, arrays=True)
    plain = data.ratings(rows=400, samples=100_000, noise=0.0, arrays=True)
    assert (noisy[0] == plain[0]).all()
    noise = noisy[1] - plain[1]
    assert abs(noise.std() - 0.5) < 0.01
    assert abs(noise.mean()) < 0.01
    assert abs(np.corrcoef(noise, plain[1])[0, 1]) < 0.02
    assert 0.85 < plain[1].var() < 1.13  # of 400 users and items, not of all that could be
    counts = np.bincount(noisy[0][:, 1], minlength=400)
    assert counts[:4].sum() / 100_000 == pytest.approx(0.1, abs=0.01)  # 1 % of the items
    assert np.bincount(noisy[0][:, 0], minlength=400).min() > 180
    again = {tuple(pair): y for pair, y in zip(*plain, strict=True)}
    assert len(again) < 100_000  # pairs come again, and without noise their rating is the same
    assert all(again[tuple(pair)] == y for pair, y in zip(plain[0][:500], plain[1], strict=False))


@pytest.mark.parametrize(
    "made",
    [data.Tissue(100, seed=1), data.Payments(1000, 4, seed=1)],
    ids=["tissue", "payments"],
)
def test_generated_samples_depend_on_their_index_alone_and_the_test_has_others(made) -> None:
    x, y = made.everything()
    some = np.array([99, 0, 50])
    assert np.allclose(made.take(some)[0], x[some], rtol=0, atol=1e-6)
    assert (made.take(some)[1] == y[some]).all()
    name = type(made).__name__.lower()
    rest = {"branches": 4} if name == "payments" else {}
    call = getattr(data, name)
    train = call("train", samples=made.samples, seed=1, arrays=True, **rest)
    assert (train[0] == x).all()
    test = call("test", samples=made.samples, seed=1, arrays=True, **rest)
    assert len(test[0]) == made.samples // 5
    later = dataclasses.replace(made, first=made.samples).take(np.arange(made.samples // 5))
    assert np.allclose(test[0], later[0], rtol=0, atol=1e-6)
    assert not (test[0] == x[: len(test[0])]).all(axis=tuple(range(1, x.ndim))).any()
    other = call("train", samples=made.samples, seed=2, arrays=True, **rest)
    assert (other[0] != x).mean() > 0.1


def test_tissue_looks_as_it_is_said_to() -> None:
    """Abnormal nuclei are larger, and the mean colour does not tell the label."""
    x, y = data.tissue(samples=400, arrays=True)
    assert (x.shape, x.dtype, y.dtype) == ((400, 3, 96, 96), np.float32, np.int64)
    assert x.min() >= 0
    assert x.max() <= 1
    assert 0.4 < y.mean() < 0.6
    red = x[:, 0].mean(axis=(1, 2))
    assert 0.6 < max(((red < cut) == y).mean() for cut in red) < 0.82
    dark = x[:, 0] < 0.75  # where a nucleus is
    squares = np.lib.stride_tricks.sliding_window_view(dark, (9, 9), axis=(1, 2))
    large = squares.all(axis=(3, 4)).any(axis=(1, 2))  # a square of 9 x 9 fits into a nucleus
    assert large[y == 1].mean() > 2 * large[y == 0].mean()


def test_what_is_said_of_payments_holds() -> None:
    x, y = data.payments(samples=200_000, arrays=True)
    assert (x.shape, x.dtype, y.dtype) == ((200_000, 11), np.float32, np.int64)
    assert y.mean() == pytest.approx(0.02, abs=0.001)
    assert (x[:, 6:].sum(axis=1) == 1).all()
    assert np.abs(x[:, :3].mean(axis=0)).max() < 0.01
    assert np.abs(x[:, :3].std(axis=0) - 1).max() < 0.01
    branch = x[:, 6:].argmax(axis=1)
    share = np.bincount(branch) / len(branch)
    assert np.allclose(share * np.arange(1, 6), share[0], atol=0.02)
    rates = np.array([y[branch == one].mean() for one in range(5)])
    assert (np.diff(rates) > 0).all()
    assert rates[-1] / rates[0] == pytest.approx(12, rel=0.2)
    assert data.payments(samples=100_000, branches=1, arrays=True)[1].mean() == pytest.approx(
        0.02, abs=0.002
    )


def test_no_guess_is_better_than_the_true_chance() -> None:
    x, y = data.payments(samples=200_000, arrays=True)
    chance = data.fraud_chance(x)

    def loss(guess):
        return -np.log(np.where(y == 1, guess, 1 - guess)).mean()

    best = loss(chance)
    assert best == pytest.approx(0.028, abs=0.002)
    assert loss(np.full(len(y), 0.02)) > 3 * best
    odds = np.log(chance / (1 - chance))
    for wrong in (0.9 * odds, 1.1 * odds, odds + 0.2, odds - 0.2):
        assert loss(1 / (1 + np.exp(-wrong))) > best
    for low, high in ((0, 0.01), (0.01, 0.1), (0.1, 0.5), (0.5, 0.9), (0.9, 1)):
        some = (chance >= low) & (chance < high)
        expected = chance[some].sum()
        assert abs(y[some].sum() - expected) < 4 * np.sqrt(expected)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: data.tissue("valid"), "WB-DATA-002"),
        (lambda: data.tissue(samples=0), r"samples.*WB-DATA-003"),
        (lambda: data.payments(branches=0), r"branches.*WB-DATA-003"),
        (lambda: data.payments("train", samples=2.5), r"samples.*WB-DATA-003"),
        (lambda: data.fraud_chance(np.zeros((3, 6))), r"WB-DATA-008[\s\S]*\(3, 6\)"),
        (lambda: data.fraud_chance([1.0, 2.0]), "WB-DATA-008"),
        (lambda: data.ratings(rows=0), r"rows.*WB-DATA-003"),
        (lambda: data.ratings(samples=1.5), r"samples.*WB-DATA-003"),
        (lambda: data.ratings(noise=-1), "WB-DATA-007"),
        (lambda: data.ratings(noise=float("nan")), "WB-DATA-007"),
        (lambda: data.ratings("tests"), "WB-DATA-002"),
        (lambda: data.digits("tset"), r"WB-DATA-002[\s\S]*did you mean 'test'"),
        (lambda: data.digits(None), "WB-DATA-002"),
        (lambda: data.corpus("train", block=0), r"block.*WB-DATA-003"),
        (lambda: data.corpus("test", block=10**7, arrays=True), "WB-DATA-005"),
        (lambda: data.synthetic(0), r"samples.*WB-DATA-003"),
        (lambda: data.synthetic(3, shape=(0,)), r"shape.*WB-DATA-003"),
    ],
)
def test_what_does_not_exist_is_refused(call, words: str) -> None:
    with pytest.raises(DataError, match=words):
        call()


@pytest.mark.torch
def test_torch_sets_give_the_same_as_arrays() -> None:
    torch = pytest.importorskip("torch")
    x, y = data.digits("test", arrays=True)
    digits = data.digits("test")
    assert len(digits) == 360
    assert digits[3][0].shape == (1, 8, 8)
    assert digits[3][0].dtype == torch.float32
    assert (digits.x.numpy() == x).all()
    assert (digits.y.numpy() == y).all()


@pytest.mark.torch
def test_ratings_are_made_on_demand() -> None:
    pytest.importorskip("torch")
    made = data.ratings(rows=10**9, samples=10**12)
    assert len(made) == 10**12
    x, y = made.take(np.array([3, 10**12 - 1]))
    assert (x.shape, y.shape) == ((2, 2), (2,))
    assert len(data.ratings("test", samples=3)) == 1


@pytest.mark.torch
def test_tissue_and_payments_are_made_on_demand() -> None:
    torch = pytest.importorskip("torch")
    images, payments = data.tissue(samples=10**9), data.payments(samples=10**12, branches=3)
    assert (len(images), len(payments)) == (10**9, 10**12)
    x, y = images.take(np.array([3, 10**9 - 1]))
    assert (x.shape, x.dtype, y.dtype) == ((2, 3, 96, 96), torch.float32, torch.int64)
    assert payments[10**12 - 1][0].shape == (9,)
    assert 0 < data.fraud_chance(payments.take(np.arange(4))[0])[0] < 1


@pytest.mark.torch
def test_text_is_read_back() -> None:
    pytest.importorskip("torch")
    text = data.corpus("test")
    assert text.decode(text.encode("def f(x):\n    é")) == "def f(x):\n     "
    assert text[0][0].shape == (64,)


@pytest.mark.torch
def test_a_huge_synthetic_set_is_made_on_demand() -> None:
    pytest.importorskip("torch")
    made = data.synthetic(10**12, shape=(2,))
    assert len(made) == 10**12
    assert (made[-1][0] == made[10**12 - 1][0]).all()
    with pytest.raises(IndexError):
        made[10**12]
