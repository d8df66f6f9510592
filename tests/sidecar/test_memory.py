"""What long prompts took goes back to the node."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pathlib import Path
from kvsteward_sidecar.memory import settle

def resident() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])  # kB

if sys.argv[1] == "settled":
    settle()
for _ in range(3):
    b"x" * 200_000  # one prompt freed is what makes glibc keep the later ones in its heaps
before = resident()
prompts, kept = [], []
for number in range(200):
    prompts.append(b"%d" % number * 70_000)
    kept.append(b"%d" % number * 2_000)  # small things that stay, in between
    assert len(prompts[-1]) > 65_536
del prompts
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and needs glibc")
def test_freed_prompts_leave_nothing_behind_once_settled() -> None:
    def left(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert left("settled") < 4_000  # kB
    assert left("unsettled") > 10_000  # the control: so the figure above says something
