"""Runs a script in which Inductor generates calls of ATen and no C++: `python without_cpp.py SCRIPT
OPTION...`

A C++ compiler takes a second for each kernel, most of a tiny benchmark's time. Reading, rewriting,
memory planning and the generated wrapper are as ever; the demo as .ci/run starts it and the step of
training in patterns/test_transformers.py are compiled whole.
"""

import gc
import runpy
import sys

import torch._inductor.config as inductor_config
from less_work import leave_out_what_is_only_logged

if __name__ == "__main__":
    gc.set_threshold(50_000, 20, 50)  # conftest.py says why
    leave_out_what_is_only_logged()
    if hasattr(inductor_config, "fallback_by_default"):  # a release without it compiles all
        inductor_config.fallback_by_default = True
    sys.argv = sys.argv[1:]
    sys.path[0] = sys.argv[0].rpartition("/")[0]  # as for a script that runs itself
    runpy.run_path(sys.argv[0], run_name="__main__")
