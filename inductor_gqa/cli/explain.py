"""Say for each attention of a model whether it is fused, and why not.

TARGET is module:name, file.py:name or an architecture of Transformers by name. `name` is a model,
a function, or a class or function that makes one when called without arguments (--make). Its
arguments come from --inputs, a function without arguments in the same place that returns a tuple, a
dict, or a pair of both. In training a function's arguments that require gradients get them, or all
if none does: let rotary tables and masks require none, as in a model. An architecture (llama, or
--model llama) is built with two layers and random weights; nothing is downloaded.

A site takes up to three lines: source line, fused or left; what was recognised, or why it was left;
memory of the score matrices and FLOPs. The exit code is 1 where a site was left or none was found.

examples:
  inductor-gqa explain --model qwen2
  inductor-gqa explain llama --html report.html
  inductor-gqa explain my_model.py:Attention --make --inputs example_inputs
  inductor-gqa explain package.module:attention --inputs tests.data:tensors --direction training
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from inductor_gqa.cli.terminal import CommandError, paint, print_json, progress

if TYPE_CHECKING:
    import torch

DIRECTIONS = ("inference", "training")
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A target or an architecture, and in which directions it is read."""
    parser.add_argument(
        "target", nargs="?", metavar="TARGET", help="module:name, file.py:name or an architecture"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="an architecture of Transformers: llama, ..."
    )
    parser.add_argument("--inputs", metavar="NAME", help="what makes the arguments of TARGET")
    parser.add_argument("--make", action="store_true", help="call TARGET to get what is explained")
    parser.add_argument(
        "--direction", choices=(*DIRECTIONS, "both"), default="both", help="default: both"
    )
    parser.add_argument(
        "--padding",
        choices=("none", "right", "left"),
        default="right",
        help="the attention mask that --model is given (default: right)",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with all details")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, if any")
    parser.add_argument(
        "--always",
        action=argparse.BooleanOptionalAction,
        help="fuse whatever can be read, though it may not pay (default with --model)",
    )


def run(args: argparse.Namespace) -> int:
    """Returns 1 when a site was left or no attention was found, in either direction."""
    if (args.target is None) == (args.model is None):
        raise CommandError("name one thing to explain: a TARGET, or an architecture with --model")
    target, architecture = args.target, args.model
    if target is not None and not set(target) & set(":./\\"):  # a bare name
        target, architecture = None, target
    import torch
    from torch.utils import _pytree as pytree

    import inductor_gqa
    from inductor_gqa import report as reports_of
    from inductor_gqa.cli.measure import default_device

    device = torch.device(args.device) if args.device else default_device()
    always = architecture is not None if args.always is None else args.always
    if target is None:
        fn, inputs, named = _call_of_architecture(architecture, args.padding, device)
    else:
        fn, inputs, named = _call_of_target(target, args.inputs, args.make, device)
    reports: dict[str, Any] = {}
    for direction in DIRECTIONS if args.direction == "both" else (args.direction,):
        is_training = direction == "training"
        if isinstance(fn, torch.nn.Module):
            fn.train(is_training)
        elif is_training:
            leaves = pytree.tree_leaves((inputs, named))
            floats = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
            if not any(tensor.requires_grad for tensor in floats):
                for tensor in floats:
                    tensor.requires_grad_()
        try:
            with progress(f"reading, {direction}"), torch.set_grad_enabled(is_training):
                reports[direction] = inductor_gqa.explain(fn, *inputs, always=always, **named)
        except Exception as error:
            traceback.print_exc()
            message = f"{target or architecture} raised {type(error).__name__}, see above"
            raise CommandError(message, exit_code=4) from error
    if args.html is not None:
        every = [site for report in reports.values() for site in report.sites]
        reports_of.Report(every).save(args.html, f"inductor_gqa: {architecture or target}")
    if args.json:
        print_json({direction: report_as_data(report) for direction, report in reports.items()})
    else:
        for direction, report in reports.items():
            print(f"{paint(direction, 'bold')}\n{report}\n")
    return 0 if all(r.sites and not r.left for r in reports.values()) else 1


def report_as_data(report: Any) -> dict[str, Any]:
    """A report as plain data for JSON."""
    return cast("dict[str, Any]", json.loads(report.to_json()))


def _call_of_architecture(name: str, padding: str, device: torch.device) -> Call:
    import torch

    from inductor_gqa.cli.architectures import TINY, causal_lm

    model = causal_lm(name, TINY).to(device)
    generator = torch.Generator().manual_seed(0)
    batch, length, padded = 2, 32, 5
    ids = torch.randint(1, TINY["vocab_size"], (batch, length), generator=generator).to(device)
    named: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if padding != "none":
        mask = torch.ones_like(ids)
        mask[-1, slice(-padded, None) if padding == "right" else slice(padded)] = 0
        named["attention_mask"] = mask
    return model, (), named


def _call_of_target(target: str, inputs: str | None, is_made: bool, device: torch.device) -> Call:
    import torch
    from torch.utils import _pytree as pytree

    module, _, name = target.rpartition(":")
    if not module or not name:
        raise CommandError(
            f"TARGET is {target!r}, accepted module:name, file.py:name or an architecture's name"
        )
    fn = _load(module, name)
    if is_made or isinstance(fn, type):
        fn = fn()
    if not callable(fn):
        raise CommandError(f"{target} is a {type(fn).__name__}, accepted is what can be called")
    args: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if inputs is not None:
        place, _, maker = inputs.rpartition(":")
        args, named = _split(_load(place or module, maker)(), inputs)
    if isinstance(fn, torch.nn.Module):
        fn = fn.to(device)
    args, named = pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), (args, named))
    return fn, args, named


def _split(made: Any, inputs: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What --inputs returned as arguments and keyword arguments."""
    if isinstance(made, dict):
        return (), cast("dict[str, Any]", made)
    if isinstance(made, (tuple, list)):
        parts = cast("tuple[Any, ...]", tuple(made))  # pyright: ignore[reportUnknownArgumentType]
        if len(parts) == 2 and isinstance(parts[0], (tuple, list)) and isinstance(parts[1], dict):
            return tuple(parts[0]), cast("dict[str, Any]", parts[1])
        return parts, {}
    raise CommandError(
        f"{inputs} returned a {type(made).__name__}, accepted a tuple, a dict or both"
    )


def _load(place: str, name: str) -> Any:
    """The object `name` of a module or of a Python file."""
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(os.path.basename(place)[:-3], place)
        if spec is None or spec.loader is None or not os.path.isfile(place):
            raise CommandError(f"there is no file {place}")
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(spec.name, module)
        spec.loader.exec_module(module)
    else:
        if os.getcwd() not in sys.path:  # the console script does not look where the user stands
            sys.path.insert(0, os.getcwd())
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise CommandError(f"{place} cannot be imported: {error}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise CommandError(f"{place} has no {name}")
        found = getattr(found, part)
    return found
