"""A wheel's contents, and an installed copy that works away from the repository."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
BESIDE = SETUPTOOLS["package-dir"]  # packages whose folder lies elsewhere
SHIPPED = ["README.md", "LICENSE", "DATA_LICENSES.md", "pyproject.toml", "ifsl_bench", *BESIDE.values()]


def folder_of(package: str) -> Path:
    return ROOT / BESIDE.get(package, package.replace(".", "/"))


def test_the_package_list_names_every_package_and_nothing_else():
    inside = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "ifsl_bench").rglob("__init__.py")}
    listed = SETUPTOOLS["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == inside | {"ifsl_bench.methods", "ifsl_bench.tasks", "ifsl_bench.results"}
    assert all((folder_of(package) / "__init__.py").is_file() for package in listed)
    modules = [*(ROOT / "ifsl_bench").rglob("*.py"), *(ROOT / "methods").rglob("*.py")]
    assert {path.parent for path in modules} <= {folder_of(package) for package in listed}, "a folder lacks __init__.py"


def package_data() -> dict[tuple[str, str], set[Path]]:
    """The files of each package and pattern."""
    listed = [(package, pattern) for package, patterns in SETUPTOOLS["package-data"].items() for pattern in patterns]
    return {(package, pattern): set(folder_of(package).glob(pattern)) for package, pattern in listed}


def test_package_data_patterns_match_files_and_every_data_file_is_matched():
    matched = package_data()
    assert {package for package, _ in matched} <= set(SETUPTOOLS["packages"])
    assert not [key for key, files in matched.items() if not files]
    data = {p for package in ("ifsl_bench", *BESIDE) for p in folder_of(package).rglob("*")
            if p.is_file() and p.suffix not in (".py", ".pyc", ".lock")}  # fmt: skip
    assert data - set((ROOT / "results" / "weights").iterdir()) == set().union(*matched.values())


def test_the_page_of_licences_names_every_file_of_data_and_no_other():
    named = re.findall(r"^\| `([^`]+)` \|", (ROOT / "DATA_LICENSES.md").read_text(), re.M)
    matched = {pattern: set(ROOT.glob(pattern)) for pattern in named}
    shipped = {path for path in set().union(*package_data().values()) if path.suffix not in (".typed", ".toml")}
    shipped |= {*(ROOT / "tests").rglob("*.npz"), *(ROOT / "results" / "weights").iterdir()}
    assert not shipped - set().union(*matched.values())
    of_weights = {re.split("-resnet|-included|[.]", path.name)[0] for path in shipped if path.suffix == ".safetensors"}
    assert all(any(f"/{name}" in pattern for pattern in named) for name in of_weights)


def test_the_dockerfile_installs_what_the_tests_of_the_wheel_do():
    text = (ROOT / "docs" / "Dockerfile").read_text().replace("\\\n", "")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    copied_lines = [words for words in lines if words[0] == "COPY"]
    assert sorted(name for _, *names, _ in copied_lines for name in names) == sorted(SHIPPED)
    assert all(target in ("./", *names) for _, *names, target in copied_lines), "each lies where it lay"
    assert lines.index(["RUN", "pip", "install", "--no-cache-dir", "."]) > max(map(lines.index, copied_lines))
    version = re.fullmatch(r"python:(\d+)\.(\d+)-slim", lines[0][1])
    least = re.fullmatch(r">=(\d+)\.(\d+)", PYPROJECT["project"]["requires-python"])
    assert tuple(map(int, version.groups())) >= tuple(map(int, least.groups()))
    assert ["ENTRYPOINT", '["ifsl-bench"]'] in lines


def test_the_conda_environment_has_the_packages_that_pyproject_has():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    environment = yaml.safe_load((ROOT / "docs" / "environment.yml").read_text())
    assert (environment["name"], environment["channels"]) == (PYPROJECT["project"]["name"], ["conda-forge"])
    theirs = {"torch": "pytorch", "matplotlib": "matplotlib-base"}  # names of conda-forge
    dependencies = [re.sub(r"^[a-z]+", lambda name: theirs.get(name[0], name[0]), requirement)
                    for requirement in PYPROJECT["project"]["dependencies"]]  # fmt: skip
    more = [f"python{PYPROJECT['project']['requires-python']}", "pip", *PYPROJECT["build-system"]["requires"]]
    assert sorted(environment["dependencies"]) == sorted([*more, *dependencies])


@pytest.fixture(scope="module")
def wheel(made_once) -> Path:
    """A wheel built from the files that git would ship."""

    def fill(out: Path) -> None:
        (out / "source").mkdir()
        names = (str(ROOT / name) for name in (*SHIPPED, "MANIFEST.in"))
        subprocess.run(["cp", "-r", *names, str(out / "source")], check=True)
        pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-q", "-w", str(out)]
        subprocess.run([*pip, str(out / "source")], check=True, capture_output=True, timeout=300)

    return next(made_once("wheel", fill).glob("*.whl"))


@pytest.mark.slow("builds a wheel")
def test_an_index_takes_the_wheel_which_holds_the_package_and_nothing_called_methods_or_tasks(wheel):
    # An index takes 100 << 20, MAX_FILESIZE of warehouse/constants.py; the rest is room for results of later versions.
    assert wheel.stat().st_size < 70 << 20
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"ifsl_bench"}
    for needed in ("ifsl_bench/py.typed", "ifsl_bench/methods/imprint.py", "ifsl_bench/tasks/mini.toml",
                   "ifsl_bench/results/published/ren2019.json", "ifsl_bench/data/sets/glyphs/letters.tsv"):  # fmt: skip
        assert needed in names
    for package in ("ifsl_bench", "methods"):
        for path in (ROOT / package).rglob("*.py"):
            relative = path.relative_to(ROOT)
            inside = relative if package == "ifsl_bench" else Path("ifsl_bench") / relative
            assert str(inside) in names, f"{relative} is not packaged"
    for path in (ROOT / "ifsl_bench").rglob("*.safetensors"):
        assert str(path.relative_to(ROOT)) in names
    assert not [name for name in names if name.startswith("ifsl_bench/results/weights")]
    assert not [n for n in names if "__pycache__" in n or n.endswith(".npz")]
    assert sum(n.endswith(".seed-0.json") for n in names) == len(list((ROOT / "results").glob("*/*.seed-0.json")))


@pytest.mark.slow("builds a wheel and installs it")
def test_installed_wheel_works_away_from_the_repository(wheel, tmp_path):
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "-q", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True, timeout=300)
    assert sorted(p.name for p in site.iterdir() if p.suffix != ".dist-info" and p.name != "bin") == ["ifsl_bench"]
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import ifsl_bench; print(ifsl_bench.table('mini-5shot')); "
        # An editable installation beside it would lend what the wheel lacks.
        "files = [module.__file__ for name, module in sys.modules.items() if name.startswith('ifsl_bench')]; "
        "assert all(file.startswith(sys.argv[1]) for file in files), files"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(site)], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert "published: ren2019" in process.stdout


@pytest.mark.slow("builds an archive of all names")
def test_a_source_archive_holds_every_file_of_the_repository(tmp_path):
    """With the tests and the documents; so whoever has it can run all tests."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    names = {name for name in listed.decode().split("\0") if name and (ROOT / name).exists()} - {".gitignore"}
    for name in names:
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).touch()  # what an archive holds is a matter of names
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "ifsl_bench/_version.py"):
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    code = f"import setuptools.build_meta as build; build.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "source", check=True, capture_output=True, timeout=300)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert not names - held
