"""Values of `--cluster`: addresses and TOML files, and what is refused of them in one line."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("distributed", reason='the extra is not installed: pip install "ifsl_bench[cluster]"')

from ifsl_bench.experiments import cluster
from ifsl_bench.experiments.cluster import parse_cluster
from ifsl_bench.utils.errors import UserError

SLURM = "dask_jobqueue.SLURMCluster"


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "cluster.toml").write_text(text)
        return str(tmp_path / "cluster.toml")

    return write


def refusal(name: str) -> str:
    with pytest.raises(UserError) as error:
        parse_cluster(name)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:8786", "tcp://[::1]:8786"])
def test_an_address_is_taken_as_it_is(address, written):
    assert parse_cluster(address).scheduler_address == address
    assert parse_cluster(written(f'address = "{address}"')).scheduler_address == address


@pytest.mark.parametrize(
    "address", ["tcp://host", "tcp://:8786", "tcp://host:0", "http://host:80", "tcp://host:8786/x"]
)
def test_what_is_no_address_is_refused(address, written):
    assert "tcp://HOST:PORT" in refusal(address)
    assert "tcp://HOST:PORT" in refusal(written(f'address = "{address}"'))


def test_a_file_names_a_class_and_its_arguments(written):
    local = parse_cluster(written('class = "LocalCluster"\n[arguments]\nn_workers = 3'))
    assert (local.cluster_class_name, local.n_workers, local.uses_accelerators) == ("LocalCluster", 3, False)
    text = f'class = "{SLURM}"\n[arguments]\nn_workers = 2\ncores = 4\nworker_extra_args = ["--resources", "GPU=1"]'
    jobs = parse_cluster(written(text))
    assert (jobs.cluster_class_name, jobs.n_workers, jobs.uses_accelerators, jobs.cluster_arguments["cores"]) == (
        "SLURMCluster",
        2,
        True,
        4,
    )


@pytest.mark.parametrize("argument", ["protocol", "security", "resources"])
def test_what_is_decided_elsewhere_is_no_argument(argument, written):
    """`protocol = "tcp"` beside [security] would leave the connections open."""
    for kind in ("LocalCluster", SLURM) if argument != "resources" else ("LocalCluster",):
        message = refusal(written(f'class = "{kind}"\n[arguments]\nn_workers = 2\n{argument} = "tcp"'))
        assert f"cluster.toml: {argument} is no argument" in message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('class = "SLURMClust"\n', "none of "),
        ('klass = "LocalCluster"\n', "did you mean 'class'"),
        (f'class = "{SLURM}"\n[arguments]\ncores = 1', "n_workers = 4"),
        ('class = "LocalCluster"\n[arguments]\nn_workers = 0', "n_workers = 4"),
        ('class = "LocalCluster"\n[arguments]\nn_workers = true', "n_workers = 4"),
        ('class = "LocalCluster"\narguments = 3', "`arguments`"),
        ('class = "LocalCluster"\naddress = "tcp://127.0.0.1:1"', "either address"),
        ("", "either address"),
        ('address = "tcp://127.0.0.1:1"\n[arguments]\nn_workers = 2', "no [arguments]"),
        ('address = "tls://127.0.0.1:1"\nsecurity = true', "has keys already"),
        ('class = "LocalCluster"\n[security]\ntls_ca_file = "x"', "`security`"),
        ("class = ", "not valid TOML"),
        ("#" * 300_000, "characters"),
    ],
)
def test_what_a_file_gets_wrong_is_told_in_one_line(text, told, written):
    assert told in refusal(written(text))


def test_what_is_no_file_is_refused(tmp_path, written):
    assert "ends in .toml" in refusal("cluster.yaml")
    assert "cannot read the cluster file" in refusal(str(tmp_path / "none.toml"))
    (tmp_path / "folder.toml").mkdir()
    assert "cannot read" in refusal(str(tmp_path / "folder.toml"))
    (tmp_path / "latin.toml").write_bytes(b'class = "\xe9"')
    assert "not UTF-8" in refusal(str(tmp_path / "latin.toml"))


def test_ctrl_c_means_what_it_did_before_the_clusters_of_queueing_systems_were_loaded(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "dask_jobqueue"]:
        monkeypatch.delitem(sys.modules, name)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        cluster.import_dask("dask_jobqueue")
        assert "dask_jobqueue.runner" in sys.modules
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("missing", ["distributed", "dask_jobqueue"])
def test_without_the_extra_it_is_said_what_to_install(missing, written, monkeypatch):
    real = cluster.import_module

    def without(name):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name)

    monkeypatch.setattr(cluster, "import_module", without)
    message = refusal(written(f'class = "{SLURM}"\n[arguments]\nn_workers = 1'))
    assert 'pip install "ifsl_bench[cluster]"' in message
    assert missing in message


def test_a_checkpoint_is_evaluated_by_this_process(call):
    for more in (("--jobs", "2"), ("--cluster", "tcp://127.0.0.1:1")):
        status, _, message = call("run", "--checkpoint", "x", "--task", "glyphs-5shot", *more)
        assert (status, message.count("\n")) == (2, 1)
        assert "in this process: leave out --jobs" in message


def test_a_device_is_a_kind_and_looked_for_on_the_workers(call, written):
    file = written('class = "LocalCluster"\n[arguments]\nn_workers = 1')
    common = ["run", "--method", "imprint", "--task", "glyphs-5shot", "--cluster", file, "--device"]
    assert "with --cluster it is auto, cpu or cuda" in call(*common, "cuda:1")[2]
    assert "unknown device" in call(*common, "gpu")[2]
    assert "no worker" in call(*common, "cuda")[2]


def test_dask_is_imported_for_a_cluster_alone():
    """It takes half a second, and not everybody has it."""
    names = re.compile(r"^\s*(?:import|from) (?:dask|distributed|dask_jobqueue)\b", re.M)
    package = Path(cluster.__file__).parents[1]
    assert not [path.name for path in package.rglob("*.py") if names.search(path.read_text())]
