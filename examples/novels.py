"""Jane Austen's "Pride and Prejudice", out of Debian's package r-cran-janeaustenr, for which R need not be there.

    Rdata.rdb    chunks: the length as a big-endian uint32, then zlib; each a serialized vector of lines
    a chunk      X, version 3, two versions of R, an encoding; 16: strings, how many; each line: 9, its length, its bytes

Source: "R Internals", 1.8, Serialization Formats; Debian's package (MIT) of the texts of Project Gutenberg.
"""

import hashlib
import re
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

from examples.assets import CACHE, AssetError

PACKAGE = "r-cran-janeaustenr"
INSTALLED = Path("/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
APT = ["apt-get", "download", PACKAGE]
TITLE = "PRIDE AND PREJUDICE"
SHA256 = "2df023e4f0525e79ae52e8184a9c904b325ae88fc31a152c448dc488854cf862"


def pride_and_prejudice(cache: Path = CACHE, say: Callable[[str], object] = lambda _: None) -> str:
    """The text, its lines joined as in the book; `say` is told if it is downloaded.

    Raises:
      AssetError: if it cannot be had, or is not the text that is expected.
    """
    kept = cache / "janeaustenr.rdb"
    if not (source := INSTALLED if INSTALLED.is_file() else kept).is_file():
        say(f"Downloading {PACKAGE} into {cache}, once ...")
        _download(kept)
    try:
        (lines,) = [x for x in vectors(source.read_bytes()) if x and x[0] == TITLE]
    except (OSError, ValueError, zlib.error) as error:
        raise AssetError(f"{source} does not hold the novels: remove it and run this again.") from error
    text = joined(lines)
    if (found := hashlib.sha256(text.encode()).hexdigest()) != SHA256:
        raise AssetError(f"{source} holds another text of the novel (sha256 {found}, not {SHA256}).")
    return text


def joined(lines: list[str]) -> str:
    """Paragraphs, each on one line; what stands before the first chapter is left out."""
    whole = "\n".join(lines)
    whole = whole[whole.index("Chapter 1") :]
    return "\n".join(p.replace("\n", " ") for p in re.split(r"\n{2,}", whole) if p.strip())


def vectors(rdb: bytes) -> list[list[str]]:
    """The vectors of strings in a data base of R's; ValueError or zlib.error if it is none."""
    out = []
    while rdb:
        packed = zlib.decompressobj()
        chunk = packed.decompress(rdb[4:])
        if len(chunk) != int.from_bytes(rdb[:4], "big") or chunk[:2] != b"X\n":
            raise ValueError("a chunk is not what it says")
        out.append(_strings(chunk))
        rdb = packed.unused_data
    return out


def _strings(chunk: bytes) -> list[str]:
    at = 14

    def number() -> int:
        nonlocal at
        at += 4
        return int.from_bytes(chunk[at - 4 : at], "big")

    def text() -> str:
        nonlocal at
        n = number()
        at += n
        return chunk[at - n : at].decode("utf-8")

    if int.from_bytes(chunk[2:6], "big") >= 3:
        text()  # the encoding
    if number() & 255 != 16:
        raise ValueError("not a vector of strings")
    lines = []
    for _ in range(number()):
        if number() & 255 != 9:
            raise ValueError("not a string")
        lines.append(text())
    return lines


def _download(target: Path) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise AssetError(f"The novel comes in Debian's package {PACKAGE}, and apt-get or dpkg-deb is not there.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".incomplete-", dir=target.parent) as folder:
        try:
            subprocess.run(APT, cwd=folder, capture_output=True, timeout=120, check=True)
            debs = list(Path(folder).glob("*.deb"))
            subprocess.run(["dpkg-deb", "-x", str(debs[0]), folder], capture_output=True, check=True)
        except (subprocess.SubprocessError, OSError, IndexError) as error:
            raise AssetError(f"apt-get did not give {PACKAGE}, which the novel comes in.") from error
        found = list(Path(folder).rglob("Rdata.rdb"))
        if not found:
            raise AssetError(f"{debs[0].name} does not hold the novels.")
        found[0].rename(target)
