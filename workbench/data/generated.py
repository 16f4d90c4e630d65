"""Data sets that are computed from the number of a sample, so that nothing is stored.

A sample depends only on its number and on the seed. So each worker computes its own share of a
batch, and every worker would compute the same sample.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pair = tuple[NDArray[np.generic], NDArray[np.generic]]
Floats = NDArray[np.float64]

TASTES = 4
"""How many hidden taste values each user and each item has; their products make a rating."""

SIDE_PIXELS = 96
"""Height and width of an image of tissue."""

NUCLEI = 16
"""Nuclei that an image of tissue has at most."""

FEATURES = 6
"""Numbers of a payment that come before its branch."""

FRAUD = 0.02
"""The share of payments that are fraud, over all branches."""


@dataclass(frozen=True)
class Synthetic:
    """Samples that are computed from their index, so no sample is stored."""

    samples: int
    shape: tuple[int, ...]
    classes: int
    seed: int

    def take(self, places: NDArray[np.int64]) -> Pair:
        """Return x (n, *shape) float32 and y (n,) int64 of the samples at `places` (n,)."""
        size = int(np.prod(self.shape))
        rows: Any = places.astype(np.uint64)
        labels = (mix(rows, self.seed) % np.uint64(self.classes)).astype(np.int64)
        cells: NDArray[np.uint64] = rows[:, None] * np.uint64(size) + np.arange(
            size, dtype=np.uint64
        )
        noise = unit(mix(cells, self.seed + 1))
        patterns = unit(
            mix(np.arange(self.classes * size, dtype=np.uint64), self.seed + 2)
        ).reshape(self.classes, size)
        x = 2.0 * noise - 1.0 + patterns[labels] - 0.5
        return x.astype(np.float32).reshape(len(places), *self.shape), labels

    def everything(self) -> Pair:
        """Return all samples."""
        return self.take(np.arange(self.samples))


@dataclass(frozen=True)
class Ratings:
    """Ratings that are computed from their index, by the known rules that `ratings` describes.

    Attributes:
        first: Index of the first rating; test ratings have the indices after the training ratings.
    """

    samples: int
    rows: int
    noise: float
    seed: int
    first: int = 0

    def take(self, places: NDArray[np.int64]) -> Pair:
        """Return x (n, 2) int64, user and item, and y (n,) float32 of the ratings at `places`."""
        which: Any = places.astype(np.uint64) + np.uint64(self.first)
        users = (mix(which, self.seed) % np.uint64(self.rows)).astype(np.int64)
        popular = unit(mix(which, self.seed + 1)) ** 2
        items = (popular * self.rows).astype(np.int64)
        user, item = self._traits(users, 2), self._traits(items, 3)
        agreement = (user[:, 1:] * item[:, 1:]).sum(axis=1) / math.sqrt(TASTES)
        y = 0.5 * user[:, 0] + 0.5 * item[:, 0] + 0.7 * agreement
        y += self.noise * normal(mix(which, self.seed + 4), mix(which, self.seed + 5))
        return np.stack([users, items], axis=1), y.astype(np.float32)

    def everything(self) -> Pair:
        """Return all ratings."""
        return self.take(np.arange(self.samples))

    def _traits(self, rows: NDArray[np.int64], stream: int) -> Floats:
        """Return a bias and tastes, (n, 1 + TASTES), of mean 0 and variance 1 over the rows."""
        width = np.uint64(1 + TASTES)
        cells: Any = rows.astype(np.uint64)[:, None] * width + np.arange(width, dtype=np.uint64)
        return math.sqrt(3) * (2.0 * unit(mix(cells, self.seed + stream)) - 1.0)


@dataclass(frozen=True)
class Tissue:
    """Simulated microscopy images of stained tissue: see `tissue`.

    Light passes through two dyes (Ruifrok and Johnston, Anal. Quant. Cytol. Histol. 23(4), 2001):
    haematoxylin colours the nuclei, eosin the rest.

    Attributes:
        first: Number of the first image. The test images come after the training images.
    """

    samples: int
    seed: int
    first: int = 0

    def take(self, places: NDArray[np.int64]) -> Pair:
        """Return x (n, 3, 96, 96) float32 in 0..1 and y (n,) int64 of the images at `places`."""
        which: Any = places.astype(np.uint64) + np.uint64(self.first)
        labels = (mix(which, self.seed) >> np.uint64(63)).astype(np.int64)
        of_image = rolls(which, 4, self.seed + 1)
        dark = self._nuclei(which, labels, of_image[:, 0], of_image[:, 1])
        dark *= (0.8 + 0.4 * of_image[:, 2]).astype(np.float32)[:, None, None]
        eosin = self._texture(which) * (0.25 + 0.2 * of_image[:, 3])[:, None, None]
        through = dark[:, None] * _DYES[0] + eosin.astype(np.float32)[:, None] * _DYES[1]
        x = np.exp(-through) + 0.1 * (self._noise(which) - np.float32(0.5))
        return np.clip(x, 0, 1, dtype=np.float32), labels

    def everything(self) -> Pair:
        """Return all images; they are computed in parts, which needs less memory."""
        parts = [
            self.take(np.arange(start, min(start + 64, self.samples)))
            for start in range(0, self.samples, 64)
        ]
        x, y = zip(*parts, strict=True)
        return np.concatenate(x), np.concatenate(y)

    def _nuclei(
        self, which: Any, labels: NDArray[np.int64], crowd: Floats, abnormal: Floats
    ) -> NDArray[np.float32]:
        """Return how dense the nuclei are at each pixel, (n, 96, 96) in 0..1."""
        ill = labels == 1
        count = np.where(ill, 6 + 9 * crowd, 7 + 10 * crowd).astype(int)
        share = np.where(ill, 0.6 + 0.35 * abnormal, 0.1 * abnormal)
        roll = rolls(which, NUCLEI * 9, self.seed + 2).reshape(-1, NUCLEI, 9)
        odd = roll[..., 0] < share[:, None]
        radius = np.where(odd, 5.0 + 3.5 * roll[..., 1], 3.5 + 2.0 * roll[..., 1])
        lobes = np.where(odd, 0.1 + 0.2 * roll[..., 2], 0.06 * roll[..., 2])
        stretch = np.sqrt(1.0 + 0.4 * roll[..., 3])
        turn, phase = 2 * np.pi * roll[..., 4], 2 * np.pi * roll[..., 5]
        density = np.where(np.arange(NUCLEI) < count[:, None], 0.6 + 0.4 * roll[..., 8], 0.0)
        middle = roll[..., 6:8] * SIDE_PIXELS
        corner = middle.astype(int)
        away = np.arange(-_REACH, _REACH + 1, dtype=np.float32)
        size = SIDE_PIXELS + 2 * _REACH
        found = np.zeros((len(which), size, size), np.float32)
        image = np.arange(len(which))[:, None, None]
        for k in range(NUCLEI):
            column = [
                one[:, k, None, None].astype(np.float32)
                for one in (radius, lobes, stretch, np.cos(turn), np.sin(turn), np.cos(phase),
                            np.sin(phase), density)
            ]  # fmt: skip
            r, wave, long, cos, sin, cos_phase, sin_phase, dense = column
            shift = (middle - corner)[:, k].astype(np.float32)
            down = away[None, :, None] - shift[:, 0, None, None]
            right = away[None, None, :] - shift[:, 1, None, None]
            u, v = (cos * down + sin * right) / long, (cos * right - sin * down) * long
            far = np.sqrt(u * u + v * v) + np.float32(1e-6)
            c, s = u / far, v / far
            three = c * (4 * c * c - 3) * cos_phase - s * (3 - 4 * s * s) * sin_phase
            inside = np.clip((r * (1 + wave * three) - far) / 1.5 + 0.5, 0, 1) * dense
            rows = corner[:, k, 0, None, None] + np.arange(len(away))[None, :, None]
            columns = corner[:, k, 1, None, None] + np.arange(len(away))[None, None, :]
            found[image, rows, columns] = np.maximum(found[image, rows, columns], inside)
        return found[:, _REACH:-_REACH, _REACH:-_REACH]

    def _texture(self, which: Any) -> Floats:
        """Return how uneven the rest of the tissue is, (n, 96, 96) in 0..1."""
        enlarge = interpolation(7, SIDE_PIXELS)
        coarse = rolls(which, 49, self.seed + 3).reshape(-1, 7, 7)
        uneven: Floats = enlarge @ coarse @ enlarge.T
        return uneven

    def _noise(self, which: Any) -> NDArray[np.float32]:
        """Return the camera's noise, (n, 3, 96, 96) in 0..1: each hash gives eight bytes."""
        shape = (len(which), 3, SIDE_PIXELS, SIDE_PIXELS)
        cells = numbers(which, 3 * SIDE_PIXELS**2 // 8)
        grains = mix(cells, self.seed + 4).view(np.uint8).reshape(shape)
        return grains.astype(np.float32) * np.float32(1 / 255)


_DYES = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11]], np.float32)[:, :, None, None]
_REACH = 14
"""Pixels from the middle of a nucleus to the edge of the square in which it is drawn."""


@dataclass(frozen=True)
class Payments:
    """Simulated card payments, of which a known share is fraud: see `payments`.

    Attributes:
        first: Number of the first payment. The test payments come after the training payments.
    """

    samples: int
    branches: int
    seed: int
    first: int = 0

    def take(self, places: NDArray[np.int64]) -> Pair:
        """Return x (n, 6 + branches) float32 and y (n,) int64 of the payments at `places`."""
        which: Any = places.astype(np.uint64) + np.uint64(self.first)
        x = np.zeros((len(which), FEATURES + self.branches), np.float32)
        x[:, :FEATURES] = _payment(which, self.seed)
        ends = np.cumsum(_shares(self.branches))
        branch = np.searchsorted(ends[:-1], unit(mix(which, self.seed + 3)), side="right")
        x[np.arange(len(x)), FEATURES + branch] = 1
        fraud = unit(mix(which, self.seed + 4)) < chance_of_fraud(x)
        return x, fraud.astype(np.int64)

    def everything(self) -> Pair:
        """Return all payments."""
        return self.take(np.arange(self.samples))


def chance_of_fraud(x: NDArray[np.float32]) -> Floats:
    """Return the true chance that each payment is fraud, (n,) in 0..1: see `fraud_chance`."""
    start = _starts(x.shape[1] - FEATURES)[x[:, FEATURES:].argmax(axis=1)]
    chance: Floats = 1.0 / (1.0 + np.exp(-(start + _suspicion(x.astype(np.float64)))))
    return chance


def _payment(which: Any, seed: int) -> Floats:
    """Return amount, distance and pace (mean 0, variance 1), new shop (0 or 1), and the hour."""
    roll = mix(numbers(which, 3), seed + 1), mix(numbers(which, 3), seed + 2)
    rest = rolls(which, 2, seed + 5)
    hour = 2 * np.pi * rest[:, 1]
    new = (rest[:, 0] < 0.25).astype(np.float64)
    columns = [*normal(*roll).T, new, np.sin(hour), np.cos(hour)]
    return np.stack(columns, axis=1)


def _suspicion(x: Floats) -> Floats:
    """Return the log-odds that speak for fraud, (n,), without the branch's part."""
    amount, distance, pace, new, _, midnight = x[:, :FEATURES].T
    night: Floats = np.maximum(midnight, 0)
    score: Floats = 1.2 * amount + distance + pace
    score = 1.5 * (score + 2 * new * amount + 2 * night * distance)
    return score


def _shares(branches: int) -> Floats:
    """Return the share of each branch in all payments: in proportion to 1, 1/2, 1/3, ..."""
    sizes: Floats = 1.0 / np.arange(1, branches + 1)
    sizes /= sizes.sum()
    return sizes


@functools.cache
def _starts(branches: int) -> Floats:
    """Return the log-odds of each branch, so that fraud has its share over all branches.

    The last branch has 12 times the fraud of the first. The shares are those of 65,536 payments
    that no data set has.
    """
    rates = 12.0 ** (np.arange(branches) / max(1, branches - 1))
    rates *= FRAUD / (rates * _shares(branches)).sum()
    some: Any = np.arange(1 << 16, dtype=np.uint64) + np.uint64(1 << 60)
    score = _suspicion(_payment(some, 0))
    grid = np.linspace(-20, 2, 89)
    shares = [float((1.0 / (1.0 + np.exp(-(start + score)))).mean()) for start in grid]
    found: Floats = np.interp(np.log(rates), np.log(shares), grid)
    return found


def interpolation(small: int, large: int) -> Floats:
    """Return the (large, small) matrix of linear interpolation."""
    places = np.linspace(0, small - 1, large)
    columns = [np.interp(places, np.arange(small), row) for row in np.eye(small)]
    return np.stack(columns, axis=1)


def numbers(which: Any, count: int) -> Any:
    """Return `count` different numbers for each of `which` (n,), as (n, count) uint64."""
    return which[:, None] * np.uint64(count) + np.arange(count, dtype=np.uint64)


def rolls(which: Any, count: int, seed: int) -> Floats:
    """Return `count` random numbers in 0..1 for each of `which` (n,), as (n, count)."""
    return unit(mix(numbers(which, count), seed))


def normal(some: NDArray[np.uint64], others: NDArray[np.uint64]) -> Floats:
    """Return normally distributed numbers (Box and Muller, Ann. Math. Stat. 1958)."""
    radius: Floats = np.sqrt(-2.0 * np.log1p(-unit(some)))
    return radius * np.cos(2.0 * np.pi * unit(others))


def mix(numbers: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Return well-mixed bits of each number: SplitMix64 (Steele et al., OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        z = numbers + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % (1 << 64))
        z = z * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def unit(bits: NDArray[np.uint64]) -> Floats:
    """Return numbers in 0..1 made of the upper 53 bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
