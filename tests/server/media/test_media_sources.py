"""Where media may come from, but for the network."""

import os
from pathlib import Path
from typing import Any, cast

import pytest

from server.errors import ApiError
from server.media.media_parts import MediaFile
from server.media.media_sources import Sources

NO_FETCHER = cast("Any", None)


async def refused(sources: Sources, url: str) -> str:
    with pytest.raises(ApiError) as error:
        await sources.read(url)
    assert error.value.status == 400
    return error.value.message


async def test_data_urls_are_passed_on_in_base64() -> None:
    sources = Sources(NO_FETCHER, None, 100)
    for head in ("data:image/png;base64,", "data:;base64,", "DATA:text/plain;charset=x;Base64,"):
        assert await sources.read(f"{head}YWJj") == MediaFile(memoryview(b"YWJj"), is_base64=True)
    for url in ("data:image/png,abc", "data:abc", f"data:{'a' * 300};base64,YWJj"):
        assert await refused(sources, url) == "A data URL must be data:TYPE;base64,DATA."
    assert "must begin with data:" in await refused(sources, "ftp://host/x")
    assert "must begin with data:" in await refused(sources, "/etc/passwd")


async def test_files_are_read_below_one_folder(tmp_path: Path) -> None:
    folder, outside = tmp_path / "allowed", tmp_path / "allowed.txt"
    folder.mkdir()
    outside.write_bytes(b"secret")
    (folder / "a b.png").write_bytes(b"pixels")
    (folder / "inner").symlink_to(folder / "a b.png")
    (folder / "outer").symlink_to(outside)
    (folder / "up").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    sources = Sources(NO_FETCHER, folder, 6)
    for name in ("a%20b.png", "inner", "up/allowed/inner"):
        assert await sources.read(f"file://{folder}/{name}") == MediaFile(b"pixels")
    for name in ("outer", "up/allowed.txt", "../allowed.txt", "..%2fallowed.txt", "../../../../etc/passwd"):
        assert "lies outside of the folder" in await refused(sources, f"file://{folder}/{name}")
    assert "lies outside of the folder" in await refused(sources, "file:///etc/passwd")
    assert "cannot be read" in await refused(sources, f"file://{folder}/none")
    assert "cannot be read" in await refused(sources, f"file://{folder}/a%00b")
    assert "regular file" in await refused(sources, f"file://{folder}/pipe")
    assert "regular file" in await refused(sources, f"file://{folder}")
    assert "without a host" in await refused(sources, f"file://host{folder}/inner")
    assert "more than the 5 bytes" in await refused(Sources(NO_FETCHER, folder, 5), f"file://{folder}/inner")
    nowhere = Sources(NO_FETCHER, None, 6)
    assert "without --allowed-local-media-path" in await refused(nowhere, f"file://{folder}/inner")
