"""The commands, as a person types them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ifsl_bench.utils.serialization import write_checksummed

TASK = "clusters.toml:clusters-5shot"


def test_run_ends_with_the_row_among_the_stored_ones(call, here):
    status, out, err = call("run", "--method", "protonet", "--task", TASK, "--device", "cpu")
    assert status == 0, err
    assert "clusters-5shot" in out
    assert "only measured row" in out
    assert "Next: 'ifsl-bench compare A B --task clusters-5shot'" in out.splitlines()[-1]
    status, out, _ = call("run", "--method", "imprint,protonet", "--task", TASK, "--device", "cpu")
    assert status == 0
    assert out.count("protonet") >= 2
    assert "All rows are provisional (1 seed); ranks need three seeds." in out
    assert "ifsl-bench compare imprint protonet --task clusters-5shot" in out
    assert "Next:" not in out, "it was told once"
    path = here / "home" / "results" / "clusters-5shot" / "imprint.seed-0.json"
    value = json.loads(path.read_text())
    assert value["provenance"]["command"].startswith("ifsl-bench run --method imprint,protonet")
    assert len(value["episodes"]["base_joint"]) == 60


def test_stored_results_are_skipped_repeated_or_kept_aside(call, here):
    def run(*more: str) -> str:
        status, _, err = call("run", "--method", "protonet", "--task", TASK, "--device", "cpu", *more)
        assert status == 0, err
        return err

    run()
    path = here / "home" / "results" / "clusters-5shot" / "protonet.seed-0.json"
    before, first = path.stat().st_mtime_ns, json.loads(path.read_text())
    assert "done already" in run()
    assert path.stat().st_mtime_ns == before
    run("--rerun")
    assert path.stat().st_mtime_ns > before
    assert first["episodes"] == json.loads(path.read_text())["episodes"]
    text = (here / "clusters.toml").read_text()
    (here / "clusters.toml").write_text(text.replace("episodes = 60", "episodes = 50"))
    err = run()
    assert "out of date (changed: task, number of episodes)" in err
    assert "is kept as" in err
    names = sorted(p.name for p in path.parent.glob("protonet*"))
    assert names == ["protonet.seed-0.json", "protonet.seed-0.json.old-0"]


def test_what_a_method_prints_does_not_get_into_json(call, here):
    (here / "loud.py").write_text(
        "from ifsl_bench.methods.imprint import Imprint\n\nclass Loud(Imprint):\n"
        "    def forward(self, support, query):\n"
        "        print('an episode')\n        return super().forward(support, query)\n"
    )
    status, out, err = call("run", "--method", "loud.py:Loud", "--task", f"{here}/clusters.toml:clusters-5shot",
                            "--episodes", "20", "--format", "json", "--home", str(here / "home"))  # fmt: skip
    assert status == 0, err
    assert any(row["method"] == "Loud.episodes=20" for row in json.loads(out))
    assert "an episode" in err


def test_seeds_compare_and_show(call, here):
    status, out, err = call("run", "--method", "lwof,imprint", "--task", TASK, "--seeds", "2", "--train", "steps=20",
                            "--device", "cpu")  # fmt: skip
    assert status == 0, err
    status, out, _ = call("compare", "lwof.train.steps=20", "imprint", "--task", TASK)
    assert status == 0
    assert "seeds 0, 1" in out
    assert "A - B overall" in out
    assert re.match(
        r"(imprint|lwof\.train\.steps=20) has a significantly higher Acc\. than |Acc\. does not tell ",
        out.splitlines()[1],
    )
    folder = Path("home/results/clusters-5shot")
    files = [str(folder / f"{m}.seed-0.json") for m in ("lwof.train.steps=20", "imprint")]
    status, out, _ = call("compare", *files)
    assert status == 0
    assert "60 episodes" in out
    status, out, _ = call("show", files[0])
    assert status == 0
    assert "novel alone" in out
    assert "digest" in out


@pytest.mark.slow("whole runs of several seeds")
def test_several_seeds_on_one_pretraining(call, here):
    """Seeds differ where there is something to meta-train; tables and comparisons say what was held fixed."""
    text = Path("clusters.toml").read_text().replace("steps = 60\n", "steps = 60\nseed = 3\n")
    Path("clusters.toml").write_text(text)
    arguments = ("run", "--method", "lwof,protonet", "--task", TASK, "--seeds", "2", "--train", "steps=20", "--device",
                 "cpu")  # fmt: skip
    status, out, _ = call(*arguments, "--dry-run")
    assert status == 0
    assert "2 pretraining, 2 meta-training, 4 evaluation" in out, "of each head one for both seeds"
    status, out, err = call(*arguments)
    assert status == 0, err
    assert "on one pretraining: every interval holds the backbone fixed" in out
    assert len(list(Path("home/pretrained").glob("clusters-*"))) == 2
    folder = Path("home/results/clusters-5shot")
    lwof, protonet = ([json.loads((folder / f"{label}.seed-{seed}.json").read_text()) for seed in (0, 1)]
                      for label in ("lwof.train.steps=20", "protonet"))  # fmt: skip
    for results in (lwof, protonet):
        assert results[0]["pretraining"] == results[1]["pretraining"]
    assert lwof[0]["episodes"] != lwof[1]["episodes"]
    assert protonet[0]["episodes"] == protonet[1]["episodes"]
    status, out, _ = call("compare", "lwof.train.steps=20", "protonet", "--task", TASK)
    assert "all seeds start from one pretraining" in out
    Path("clusters.toml").write_text(text.replace("seed = 3", "seed = -1"))
    status, _, err = call("run", "--method", "protonet", "--task", TASK)
    assert status == 2
    assert "pretraining.seed must not be negative" in err


def test_checkpoint_is_evaluated_alone(call, here):
    call("run", "--method", "lwof", "--task", TASK, "--train", "steps=20", "--device", "cpu")
    result = json.loads((here / "home/results/clusters-5shot/lwof.train.steps=20.seed-0.json").read_text())
    folder = result["provenance"]["checkpoint"]
    status, out, err = call("run", "--checkpoint", folder, "--task", TASK, "--device", "cpu")
    assert status == 0, err
    assert f"{result['summary']['acc']['mean']:.2f}" in out
    assert "meta-training" not in err
    arguments = ("--task", "clusters.toml:clusters-1shot", "--format", "json")
    status, out, err = call("run", "--checkpoint", folder, *arguments, "--device", "cpu")
    assert status == 0, err
    assert json.loads(out)[0]["metric"] == "acc", "one document"
    (here / "home" / "pretrained").rename(here / "home" / "gone")
    status, _, err = call("run", "--checkpoint", folder, "--task", TASK, "--device", "cpu")
    assert status == 2
    assert "is not in" in err
    assert not (here / "home" / "pretrained").exists(), "nothing is trained"
    status, _, err = call("run", "--checkpoint", "nowhere", "--task", TASK)
    assert status == 2
    assert "no meta-trained model" in err
    status, _, err = call("run", "--checkpoint", folder, "--method", "lwof", "--task", TASK)
    assert status == 2


def test_what_is_prepared_is_verified(call, here):
    status, out, _ = call("data", "verify")
    assert (status, "verified" in out) == (0, True)


def write_plugin(folder: Path, entries: str, code: str) -> None:
    """An installed distribution with entry points, as pip leaves it."""
    info = folder / "other-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\nProvides-Extra: big\n")
    (info / "entry_points.txt").write_text(f"[ifsl_bench.methods]\n{entries}")
    (folder / "other_methods.py").write_text(code)


PLUGIN = '''
from ifsl_bench import Method

class Text:
    pass

class Wants(Method):
    """Imports something when it is made."""
    def forward(self, support, query): ...
    requires = {"torch": "pip install torch", "another_that_nobody_has": "pip install 'another==1'"}
'''


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    entries = (
        "text = other_methods:Text\nwants = other_methods:Wants\n"
        "gone = other_methods:Gone\nbroken = other_broken:X\nheavy = other_heavy:X [big]\nleaves = other_leaves:X\n"
    )
    write_plugin(folder, entries, PLUGIN)
    (folder / "other_leaves.py").write_text("import sys; sys.exit(0)\n")
    (folder / "other_broken.py").write_text("raise RuntimeError('no luck')\n")
    (folder / "other_heavy.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(folder))
    yield
    for name in ("other_methods", "other_broken", "other_heavy", "other_leaves"):
        sys.modules.pop(name, None)


def test_a_method_of_a_campaign_that_lacks_an_extra_takes_its_own_jobs_with_it_alone(call, here, plugins):
    (here / "some.toml").write_text(
        '[[run]]\nmethods = ["heavy", "imprint"]\ntasks = "clusters.toml:clusters-5shot"\nseeds = 2\nepisodes = 20\n'
    )
    (here / "none.toml").write_text('[[run]]\nmethods = "heavy"\ntasks = "clusters.toml:clusters-5shot"\n')
    message = "ifsl-bench: 2 jobs cannot be run here: method 'heavy' of package other"
    for command in ("plan", "status", "run"):
        status, out, err = call(command, "some.toml")
        assert (status, message in err) == (int(command == "run"), True), (command, err)
        assert "imprint" in out
        status, _, err = call(command, "none.toml")
        assert status == 2
        assert 'pip install "other[big]"' in err
    status, _, err = call("run", "some.toml", "-q")  # what is stored already is no success
    assert status == 1


def test_broken_plugins_are_listed_and_take_nobody_down(call, here, plugins):
    status, out, _ = call("methods")
    assert status == 0
    lines = {line.split()[0]: line for line in out.splitlines() if line.split()}
    assert "broken: RuntimeError: no luck" in lines["broken"]
    assert 'needs an extra (a_package_that_nobody_has is not installed): pip install "other[big]"' in lines["heavy"]
    assert "needs an extra (another_that_nobody_has is not installed): pip install 'another==1'" in lines["wants"]
    assert "broken: AttributeError" in lines["gone"]
    assert "not a subclass" in lines["text"]
    assert "broken: SystemExit" in lines["leaves"]
    assert "imprint" in lines
    for name, message in (("broken", "no luck"), ("heavy", "pip install"), ("leaves", "SystemExit")):
        status, _, err = call("run", "--method", name, "--task", TASK)
        assert status == 2
        assert message in err
    assert call("run", "--method", "imprint", "--task", TASK, "--device", "cpu")[0] == 0


@pytest.mark.slow("whole runs on changed data and weights")
def test_results_on_other_data_or_weights_are_made_again(call, here, tmp_path, write_features):
    """The same names and settings, but other features or another backbone: nothing stale is mixed in."""
    arguments = ("run", "--method", "imprint,lwof", "--train", "steps=20", "--task", TASK, "--device", "cpu")
    assert call(*arguments)[0] == 0
    files = sorted((here / "home/results/clusters-5shot").glob("*.json"))
    before = [json.loads(p.read_text()) for p in files]
    write_features(tmp_path / "other", seed=5)
    assert call("data", "prepare", "clusters", "--from", str(tmp_path / "other"), "--force")[0] == 0
    status, _, err = call(*arguments)
    assert status == 0
    assert "imprint.seed-0.json is out of date (changed: data, backbone" in err
    after = [json.loads(p.read_text()) for p in files]
    assert all(a["fingerprint"] != b["fingerprint"] for a, b in zip(after, before, strict=True))
    assert "done already" in call(*arguments)[2]

    (folder,) = (here / "home/pretrained").glob(f"[!.]*cosine*{after[0]['pretraining']['key'][-12:]}")
    other_folder = next(p for p in (here / "home/pretrained").glob("[!.]*cosine*") if p != folder)
    for path in folder.iterdir():
        path.unlink()
    for path in other_folder.iterdir():  # the weights of another training under the same key
        (folder / path.name).write_bytes(path.read_bytes())
    info = json.loads((folder / "checkpoint.json").read_text())
    write_checksummed(
        folder / "checkpoint.json", {k: v for k, v in info.items() if k != "checksum"} | {"key": folder.name}
    )
    status, _, err = call(*arguments)
    assert status == 0
    assert "changed: backbone's weights" in err
    assert "was trained on the features of other weights" in err
    assert json.loads(files[0].read_text())["episodes"] != after[0]["episodes"]


def test_options_of_training_that_mean_nothing_are_told_or_refused(call, here):
    status, _, err = call("run", "--method", "imprint,lwof", "--task", TASK, "--train", "steps=20", "--device", "cpu")
    assert status == 0
    assert "imprint: nothing is meta-trained, so --train changes nothing" in err
    assert (here / "home/results/clusters-5shot/imprint.seed-0.json").exists(), "nothing to train, nothing in the label"
    status, _, err = call("run", "--method", "lwof", "--task", TASK, "--train", "views=2")
    assert status == 2
    assert "has no augmentation" in err


def test_a_method_that_the_list_has_under_other_names_says_so(here, call):
    assert re.search(r"By options: attractor is (lr\+a or mlp\+a|mlp\+a or lr\+a); ", call("methods")[1])
    status, _, err = call("run", "--method", "attractor", "--task", "clusters.toml:clusters-5shot", "--dry-run")
    assert status == 0
    assert "attractor with these options is called " in err


def test_a_home_that_may_not_be_written_makes_matplotlib_say_nothing(tmp_path):
    (nowhere := tmp_path / "file").write_text("")
    script = "import logging, sys; from ifsl_bench.cli import main; sys.argv = ['ifsl-bench', '--version']\n" \
             "try:\n    main.main()\nexcept SystemExit:\n    import matplotlib; matplotlib.get_configdir()"  # fmt: skip
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          env={**os.environ, "MPLCONFIGDIR": str(nowhere / "below"), "HOME": str(nowhere)})  # fmt: skip
    assert process.stderr == ""
