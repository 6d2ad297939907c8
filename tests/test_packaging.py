"""What is built and installed: the package with its readers, nothing else, cheap to import."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import setuptools.build_meta as b, sys; getattr(b, sys.argv[1])(sys.argv[2])"
LARGEST_WHEEL_BYTES = 1_000_000
SLOWEST_IMPORT_MS = 50


def build(source: Path, hook: str, target: Path) -> Path:
    """Builds a wheel or an sdist with the installed setuptools: needs no network."""
    target.mkdir(exist_ok=True)
    command = [sys.executable, "-W", "ignore", "-c", BUILD, hook, str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the build reads, so that it leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source") / "inductor-gqa"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy)
    for name in ("inductor_gqa", "patterns", "tests", "bench"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "results")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    return copy


@pytest.fixture(scope="session")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, "build_wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, "build_sdist", tmp_path_factory.mktemp("sdist"))


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata_of(wheel: Path) -> metadata.PackageMetadata:
    (name,) = [name for name in names_in(wheel) if name.endswith(".dist-info/METADATA")]
    with zipfile.ZipFile(wheel) as archive:
        folder = wheel.parent.with_name("metadata") / name.partition("/")[0]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_bytes(archive.read(name))
    return metadata.Distribution.at(folder).metadata


def version_in_pyproject() -> str:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def run_python(code: str, **environment: str) -> str:
    """What `code` prints in a fresh interpreter outside the checkout."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_readers_are_linked_by_a_relative_path():
    assert os.readlink(ROOT / "inductor_gqa" / "patterns") == "../patterns"


def test_wheel_puts_nothing_but_the_package_beside_other_packages(wheel: Path):
    top = {name.partition("/")[0] for name in names_in(wheel)}
    assert top == {"inductor_gqa", f"inductor_gqa-{version_in_pyproject()}.dist-info"}


def test_wheel_contains_every_source_file_and_the_types_marker(wheel: Path, source: Path):
    package, readers = source / "inductor_gqa", source / "patterns"
    expected = {f"inductor_gqa/{path.relative_to(package)}" for path in package.rglob("*.py")}
    expected |= {
        f"inductor_gqa/patterns/{path.relative_to(readers)}" for path in readers.rglob("*.py")
    }
    expected |= {"inductor_gqa/py.typed"}
    assert {name for name in names_in(wheel) if ".dist-info/" not in name} == expected


def test_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    (unpacked,) = tmp_path.iterdir()
    again = build(unpacked, "build_wheel", tmp_path / "again")
    assert names_in(again) == names_in(wheel)


def test_unpacked_wheel_imports_its_readers(wheel: Path, tmp_path: Path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "import inductor_gqa.patterns as p; print(p.__file__)"
    printed = run_python(code, PYTHONPATH=str(tmp_path)).strip()
    assert printed == str(tmp_path / "inductor_gqa" / "patterns" / "__init__.py")


def test_wheel_is_small(wheel: Path):
    assert wheel.stat().st_size < LARGEST_WHEEL_BYTES


def test_wheel_carries_the_licence(wheel: Path):
    assert metadata_of(wheel)["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("/licenses/LICENSE") for name in names_in(wheel))


def test_base_install_needs_torch_and_triton_only(wheel: Path):
    required = metadata_of(wheel).get_all("Requires-Dist") or []
    base = {re.split(r"[^\w-]", line)[0] for line in required if "extra ==" not in line}
    assert base == {"torch", "triton"}


def test_version_is_the_same_everywhere(wheel: Path):
    version = version_in_pyproject()
    assert metadata_of(wheel)["Version"] == version
    assert metadata.version("inductor-gqa") == version
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == version


def test_import_loads_neither_the_command_line_nor_its_tools():
    code = "import sys, inductor_gqa; print(*sorted(sys.modules))"
    loaded = set(run_python(code).split())
    assert "inductor_gqa" in loaded
    unwanted = {"inductor_gqa.cli", "transformers", "rich", "matplotlib", "hypothesis", "pytest"}
    assert not loaded & unwanted


def test_import_costs_little_beyond_torch():
    code = (
        "import time, torch; start = time.perf_counter(); import inductor_gqa; "
        "print(1e3 * (time.perf_counter() - start))"
    )
    # The fastest of three: a busy machine makes one slow, not the package.
    assert min(float(run_python(code)) for _ in range(3)) < SLOWEST_IMPORT_MS
