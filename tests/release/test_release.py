"""Tests that a release can be installed from a registry, as a wheel, as a Debian package and with
helm.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from podgpu import __version__
from podgpu.labs.simulate.simulated_kubelet import SimulatedKubelet, SimulatedPod
from release.rootfs import MIRROR, PYTHONS
from tests.net import free_port, read_if_ready
from tests.release.conftest import build_release

HELM = str(Path(sys.executable).with_name("helm"))
FIXTURES = Path(__file__).parents[1] / "fixtures"
ENGINE_WITH_ONE_GPU = f"""\
#include "{Path(__file__).parents[1] / "gpu/dcgm/fake_libdcgm.c"}"

__attribute__((constructor)) static void add_gpu(void) {{
    fake_reset();
    fake_gpu(0, "GPU-1", "00000000:18:00.0", "NVIDIA H100 80GB HBM3", 0);
    fake_int(1, 0, 55, 1700000000000000, 0, 4);
    fake_int(1, 0, 150, 1700000000000000, 0, 41);
}}
"""
REGISTRY_CONFIG = """\
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


def run(*command: str | Path, **options: Any) -> str:
    result = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, **options
    )
    assert result.returncode == 0, f"{command}: {result.stdout[-1000:]} {result.stderr[-2000:]}"
    return result.stdout


def need(*commands: str) -> None:
    missing = [command for command in commands if shutil.which(command) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@contextmanager
def background(*command: str | Path, url: str, text: str = "", **options: Any) -> Iterator[str]:
    """Runs a server. Yields the first answer of the URL that contains the text."""
    with subprocess.Popen(
        [str(word) for word in command], stderr=subprocess.PIPE, text=True, **options
    ) as process:
        try:
            yield _wait_for(url, text, process)
        finally:
            process.terminate()
            process.wait(30)


def _wait_for(url: str, text: str, process: subprocess.Popen[str]) -> str:
    body = ""
    for _ in range(900):
        body = (read_if_ready(url) or b"").decode()
        if text in body:
            return body
        if process.poll() is not None:
            break
        time.sleep(0.2)
    process.kill()
    raise AssertionError(
        f"no {text} from {url}: {body[-2000:]}\n{process.communicate()[1][-2000:]}"
    )


def test_checksums(dist: Path) -> None:
    lines = (dist / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    sums = {line.split("  ")[1]: line.split("  ")[0] for line in lines}
    names = {path.name for path in dist.iterdir()} - {"SHA256SUMS"}
    assert sums.keys() == names
    assert all(
        hashlib.sha256((dist / name).read_bytes()).hexdigest() == sums[name] for name in names
    )


def find_pythons() -> list[str]:
    """Returns the supported versions of Python that are installed, also by pyenv."""
    found = []
    for version in PYTHONS:
        name = f"python{version}"
        programs = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}"))
        installed = shutil.which(name)
        if programs:
            found.append(str(programs[-1]))
        # Another program of pyenv exists even if its version is not selected.
        elif installed is not None and ".pyenv/" not in installed:
            found.append(installed)
    return found


def test_two_builds_are_identical(dist: Path, tmp_path: Path) -> None:
    again = build_release(tmp_path / "dist")
    assert (again / "SHA256SUMS").read_text() == (dist / "SHA256SUMS").read_text()


def test_image_size(dist: Path) -> None:
    """The compressed image of each architecture is one layer of at most 35 MB."""
    with tarfile.open(dist / f"podgpu-image-{__version__}.tar") as layout:
        assert max(member.size for member in layout) < 35_000_000


def test_wheel_in_a_clean_environment(dist: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    (wheel,) = dist.glob("*.whl")
    run(tmp_path / "venv/bin/pip", "install", "--quiet", wheel)
    podgpu, port = tmp_path / "venv/bin/podgpu", free_port()
    assert __version__ in run(podgpu, "--version")
    without_grpc = subprocess.run([podgpu, "demo"], capture_output=True, text=True, check=False)
    assert (without_grpc.returncode, without_grpc.stderr.count("\n")) == (1, 1)
    assert "pip install '.[demo]'" in without_grpc.stderr
    command = [
        str(podgpu),
        "exporter",
        "--telemetry",
        "simulated:1xH100",
        "-a",
        f"127.0.0.1:{port}",
    ]
    with background(
        *command, url=f"http://127.0.0.1:{port}/metrics", text="DCGM_FI_DEV_GPU_TEMP{"
    ) as metrics:
        assert "DCGM_FI_DEV_FB_USED{" in metrics


def test_sdist_builds_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    with tarfile.open(dist / f"podgpu-{__version__}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"podgpu-{__version__}"
    assert (source / "PKG-INFO").read_text().startswith("Metadata-Version")
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        tmp_path,
        source,
    )
    assert list(tmp_path.glob(f"podgpu-{__version__}-*.whl"))


def test_wheel_of_a_clone_has_its_commit(tmp_path: Path) -> None:
    run("git", "clone", "--quiet", Path(__file__).parents[2], tmp_path / "clone")
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        tmp_path,
        tmp_path / "clone",
    )
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        commit = archive.read("podgpu/commit.txt").decode().strip()
    assert len(commit) == 12
    assert run("git", "rev-parse", "HEAD", cwd=tmp_path / "clone").startswith(commit)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    need("docker-registry", "skopeo")
    folder, port = tmp_path_factory.mktemp("registry"), free_port()
    config = folder / "config.yml"
    config.write_text(REGISTRY_CONFIG.format(folder=folder / "data", port=port), encoding="utf-8")
    address = f"127.0.0.1:{port}"
    with background(
        "docker-registry", "serve", config, url=f"http://{address}/v2/", stdout=subprocess.DEVNULL
    ):
        yield address


@pytest.mark.parametrize("suffix", ["", "-autoscale"])
def test_image_from_a_registry(dist: Path, registry: str, suffix: str) -> None:
    archive = dist / f"podgpu-image-{__version__}{suffix}.tar"
    target = f"docker://{registry}/podgpu:{__version__}{suffix}"
    run(
        "skopeo",
        "copy",
        "--quiet",
        "--all",
        "--dest-tls-verify=false",
        f"oci-archive:{archive}",
        target,
    )
    config = json.loads(run("skopeo", "inspect", "--config", "--tls-verify=false", target))
    assert config["config"]["Entrypoint"] == ["podgpu", "exporter"]
    assert config["config"]["Labels"]["org.opencontainers.image.version"] == __version__


def test_chart_from_a_registry(dist: Path, registry: str, tmp_path: Path) -> None:
    environment = os.environ | {"HELM_REGISTRY_CONFIG": str(tmp_path / "config.json")}
    run(
        HELM,
        "push",
        "--plain-http",
        dist / f"podgpu-{__version__}.tgz",
        f"oci://{registry}/charts",
        env=environment,
    )
    chart = f"oci://{registry}/charts/podgpu"
    rendered = run(
        *(HELM, "template", "podgpu", chart, "--plain-http", "--version", __version__),
        *("--set", f"image.repository={registry}/podgpu"),
        env=environment,
    )
    assert f"image: {registry}/podgpu:{__version__}" in rendered


def unpack_image(archive: Path, folder: Path) -> dict[str, Any]:
    """Unpacks the amd64 image and returns its configuration."""
    with tarfile.open(archive) as layout:

        def read(digest: str) -> bytes:
            member = layout.extractfile(f"blobs/sha256/{digest.removeprefix('sha256:')}")
            assert member is not None
            return member.read()

        top = layout.extractfile("index.json")
        assert top is not None
        index = json.loads(read(json.load(top)["manifests"][0]["digest"]))
        (entry,) = (m for m in index["manifests"] if m["platform"]["architecture"] == "amd64")
        manifest = json.loads(read(entry["digest"]))
        layer = folder.with_suffix(".tar.gz")
        layer.write_bytes(read(manifest["layers"][0]["digest"]))
        config = json.loads(read(manifest["config"]["digest"]))["config"]
    folder.mkdir()
    run("tar", "-xzf", layer, "-C", folder)
    assert isinstance(config, dict)
    return config


def write_bundle(
    archive: Path,
    folder: Path,
    arguments: list[str],
    *,
    uid: int = 0,
    mounts: Mapping[str, Path] | None = None,
    variables: Sequence[str] = (),
) -> None:
    """Prepares an image for runc as the chart does: read-only root file system, no capability, no
    new privileges.
    """
    need("runc")
    if os.geteuid() != 0 or platform.machine() != "x86_64":
        pytest.skip("runc needs root here, and the image is for amd64")
    image = unpack_image(archive, folder / "rootfs")
    run("runc", "spec", cwd=folder)
    spec = json.loads((folder / "config.json").read_text())
    spec["process"] |= {
        "terminal": False,
        "user": {"uid": uid, "gid": uid},
        "args": arguments,
        "env": [*image["Env"], *variables],
        "capabilities": {},
        "noNewPrivileges": True,
    }
    spec["root"] = {"path": "rootfs", "readonly": True}
    spec["mounts"].append({"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"})
    for destination, source in (mounts or {}).items():
        spec["mounts"].append(
            {
                "destination": destination,
                "type": "bind",
                "source": str(source),
                "options": ["rbind", "rw"],
            }
        )
    spec["linux"]["namespaces"] = [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]
    (folder / "config.json").write_text(json.dumps(spec))


def run_bundle(folder: Path, url: str, text: str) -> str:
    """Runs a container until the answer of a URL contains the text. Returns the answer."""
    name = f"podgpu-test-{os.getpid()}"
    try:
        with background("runc", "run", name, url=url, text=text, cwd=folder) as answer:
            return answer
    finally:
        subprocess.run(["runc", "delete", "--force", name], check=False, capture_output=True)


def test_exporter_image_runs(dist: Path, tmp_path: Path) -> None:
    port = free_port()
    counters = "/etc/dcgm-exporter/dcp-metrics-included.csv"
    options = [
        "--telemetry",
        "simulated:1xH100",
        "-a",
        f"127.0.0.1:{port}",
        "-f",
        counters,
        "-c",
        "1s",
    ]
    write_bundle(
        dist / f"podgpu-image-{__version__}.tar", tmp_path, ["podgpu", "exporter", *options]
    )
    text = run_bundle(
        tmp_path, f"http://127.0.0.1:{port}/metrics", "DCGM_FI_PROF_GR_ENGINE_ACTIVE{"
    )
    assert "DCGM_FI_DEV_GPU_TEMP{" in text


def test_host_engine_with_a_mounted_library(dist: Path, tmp_path: Path) -> None:
    """Tests `-r` with libdcgm.so.4 from a mounted directory and LD_LIBRARY_PATH, as in
    docs/dcgm.md.
    """
    need("cc")
    library, port = tmp_path / "dcgm", free_port()
    library.mkdir()
    run(
        "cc",
        "-shared",
        "-fPIC",
        "-o",
        library / "libdcgm.so.4",
        "-x",
        "c",
        "-",
        input=ENGINE_WITH_ONE_GPU,
    )
    options = ["-r", "localhost:5555", "-a", f"127.0.0.1:{port}"]
    write_bundle(
        dist / f"podgpu-image-{__version__}.tar",
        tmp_path,
        ["podgpu", "exporter", *options],
        mounts={"/opt/dcgm": library},
        variables=["LD_LIBRARY_PATH=/opt/dcgm"],
    )
    text = run_bundle(tmp_path, f"http://127.0.0.1:{port}/metrics", "DCGM_FI_DEV_GPU_TEMP{")
    assert re.search(r'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1".*} 41', text)


def test_enrich_in_a_container(dist: Path, tmp_path: Path) -> None:
    """Runs the `docker run` command of docs/install-beside-dcgm-exporter.md with --once."""
    seed = (FIXTURES / "seeds" / "000-sample.prom").read_text(encoding="utf-8")
    bare = re.sub(r'(container_name|pod_name|pod_namespace)="[^"]*",', "", seed)
    folders = {name: tmp_path / name for name in ("pod-resources", "prometheus", "textfile")}
    for folder in folders.values():
        folder.mkdir()
    (folders["prometheus"] / "dcgm.prom").write_text(bare, encoding="utf-8")
    places = ["--in", "/run/prometheus/dcgm.prom", "--out", "/run/textfile/podgpu.prom"]
    mounts = {
        "/var/lib/kubelet/pod-resources": folders["pod-resources"],
        "/run/prometheus": folders["prometheus"],
        "/run/textfile": folders["textfile"],
    }
    arguments = ["podgpu", "enrich", *places, "-o", "--once"]
    write_bundle(dist / f"podgpu-image-{__version__}.tar", tmp_path, arguments, mounts=mounts)
    uuids = sorted(set(re.findall(r"GPU-[-0-9a-f]+", seed)))
    pod = SimulatedPod("default", "pod1", {"pod1-ctr": {"nvidia.com/gpu": uuids}})
    with SimulatedKubelet(f"{folders['pod-resources']}/kubelet.sock", [pod]):
        run("runc", "run", f"podgpu-enrich-{os.getpid()}", cwd=tmp_path)
    text = (folders["textfile"] / "podgpu.prom").read_text(encoding="utf-8")
    labels = 'container_name="pod1-ctr",pod_name="pod1",pod_namespace="default"'
    assert f'dcgm_gpu_temp{{gpu="0",uuid="{uuids[0]}",{labels}}} 33' in text


def test_demo_runs_in_the_autoscale_image(dist: Path, tmp_path: Path) -> None:
    exporter, cluster = free_port(), free_port()
    addresses = ["-a", f"127.0.0.1:{exporter}", "--cluster-address", f"127.0.0.1:{cluster}"]
    archive = dist / f"podgpu-image-{__version__}-autoscale.tar"
    write_bundle(archive, tmp_path, ["podgpu", "demo", *addresses], uid=65534)
    assert run_bundle(tmp_path, f"http://127.0.0.1:{cluster}/api/v1/view", '"gpus"')


@pytest.mark.parametrize(
    ("suite", "python"), [("bookworm", "3.11"), ("trixie", "3.13"), ("forky", "3.14")]
)
def test_debian_package(suite: str, python: str, dist: Path, tmp_path: Path) -> None:
    """Tests the package on Debian 12, on Debian 13 and on the next one."""
    need("debootstrap", "systemd-analyze", "dpkg-deb")
    if os.geteuid() != 0:
        pytest.skip("debootstrap needs root")
    root = tmp_path / "root"
    deb = dist / f"podgpu_{__version__}_amd64.deb"
    packages = "--include=python3,man-db,procps,systemd"
    # The debootstrap of Debian 12 has no script for newer suites. All are the same as that of sid.
    script = "/usr/share/debootstrap/scripts/sid"
    run("debootstrap", "--variant=minbase", packages, suite, root, f"{MIRROR}/debian", script)
    assert run("chroot", root, "python3", "--version").startswith(f"Python {python}.")
    shutil.copy(deb, root / "podgpu.deb")
    run("chroot", root, "dpkg", "--install", "/podgpu.deb")
    assert __version__ in run("chroot", root, "podgpu", "--version")
    assert "podgpu exporter" in run("chroot", root, "man", "-P", "cat", "podgpu")
    metrics = run("chroot", root, "podgpu", "exporter", "--telemetry", "simulated:1xH100", "--once")
    assert "DCGM_FI_DEV_GPU_TEMP{" in metrics
    unit = "/lib/systemd/system/podgpu.service"
    run("chroot", root, "systemd-analyze", "verify", "--man=no", unit)

    (root / "etc/default/podgpu").write_text("PODGPU_ARGUMENTS=--telemetry simulated:1xH100\n")
    run("chroot", root, "dpkg", "--remove", "podgpu")
    # Removing a package keeps its configuration files.
    assert (root / "etc/default/podgpu").exists()
    assert not (root / "usr/bin/podgpu").exists()
    assert not (root / "usr/lib/podgpu").exists()


@pytest.mark.parametrize("python", find_pythons(), ids=lambda python: Path(python).name)
def test_debian_package_with_each_python(python: str, dist: Path, tmp_path: Path) -> None:
    """Ubuntu 24.04 has Python 3.12. Its packages cannot be downloaded here."""
    need("dpkg-deb")
    run("dpkg-deb", "--extract", dist / f"podgpu_{__version__}_amd64.deb", tmp_path)
    library = tmp_path / "usr/lib/podgpu"
    program = tmp_path / "usr/bin/podgpu"
    text = program.read_text(encoding="utf-8").replace("/usr/lib/podgpu", str(library))
    program.write_text(text, encoding="utf-8")
    assert __version__ in run(python, "-I", program, "--version")
    options = ["exporter", "--telemetry", "simulated:1xH100", "--once"]
    assert "DCGM_FI_DEV_GPU_TEMP{" in run(python, "-I", program, *options)
