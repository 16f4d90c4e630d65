"""Mistakes with Keras, made on real engines (see `test_mistakes.py`)."""

from __future__ import annotations

import pytest
from mistake_making import make, title
from mistakes_of_keras import TENSORFLOW
from needs import need
from notebook_shell import notebook

pytestmark = [pytest.mark.cluster, pytest.mark.tensorflow]
need("tensorflow")


@pytest.fixture(scope="module")
def book():
    with notebook() as book:
        book.ok("%cluster start 2 --framework tensorflow")
        yield book


@pytest.mark.parametrize("mistake", TENSORFLOW, ids=title)
def test_a_mistake_is_named_with_the_next_step(book, mistake):
    make(book, mistake)
