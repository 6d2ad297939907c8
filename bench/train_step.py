"""Training step of a Transformers model, random weights: before and after, and beside SDPA.

Four variants of one model with the same weights and batch, in one process, taking turns:

  eager    eager attention, not compiled (only when named in --variants: it needs most memory)
  plain    eager attention under torch.compile
  fused    the same unchanged model under torch.compile after inductor_gqa.enable()
  sdpa     the model switched to attn_implementation="sdpa" under torch.compile

First the fused variant is checked on a small instance of the same architecture: logits and every
parameter gradient against float64, at most twice as far off as without the pass
(inductor_gqa/cli/accuracy.py has the rule). No number is printed without that check. Running out
of memory is a result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch

import inductor_gqa
from inductor_gqa import report
from inductor_gqa.cli.accuracy import (
    Sample,
    Verdict,
    cast_parameters,
    double_copy,
    double_stays_double,
)
from inductor_gqa.cli.architectures import TINY, causal_lm
from inductor_gqa.cli.terminal import CommandError, bytes_as_text, complain, progress, table
from measure import (
    OUT_OF_MEMORY,
    Variant,
    add_arguments,
    choose_device,
    cold_caches,
    first_steps,
    record,
    take_turns,
    write,
)
from shapes import ALIASES, SHAPES

VARIANTS = ("eager", "plain", "fused", "sdpa")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = (*SHAPES, *ALIASES)
    parser.add_argument(
        "--model", choices=names, default="llama-3.2-1b", help="default: %(default)s"
    )
    parser.add_argument("--layers", type=int, help="layers, default: the model's own")
    parser.add_argument("--batch", type=int, help="sequences (default: 8, tiny: 2)")
    parser.add_argument("--length", type=int, help="tokens in a sequence (default: 1024, tiny: 64)")
    parser.add_argument(
        "--variants", default="plain,fused,sdpa", help="comma-separated, default: %(default)s"
    )
    parser.add_argument("--optimizer", choices=("none", "adamw"), default="none")
    parser.add_argument(
        "--always", action="store_true", help="fuse though it may not pay (tiny: always on)"
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    args.model = ALIASES.get(args.model, args.model)
    args.batch = args.batch or (2 if args.tiny else 8)
    args.length = args.length or (64 if args.tiny else 1024)
    args.always = args.always or args.tiny
    args.variants = args.variants.split(",")
    unknown = [name for name in args.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"unknown variants {', '.join(unknown)}, there are {', '.join(VARIANTS)}")
    return args


def sizes_of(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Architecture and configuration of the model that is timed."""
    architecture, sizes = SHAPES[args.model]
    sizes = {**sizes, "max_position_embeddings": max(args.length, 2048)}
    if args.tiny:
        sizes = {**sizes, **TINY}
    if args.layers:
        sizes["num_hidden_layers"] = args.layers
    return architecture, sizes


def build(
    architecture: str, sizes: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> Any:
    """The model in training mode, seeded, built on the device: initialising there is fast."""
    torch.manual_seed(0)
    with torch.device(device):
        model = causal_lm(architecture, sizes)
    return cast_parameters(model.to(device), dtype).train()


def batch_of(vocabulary: int, batch: int, length: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocabulary, (batch, length), generator=generator).to(device)


def check(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The error rule on two layers of the same heads, a small vocabulary and an odd length."""
    architecture, sizes = sizes_of(args)
    length = 63 if args.tiny else 255
    sizes |= {"num_hidden_layers": 2, "vocab_size": 512}
    if "sliding_window" in sizes:
        sizes["sliding_window"] = length // 3  # a window that the short sequence leaves
    model = build(architecture, sizes, device, dtype)
    ids = batch_of(512, 2, length, device)

    def sample(module: Any, run: Callable[..., Any]) -> Sample:
        result = run(input_ids=ids, labels=ids, use_cache=False)
        result.loss.backward()
        return Sample.take(result.logits, module)

    with double_stays_double():
        reference = double_copy(model)
        truth = sample(reference, reference)
    del reference
    eager = sample(model, model).errors(truth)
    plain = sample(model, torch.compile(model)).errors(truth)
    found = inductor_gqa.explain(model, input_ids=ids, labels=ids, use_cache=False)
    torch.compiler.reset()
    with inductor_gqa.enabled(always=True):
        fused = sample(model, torch.compile(model)).errors(truth)
    torch.compiler.reset()
    verdict = Verdict(eager, plain, fused)
    return {
        "ok": verdict.holds and found.fused > 0 and found.left == 0,
        "sites": len(found.sites),
        "sites_fused": found.fused,
        "length": length,
        **verdict.as_data(),
    }


@contextlib.contextmanager
def compiling_fused(facts: dict[str, Any], always: bool) -> Generator[None, None, None]:
    """Switches the pass on, and notes how long it took and how many sites it fused."""
    before = report.pass_seconds()
    with inductor_gqa.enabled(always=always), report.collected() as found:
        yield
    facts["pass_seconds"] = report.pass_seconds() - before
    facts["sites_fused"], facts["sites_left"] = found.fused, found.left


def variants_of(args: argparse.Namespace, model: Any, ids: torch.Tensor) -> list[Variant]:
    """The variants that were asked for, each a function of its own around one model."""
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        if args.optimizer == "adamw"
        else None
    )

    def variant(name: str) -> Variant:
        def forward() -> torch.Tensor:
            return model(input_ids=ids, labels=ids, use_cache=False).loss

        # Dynamo keeps compiled code by code object and does not guard our pass: with a code object
        # of its own, no variant is given what was compiled for another.
        forward.__code__ = forward.__code__.replace(co_name=f"forward_{name}")
        run = forward if name == "eager" else torch.compile(forward, fullgraph=True)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            loss = run()
            loss.backward()
            if "first_loss" not in facts:  # before any update, so all see the same weights
                facts["first_loss"] = float(loss.detach())
            elif optimizer is not None:
                optimizer.step()

        @contextlib.contextmanager
        def scope() -> Generator[None, None, None]:
            model.set_attn_implementation("sdpa" if name == "sdpa" else "eager")
            is_compiled = "pass_seconds" in facts
            try:
                if name == "fused" and not is_compiled:
                    with compiling_fused(facts, args.always):
                        yield
                else:
                    yield
            finally:
                model.zero_grad(set_to_none=True)

        found = Variant(name, step, run, scope)
        facts = found.facts
        return found

    return [variant(name) for name in args.variants]


def compare_losses(variants: list[Variant], dtype: torch.dtype) -> dict[str, Any] | None:
    """Loss of the first step at full size, fused beside sdpa: equal up to the dtype's rounding."""
    losses = {v.name: v.facts["first_loss"] for v in variants if "first_loss" in v.facts}
    if not {"fused", "sdpa"} <= losses.keys():
        return None
    difference = abs(losses["fused"] - losses["sdpa"]) / abs(losses["sdpa"])
    allowed = torch.finfo(dtype).eps
    return {"ok": difference <= allowed, "relative_difference": difference, "allowed": allowed}


def print_table(result: dict[str, Any]) -> None:
    verdict, settings = result["check"], result["settings"]
    place = result["environment"].get("gpu", "CPU")
    print(
        f"{settings['model']}, {settings['layers']} layers, B={settings['batch']} "
        f"S={settings['length']}, {settings['dtype']}, {place}"
    )
    print(
        f"check: {verdict['sites_fused']} of {verdict['sites']} sites fused; worst error "
        f"{verdict['worst_ratio']:.2f}x the one without us ({verdict['worst_tensor']}), allowed "
        f"{verdict['allowed_ratio']:g}x: {'ok' if verdict['ok'] else 'FAILED'}"
    )
    if "variants" not in result:
        return
    rows: list[list[str]] = []
    for name, data in result["variants"].items():
        if data["status"] == OUT_OF_MEMORY:
            rows.append([name, OUT_OF_MEMORY, *["-"] * 5])
            continue
        share = data.get("pass_share")
        rows.append(
            [
                name,
                f"{data['step_ms']:.1f} ms",
                f"{data['forward_ms']:.1f} ms",
                f"{data['tokens_per_second']:,.0f}",
                bytes_as_text(data["peak_bytes"]),
                f"{data['first_step_seconds']:.1f} s",
                "-" if share is None else f"{share:.1%}",
            ]
        )
    print(table(["", "step", "forward", "tokens/s", "memory", "compile", "our pass"], rows))
    if result["loss"] is not None:
        loss = result["loss"]
        print(f"loss, fused beside sdpa: {loss['relative_difference']:.1e} apart, ok: {loss['ok']}")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device, dtype = choose_device(args)
    architecture, sizes = sizes_of(args)
    settings = {
        **{name: getattr(args, name) for name in ("model", "batch", "length", "tiny", "always")},
        **{name: getattr(args, name) for name in ("optimizer", "rounds", "steps")},
        "architecture": architecture,
        "layers": sizes["num_hidden_layers"],
        "sizes": sizes,
        "dtype": str(dtype).removeprefix("torch."),
    }
    result = record("train_step", settings, device)
    with progress("checking a small instance against float64"):
        result["check"] = check(args, device, dtype)
    if not result["check"]["ok"]:
        return result
    model = build(architecture, sizes, device, dtype)
    ids = batch_of(sizes["vocab_size"], args.batch, args.length, device)
    variants = variants_of(args, model, ids)
    first_steps(variants, device)
    take_turns(variants, device, args.rounds, args.steps)
    for variant in variants:
        if variant.is_alive and "pass_seconds" in variant.facts:
            share = variant.facts["pass_seconds"] / variant.first_step_seconds
            variant.facts["pass_share"] = share
    result["variants"] = {v.name: v.as_data(args.batch * args.length) for v in variants}
    result["loss"] = compare_losses(variants, dtype)
    return result


def main(argv: list[str] | None = None) -> int:
    """Returns 1 when a check fails."""
    args = parse(argv)
    try:
        with cold_caches():
            result = measure(args)
    except CommandError as error:
        complain(str(error))
        return error.exit_code
    write(result, args.out)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print_table(result)
    is_right = result["check"]["ok"] and (result.get("loss") or {"ok": True})["ok"]
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
