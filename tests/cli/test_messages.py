"""The command line's answer to mistakes: one line with what is wrong, where, and what to say instead."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from ifsl_bench.cli.main import _run_with_error_lines
from ifsl_bench.cli.running import _command_line_to_record
from ifsl_bench.protocols.tasks.task_files import packaged_tasks
from ifsl_bench.utils.errors import format_error, unknown_name_error
from ifsl_bench.utils.files import Paths

TASK = ("--task", "glyphs-5shot")
LONG = "x" * 300  # longer than a file system takes, so that looking at it fails

MISTAKES = [
    (["run", "--method", "lr", *TASK, "--set", "weight_decay"], "--set takes NAME=VALUE, not 'weight_decay'"),
    (["run", "--method", "lr+a", *TASK, "--set", "memory=supports", "--train", "sessions=2"], "one session after"),
    (["run", "--method", "imprint,lda", *TASK, "--train", "steps=5"], "imprint and lda: nothing is meta-trained"),
    (["run", "--method", "lr", *TASK, "--seeds", "0,1,2"], "--seeds 3 runs seeds 0, 1 and 2"),
    (["run", "--method", "lr", *TASK, "--seeds", "999999999999"], "range"),
    (["run", "--method", "lr", *TASK, "--tune", "999999999999"], "settings to try, 2 to 10,000"),
    (["tasks", "--home", "~nosuchuser/x"], "no home folder is known for that user; give the whole path with --home"),
    (["table", "--results", "~nosuchuser/x"], "no home folder is known for that user"),
    (["run", "imprint", "glyphs-5shot"], "ifsl-bench run --method imprint --task glyphs-5shot"),
    (["run", "--method", "lr", *TASK, "--set", "weight_decay=1e-5", "--set", "weight_decay=1e-4"], "is given twice"),
    (["table", "--results", "nowhere"], "--results: there is no folder "),
    (["show", "glyphs-5shot"], "ifsl-bench show LABEL glyphs-5shot"),
    (["run", "--method", "lr", *TASK, "--backbone", "timm:resnet9"], "did you mean 'resnet"),
    (["run", "--method", "lr", *TASK, "--backbone", "torchvision:resnet9"], "torchvision.models.list_models()"),
    (["compare", "lr", "lr+a", "--task", "cub-5shot"], "no results of task 'cub-5shot' are stored"),
    (["show", "a", "b", "c"], "show takes a result file, or a row's label and its task"),
    (["table", "a/b.json"], "ifsl-bench show a/b.json"),
    (["run", "--method", "imprint", *TASK, "--results", "file/x"], "part of the path is a file, not a folder"),
    (["data", "show", "glyphs", "--out", "file/x/y.png"], "choose another folder with --out"),
    (["data", "show", "glyphs", "--out", "x.pdf"], "ends in .png, .jpg, .jpeg, .webp"),
    (["tasks", "new", "glyphs-5shot", "--data", "glyphs"], "leave out '-5shot': ifsl-bench tasks new glyphs"),
    (["methods", "lr", "--check", "lr"], "say one of them"),
    (["run", "--method", "lwof", *TASK, "--episodes", "many"], "not a whole number"),
    (["run", "--method", "lwof", *TASK, "--device", "tpu"], "device 'tpu'"),
    (["run", "--method", "lwof", *TASK, "--format", "pdf"], "unknown format 'pdf'"),
    (["run", "--method", "lwof", "--task", "none.toml"], "cannot read the task file"),
    (["run"], "say what to run"),
    (["rnu"], "did you mean 'run'"),
    (["data", "prepare", "mine", "--from", "/nonexistent/x"], "there is no file or folder /nonexistent/x"),
    (["data", "verify", "glyphs"], "not prepared"),
    (["compare", "a", "b"], "there is no result file a"),
    (["show", "none.json"], "cannot read the result"),
    (["run", "--nonsense"], "No such option"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(a)[:60] for a, _ in MISTAKES])
def test_a_mistake_is_told_in_one_line(call, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    status, out, err = call(*arguments)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1
    assert len(err.replace(LONG, "")) < 500, "the nearest names and where all are, not all of them"
    assert out == ""
    assert sorted(tmp_path.rglob("*")) == before, "nothing is left behind"


def test_few_names_are_listed_and_many_are_not():
    assert str(unknown_name_error("thing", "q", ["a", "b"])) == "unknown thing 'q'; available: a, b"
    many = [f"name-{i}" for i in range(100)]
    message = str(unknown_name_error("thing", "name-1x", many, see="ifsl-bench things"))
    assert message.count("name-") == 4, "what was said, and the nearest three"
    assert message.endswith("all of them: ifsl-bench things")


@pytest.mark.parametrize(("name", "kind"), [("s.jpg", "JPEG"), ("s.PNG", "PNG")])
def test_a_contact_sheet_is_of_the_kind_that_its_name_says(call, glyph_home, tmp_path, name, kind):
    sheet = tmp_path / name
    status, _, err = call("data", "show", "glyphs", "--home", str(glyph_home), "--out", str(sheet), "--classes", "2",
                          "--images", "2")  # fmt: skip
    assert status == 0, err
    with Image.open(sheet) as image:
        assert image.format == kind


def test_methods_are_rows_of_one_line(call):
    status, out, _ = call("methods")
    assert status == 0
    lines = {line.split()[0]: line for line in out.splitlines()[2:] if line}
    assert {"lr", "lr+s", "lr+a", "mlp", "mlp+s", "mlp+a", "imprint"} <= lines.keys()
    assert "Ren et al. 2019" in lines["lr+a"]
    status, out, _ = call("methods", "lr+a")
    assert status == 0
    for text in ("learner=lr", "gamma", "1e-05 to 10 (log)", "Incremental Few-Shot Learning", "ifsl-bench cite lr+a"):
        assert text in out, text


def test_tasks_are_by_data_set_and_those_that_can_be_run_come_first(call, here):
    out = call("tasks")[1]
    titles = [line.partition(":")[0] for line in out.splitlines() if ": " in line and not line.startswith("Run")]
    assert (
        len(titles) == len(set(titles)) == len({task.dataset.name for task in packaged_tasks().values()} | set(titles))
    )
    first = [line for line in out.splitlines() if ": " in line][:2]
    assert not any("files" in line for line in first), "prepared, or made when first used"
    assert out.index("glyphs-5shot") < out.index("cub-5shot")


@pytest.mark.skipif(os.name == "nt", reason="a shell's completion")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("compare lr+a.gradient=i", {"lr+a.gradient=implicit"}),
        ("compare lr castl", {"castle", "castle@tuned-12"}),
        ("plot tradeoff glyphs-1", {"glyphs-1shot"}),
        ("plot ranks glyphs-5shot --method im", {"imprint"}),
        ("run --task glyphs-1shot,cub-5", {"glyphs-1shot,cub-5shot"}),
        ("run --method lr+", {"lr+a", "lr+s"}),
        ("show lr tiny-pack-1", {"tiny-pack-1shot"}),
        ("reproduce lr tiny-pack-1", {"tiny-pack-1shot"}),
        ("report tiny-pack-1", {"tiny-pack-1shot"}),
        ("data prepare cub", {"cub", "cub-64", "cub-sessions"}),
        ("tasks new mine --data cub-", {"cub-64", "cub-sessions"}),
        ("pretrain --task tiny-pack-1", {"tiny-pack-1shot"}),
        ("run --method lr+a --set ga", {"gamma="}),
        ("plot inner-steps glyphs-5shot --method lr+a --set learn", {"learner="}),
    ],
)
def test_every_command_completes_its_names(words, offered, call, monkeypatch):
    monkeypatch.setenv("_IFSL_BENCH_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"ifsl-bench {words}")
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ") + 1))
    assert sorted(line.removeprefix("plain,") for line in call()[1].split()) == sorted(offered)


@pytest.mark.skipif(os.name == "nt", reason="a shell's completion")
def test_data_sets_of_ones_own_are_completed(call, clusters, monkeypatch):
    (clusters / "home" / "data" / "cub-mine").mkdir()
    (clusters / "home" / "data" / ".partial-cub-half").mkdir()
    monkeypatch.setenv("IFSL_BENCH_HOME", str(clusters / "home"))
    test_every_command_completes_its_names("data remove cub-m", {"cub-mine"}, call, monkeypatch)


def test_folders_of_this_machine_are_no_part_of_a_recorded_command():
    command = "run /h/i.toml --method lr --log csv --log-dir /a --home=/c --results /d --data x=/e --cluster f.toml -v"
    assert _command_line_to_record(command.split()) == "ifsl-bench run i.toml --method lr --log csv -v"
    command = "run --method lr,/a/b.py:C --task=/c/d.toml:t,~/e/f.toml --weights=/g/h.pt --checkpoint /j/k/ g/i.py"
    assert _command_line_to_record(command.split()) == (
        "ifsl-bench run --method lr,b.py:C --task=d.toml:t,f.toml --weights=h.pt --checkpoint k g/i.py"
    )
    assert _command_line_to_record(["lr, /a/b.py:C"]) == "ifsl-bench 'lr, b.py:C'"


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("closed", ["", "2>&-"])
def test_what_takes_the_process_down_is_named_by_its_line(closed):
    program = "import os, ifsl_bench.cli.main as cli; cli.main = os.abort; cli.entry()"
    done = subprocess.run(
        ["sh", "-c", f"exec '{sys.executable}' -c '{program}' {closed}"], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGABRT
    assert closed or 'File "<string>", line 1 in <module>' in done.stderr


def test_errors_of_the_system_have_a_traceback_too(monkeypatch, capsys):
    def fail() -> None:
        raise OSError(errno.EIO, "the disk fails")

    for more, traced in (([], False), (["--traceback"], True)):
        monkeypatch.setattr(sys, "argv", ["ifsl-bench", *more])
        assert _run_with_error_lines(fail) == 2
        assert ("in fail" in capsys.readouterr().err) == traced


def test_a_program_hears_of_failures_beside_the_rows_there_are(call, clusters, tmp_path):
    """A task without any row has none in the document, and the others stay."""
    (tmp_path / "odd.py").write_text(ODD)
    tasks = [f"{clusters / 'clusters.toml'}:clusters-{shots}shot" for shots in (1, 5)]
    where = ["--home", str(clusters / "home"), "--device", "cpu", "-q", "--format", "json"]
    status, out, err = call("run", "--method", str(tmp_path / "odd.py"), "--task", ",".join(tasks), *where)
    assert [row["task"] for row in json.loads(out)] == ["clusters-5shot"]
    assert (status, "1 of 2 jobs failed" in err, "of one shot" in err) == (1, True, True)
    status, out, err = call("run", "--method", str(tmp_path / "odd.py"), "--task", tasks[0], *where)
    assert (status, json.loads(out or "[]"), "of one shot" in err) == (1, [], True) or status == 2, (out, err)


ODD = """
from ifsl_bench.methods.imprint import Imprint


class Odd(Imprint):
    def forward(self, support, query):
        if support.features.shape[-2] == self.ways:
            raise ValueError("of one shot")
        return super().forward(support, query)
"""


STREAMS = """
import io, os, sys
from ifsl_bench.methods.imprint import Imprint


class Broken:
    def write(self, text):
        raise ValueError("nobody writes here")


class Replaces(Imprint):
    def forward(self, support, query):
        sys.stdout = sys.stderr = Broken()
        return super().forward(support, query)


class Wraps(Imprint):
    def __init__(self, base, ways):
        super().__init__(base, ways)
        sys.stdout = io.TextIOWrapper(sys.stdout.buffer)


class Closes(Imprint):
    def forward(self, support, query):
        sys.stdout.close()
        return super().forward(support, query)


class Exits(Imprint):
    def forward(self, support, query):
        if os.environ.get("EXITS"):
            os._exit(3)
        return super().forward(support, query)
"""


def run_streams(here: Path, name: str, **environment: str) -> tuple[int, str, str]:
    """Run a method of STREAMS in a process of its own; its status and what it printed."""
    (here / "streams.py").write_text(STREAMS)
    words = "--method", f"streams.py:{name}", "--task", "clusters.toml:clusters-5shot", "--device", "cpu"
    command = [sys.executable, "-m", "ifsl_bench", "run", *words, "--episodes", "20"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow("a run in a process of its own")
@pytest.mark.parametrize(("name", "replaced"), [("Replaces", ["stdout", "stderr"]), ("Wraps", ["stdout"])])
def test_streams_that_a_method_replaces_are_put_back(here, name, replaced):
    status, out, err = run_streams(here, name)
    assert (status, "Traceback" in err) == (0, False), err
    warnings = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert warnings == [f"warning: the code of a method has replaced sys.{s}, which is put back" for s in replaced]
    assert re.search(rf"(?m)^{name}\S* +\d+\.\d\d ± ", out)


@pytest.mark.slow("a run in a process of its own")
def test_an_output_that_a_method_closes_is_one_line(here):
    status, out, err = run_streams(here, "Closes")
    assert (status, out, "Traceback" in err) == (2, "", False), err
    assert err.splitlines()[-1] == (
        "ifsl-bench: the output was closed, perhaps by a method; what has been computed is stored"
    )
    assert len([*here.glob("home/results/*/Closes*.json")]) == 1


@pytest.mark.slow("runs in processes of their own")
def test_a_method_that_ends_the_process_is_named_by_the_next_run(here):
    said = r"(?m)^Exits\S* on clusters-5shot, seed 0: the last run of it ended without a word"
    status, _, err = run_streams(here, "Exits", EXITS="1")
    assert (status, re.search(said, err)) == (3, None)
    for environment in ({"EXITS": "1"}, {}):
        assert re.search(said, run_streams(here, "Exits", **environment)[2])
    assert "done already" in (err := run_streams(here, "Exits")[2])
    assert not re.search(said, err)


@pytest.mark.parametrize(
    "said",
    [
        ("show", LONG), ("reproduce", LONG, LONG), ("compare", LONG, LONG), ("cache", "prune", "--results", LONG),
        ("data", "prepare", "omniglot", "--from", LONG), ("plan", "--method", "lr", "--task", LONG),
        ("plan", "--method", f"{LONG}.py", *TASK), ("plan", "--method", "lr", *TASK, "--data", f"glyphs={LONG}"),
    ],
)  # fmt: skip
def test_names_that_no_file_can_have_are_not_the_systems_refusal(said, call, tmp_path, monkeypatch):
    """Also where there are folders in which somebody looks for them."""
    home = Paths.locate(tmp_path)
    for folder in (home.results, home.data):
        folder.mkdir(parents=True)
    monkeypatch.setenv("IFSL_BENCH_HOME", str(tmp_path))
    status, out, err = call(*said)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "the system refused" not in err


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_an_error_without_a_text_is_named_and_lack_of_memory_says_what_helps():
    assert [format_error(error) for error in (AssertionError(), Wordless(), KeyError("a"))] == [
        "AssertionError",
        "Wordless",
        "KeyError: 'a'",
    ]
    assert "not enough memory: end other programs, or take fewer --jobs; " in format_error(MemoryError(8))
    assert "on the accelerator: end other programs, or take fewer --jobs, or --device" in format_error(OUT_OF_MEMORY)


def test_an_accelerator_out_of_memory_is_one_line(capsys):
    def fail(error: Exception) -> None:
        raise error

    assert _run_with_error_lines(lambda: fail(OUT_OF_MEMORY)) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(RuntimeError, match="another"):
        _run_with_error_lines(lambda: fail(RuntimeError("another")))
