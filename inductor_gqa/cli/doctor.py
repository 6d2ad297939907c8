"""Check this machine: what works, what does not, and how to mend it.

Looks at versions, the compilers that torch.compile needs, its cache folder, the GPU and Triton.
Nothing is compiled or changed. With --try a small attention is compiled, fused, run forward and
backward and compared with eager on the device at hand: some seconds. The exit code is 0 when
attention can be fused on at least the CPU, and with --try when it was and the results are right.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import shutil
import tempfile
from collections.abc import Callable

from inductor_gqa.cli.measure import version_of
from inductor_gqa.cli.terminal import paint, print_json, progress, table

OK, NOTE, FAILED = "ok", "note", "failed"
COLOURS = {OK: "green", NOTE: "yellow", FAILED: "red"}
LOWEST_TORCH = (2, 11)
LOWEST_CAPABILITY = (8, 0)
# What results and tests come from; others may work and are not known to.
RUN_ON_TORCH = ((2, 11), (2, 13))
RUN_ON_CAPABILITY = ((9, 0),)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing looked at: `state` is ok, note (works, with less) or failed."""

    name: str
    value: str
    state: str = OK
    mend: str = ""
    works: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Looking changes nothing; trying compiles."""
    parser.add_argument(
        "--try", dest="is_tried", action="store_true", help="fuse, run and compare an attention"
    )


def run(args: argparse.Namespace) -> int:
    """Returns 1 when a finding says that attention cannot be fused here at all."""
    findings = [check() for check in CHECKS]
    if args.is_tried and all(finding.state != FAILED for finding in findings):
        with progress("fusing, running and comparing an attention"):
            findings.append(check_by_trying())
    is_usable = all(finding.state != FAILED for finding in findings)
    works = what_works(findings) if is_usable else {}
    if args.json:
        print_json(
            {
                "ok": is_usable,
                "findings": [dataclasses.asdict(finding) for finding in findings],
                "works": works,
            }
        )
        return 0 if is_usable else 1
    rows = [[finding.name, finding.value] for finding in findings]
    print(table(["", "found"], rows, words=2))
    for finding in findings:
        if finding.mend:
            print(
                f"\n{paint(finding.state, COLOURS[finding.state])} {finding.name}: {finding.mend}"
            )
    if is_usable:
        print(f"\n{paint('what works here', 'bold')}")
        print("\n".join(f"  {what}: {how}" for what, how in works.items()))
    else:
        print(f"\n{paint('attention cannot be fused here until this is mended', 'red')}")
    return 0 if is_usable else 1


def what_works(findings: list[Finding]) -> dict[str, str]:
    """One line for each way to run, given findings of which none failed."""
    state = {finding.name: finding.state for finding in findings}
    gpu = next(finding for finding in findings if finding.name == "GPU")
    has_gpu = gpu.works and state["Triton"] == OK
    no = "not here, see the notes above"
    return {
        "inference and training on the GPU": "our Triton kernels" if has_gpu else no,
        "inference and training on the CPU": (
            "PyTorch's fused CPU attention" if state["C++ compiler"] == OK else no
        ),
        "explain --model, bench": "yes" if state["Transformers"] == OK else no,
    }


def check_python() -> Finding:
    return Finding("Python", platform.python_version())


def check_package() -> Finding:
    version = version_of("inductor-gqa")
    if version is not None:
        return Finding("inductor-gqa", version)
    return Finding("inductor-gqa", "not installed", NOTE, "runs from a checkout; pip install .")


def check_torch() -> Finding:
    import torch

    version = torch.__version__
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < LOWEST_TORCH:
        return Finding("torch", version, FAILED, "pip install --upgrade 'torch>=2.11'")
    import torch._inductor.config as inductor_config

    if not hasattr(inductor_config, "joint_custom_pre_pass"):
        mend = "this release has no joint_custom_pre_pass: use torch 2.11 to 2.14"
        return Finding("torch", version, FAILED, mend)
    if numbers not in RUN_ON_TORCH:
        mend = (
            "untried: results and tests come from 2.11 and 2.13; doctor --try compares with eager"
        )
        return Finding("torch", version, NOTE, mend)
    return Finding("torch", version)


def check_compiling() -> Finding:
    import torch._dynamo.config as dynamo_config

    if os.environ.get("TORCH_COMPILE_DISABLE") == "1" or dynamo_config.disable:
        mend = "torch.compile is switched off: unset TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE"
        return Finding("torch.compile", "off", FAILED, mend)
    return Finding("torch.compile", "on")


def check_compiler() -> Finding:
    named = os.environ.get("CXX")
    found = next((c for c in (named, "g++", "clang++") if c and shutil.which(c)), None)
    if found:
        return Finding("C++ compiler", found)
    mend = "torch.compile needs one for models on the CPU: install g++ or clang++"
    return Finding("C++ compiler", "none", NOTE, mend)


def check_cache() -> Finding:
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    existing = folder
    while not os.path.exists(existing) and os.path.dirname(existing) != existing:
        existing = os.path.dirname(existing)
    if os.access(existing, os.W_OK):
        return Finding("compile cache", folder)
    mend = "torch.compile cannot write there: set TORCHINDUCTOR_CACHE_DIR to a folder of yours"
    return Finding("compile cache", folder, FAILED, mend)


def check_triton() -> Finding:
    version = version_of("triton")
    if version is None:
        return Finding("Triton", "not installed", NOTE, "the kernels need it: pip install triton")
    try:
        import triton  # pyright: ignore[reportUnusedImport]  # noqa: F401
    except Exception as error:  # a broken install can raise anything
        mend = f"installed, but import triton says: {error}; install it anew"
        return Finding("Triton", version, NOTE, mend)
    return Finding("Triton", version)


def check_gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        if torch.version.cuda is not None:
            mend = "torch sees no CUDA GPU: CPU only; does nvidia-smi, and CUDA_VISIBLE_DEVICES?"
            return Finding("GPU", "none", NOTE, mend, False)
        mend = "this torch is built without CUDA: CPU only"
        if shutil.which("nvidia-smi"):
            mend += "; nvidia-smi is here: take a CUDA build of torch, see pytorch.org/get-started"
        return Finding("GPU", "none", NOTE, mend, False)
    capability = torch.cuda.get_device_capability()
    value = f"{torch.cuda.get_device_name()}, capability {capability[0]}.{capability[1]}"
    if capability < LOWEST_CAPABILITY:
        return Finding("GPU", value, NOTE, "the kernels need capability 8.0 or higher", False)
    if shutil.which(os.environ.get("CC") or "cc") is None and shutil.which("gcc") is None:
        return Finding("GPU", value, NOTE, "Triton needs a C compiler: install gcc", False)
    if capability not in RUN_ON_CAPABILITY:
        mend = "the kernels have only been run on capability 9.0; doctor --try compares with eager"
        return Finding("GPU", value, NOTE, mend)
    return Finding("GPU", value)


def check_transformers() -> Finding:
    version = version_of("transformers")
    if version is None:
        mend = "only explain --model and the benchmarks need it: pip install 'transformers>=5'"
        return Finding("Transformers", "not installed", NOTE, mend)
    if int(version.split(".")[0]) < 5:
        return Finding("Transformers", version, NOTE, "use 5: pip install 'transformers>=5'")
    return Finding("Transformers", version)


def check_by_trying() -> Finding:
    from inductor_gqa.cli.trial import errors

    try:
        device, eager, fused = errors()
    except Exception as reason:  # whatever it is, it is what the user wants to know
        return Finding("trial", "raised", FAILED, f"{type(reason).__name__}: {reason}", False)
    value = f"fused on {device}, error {fused:.1e} (eager {eager:.1e})"
    if not fused <= 2 * eager:
        mend = "the fused result is further off than twice eager: please report it, with this table"
        return Finding("trial", value, FAILED, mend, False)
    return Finding("trial", value)


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_package,
    check_torch,
    check_compiling,
    check_compiler,
    check_cache,
    check_triton,
    check_gpu,
    check_transformers,
)
