import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pathlib import Path
from wildflower.models.allocator import return_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "returned":
    assert return_freed_memory()
bytearray(30_000_000)  # by default, freeing this makes glibc keep everything smaller in its heap
before = resident()
blocks = [bytearray(2_000_000) for _ in range(40)]
pin = [bytes(1000) + bytes([i % 256]) for i in range(200)]  # above them: the heap cannot shrink
blocks.clear()
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
@pytest.mark.parametrize(("mode", "kept"), [("returned", False), ("default", True)])
def test_freed_blocks_leave_the_process(mode, kept):
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 40_000_000) == kept
