"""Weights as files: handed on, shipped with the package, refused when damaged or made up."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save

from ifsl_bench.backbones import fetch_weights, pretrained
from ifsl_bench.backbones.pretrained import PACKAGED_WEIGHTS_DISABLED_FILE, find_packaged_file, is_package_used
from ifsl_bench.backbones.trainer import pretrain
from ifsl_bench.backbones.weights import (
    SAFETENSORS_METADATA_KEY,
    has_other_weights,
    import_weights,
    list_packaged_weights,
    read_metadata_and_tensors,
    write_weights,
)
from ifsl_bench.data.preparing.prepare import open_or_build
from ifsl_bench.experiments.job import make_jobs
from ifsl_bench.experiments.pretraining import export_weights, mark_for_training
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.experiments.stages import PretrainStage, make_pretrain_stage
from ifsl_bench.experiments.workspace import workspace
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.store.result_folder import packaged_results_folder
from ifsl_bench.utils.checkpoint import CheckpointFolder
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import Paths, sha256_json
from ifsl_bench.utils.progress import LogReporter, Reporter

CPU = torch.device("cpu")
TASK = "clusters.toml:clusters-1shot"


def weights_of(home: Paths, log: io.StringIO | None = None, seed: int = 0):
    """The weights of the clusters' pretraining in a home."""
    (task,) = load_tasks(TASK)
    dataset = open_or_build(home, task.dataset, Reporter())
    return pretrain(home, task, dataset, "linear", seed, CPU, LogReporter(log or io.StringIO()))


@pytest.fixture(scope="module")
def pretrained_source(clusters_source, tmp_path_factory) -> Path:
    """What a finished pretraining leaves in a home, and its file."""
    root = tmp_path_factory.mktemp("pretrained")
    shutil.copytree(clusters_source, root / "clusters")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root / "clusters")
        home = Paths.locate(root / "clusters" / "home")
        weights_of(home)
        export_weights(TASK, "linear", 0, home, root / "out.safetensors")
    return root


@pytest.fixture
def exported(pretrained_source, here, tmp_path) -> tuple[Paths, Path]:
    """A home with a finished pretraining, and its file, to play with."""
    home = Paths.locate(here / "home")
    shutil.copytree(pretrained_source / "clusters" / "home" / "pretrained", home.pretrained)
    return home, Path(shutil.copy(pretrained_source / "out.safetensors", tmp_path))


@pytest.fixture
def other(here, tmp_path) -> Paths:
    """A home with the same data and nothing else."""
    home = Paths.locate(tmp_path / "other")
    home.cache.mkdir()
    (home.cache / "data").symlink_to(here / "home" / "data")
    return home


@pytest.fixture
def packaged(exported, tmp_path, monkeypatch) -> Path:
    """The same weights as if they came with the package."""
    folder = tmp_path / "weights"
    folder.mkdir()
    weights, _ = read_metadata_and_tensors(exported[1])
    exported[1].rename(folder / f"{weights.pretraining_key}.safetensors")
    monkeypatch.setattr(pretrained, "PACKAGED_FOLDERS", (folder,))
    return folder / f"{weights.pretraining_key}.safetensors"


def altered(path: Path, change) -> None:
    """Changes what a file says of its pretraining, with the checksum that fits."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    metadata = json.loads(header["__metadata__"][SAFETENSORS_METADATA_KEY])
    del metadata["checksum"]
    change(metadata)
    header["__metadata__"][SAFETENSORS_METADATA_KEY] = json.dumps(metadata | {"checksum": sha256_json(metadata)})
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def test_an_exported_file_holds_the_weights_that_results_name_and_any_tool_reads_them(exported):
    home, path = exported
    weights, content = read_metadata_and_tensors(path)
    (folder,) = (child for child in home.pretrained.iterdir() if child.is_dir())
    (state,) = folder.glob("*.safetensors")
    assert content == state.read_bytes()
    assert hashlib.sha256(content).hexdigest() == weights.sha256 == weights_of(home).sha256
    expected, tensors = load_file(path), load(content)
    assert expected.keys() == tensors.keys()
    assert all(torch.equal(value, expected[name]) for name, value in tensors.items())
    with safe_open(path, "np") as file:
        assert "accuracy" in file.metadata()[SAFETENSORS_METADATA_KEY]


def test_imported_weights_are_those_that_were_trained(exported, other):
    home, path = exported
    first = weights_of(home)
    weights, new = import_weights(path, other, Reporter())
    assert (weights.pretraining_key, weights.sha256, new) == (first.pretraining_key, first.sha256, True)
    log = io.StringIO()
    again = weights_of(other, log)
    assert log.getvalue() == "", "nothing is trained"
    assert again.sha256 == first.sha256
    assert again.result_entry() == first.result_entry()
    assert torch.equal(again.base_classifier.weight, first.base_classifier.weight)
    assert not import_weights(path, other, Reporter())[1], "there already"
    assert export_weights(TASK, "linear", 0, other, other.cache / "x.safetensors")[1] == weights


def test_the_cosine_head_of_sessions_is_on_the_linear_backbone_of_this_home(call):
    task, home = "tiny-features-sessions", Paths.locate()
    for _ in range(2):  # the second time it is there already
        status, out, err = call("pretrain", "--task", task, "--head", "cosine")
        assert status == 0, err
        assert out.startswith("tiny-features-included-cosine-seed0-")
    stage = PretrainStage(load_tasks(task)[0], "cosine", 0)
    linear, head = stage.linear_stage.key(home), stage.key(home)
    assert {child.name for child in home.pretrained.iterdir() if child.is_dir()} == {linear, head}, "none is put aside"
    for command, said in ((["weights", "export"], "export that: --head linear"), (["pretrain", "--anew"], "cannot be")):
        status, _, err = call(*command, "--task", task, "--head", "cosine")
        assert (status, said in err) == (2, True)

    assert stage.is_cached(home)
    fitted = stage.weights_checksum(home)
    assert fitted
    assert not has_other_weights(home, head, fitted)
    state = CheckpointFolder(home.pretrained / linear).load()
    tensors = state.tensors | {"head.bias": state.tensors["head.bias"] + 1}
    CheckpointFolder(home.pretrained / linear).write_tensors(tensors, state.metadata)
    assert not stage.is_cached(home), "it was fitted on other weights"
    assert has_other_weights(home, head, fitted)


def test_the_linear_backbone_is_trained_for_methods_on_the_cosine_head_of_sessions():
    work = workspace(device="cpu")
    jobs = make_jobs(RunConfig(["imprint"], ["glyphs-sessions"]))
    linear = make_pretrain_stage(jobs[0]).linear_stage.key(work.home)
    assert is_package_used(work.home, linear)
    mark_for_training(jobs, work)
    assert not is_package_used(work.home, linear)


def test_a_folder_that_is_not_there_is_not_made(exported, other):
    home, _ = exported
    with pytest.raises(UserError, match=r"there is no folder .*/no/where; make it, or choose another with --to FILE"):
        export_weights(TASK, "linear", 0, home, other.cache / "no" / "where" / "x.safetensors")
    assert not (other.cache / "no").exists()


def test_other_weights_that_are_there_stay_unless_forced(exported, other):
    home, path = exported
    weights = weights_of(home)
    state = CheckpointFolder(home.pretrained / weights.pretraining_key).load()
    tensors = state.tensors | {"head.bias": state.tensors["head.bias"] + 1}
    CheckpointFolder(other.pretrained / weights.pretraining_key).write_tensors(tensors, state.metadata)
    before = weights_of(other)
    assert before.sha256 != weights.sha256
    with pytest.raises(UserError, match="holds weights of this pretraining already; --force puts them aside"):
        import_weights(path, other, Reporter())
    assert weights_of(other).sha256 == before.sha256
    import_weights(path, other, Reporter(), force=True)
    assert weights_of(other).sha256 == weights.sha256
    (aside,) = other.pretrained.glob("*.replaced-0")
    assert CheckpointFolder(aside).read_metadata()["tensors"]["sha256"] == before.sha256


def test_the_home_takes_what_comes_with_the_package_and_says_so(packaged, exported, other):
    """Once; then it is the home's, also without the package's file."""
    log = io.StringIO()
    first = weights_of(other, log)
    assert "come with the package" in log.getvalue()
    assert "step" not in log.getvalue()
    assert first.sha256 == weights_of(exported[0]).sha256
    assert [weights.sha256 for weights in list_packaged_weights(other).values()] == [first.sha256]
    packaged.unlink()
    log = io.StringIO()
    assert weights_of(other, log).sha256 == first.sha256
    assert log.getvalue() == ""


def test_a_run_uses_them_and_names_them_and_pretrain_trains_anew(packaged, exported, other, call):
    arguments = ["run", "--method", "protonet", "--task", TASK, "--device", "cpu", "--home", str(other.cache)]
    sha256 = read_metadata_and_tensors(packaged)[0].sha256
    status, _, err = call(*arguments)
    assert status == 0, err
    assert err.count("come with the package") == 1
    assert "pretraining none" not in err
    (file,) = other.results.rglob("protonet.seed-0.json")
    assert json.loads(file.read_text())["pretraining"]["sha256"] == sha256
    status, _, err = call(*arguments, "--pretrain", "--dry-run")
    assert (status, "leave one of them out" in err) == (2, True)
    status, _, err = call(*arguments, "--pretrain")
    assert status == 0, err
    assert "the weights from the package are kept as" in err
    assert "pretraining none, linear head, seed 0: done" in err
    (folder,) = (path.parent for path in other.pretrained.glob(f"*/{PACKAGED_WEIGHTS_DISABLED_FILE}"))
    made_here = CheckpointFolder(folder).read_metadata()
    status, _, err = call(*arguments, "--pretrain")
    assert (status, "come with the package" in err) == (0, False)
    assert CheckpointFolder(folder).read_metadata() == made_here, "trained once"


def test_pretrain_takes_them_too_unless_told_otherwise(packaged, exported, other, call):
    arguments = ["pretrain", "--task", TASK, "--device", "cpu", "--home", str(other.cache)]
    status, out, err = call(*arguments)
    assert status == 0, err
    assert "come with the package" in err
    status, again, err = call(*arguments, "--anew")
    assert status == 0, err
    assert "pretraining none, linear head, seed 0: done" in err
    assert again.splitlines()[0] == out.splitlines()[0], "trained alike, on the same machine"


def test_weights_that_could_be_fetched_are_named_and_trained_here_until_they_are(
    packaged, other, call, tmp_path, monkeypatch
):
    content = packaged.read_bytes()
    (site := tmp_path / "site").mkdir()
    packaged.rename(site / packaged.name)
    entry = f'{{ size = {len(content)}, sha256 = "{hashlib.sha256(content).hexdigest()}" }}'
    (tmp_path / "list.toml").write_text(f'address = ""\n[files]\n{packaged.stem} = {entry}\n')
    monkeypatch.setattr(fetch_weights, "WEIGHTS_LIST_FILE", tmp_path / "list.toml")
    home = ("--home", str(other.cache))
    status, _, err = call("pretrain", "--task", TASK, "--device", "cpu", *home)
    assert (status, err.count(f"ifsl-bench weights fetch {packaged.stem}\n")) == (0, 1)
    assert "pretraining none, linear head, seed 0: done" in err
    fetch = ("weights", "fetch", packaged.stem, "--from", str(site), *home)
    assert "this home has begun" not in call(*fetch)[2], "trained to the same weights, on the same machine"
    (folder,) = (path for path in other.pretrained.iterdir() if path.is_dir())
    shutil.rmtree(folder)
    log = io.StringIO()
    assert weights_of(other, log).sha256 == read_metadata_and_tensors(site / packaged.name)[0].sha256
    assert "come with the package" in log.getvalue()
    assert "pretraining none" not in log.getvalue()
    state = CheckpointFolder(folder).load()
    CheckpointFolder(folder).write_tensors(state.tensors, state.metadata | {"finished": False})
    status, out, err = call(*fetch)
    assert (status, out) == (0, f"{other.weights / packaged.name}: here already\n")
    assert f"to replace it: weights import {out.split(': here')[0]} --force" in err
    fetched = other.weights / packaged.name
    fetched.write_bytes(content[:-1])
    shutil.rmtree(folder)
    with pytest.raises(CorruptFile, match=f"get another copy; 'ifsl-bench weights fetch {packaged.stem}', or train"):
        weights_of(other)
    fetched.unlink()
    status, _, err = call("pretrain", "--task", TASK, "--device", "cpu", "--anew", *home)
    assert (status, "weights fetch" in err) == (0, False), "trained here as asked"


def test_an_unfinished_training_goes_on(packaged, exported, other):
    """Whoever began to train did so on purpose."""
    key = packaged.stem
    state = CheckpointFolder(exported[0].pretrained / key).load()
    full = {name: value.float() for name, value in state.tensors.items()}
    info = {name: value for name, value in state.metadata.items() if name not in ("accuracy", "rounded", "tensors")}
    CheckpointFolder(other.pretrained / key).write_tensors(full, info | {"finished": False, "epoch": 1})
    log = io.StringIO()
    weights_of(other, log)
    assert "come with the package" not in log.getvalue()
    assert "pretraining none" in log.getvalue()


def test_a_damaged_file_of_the_package_is_refused_by_name(packaged, other):
    content = bytearray(packaged.read_bytes())
    content[-3] ^= 1
    packaged.write_bytes(content)
    with pytest.raises(CorruptFile, match=r"are not those that it names; get another copy; install ifsl_bench again"):
        weights_of(other)
    assert not list(other.pretrained.glob("*/*.safetensors"))


def _tensors(name: str, value: torch.Tensor):
    def change(path: Path) -> None:
        """Other tensors, with all checksums right."""
        weights, content = read_metadata_and_tensors(path)
        path.unlink()
        write_weights(
            path, save(load(content) | {name: value}), weights.pretraining_definition, weights.training_record
        )

    return change


SAID = {
    "its definition does not make 'clusters-none-linear-seed0-": lambda v: v["definition"].update(recipe=9),
    "its definition does not make '../../x": lambda v: v["info"].update(key="../../x-0123456789ab"),
    "its weights are not those that it names": lambda v: v["info"]["tensors"].update(sha256="0" * 64),
    "texts that cannot be printed": lambda v: v["info"].update(device="\x1b[2J"),
    "length <= 300 - at `$.device`": lambda v: v["info"].update(device="x" * 301),
    "no finished pretraining": lambda v: v["info"].update(finished=False),
    "<= 1.0 - at `$.accuracy[...]`": lambda v: v["info"]["accuracy"].update({"base/val": 2}),
    "Invalid enum value 'x' - at `key` in `$.accuracy`": lambda v: v["info"]["accuracy"].update({"x": 0.5}),
    "missing required field `precision`": lambda v: v["info"].pop("precision"),
    "in format 9": lambda v: v.update(format=9),
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *((lambda path, change=change: altered(path, change), said) for said, change in SAID.items()),
        (lambda path: path.write_bytes(b""), "no safetensors file"),
        (lambda path: path.write_bytes(b"\xff" * 100), "no safetensors file, or is cut short"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "not those that it names"),
        (lambda path: path.write_bytes(path.read_bytes()[:200]), "cut short"),
        (lambda path: path.write_bytes((9 << 20).to_bytes(8, "little") + b" " * (9 << 20)), "has a header of"),
        (lambda path: path.write_bytes((90).to_bytes(8, "little") + b"[" * 90), "is not valid JSON"),
        (lambda path: path.write_bytes((1 << 20).to_bytes(8, "little") + b"[" * (1 << 20)), "is not valid JSON"),
        (lambda path: path.write_bytes(save({"x": torch.zeros(3)})), "does not say its pretraining"),
        (_tensors("head.weight", torch.full((8, 16), float("nan"))), "'head.weight' is not finite"),
        (_tensors("head.weight", torch.zeros(8)), "no base classifier"),
        (lambda path: (path.unlink(), path.mkdir()), "is not a file"),
        (lambda path: path.unlink(), "there is no"),
    ],
)  # fmt: skip
def test_hostile_files_are_refused_in_one_line(exported, other, call, change, said):
    change(exported[1])
    status, out, err = call("weights", "import", str(exported[1]), "--home", str(other.cache))
    assert (status, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
    assert not list(other.cache.rglob("*.safetensors"))


def test_weights_of_another_network_are_refused_where_they_are_used(exported, other):
    """The file is sound, and its network is not that of the key."""
    _tensors("head.weight", torch.zeros(3, 3, dtype=torch.float16))(exported[1])
    import_weights(exported[1], other, Reporter())
    log = io.StringIO()
    weights_of(other, log)
    assert "does not fit the network" in log.getvalue()


def test_commands_export_list_and_import(exported, other, call, here, packaged):
    status, out, err = call("weights", "export", "--task", TASK)
    assert status == 0, err
    (file,) = here.glob("clusters-none-linear-*.safetensors")
    assert out.startswith(f"{file.name}: 0.0 MB, weights ")
    status, _, err = call("weights", "export", "--task", TASK)
    assert (status, "is there already" in err) == (2, True)
    status, _, err = call("weights", "export", "--task", TASK, "--seed", "4")
    assert (status, "first: ifsl-bench pretrain --task clusters.toml" in err) == (2, True)
    status, _, err = call("weights", "export", "--task", TASK, "--home", str(other.cache), "--to", "copy.safetensors")
    assert status == 0, err
    assert Path("copy.safetensors").read_bytes() == packaged.read_bytes()
    status, out, err = call("weights", "import", str(file), "--home", str(other.cache))
    assert status == 0, err
    assert out.splitlines()[0].startswith(f"{file.stem}: base/val ")
    status, out, _ = call("weights", "import", str(file), "--home", str(other.cache))
    assert "there already" in out
    status, out, _ = call("weights", "list", "--home", str(other.cache), "--format", "json")
    here = [(row["pretraining"], row["where"]) for row in json.loads(out) if "to be fetched" not in row["where"]]
    assert here == [(file.stem, "home, from the package")]
    for arguments, message in ((["export"], "say the weights of which task"), (["import"], "say which file")):
        status, _, err = call("weights", *arguments)
        assert (status, message in err) == (2, True)


@pytest.mark.parametrize(
    "path",
    sorted(path for folder in pretrained.PACKAGED_FOLDERS for path in folder.iterdir()),
    ids=lambda path: path.stem,
)
def test_every_file_of_the_package_is_whole_and_of_a_packaged_task(path, tmp_path):
    weights, content = read_metadata_and_tensors(path)
    assert weights.pretraining_key == path.stem
    assert find_packaged_file(Paths.locate(tmp_path), path.stem) == path
    # Buffers stay in single precision: statistics of batch norm and of features, and the corners of a simplex.
    whole = ("running", "network.scale", "network.offset", "network.means", "network.covariance", "recipe.corners")
    kinds = {str(value.dtype) for name, value in load(content).items() if not any(part in name for part in whole)}
    assert kinds <= {"torch.float16", "torch.int64"}


def test_stored_rows_are_on_the_backbones_that_come_with_the_package(tmp_path):
    """So a stranger's row stands beside rows on the same features."""
    offered, keys = list_packaged_weights(Paths.locate(tmp_path)), set()
    for path in sorted(packaged_results_folder().glob("*/*.seed-*.json")):
        made_with = json.loads(path.read_text())["pretraining"]
        if made_with["key"] in offered:
            assert made_with["sha256"] == offered[made_with["key"]].sha256, path.name
            keys.add(made_with["key"])
        elif made_with.get("features"):  # in sessions a second head is trained on the features of a shipped backbone
            assert made_with["features"] in offered, path
        else:  # of a changed task, whose backbone is trained anew
            assert "+" in path.parent.name, path
    assert {key.partition("-")[0] for key in keys} == {"cifar100", "glyphs", "mini", "tiny"}


def test_a_network_pretrained_here_and_its_exported_file_taken_as_weights_give_the_same_features_and_counts(hues, call):
    """The classifier is another one, fitted until it converges; what novel classes alone get does not depend on it."""
    task = (hues / "hues.toml").read_text().replace("steps = 2", "steps = 2\nseed = 0")
    (hues / "hues.toml").write_text(task)
    run = ("run", "--method", "protonet", "-q", "--task")
    status, _, err = call(*run, "hues.toml", "--results", "trained")
    assert status == 0, err
    status, _, err = call("weights", "export", "--task", "hues.toml", "--to", "mine.safetensors")
    assert status == 0, err
    digits = hashlib.sha256((hues / "mine.safetensors").read_bytes()).hexdigest()[:16]
    settings = f'seed = 0\nweights = "{digits}"\npretrained_on = "base"\ncentre = "none"'
    (hues / "given.toml").write_text(task.replace("seed = 0", settings))
    for corpora, marks in (("imagenet-1k", 1), ("base", 0)):
        options = ("--weights", "mine.safetensors", "--pretrained-on", corpora)
        status, out, err = call(*run, "hues.toml", *options, "--results", corpora)
        assert status == 0, err
        assert out.count("novel classes perhaps seen in pretraining") == marks
        assert f"seen {corpora} and nothing else is the word of whoever gave its weights" in out
        (path,) = Path(corpora).rglob("*.json")
        assert path.parent.name == f"hues-1shot+weights={digits}+pretrained-on={corpora}"
    status, _, err = call(*run, "given.toml", "--results", "given")
    assert status == 0, err
    results = {name: next(Path(name).rglob("*.json")) for name in ("trained", "given")}
    trained_result, given_result = (json.loads(path.read_text()) for path in results.values())
    assert given_result["pretraining"]["pretrained_on"] == ["base"]
    assert given_result["pretraining"]["seen"] == "no"
    assert given_result["episodes"]["novel_alone"] == trained_result["episodes"]["novel_alone"]
    home = Paths.locate(hues / "home")
    banks = [np.load(path) for path in sorted(home.features.glob("*/novel-test/features.npy"))]
    assert len(banks) == 2, "one with the training, one with the weights, whatever is said of them"
    np.testing.assert_array_equal(*banks)
    _, out, err = call("check", str(results["given"]), "--task", "given.toml")
    assert "pretrained_on" not in out + err
    assert "pretraining.seen" not in out + err
