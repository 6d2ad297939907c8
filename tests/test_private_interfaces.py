"""Which private interfaces of torch this package stands on: each is imported by one module of ours,
and all of them are listed here, so that a release of torch that moves one is answered by its name.
"""

import ast
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "inductor_gqa"
PRIVATE = {
    "api.py": {
        "torch._dynamo: convert_frame", "torch._functorch.aot_autograd: make_boxed_func",
        "torch._inductor.compile_fx: compile_fx", "torch._inductor.config",
        "torch._inductor.fx_passes.post_grad: view_to_reshape",
    },
    "cli/accuracy.py": {"torch.utils._python_dispatch: TorchDispatchMode"},
    "cli/doctor.py": {"torch._dynamo.config", "torch._inductor.config"},
    "decide.py": {"torch._guards: TracingContext", "torch._inductor.virtualized: V"},
    "errors.py": {"torch._dynamo: exc"},
    "lowering.py": {
        "torch._higher_order_ops.triton_kernel_wrap: kernel_side_table", "torch._inductor: ir",
        "torch._inductor.lowering: fallback_handler", "torch._inductor.lowering: lowerings",
        "torch._inductor.lowering: register_lowering", "torch._inductor.virtualized: V",
    },
    "passes.py": {
        "torch._inductor.custom_graph_pass: CustomGraphPass",
        "torch._inductor.pattern_matcher: stable_topological_sort",
    },
    "patterns/anchors.py": {
        f"torch._inductor.pattern_matcher: {name}"
        for name in (
            "MULTIPLE", "Arg", "CallFunction", "Match", "PatternMatcherPass",
            "register_graph_pattern",
        )
    },
    "patterns/elements.py": {"torch._inductor.inductor_prims"},
    "patterns/values.py": {
        "torch._subclasses.fake_tensor: FakeTensor",
        "torch.utils._python_dispatch: _disable_current_modes",
    },
    "verify.py": {"torch.utils._python_dispatch: _disable_current_modes"},
}  # fmt: skip
# In several of ours: settings and the graph at hand are asked, not driven, and sorting is no
# matching.
SHARED = {
    "torch._inductor.config", "torch._inductor.virtualized", "torch._inductor.pattern_matcher",
    "torch._dynamo", "torch.utils._python_dispatch",
}  # fmt: skip
NAMES = sorted(set().union(*PRIVATE.values()))


def is_private(module):
    return module.split(".")[0] == "torch" and any(x.startswith("_") for x in module.split("."))


def imported(path):
    """ "module: name" or "module" of every import of a private part of torch."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and is_private(node.module or ""):
            found |= {f"{node.module}: {alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if is_private(alias.name)}
    return found


def used(folder):
    """What each of our modules imports; those that import nothing private are left out."""
    paths = [*folder.glob("*.py"), *folder.glob("*/*.py")]
    found = {path.relative_to(folder).as_posix(): imported(path) for path in paths}
    return {name: names for name, names in found.items() if names}


def test_every_private_interface_is_listed_with_the_module_that_uses_it():
    assert used(PACKAGE) == PRIVATE


def test_a_private_module_of_torch_is_used_by_one_of_ours():
    users: dict[str, set[str]] = {}
    for ours, names in PRIVATE.items():
        for name in names:
            users.setdefault(name.split(":")[0], set()).add(ours)
    assert {
        name: ours for name, ours in users.items() if len(ours) > 1 and name not in SHARED
    } == {}


@pytest.mark.parametrize("name", NAMES)
def test_this_torch_has_it(name):
    module, _, attribute = name.partition(": ")
    found = importlib.import_module(module)
    assert (
        not attribute
        or hasattr(found, attribute)
        or importlib.import_module(f"{module}.{attribute}")
    )


def test_an_import_that_is_not_listed_is_found(tmp_path):
    """In a function too, and below a package."""
    (tmp_path / "kernels").mkdir()
    source = (
        "import torch\ndef f():\n    from torch._inductor.ir import IRNode\n    import torch._C\n"
    )
    (tmp_path / "kernels" / "new.py").write_text(source)
    (tmp_path / "plain.py").write_text("import torch\nfrom torch.fx import Graph\n")
    assert used(tmp_path) == {"kernels/new.py": {"torch._inductor.ir: IRNode", "torch._C"}}
