"""What `--cluster` says: addresses and TOML files, and what is refused of them in one line."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("distributed", reason='the extra is not installed: pip install "ifsl_bench[cluster]"')

from ifsl_bench.common.errors import UserError
from ifsl_bench.scheduler import cluster_file
from ifsl_bench.scheduler.cluster_file import CLASSES, arguments_of, read_cluster

SLURM = "dask_jobqueue.SLURMCluster"


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "cluster.toml").write_text(text)
        return str(tmp_path / "cluster.toml")

    return write


def refusal(said: str) -> str:
    with pytest.raises(UserError) as error:
        read_cluster(said)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:8786", "tls://scheduler.example.org:1", "tcp://[::1]:8786"])
def test_an_address_is_taken_as_it_is(address, written):
    assert read_cluster(address).address == address
    assert read_cluster(written(f'address = "{address}"')).address == address


@pytest.mark.parametrize(
    "said", ["tcp://host", "tcp://:8786", "tcp://host:0", "tcp://host:99999", "http://host:80", "tcp://host:8786/x"]
)
def test_what_is_no_address_is_refused(said, written):
    assert "tcp://HOST:PORT" in refusal(said)
    assert "tcp://HOST:PORT" in refusal(written(f'address = "{said}"'))


def test_a_file_names_a_class_and_its_arguments(written):
    local = read_cluster(written('class = "LocalCluster"\n[arguments]\nn_workers = 3\nresources = {GPU = 1}'))
    assert (local.kind, local.count, local.accelerators) == ("LocalCluster", 3, True)
    jobs = read_cluster(written(f'class = "{SLURM}"\n[arguments]\nn_workers = 2\ncores = 4\nmemory = "8GB"'))
    assert (jobs.kind, jobs.count, jobs.accelerators, jobs.arguments["cores"]) == ("SLURMCluster", 2, False, 4)
    text = f'class = "{SLURM}"\n[arguments]\nn_workers = 2\nworker_extra_args = ["--resources", "GPU=1"]'
    assert read_cluster(written(text)).accelerators


@pytest.mark.parametrize("argument", ["protocol", "security", "nthreads"])
@pytest.mark.parametrize("kind", ["LocalCluster", SLURM])
def test_what_is_decided_elsewhere_is_no_argument(argument, kind, written):
    """`protocol = "tcp"` beside [security] would leave the connections open."""
    said = refusal(written(f'class = "{kind}"\n[arguments]\nn_workers = 2\n{argument} = "tcp"'))
    assert argument in said
    assert "cluster.toml" in said


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_takes_its_own_arguments_and_those_of_its_workers(kind):
    known = arguments_of(kind)
    assert {"n_workers", "interface", "local_directory", "death_timeout"} <= known
    assert {"cores", "memory", "worker_extra_args", "job_script_prologue"} <= known or kind == "LocalCluster"
    assert not known & {"self", "loop", "asynchronous", "kwargs", "worker_kwargs", "job_kwargs"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('class = "SLURMClust"\n', "did you mean 'SLURMCluster'"),
        ('class = "os.system"\n', "unknown class"),
        ('klass = "LocalCluster"\n', "did you mean 'class'"),
        ('class = "LocalCluster"\n[argument]\nn_workers = 2', "did you mean 'arguments'"),
        ('class = "LocalCluster"\n[arguments]\nn_worker = 2', "did you mean 'n_workers'"),
        (f'class = "{SLURM}"\n[arguments]\nn_workers = 2\nquue = "x"', "did you mean 'queue'"),
        (f'class = "{SLURM}"\n[arguments]\ncores = 1', "n_workers = 4"),
        ('class = "LocalCluster"\n[arguments]\nn_workers = 0', "n_workers = 4"),
        ('class = "LocalCluster"\n[arguments]\nn_workers = true', "n_workers = 4"),
        ('class = "LocalCluster"\narguments = 3', "arguments is a table"),
        ('class = "LocalCluster"\naddress = "tcp://127.0.0.1:1"', "either address"),
        ("", "either address"),
        ('address = "tcp://127.0.0.1:1"\n[arguments]\nn_workers = 2', "no [arguments]"),
        ('address = "tcp://127.0.0.1:1"\nsecurity = true', "security is a table"),
        ('address = "tls://127.0.0.1:1"\n[security]\ntls_ca_file = "no.pem"', "there is no file"),
        ('address = "tls://127.0.0.1:1"\n[security]\ntls_ca = "no.pem"', "did you mean 'tls_ca_file'"),
        ("class = ", "not valid TOML"),
        ("x = " + "[" * 3000, "not valid TOML"),
        ("a" + ".a" * 300 + " = 1", "dots"),
        ("#" * 100_000, "characters"),
    ],
)
def test_what_a_file_gets_wrong_is_told_in_one_line(text, told, written):
    assert told in refusal(written(text))


def test_keys_are_files_seen_from_the_file_that_names_them(written, tmp_path):
    names = ("tls_ca_file", "tls_client_cert", "tls_client_key")
    text = 'address = "tls://host:1"\n[security]\n' + "".join(f'{name} = "{name}.pem"\n' for name in names)
    for name in names:
        (tmp_path / f"{name}.pem").write_text("")
    assert read_cluster(written(text)).security == {name: str(tmp_path / f"{name}.pem") for name in names}
    assert "lacks tls_client_key" in refusal(written(text.replace('tls_client_key = "tls_client_key.pem"\n', "")))
    assert "begins with tls://" in refusal(written(text.replace("tls://", "tcp://")))


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
        cluster_file.dask("dask_jobqueue")
        assert "dask_jobqueue.runner" in sys.modules
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("missing", ["distributed", "dask_jobqueue"])
def test_without_the_extra_it_is_said_what_to_install(missing, written, monkeypatch):
    real = cluster_file.import_module

    def without(name):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name)

    monkeypatch.setattr(cluster_file, "import_module", without)
    told = refusal(written(f'class = "{SLURM}"\n[arguments]\nn_workers = 1'))
    assert 'pip install "ifsl_bench[cluster]"' in told
    assert missing in told


def test_the_cluster_brings_its_own_workers(call):
    asked = ["run", "--method", "imprint", "--task", "glyphs-5shot", "--cluster", "tcp://127.0.0.1:1"]
    status, _, told = call(*asked, "--jobs", "2")
    assert status == 2
    assert "leave out --jobs and --devices" in told


def test_a_device_is_a_kind_and_looked_for_on_the_workers(call, written):
    said = written('class = "LocalCluster"\n[arguments]\nn_workers = 1')
    common = ["run", "--method", "imprint", "--task", "glyphs-5shot", "--cluster", said, "--device"]
    assert "with --cluster it is auto, cpu or cuda" in call(*common, "cuda:1")[2]
    assert "unknown device" in call(*common, "gpu")[2]
    assert "no worker" in call(*common, "cuda")[2]


def test_dask_is_imported_for_a_cluster_alone():
    """It takes half a second, and not everybody has it."""
    names = re.compile(r"^\s*(?:import|from) (?:dask|distributed|dask_jobqueue)\b", re.M)
    package = Path(cluster_file.__file__).parents[1]
    assert not [path.name for path in package.rglob("*.py") if names.search(path.read_text())]
