"""The list of deliberate faults fits the sources; running all of them is
`python tests/mutations/run.py`."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
from faults import FAULTS  # noqa: E402
from faults_of_kernels import FAULTS_OF_KERNELS  # noqa: E402

ALL = (*FAULTS, *FAULTS_OF_KERNELS)


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_fault_can_be_injected(fault):
    """Its text occurs once, what it becomes is another program, and the test exists."""
    source = (ROOT / fault.path).read_text()
    assert source.count(fault.old) == 1
    mutated = source.replace(fault.old, fault.new)
    assert mutated != source
    compile(mutated, fault.path, "exec")
    assert (ROOT / fault.test.split()[0]).exists()


def test_names_are_unique():
    assert len({fault.name for fault in ALL}) == len(ALL) >= 50


@pytest.mark.slow
def test_a_fault_is_caught():
    """One of them, to hold the runner itself; a fault that does nothing survives."""
    command = [sys.executable, str(HERE / "run.py"), "knows no sources"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "1 caught, 0 survived"
