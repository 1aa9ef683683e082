"""What clients are told of media that another process could not read."""

import errno

import pytest

from models.media.item import MediaError
from server.errors import ApiError
from server.media.failures import refused_unless_read


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (OSError(errno.ENOSPC, "why"), 507, "The server's folder for temporary files is full."),
        (OSError(errno.EDQUOT, "why"), 507, "The server's folder for temporary files is full."),
        (MemoryError(), 400, "Decoding a recording took more memory than it may."),
        (MediaError("It is too short."), 400, "It is too short."),
    ],
)
def test_what_cannot_be_read_has_a_reason(error: Exception, status: int, message: str) -> None:
    with pytest.raises(ApiError) as refused, refused_unless_read("recording", "file"):
        raise error
    assert refused.value.status == status and refused.value.message.startswith(message)
