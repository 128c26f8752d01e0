import mmap
import subprocess
import sys

import pytest
import torch

from wildflower.client_app import memory
from wildflower.client_app.memory import LIBRARY_BYTES, MemoryMeter, is_out_of_memory, memory_limit, resident_bytes

MB = 2**20


def pages(megabytes: int) -> mmap.mmap:
    """Anonymous memory of its own, every page of it written: it comes and goes at once, whatever malloc keeps."""
    held = mmap.mmap(-1, megabytes * MB)
    for start in range(0, megabytes * MB, mmap.PAGESIZE):
        held[start] = 1
    return held


def test_a_known_allocation_is_measured_even_when_it_is_gone():
    meter = MemoryMeter(torch.device("cpu"))
    held = pages(64)
    assert meter.now_bytes() == pytest.approx(64 * MB, abs=4 * MB)
    held.close()
    assert meter.now_bytes() < 8 * MB
    assert meter.peak_bytes() == pytest.approx(64 * MB, abs=4 * MB)


def test_a_peak_before_the_work_is_not_counted():
    pages(64).close()
    meter = MemoryMeter(torch.device("cpu"))
    assert meter.peak_bytes() < 8 * MB


def test_where_the_kernels_mark_cannot_be_set_back_samples_are_the_peak(monkeypatch):
    monkeypatch.setattr(memory, "_reset_high_water_mark", lambda: False)
    meter = MemoryMeter(torch.device("cpu"))
    held = pages(32)
    assert meter.now_bytes() > 24 * MB
    held.close()
    assert meter.peak_bytes() == pytest.approx(32 * MB, abs=4 * MB)


def test_resident_memory_is_that_of_this_process():
    assert 20 * MB < resident_bytes() < 64 * 2**30


def test_pages_of_files_are_not_the_works(tmp_path):
    (tmp_path / "code").write_bytes(bytes(32 * MB))
    meter = MemoryMeter(torch.device("cpu"))
    with (tmp_path / "code").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    assert sum(mapped[:: mmap.PAGESIZE]) == 0
    assert meter.peak_bytes() < 8 * MB
    mapped.close()


def test_memory_beyond_a_limit_is_refused_and_only_within_it():
    limit_bytes = 16 * MB
    # Elements, more than stacks and what malloc has over from the tests before; not a page of them is written.
    beyond = (limit_bytes + LIBRARY_BYTES + 4096 * MB) // 4
    with memory_limit(limit_bytes, torch.device("cpu")):
        assert torch.zeros(limit_bytes // 4).sum() == 0
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            torch.empty(beyond)
    assert is_out_of_memory(caught.value)
    assert torch.empty(beyond).numel() == beyond
    with memory_limit(None, torch.device("cpu")):
        assert torch.empty(beyond).numel() == beyond


@pytest.mark.thorough
def test_the_code_of_many_convolutions_fits_beside_a_small_limit():
    """In a process of its own, because code is kept; with two sizes of batches, and of another size than any test's."""
    program = """
import torch
from torch import nn
from wildflower.client_app.memory import memory_limit
torch.set_num_threads(1)
layers = [nn.Conv2d(n, n + 1, 3, padding=1) for n in range(3, 27)]
model = nn.Sequential(*layers)
with memory_limit(2**22, torch.device("cpu"), model):
    for size in (7, 5):
        model(torch.zeros(size, 3, 6, 6)).sum().backward()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.thorough
def test_what_libraries_touch_beside_a_small_model_is_allowed_for():
    """In a process of its own, as code is kept; layers of few channels have the longest code."""
    program = """
import torch
from torch import nn
from wildflower.client_app.memory import MemoryMeter, touched_bytes
from wildflower.models.allocator import return_freed_memory
from wildflower.models.cost import cost
from wildflower.models.family import make_family
torch.set_num_threads(1)
family = make_family({"name": "resnet18", "first_channels": 32, "input_shape": [1, 8, 8], "classes": 10})
architecture = family.width(1 / 16)
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # as the worker has done
meter = MemoryMeter(torch.device("cpu"))
return_freed_memory()
model = family.build(architecture)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for size in (16, 12):
    optimizer.zero_grad(set_to_none=True)
    model(torch.zeros(size, 1, 8, 8)).sum().backward()
    optimizer.step()
predicted_bytes = cost(family, architecture, batch_size=16, optimizer="sgd").peak_training_memory_bytes
beyond_bytes = meter.peak_bytes() - predicted_bytes
assert beyond_bytes <= touched_bytes(model), beyond_bytes
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_only_some_errors_are_of_memory():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 5 bytes"))
    assert is_out_of_memory(RuntimeError("could not create a primitive"))
    assert not is_out_of_memory(RuntimeError("could not create a primitive descriptor for a convolution"))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("size mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))
