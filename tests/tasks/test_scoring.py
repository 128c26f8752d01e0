import torch
from torch import nn

from tasks.scoring import score
from tasks.task import TaskSpec, load_task


def _model(pixels: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(pixels), nn.Dropout(0.5), nn.Linear(pixels, 10))


def test_a_score_is_that_of_all_examples_at_once_whatever_the_batch() -> None:
    task = load_task(TaskSpec(name="digits", devices=2))
    inputs, labels = task.test.inputs[:101], task.test.labels[:101]
    model = _model(64).eval()
    outputs = model(task.prepare(inputs, augment=None)).detach()
    model.train()
    for batch_size in (7, 101, 1000):
        correct, loss, examples = score(model, task, inputs, labels, batch_size=batch_size, device=torch.device("cpu"))
        assert correct == int((outputs.argmax(1) == labels).sum())
        assert abs(loss - float(nn.functional.cross_entropy(outputs, labels, reduction="sum"))) < 1e-3
        assert examples == 101
