"""The fuzzer: what it runs, that it finds each kind of fault, that families share compiled code."""

import collections
import dataclasses
import importlib
import json
import math
import queue
import sys
from pathlib import Path

import pytest
import torch

from inductor_gqa.kernels import forward, plan

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("fuzz", "fuzz_checks", "fuzz_families", "fuzz_memory", "measure")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """bench/fuzz.py, imported as it imports its neighbours."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    threads = torch.get_num_threads()
    yield importlib.import_module("fuzz")
    torch.set_num_threads(threads)
    for name in MODULES:
        sys.modules.pop(name, None)


def test_every_route_is_run_and_counted(script, tmp_path, capsys):
    out = tmp_path / "fuzz.json"
    options = ["--examples", "15", "--families", "14", "--jobs", "2", "--out", str(out)]
    assert script.main(options) == 0, capsys.readouterr().out
    record = json.loads(out.read_text())
    assert (record["examples"], record["wrong"], record["failures"]) == (15, 0, [])
    routes = {"plain", "chosen", "decode", "weights", "given", "op"}
    if torch.cuda.is_available():
        routes |= {"sm90"}
    assert set(record["counts"]["route"]) == routes
    assert all(sum(values.values()) == 15 for values in record["counts"].values())
    assert record["settings"] == {"seed": 0, "families": 14, "jobs": 2, "asked": 15}
    assert record["environment"]["torch"]


def test_an_example_is_found_again_by_its_numbers(script):
    families = importlib.import_module("fuzz_families")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    first, second = (
        families.Example(families.family(3, 7, True), 3, 5, device).case() for _ in range(2)
    )
    assert repr(first) == repr(second)
    assert torch.equal(first.q, second.q)


def plain_family(script, **changes):
    """Square, without a mask, in fp32: what a fault is injected into."""
    families = importlib.import_module("fuzz_families")
    of = dataclasses.replace(
        families.family(0, 0, True), route="plain", dtype=torch.float32, sizes=(2, 21, 21), K=1,
        R=2, D=16, E=16, mask="none", softcap=0.0, has_sink=False, has_keep=False, rotation="none",
        layouts=("contiguous",) * 4, needs=(True, True, True),
    )  # fmt: skip
    return dataclasses.replace(of, **changes)


def values_off(out, q):
    out[-1, -1, -1, -1, -1] *= 1.0001


def first_head_of_another_batch(out, q):
    out[0] = out[1]


def result_written_one_past_its_end(out, q):
    flat = torch.as_strided(out, (out.numel() + 1,), (1,), out.storage_offset())
    flat[-1] = 0.0


def result_written_one_before_its_start(out, q):
    torch.as_strided(out, (1,), (1,), out.storage_offset() - 1).zero_()


def operand_written(out, q):
    q[0, 0, 0, 0, 0] += 1.0


def read_beyond_an_operand(out, q):
    out[-1, -1, -1, -1, -1] += torch.as_strided(q, (1,), (1,), q.storage_offset() + q.numel())[0]


def value_left_unwritten(out, q):
    out[0, 0, 0, 0, 0] = math.nan


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (values_off, "out: error is"),
        (first_head_of_another_batch, "out: error is"),
        (result_written_one_past_its_end, "bytes beside one were written"),
        (result_written_one_before_its_start, "bytes beside one were written"),
        (operand_written, "bytes of one were written"),
        (read_beyond_an_operand, "out: error is inf"),
        (value_left_unwritten, "out: error is inf"),
    ],
)
def test_an_injected_fault_is_found(script, monkeypatch, fault, message):
    families = importlib.import_module("fuzz_families")
    checks = importlib.import_module("fuzz_checks")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    example = lambda: families.Example(plain_family(script), 0, 0, device)  # noqa: E731
    assert checks.wrong(example()) == []

    def faulty(made, tensors):
        results = plan.execute(made, tensors)
        fault(results[0], tensors["q"])
        return results

    monkeypatch.setattr(forward, "execute", faulty)
    found = checks.wrong(example())
    assert any(message in sentence for sentence in found), found


def test_a_failure_is_reported_with_what_it_takes_to_run_it_again(
    script, monkeypatch, tmp_path, capsys
):
    def broken(*args, **keywords):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(forward, "execute", broken)
    out = tmp_path / "fuzz.json"
    assert script.main(["--examples", "7", "--families", "7", "--out", str(out)]) == 1
    (failure, *_) = json.loads(out.read_text())["failures"]
    assert failure["example"] == "0/0"
    assert failure["wrong"] == ["RuntimeError: out of registers"]
    assert "route='plain'" in failure["family"]
    assert "0/0: RuntimeError: out of registers" in capsys.readouterr().out
    assert script.main(["--only", "0/0"]) == 1
    found = script.run_family(0, 0, range(10), torch.device("cpu"))
    assert (found["ran"], len(found["failures"])) == (3, 3)


def test_an_op_that_falls_back_to_plain_pytorch_is_an_error(script):
    checks = importlib.import_module("fuzz_checks")
    fallback = importlib.import_module("inductor_gqa.fallback")

    def broken():
        raise ValueError("no such layout")

    run = fallback.or_reference(broken, lambda: "plain", "attention")
    assert run() == "plain"
    run = fallback.or_reference(broken, lambda: "plain", "attention")
    with checks._fallback_is_an_error(), pytest.raises(RuntimeError, match="no such layout"):
        run()


def kind(x):
    """What Triton compiles for: 1, a multiple of 16, or any integer; constants as they are."""
    if not isinstance(x, int) or isinstance(x, bool):
        return x
    return "one" if x == 1 else "multiple of 16" if x % 16 == 0 else "any"


def test_examples_of_a_family_share_compiled_kernels(script, monkeypatch):
    """Of the forward kernel one kind for most families."""
    families = importlib.import_module("fuzz_families")
    kinds: dict[int, set] = collections.defaultdict(set)
    for index in range(0, 7 * 40, 7):  # "plain"
        of = families.family(0, index, False)
        for number in range(6):
            example = families.Example(of, 0, number, torch.device("cpu"))
            case = example.case()
            numbers = {n: x for n, x in case.keywords.items() if not isinstance(x, torch.Tensor)}
            tensors = {n: x for n, x in case.keywords.items() if isinstance(x, torch.Tensor)}
            tensors |= {"q": case.q, "k": case.k, "v": case.v}
            _, attention = forward.collect(tensors, numbers)
            launch = forward.plan_forward(attention).launches[-1]
            notes = launch.kernel.fn.__annotations__
            constants = {name for name, note in notes.items() if "constexpr" in str(note)}
            seen = tuple(
                x if name in constants else kind(x)
                for name, x in launch.scalars.items()
                if not isinstance(x, float)
            )
            kinds[index].add(seen)
    counts = [len(one) for one in kinds.values()]
    assert sum(count == 1 for count in counts) >= 0.9 * len(counts), counts
    assert max(counts) <= 3


def test_a_narrow_miss_is_drawn_again_and_stands_if_it_is_repeated(script, monkeypatch):
    """In one example of a thousand eager is lucky; a wrong kernel is wrong in the others too."""
    checks = importlib.import_module("fuzz_checks")
    narrow, far = ["dq: error is 0.146, eager 0.0588, floor 0.145"], ["out: error is inf, eager"]
    assert checks.is_narrow(narrow)
    assert not checks.is_narrow(["dq: error is 0.3, eager 0.0588, floor 0.145"])
    assert not checks.is_narrow(far)
    assert not checks.is_narrow([*narrow, "operands: 2 bytes of one were written, accepted none"])
    device = torch.device("cpu")
    for repeats, is_wrong in ((0, False), (1, False), (2, True)):
        answers = iter([narrow, *[narrow] * repeats, *[[]] * 16])
        monkeypatch.setattr(checks, "wrong", lambda example, answers=answers: next(answers))
        found = script.run_family(0, 0, range(1), device)
        assert (len(found["failures"]), len(found["unlucky"])) == (is_wrong, not is_wrong)


def test_a_process_that_dies_is_noted_and_replaced(script):
    """As after a segmentation fault; the other families still run."""
    results: queue.Queue = queue.Queue()

    class Process:
        count = 0

        def __init__(self):
            Process.count += 1
            self.pid, self.exitcode, self.left = Process.count, None, [0, 1, 2]

        def start(self):
            if self.pid == 1:  # dies in its first family
                results.put((1, 0, None))
                self.exitcode = -11
                return
            for index in (1, 2):
                results.put((self.pid, index, None))
                made = {"family": index, "ran": 5, "failures": [], "kinds": {}, "seconds": 0.0}
                results.put((self.pid, index, made))
            self.exitcode = 0

        def is_alive(self):
            return self.exitcode is None

    first = Process()
    first.start()
    args = script.parse(["--families", "3", "--jobs", "1"])
    found = script._gather([first], Process, results, args)
    assert Process.count == 2
    assert [(one["family"], one["ran"]) for one in found] == [(0, 0), (1, 5), (2, 5)]
    assert found[0]["failures"] == [{"example": "0/?", "wrong": ["process ended, -11"]}]
    assert script.summary(found)["wrong"] == 1
