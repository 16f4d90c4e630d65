"""The textbooks' two-device CNN, and the shape mistake that everybody makes in it."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from workbench.engine.torch.support import explain_mistake  # noqa: E402  # noqa: E402

pytestmark = pytest.mark.torch


class ModelParallelCNN(nn.Module):
    def __init__(self, first, second, features):
        super().__init__()
        self.first, self.second, self.features = first, second, features
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1).to(first)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1).to(second)
        self.fc1 = nn.Linear(features, 16).to(first)
        self.fc2 = nn.Linear(16, 10).to(second)

    def forward(self, x):
        x = torch.relu(self.conv1(x.to(self.first)))
        x = torch.relu(self.conv2(x.to(self.second)))
        x = x.view(-1, self.features)
        x = torch.relu(self.fc1(x.to(self.first)))
        return self.fc2(x.to(self.second))


def error_of(model, samples=4):
    try:
        x, y = torch.randn(samples, 1, 28, 28), torch.randint(0, 10, (samples,))
        nn.CrossEntropyLoss()(model(x), y)
    except (ValueError, RuntimeError) as error:
        return error
    return None


def test_the_two_device_cnn_runs_on_stand_ins():
    assert error_of(ModelParallelCNN("cpu", "cpu", 64 * 28 * 28)) is None


def test_the_view_that_folds_the_batch_is_named_with_its_cure():
    text = explain_mistake(error_of(ModelParallelCNN("cpu", "cpu", 64 * 14 * 14)))
    assert text is not None
    assert "16 outputs for 4 targets" in text
    assert "(4, 64, 28, 28) became (16, 12544)" in text
    assert "x = x.view(-1, self.features)" in text
    assert re.search("50176 values.*not 12544", text)
    assert "2x2 max-pool" in text
    assert re.search("28x28 .*14x14", text)


def test_other_errors_are_left_alone():
    assert explain_mistake(ValueError("something else")) is None
    with pytest.raises(ValueError, match="batch_size") as caught:  # no view is to blame
        nn.CrossEntropyLoss()(nn.Linear(3, 2)(torch.randn(5, 3)), torch.zeros(4).long())
    assert explain_mistake(caught.value) is None
