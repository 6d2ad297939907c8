"""The README says what the results say, and every block of code in it and in docs/ runs."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config

from inductor_gqa.cli.demo_model import Decoder, Sizes
from inductor_gqa.cli.main import build_parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_SHELL = [page for page in (*PAGES, ROOT / "CONTRIBUTING.md") if "```sh" in page.read_text()]
LANGUAGES = {"python", "sh", "mermaid"}
TOOLS = {"pytest", "ruff", "pyright", "pre-commit"}  # what the extras install, run as they are
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LONGEST_README = 150


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line, code) of each block of a language."""
    text = page.read_text(encoding="utf-8")
    found = BLOCK.finditer(text)
    return [(text[: m.start()].count("\n") + 1, m[2]) for m in found if m[1] == language]


def given(page: Path) -> dict[str, Any]:
    """What the README takes for granted: a user's model and batch. Pages of docs/ bring their
    own."""
    if page.name != "README.md":
        return {}
    torch.manual_seed(0)
    sizes = Sizes(batch=1, length=33, layers=1, hidden=32, heads=4, kv_heads=2, vocabulary=32)
    model = Decoder(sizes)
    input_ids = torch.randint(32, (1, 33))

    def train_step(batch: torch.Tensor) -> torch.Tensor:
        return model(batch).logsumexp(-1).mean()

    names = {"torch": torch, "model": model, "input_ids": input_ids}
    return {**names, "train_step": train_step, "batch": input_ids}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Blocks run on the CPU, what they write goes to a folder of its own, what they switch on is
    switched off."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    saved = inductor_config.joint_custom_pre_pass
    torch._dynamo.reset()
    yield
    inductor_config.joint_custom_pre_pass = saved
    torch._dynamo.reset()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_runs(page):
    names = given(page)
    for line, code in blocks(page, "python"):
        place = f"{page.name}:{line}"
        exec(compile("\n" * line + code, place, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_ones_that_the_command_line_takes(page):
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"(?:python -m inductor_gqa|inductor-gqa)((?: [\w./:=-]+)+)", text)
    for arguments in found:
        build_parser().parse_args(shlex.split(arguments))
    if page.name in ("README.md", "troubleshooting.md"):
        assert found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_of_a_language_that_is_tested(page):
    found = re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(found[::2]) <= LANGUAGES
    assert set(found[1::2]) <= {""}


def commands(page: Path) -> list[list[str]]:
    """Every command of the shell blocks, split into words."""
    lines = [line for _, code in blocks(page, "sh") for line in code.splitlines()]
    words = [shlex.split(part, comments=True) for line in lines for part in line.split("&&")]
    return [command for command in words if command]


@pytest.mark.parametrize("page", WITH_SHELL, ids=lambda page: page.name)
def test_every_command_is_one_that_can_be_given(page, capsys):
    """Extras exist, scripts are there and take the options. The first block of the README is run
    as it stands by .ci/run."""
    assert commands(page)
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for command in commands(page):
        if command[:2] == ["pip", "install"]:
            named = re.findall(r"^\.\[([\w,]+)\]$", command[-1])
            assert not named or set(named[0].split(",")) <= extras, command
        elif command[:3] == ["python", "-m", "inductor_gqa"]:
            build_parser().parse_args(command[3:])
        elif (command[0] == "python" and command[1] != "-m") or command[0] == "bash":
            assert (ROOT / command[1]).is_file(), command
        else:
            name = command[2] if command[:2] == ["python", "-m"] else command[0]
            assert name in TOOLS, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page):
    text = page.read_text(encoding="utf-8")
    links = [x for x in re.findall(r"\]\(([^)#]+)\)", text) if not x.startswith("http")]
    for link in links:
        assert (page.parent / link).exists(), link
    named = re.findall(r"`((?:inductor_gqa|patterns|bench|tests|docs)/[\w./-]+)`", text)
    for name in named:
        assert (ROOT / name).exists(), name


def test_every_page_of_the_docs_is_linked_from_the_readme():
    readme = PAGES[0].read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if f"](docs/{page.name})" not in readme] == []


def test_readme_can_be_read_at_one_go():
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= LONGEST_README
