import pytest
import torch
import torch.nn.functional as F

from wildflower.tasks.labels import NO_LABEL
from wildflower.tasks.losses import squared_error, token_cross_entropy


def test_the_squared_error_of_one_output() -> None:
    outputs, labels = torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([1.0, 4.0, 2.0])
    assert float(squared_error(outputs, labels)) == pytest.approx(13 / 3)
    assert float(squared_error(outputs, labels, reduction="sum")) == 13


def test_the_loss_of_an_example_is_the_mean_over_its_labeled_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, 3, 6, generator=generator)
    labels = torch.randint(0, 3, (4, 6), generator=generator)
    labels[0, :2], labels[1, 5], labels[3] = NO_LABEL, NO_LABEL, NO_LABEL
    of_examples = [float(F.cross_entropy(outputs[n : n + 1], labels[n : n + 1])) for n in range(3)]
    torch.testing.assert_close(float(token_cross_entropy(outputs, labels)), sum(of_examples) / 4)
    torch.testing.assert_close(float(token_cross_entropy(outputs, labels, reduction="sum")), sum(of_examples))
