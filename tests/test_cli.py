"""The command line as a user meets it: help, exit codes, JSON, and the demo's error rule."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config

from inductor_gqa.cli import doctor
from inductor_gqa.cli.accuracy import Sample, Verdict, double_stays_double
from inductor_gqa.cli.main import main
from inductor_gqa.cli.terminal import paint, table

TINY_DEMO = [
    "--device",
    "cpu",
    "--length",
    "63",
    "--hidden",
    "64",
    "--heads",
    "4",
    "--kv-heads",
    "2",
]
ATTENTION_FILE = """
import torch


def attention(q, k, v, cos, sin):
    def rotate(x):
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    q, k = rotate(q), rotate(k).repeat_interleave(2, dim=1)
    weights = torch.softmax(q @ k.transpose(-1, -2) * 0.25, dim=-1)
    return weights @ v.repeat_interleave(2, dim=1)


def example_inputs():
    angles = torch.arange(20.0)[:, None] * torch.rand(8)
    angles = torch.cat((angles, angles), dim=-1)
    q, k, v = torch.randn(1, 4, 20, 16), torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16)
    for x in (q, k, v):
        x.requires_grad_()
    return q, k, v, angles.cos(), angles.sin()
"""


def json_of(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


def test_help_teaches_where_to_start_and_what_exit_codes_mean(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    for expected in ("demo", "doctor", "explain", "bench", "start here", "exit codes"):
        assert expected in printed


@pytest.mark.parametrize("command", ["demo", "doctor", "explain", "bench"])
def test_every_command_has_help_and_json(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_a_mistyped_command_is_exit_code_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["explane"])
    assert stopped.value.code == 2
    assert "explain" in capsys.readouterr().err


def test_nothing_is_coloured_outside_a_terminal():
    assert paint("fused", "green", sys.__stderr__ if not sys.stderr.isatty() else None) == "fused"


def test_table_aligns_names_left_and_numbers_right():
    lines = table(["", "ms"], [["plain", "10"], ["a", "9"]]).splitlines()
    assert lines[2:] == ["plain  10", "a       9"]


# doctor


def test_doctor_finds_this_machine_usable(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json_of(capsys)
    assert found["ok"]
    values = {finding["name"]: finding["value"] for finding in found["findings"]}
    assert values["torch"] == torch.__version__
    assert {"Python", "inductor-gqa", "C++ compiler", "Triton", "GPU", "Transformers"} <= set(
        values
    )


def test_doctor_says_no_where_compiling_is_switched_off(capsys, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert main(["doctor"]) == 1
    assert "unset TORCH_COMPILE_DISABLE" in capsys.readouterr().out


def test_doctor_names_the_command_that_mends(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda package: None)
    assert main(["doctor"]) == 0
    assert "pip install triton" in capsys.readouterr().out


def test_doctor_says_what_cannot_be_written(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: path != str(tmp_path))
    assert main(["doctor"]) == 1
    assert "set TORCHINDUCTOR_CACHE_DIR" in capsys.readouterr().out


def test_doctor_sends_an_owner_of_a_gpu_to_a_cuda_build(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "pytorch.org/get-started" in doctor.check_gpu().mend


@pytest.mark.parametrize(
    ("capability", "state", "works"),
    [((9, 0), "ok", True), ((8, 0), "note", True), ((7, 5), "note", False)],
)
def test_doctor_tells_apart_gpus_run_untried_and_too_old(capability, state, works, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    found = doctor.check_gpu()
    assert (found.state, found.works) == (state, works)


@pytest.mark.slow
def test_doctor_tries_and_compares_with_eager(capsys):
    assert main(["doctor", "--try", "--json"]) == 0
    (trial,) = [f for f in json_of(capsys)["findings"] if f["name"] == "trial"]
    assert trial["value"].startswith("fused on")


def test_doctor_fails_where_the_trial_is_wrong(capsys, monkeypatch):
    from inductor_gqa.cli.trial import attention as plain

    monkeypatch.setattr(torch, "compile", lambda fn: lambda *args: plain(*args) * 1.01)
    assert main(["doctor", "--try"]) == 1
    assert "further off than twice eager" in capsys.readouterr().out


# bench


def test_bench_lists_the_scripts_with_what_they_measure(capsys):
    assert main(["bench", "--json"]) == 0
    assert json_of(capsys)["train_step"].startswith("Training step of a Transformers model")


def test_bench_refuses_an_unknown_name_with_those_there_are(capsys):
    assert main(["bench", "nothing"]) == 2
    message = capsys.readouterr().err
    assert "nothing" in message
    assert "train_step" in message


def test_bench_says_that_it_needs_a_checkout(capsys, monkeypatch, tmp_path):
    from inductor_gqa.cli import bench

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "a" / "b" / "bench.py"))
    assert main(["bench", "train_step"]) == 2
    assert "run this in a checkout" in capsys.readouterr().err


# explain


def test_explain_wants_one_thing_to_explain(capsys):
    assert main(["explain"]) == 2
    assert main(["explain", "a:b", "--model", "llama"]) == 2
    assert capsys.readouterr().err.count("name one thing to explain") == 2


def test_explain_shows_an_error_of_the_users_code_as_exit_code_4(capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def broken():\n    raise ZeroDivisionError('mine')\n")
    assert main(["explain", f"{file}:broken"]) == 4
    message = capsys.readouterr().err
    assert "ZeroDivisionError: mine" in message
    assert f"error: {file}:broken raised" in message


def test_explain_suggests_an_architecture_for_a_mistyped_one(capsys):
    assert main(["explain", "--model", "lama"]) == 2
    assert "llama" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("my_model.py", "accepted module:name, file.py:name or an architecture's name"),
        ("nothing_to_split", "a callable of your own is module:name or file.py:name"),
        ("no_such_module_here:f", "no_such_module_here cannot be imported"),
        ("no_such_file.py:f", "there is no file no_such_file.py"),
        ("math:no_such_name", "math has no no_such_name"),
        ("math:pi", "math:pi is a float, accepted is what can be called"),
    ],
)
def test_explain_says_what_is_wrong_with_a_target(target, message, capsys):
    assert main(["explain", target]) == 2
    assert message in capsys.readouterr().err


def test_explain_fuses_a_function_in_a_file_in_both_directions(capsys, tmp_path):
    file = tmp_path / "my_attention.py"
    file.write_text(ATTENTION_FILE)
    target = [f"{file}:attention", "--inputs", "example_inputs", "--device", "cpu", "--always"]
    assert main(["explain", *target, "--json"]) == 0
    for report in json_of(capsys).values():
        (site,) = report["sites"]
        assert site["fused"]
        assert site["place"].startswith("my_attention.py:")
        assert site["source"].startswith("weights = torch.softmax(")
        assert "4 query / 2 key-value heads of 16, rotate-half RoPE" in site["summary"]
        assert site["score_bytes"] == site["score_matrices"] * 4 * 20 * 20 * 4


def test_explain_takes_at_most_three_lines_a_site(capsys, tmp_path):
    file = tmp_path / "my_attention.py"
    file.write_text(ATTENTION_FILE)
    target = [f"{file}:attention", "--inputs", "example_inputs", "--device", "cpu"]
    for options, code in (("--always", 0), ("--no-always", 1)):
        asked = [*target, "--direction", "inference", options]
        assert main(["explain", *asked]) == code
        title, *lines, total = capsys.readouterr().out.strip().splitlines()
        assert title == "inference"
        assert total == ("1 fused, 0 left" if code == 0 else "0 fused, 1 left")
        assert lines[0].startswith("my_attention.py:")
        assert len([line for line in lines if not line.startswith("score matrices that")]) <= 3


def test_explain_writes_a_page(capsys, tmp_path):
    file, page = tmp_path / "my_attention.py", tmp_path / "page.html"
    file.write_text(ATTENTION_FILE)
    target = [f"{file}:attention", "--inputs", "example_inputs", "--device", "cpu", "--always"]
    assert main(["explain", *target, "--html", str(page)]) == 0
    text = page.read_text()
    assert "(inference)" in text
    assert "(training)" in text


@pytest.mark.parametrize("arguments", [["llama"], ["--model", "llama"]])
def test_explain_takes_an_architecture_by_its_bare_name(arguments, capsys, monkeypatch):
    from inductor_gqa.cli import explain

    asked = []

    def stop(name: str, *_):
        asked.append(name)
        raise explain.CommandError("enough")

    monkeypatch.setattr(explain, "_call_of_architecture", stop)
    assert main(["explain", *arguments]) == 2
    assert asked == ["llama"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_explain_fuses_both_layers_of_an_architecture_in_both_directions(name, capsys):
    pytest.importorskip("transformers")
    assert main(["explain", "--model", name, "--device", "cpu", "--json"]) == 0
    reports = json_of(capsys)
    assert set(reports) == {"inference", "training"}
    for direction, report in reports.items():
        assert [site["fused"] for site in report["sites"]] == [True, True]
        assert {site["direction"] for site in report["sites"]} == {direction}


# demo


@pytest.mark.slow
def test_demo_fuses_every_site_and_meets_the_error_rule(capsys):
    """Without C++, which takes most of its time; .ci/run starts the demo as users do."""
    has_fallback = hasattr(inductor_config, "fallback_by_default")
    with inductor_config.patch({"fallback_by_default": True} if has_fallback else {}):
        assert main(["demo", *TINY_DEMO, "--json"]) == 0
    result = json_of(capsys)
    assert result["ok"]
    assert result["verdict"]["holds"]
    for report in result["reports"].values():
        assert [site["fused"] for site in report["sites"]] == [True, True]
    assert list(result["variants"]) == ["eager", "torch.compile", "+ inductor_gqa"]


def test_demo_refuses_heads_that_do_not_group(capsys):
    assert main(["demo", "--device", "cpu", "--heads", "3", "--kv-heads", "2"]) == 2
    assert "heads=3 must be a multiple of kv_heads=2" in capsys.readouterr().err


# the error rule


def verdict(eager: float, plain: float, fused: float) -> Verdict:
    return Verdict({"output": eager}, {"output": plain}, {"output": fused})


def test_error_rule_allows_twice_the_error_without_us():
    assert verdict(eager=1.0, plain=1.0, fused=2.0).holds
    assert not verdict(eager=1.0, plain=1.0, fused=2.1).holds


def test_error_rule_grants_what_compiling_costs_elsewhere_up_to_ten_times_eager():
    assert verdict(eager=1.0, plain=3.0, fused=6.0).holds
    assert not verdict(eager=1.0, plain=1000.0, fused=21.0).holds


def test_error_rule_fails_on_nan_and_on_a_missing_gradient():
    assert not verdict(eager=1.0, plain=1.0, fused=float("nan")).holds
    truth = Sample(torch.ones(2).double(), {"weight": torch.ones(2).double()})
    assert Sample(torch.ones(2), {}).errors(truth)["weight"] == float("inf")


def test_reference_in_float64_does_not_pass_through_float32():
    scores = torch.randn(3, 5, dtype=torch.float64)
    with double_stays_double():
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    assert weights.dtype == torch.float64
    assert torch.equal(weights, torch.softmax(scores, dim=-1))


def test_readme_sets_up_with_two_commands():
    readme = (Path(__file__).resolve().parents[1] / "README.md").read_text()
    block = readme.partition("## Set up")[2].partition("```sh\n")[2].partition("```")[0]
    assert len(block.splitlines()) == 2
