"""Greedy decoding with a static cache: a Transformers model before and after, and beside SDPA.

Four variants of one model with the same weights and prompt, in one process, taking turns:

  eager    eager attention, not compiled
  plain    eager attention, the step of one token under torch.compile
  fused    the same after inductor_gqa.enable()
  sdpa     the model switched to attn_implementation="sdpa" under torch.compile

The prompt is read without compiling, in every variant and outside the times. First the fused step
is checked on two layers: logits of forced tokens against float64, at most twice as far off as
without the pass (inductor_gqa/cli/accuracy.py has the rule). No number is printed without that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

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
    parser.add_argument("--model", choices=names, default="llama-3.2-1b")
    parser.add_argument("--layers", type=int, help="layers, default: the model's own")
    parser.add_argument("--batch", type=int, help="sequences (default: 8, tiny: 2)")
    parser.add_argument("--prompt", type=int, help="tokens given (default: 1024, tiny: 12)")
    parser.add_argument("--new", type=int, help="tokens to decode (default: 128, tiny: 6)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    parser.add_argument("--always", action="store_true", help="fuse though it may not pay")
    add_arguments(parser)
    args = parser.parse_args(argv)
    args.model = ALIASES.get(args.model, args.model)
    args.batch = args.batch or (2 if args.tiny else 8)
    args.prompt = args.prompt or (12 if args.tiny else 1024)
    args.new = args.new or (6 if args.tiny else 128)
    args.always = args.always or args.tiny
    args.variants = args.variants.split(",")
    unknown = [name for name in args.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"unknown variants {', '.join(unknown)}, there are {', '.join(VARIANTS)}")
    return args


class Decoder:
    """A model with a static cache, and a step of one token that may be compiled."""

    def __init__(self, model: Any, prompt: Tensor, new: int, name: str, is_compiled: bool) -> None:
        from transformers import StaticCache

        self.model, self.prompt, self.new = model, prompt, new
        self.cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + new)

        def step(token: Tensor, position: Tensor) -> Tensor:
            cached = {"past_key_values": self.cache, "use_cache": True}
            return model(input_ids=token, position_ids=position, **cached).logits

        # As in train_step: compiled code is kept by code object and does not notice our pass.
        step.__code__ = step.__code__.replace(co_name=f"step_{name}")
        self.step: Callable[[Tensor, Tensor], Tensor] = torch.compile(step) if is_compiled else step

    def read_prompt(self) -> Tensor:
        """Fills an empty cache; returns the logits [B, 1, V] of the first token to come."""
        self.cache.reset()
        cached = {"past_key_values": self.cache, "use_cache": True}
        return self.model(input_ids=self.prompt, **cached).logits[:, -1:]

    @torch.no_grad()
    def decode(self, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(tokens [B, N], their logits [B, N, V]): greedy, or along tokens that are forced."""
        logits = [self.read_prompt()]
        tokens: list[Tensor] = []
        for n in range(self.new):
            chosen = logits[-1].argmax(-1) if forced is None else forced[:, n : n + 1]
            tokens.append(chosen)
            if n + 1 < self.new:
                position = torch.full_like(chosen, self.prompt.shape[1] + n)
                logits.append(self.step(chosen, position))
        return torch.cat(tokens, 1), torch.cat(logits, 1)


def build(args: argparse.Namespace, device: torch.device, dtype: torch.dtype, **changes: int):
    architecture, sizes = SHAPES[args.model]
    sizes = {**sizes, "max_position_embeddings": max(args.prompt + args.new, 2048)}
    sizes |= TINY if args.tiny else {}
    if args.layers:
        sizes["num_hidden_layers"] = args.layers
    sizes |= changes
    torch.manual_seed(0)
    with torch.device(device):
        model = causal_lm(architecture, sizes)
    model = cast_parameters(model.to(device), dtype).eval()
    generator = torch.Generator().manual_seed(1)
    shape = (args.batch, args.prompt)
    prompt = torch.randint(sizes["vocab_size"], shape, generator=generator).to(device)
    return model, prompt, sizes


def check(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The error rule on two layers, along the tokens that eager chooses."""
    model, prompt, _ = build(args, device, dtype, num_hidden_layers=2, vocab_size=512)
    new = min(args.new, 8)
    tokens, logits = Decoder(model, prompt, new, "check_eager", is_compiled=False).decode()
    with double_stays_double(), torch.no_grad():
        ids = torch.cat((prompt, tokens[:, :-1]), 1)
        exact = double_copy(model)(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] - 1 :]
    truth = Sample(exact, {})
    eager = Sample(logits, {}).errors(truth)
    _, logits = Decoder(model, prompt, new, "check_plain", is_compiled=True).decode(tokens)
    plain = Sample(logits, {}).errors(truth)
    torch.compiler.reset()
    decoder = Decoder(model, prompt, new, "check_fused", is_compiled=True)
    with inductor_gqa.enabled(always=True), report.collected() as found:
        _, logits = decoder.decode(tokens)
        chosen, _ = decoder.decode()
    torch.compiler.reset()
    verdict = Verdict(eager, plain, Sample(logits, {}).errors(truth))
    return {
        "ok": verdict.holds and found.fused > 0 and found.left == 0,
        # Counted in each compile: Dynamo may compile the step again with other guards.
        "sites_fused": found.fused,
        "sites_left": found.left,
        "tokens_equal": torch.equal(chosen, tokens),
        **verdict.as_data(),
    }


def variants_of(args: argparse.Namespace, model: Any, prompt: Tensor) -> list[Variant]:
    def variant(name: str) -> Variant:
        decoder = Decoder(model, prompt, args.new, name, is_compiled=name != "eager")

        @contextlib.contextmanager
        def scope() -> Generator[None, None, None]:
            model.set_attn_implementation("sdpa" if name == "sdpa" else "eager")
            if name != "fused":
                yield
                return
            # In every turn: a step that Dynamo compiles again must not lose the pass.
            with inductor_gqa.enabled(always=args.always), report.collected() as seen:
                yield
            for fact, count in (("sites_fused", seen.fused), ("sites_left", seen.left)):
                found.facts[fact] = found.facts.get(fact, 0) + count

        def prompt_alone() -> Tensor:
            with torch.no_grad():
                return decoder.read_prompt()

        found = Variant(name, decoder.decode, prompt_alone, scope)
        return found

    return [variant(name) for name in args.variants]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device, dtype = choose_device(args)
    model, prompt, sizes = build(args, device, dtype)
    names = ("model", "batch", "prompt", "new", "tiny", "always", "rounds", "steps")
    settings = {name: getattr(args, name) for name in names}
    settings |= {"layers": sizes["num_hidden_layers"], "dtype": str(dtype).removeprefix("torch.")}
    result = record("generate", settings, device)
    with progress("checking two layers against float64"):
        result["check"] = check(args, device, dtype)
    if not result["check"]["ok"]:
        return result
    variants = variants_of(args, model, prompt)
    first_steps(variants, device)
    take_turns(variants, device, args.rounds, args.steps)
    result["variants"] = {v.name: v.as_data(args.batch * args.new) for v in variants}
    for data in result["variants"].values():
        if data["status"] == "ok":
            data["prompt_ms"] = data.pop("forward_ms")
            data["token_ms"] = (data["step_ms"] - data["prompt_ms"]) / (args.new - 1)
    return result


def print_table(result: dict[str, Any]) -> None:
    settings, verdict = result["settings"], result["check"]
    print(
        f"{settings['model']}, {settings['layers']} layers, B={settings['batch']}, prompt "
        f"{settings['prompt']}, {settings['new']} new, {settings['dtype']}"
    )
    print(
        f"check: {verdict['sites_fused']} sites fused, {verdict['sites_left']} left; error "
        f"{verdict['worst_ratio']:.2f}x the one without us, allowed {verdict['allowed_ratio']:g}x; "
        f"tokens equal: {verdict['tokens_equal']}; {'ok' if verdict['ok'] else 'FAILED'}"
    )
    rows: list[list[str]] = []
    for name, data in result.get("variants", {}).items():
        if data["status"] != "ok":
            rows.append([name, data["status"], "-", "-", "-"])
            continue
        times = [f"{data[key]:.2f} ms" for key in ("token_ms", "prompt_ms")]
        memory, first = bytes_as_text(data["peak_bytes"]), f"{data['first_step_seconds']:.1f} s"
        rows.append([name, *times, memory, first])
    if rows:
        print(table(["", "a token", "prompt", "memory", "compile"], rows))


def main(argv: list[str] | None = None) -> int:
    """Returns 1 when the check fails."""
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
    return 0 if result["check"]["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
