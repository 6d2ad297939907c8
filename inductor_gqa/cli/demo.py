"""Compile a small unchanged GQA + RoPE model before and after enable().

The model is inductor_gqa/cli/demo_model.py, plain PyTorch. It runs three times with the same
weights: eager, under torch.compile, and under torch.compile after enable(always=True). Shown are
what was fused, the error of each against float64, time, and peak memory, for inference and for a
training step. On a CPU where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from inductor_gqa.cli.terminal import (
    CommandError,
    bytes_as_text,
    paint,
    print_json,
    progress,
    table,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from inductor_gqa.cli.accuracy import Verdict
    from inductor_gqa.cli.demo_model import Sizes
    from inductor_gqa.cli.measure import Memory

SIZES = ("batch", "length", "layers", "hidden", "heads", "kv_heads")
DEFAULTS = {
    "cpu": {"batch": 1, "length": 1024, "layers": 2, "hidden": 256, "heads": 8, "kv_heads": 2},
    "cuda": {"batch": 1, "length": 2048, "layers": 2, "hidden": 1024, "heads": 16, "kv_heads": 4},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes default to what suits the device."""
    for name in SIZES:
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, metavar="N", help=f"{name} of the model or batch")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, if any")


@dataclasses.dataclass
class Variant:
    """One way to run the model and what was found out about it."""

    name: str
    run: Callable[[Tensor], Tensor]
    is_fused: bool = False
    compile_seconds: float | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    inference_ms: float = 0.0
    training_ms: float = 0.0
    inference_memory: Memory | None = None
    training_memory: Memory | None = None


def run(args: argparse.Namespace) -> int:
    """Returns 1 when nothing was fused or the error rule fails."""
    import torch

    import inductor_gqa
    from inductor_gqa.cli.accuracy import Verdict, cast_parameters, double_copy
    from inductor_gqa.cli.demo_model import Decoder, Sizes
    from inductor_gqa.cli.measure import default_device

    device = torch.device(args.device) if args.device else default_device()
    if device.type == "cpu" and not shutil.which("g++") and not shutil.which("clang++"):
        message = "torch.compile needs a C++ compiler on a CPU: install g++ or clang++"
        raise CommandError(message, exit_code=3)
    asked = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    sizes = Sizes(**{**DEFAULTS[device.type], **asked})
    if sizes.heads % sizes.kv_heads or sizes.hidden % (2 * sizes.heads):
        raise CommandError(
            f"heads={sizes.heads} must be a multiple of kv_heads={sizes.kv_heads}, "
            f"hidden={sizes.hidden} of twice the heads"
        )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = cast_parameters(Decoder(sizes).to(device), dtype)
    ids = torch.randint(sizes.vocabulary, (sizes.batch, sizes.length), device=device)

    with progress("float64 reference"):
        truth = _reference(double_copy(model), ids)
    reports: dict[str, Any] = {}
    with progress("reading the attention, inference"), torch.no_grad():
        reports["inference"] = inductor_gqa.explain(model, ids)
    with progress("reading the attention, training"):
        reports["training"] = inductor_gqa.explain(model, ids)

    variants = [
        Variant("eager", model),
        Variant("torch.compile", torch.compile(model)),
        Variant("+ inductor_gqa", torch.compile(model), is_fused=True),
    ]
    for variant in variants:
        with progress(variant.name):
            _try(variant, model, ids, truth, device)
    verdict = Verdict(*(variant.errors for variant in variants))
    is_fused = all(report.fused > 0 for report in reports.values())
    if args.json:
        print_json(_as_data(sizes, device, dtype, reports, variants, verdict, is_fused))
    else:
        _print(sizes, device, dtype, reports, variants, verdict, is_fused)
    return 0 if is_fused and verdict.holds else 1


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    from torch.nn import functional as F

    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _reference(model: nn.Module, ids: Tensor) -> Any:
    from inductor_gqa.cli.accuracy import Sample, double_stays_double

    with double_stays_double():
        logits = model(ids)
        _loss(logits, ids).backward()
    return Sample.take(logits, model)


def _try(variant: Variant, model: nn.Module, ids: Tensor, truth: Any, device: torch.device) -> None:
    """Compiles, compares with `truth`, then measures one variant, which keeps the findings."""
    import torch

    import inductor_gqa
    from inductor_gqa.cli.accuracy import Sample
    from inductor_gqa.cli.measure import median_ms, peak_memory

    @torch.no_grad()
    def infer() -> Tensor:
        return variant.run(ids)

    def train() -> Tensor:
        model.zero_grad(set_to_none=True)
        logits = variant.run(ids)
        _loss(logits, ids).backward()
        return logits

    repeats = 10 if device.type == "cuda" else 3
    torch.compiler.reset()  # compiled code of the variant before would be taken for this one's
    with inductor_gqa.enabled(always=True) if variant.is_fused else contextlib.nullcontext():
        start = time.perf_counter()
        infer()
        sample = Sample.take(train(), model)
        if variant.run is not model:
            variant.compile_seconds = time.perf_counter() - start
    variant.errors = sample.errors(truth)
    del sample
    variant.inference_ms = median_ms(infer, device, repeats)
    variant.training_ms = median_ms(train, device, repeats)
    variant.inference_memory = peak_memory(infer, device)
    model.zero_grad(set_to_none=True)
    variant.training_memory = peak_memory(train, device)
    model.zero_grad(set_to_none=True)


def _rows(variants: list[Variant]) -> list[list[str]]:
    from inductor_gqa.cli.accuracy import worst_gradient_error

    def memory(found: Memory | None) -> str:
        return bytes_as_text(found.added if found else None)

    def seconds(found: float | None) -> str:
        return "-" if found is None else f"{found:.1f} s"

    return [
        ["error of the output", *(f"{v.errors['output']:.2e}" for v in variants)],
        ["largest gradient error", *(f"{worst_gradient_error(v.errors):.2e}" for v in variants)],
        ["inference, time", *(f"{v.inference_ms:.1f} ms" for v in variants)],
        ["inference, memory added", *(memory(v.inference_memory) for v in variants)],
        ["training step, time", *(f"{v.training_ms:.1f} ms" for v in variants)],
        ["training step, memory added", *(memory(v.training_memory) for v in variants)],
        ["compile time, both", *(seconds(v.compile_seconds) for v in variants)],
    ]


def _print(
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype,
    reports: dict[str, Any],
    variants: list[Variant],
    verdict: Verdict,
    is_fused: bool,
) -> None:
    shape = ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(sizes).items())
    print(f"{paint('Model', 'bold')} (plain PyTorch, unchanged): {shape}; {dtype} on {device}")
    for direction, report in reports.items():
        print(f"\n{paint('Found, ' + direction, 'bold')}\n{report}")
    print(f"\n{paint('Before and after', 'bold')} (errors are relative, against float64)")
    print(table(["", *(variant.name for variant in variants)], _rows(variants)))
    name, ratio = verdict.worst
    sites = sum(report.fused for report in reports.values())
    total = sum(len(report.sites) for report in reports.values())
    facts = f"{sites} of {total} sites fused; worst is {name}, {ratio:.2f}x the error without us"
    if is_fused and verdict.holds:
        print(f"\n{paint('ok:', 'green')} {facts}")
    else:
        print(f"\n{paint('failed:', 'red')} {facts}", file=sys.stdout)


def _as_data(
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype,
    reports: dict[str, Any],
    variants: list[Variant],
    verdict: Verdict,
    is_fused: bool,
) -> dict[str, Any]:
    from inductor_gqa.cli.accuracy import worst_gradient_error
    from inductor_gqa.cli.explain import report_as_data
    from inductor_gqa.cli.measure import environment

    def as_data(variant: Variant) -> dict[str, Any]:
        inference, training = variant.inference_memory, variant.training_memory
        return {
            "output_error": variant.errors["output"],
            "worst_gradient_error": worst_gradient_error(variant.errors),
            "inference_ms": variant.inference_ms,
            "inference_added_bytes": inference.added if inference else None,
            "training_ms": variant.training_ms,
            "training_added_bytes": training.added if training else None,
            "compile_seconds": variant.compile_seconds,
        }

    return {
        "ok": is_fused and verdict.holds,
        "sizes": dataclasses.asdict(sizes),
        "dtype": str(dtype).removeprefix("torch."),
        "environment": environment(device),
        "reports": {direction: report_as_data(report) for direction, report in reports.items()},
        "verdict": verdict.as_data(),
        "variants": {variant.name: as_data(variant) for variant in variants},
    }
