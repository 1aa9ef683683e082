"""What clients are told of media that another process could not read."""

import errno

import pytest

from server.media.failures import sent_failure


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EIO, 500)])
def test_a_full_disk_has_a_status_of_its_own(number: int, status: int) -> None:
    assert sent_failure(OSError(number, "why"), "recording", "file").status == status
