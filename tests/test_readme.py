"""The README says what the results say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_speed_table_is_made_from_the_committed_results():
    script = ROOT / "bench" / "readme.py"
    made = subprocess.run([sys.executable, str(script), "--check"], check=False)
    assert made.returncode == 0, "run `python bench/readme.py`"
