"""What options name is looked at before anything is started."""

import os
from pathlib import Path
from typing import Any

import pytest

from server.options.option_parsing import OptionError
from server.options.parse_server_options import parse
from server.run.start_checks import check_kept


@pytest.mark.parametrize("where", ["", "files"])
def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    config = parse(["demo", "--batch-dir", str(tmp_path)], {})
    check_kept(config)
    real = os.access

    def access(path: Any, mode: int) -> bool:
        return real(path, mode) and not (mode & os.W_OK and Path(path) == tmp_path / where)

    monkeypatch.setattr(os, "access", access)
    with pytest.raises(OptionError, match=f"--batch-dir {tmp_path} cannot be used: .* read-only"):
        check_kept(config)
