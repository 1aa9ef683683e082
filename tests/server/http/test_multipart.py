"""Forms with files, cut anywhere, and those that are none."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from server.errors import ApiError
from server.http.multipart import FormReader

TYPE = "multipart/form-data; boundary=xx"


def form(content: bytes, *more: tuple[str, bytes]) -> bytes:
    """A form with a file and further fields, as clients write it."""
    parts = [
        *((f'Content-Disposition: form-data; name="{name}"', value) for name, value in more),
        (
            'Content-Disposition: form-data; name="file"; filename="in%20put.jsonl"\r\nContent-Type: a/b',
            content,
        ),
    ]
    return (
        b"".join(b"--xx\r\n%s\r\n\r\n%s\r\n" % (head.encode(), value) for head, value in parts)
        + b"--xx--\r\n"
    )


CONTENT = st.one_of(
    st.binary(max_size=60),
    st.lists(
        st.sampled_from([b"\r\n", b"--", b"-", b"xx", b"\r", b"--xx", b"a", b"\r\n--x"]), max_size=12
    ).map(b"".join),
)


@settings(max_examples=100, deadline=None)
@given(CONTENT, st.lists(st.integers(0, 400), max_size=6))
def test_a_file_is_read_however_it_is_cut(content: bytes, cuts: list[int]) -> None:
    assume(b"\r\n--xx" not in b"\r\n" + content)
    whole = b"before\r\n" + form(content, ("purpose", b"batch"), ("empty", b""))
    reader, found, at = FormReader(TYPE), b"", 0
    for cut in [*sorted(cuts), len(whole)]:
        found += reader.push(whole[at:cut])
        at = max(at, cut)
    reader.check_complete()
    assert found == content
    assert reader.fields == {"purpose": "batch", "empty": ""} and reader.filename == "in put.jsonl"


@pytest.mark.parametrize(
    ("head", "filename"),
    [
        ("Content-Disposition: form-data; name=file; filename=a; filename*=utf-8''a", "a"),  # .NET
        ('content-disposition:form-data;name="file";filename="C:\\d\\a;.wav"', "C:\\d\\a;.wav"),
        (r'Content-Disposition: form-data; filename="a\"; name=b"; name="file"', 'a"; name=b'),
        ('Content-Disposition: form-data; name="file"\r\nContent-Type: a/b; name="x"', ""),
    ],
)
def test_names_are_found_however_they_are_written(head: str, filename: str) -> None:
    reader = FormReader(TYPE)
    assert reader.push(f"--xx\r\n{head}\r\n\r\nabc\r\n--xx--\r\n".encode()) == b"abc"
    assert reader.filename == filename


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (form(b"abc").replace(b"--xx", b"--yy"), "ends before its last boundary"),
        (form(b"abc")[:-8], "ends before its last boundary"),
        (b"--xx--\r\n", "no file in its field `file`"),
        (b"--xxzz\r\n", "neither ends it nor begins a line"),
        (b"--xx\r\nContent-Type: a\r\n\r\nabc\r\n--xx--", "has no name"),
        (b"--xx\r\n" + b"a" * 9000, "bytes of headers"),
        (form(b"", ("purpose", b"a" * 9000)), "a field of the form has more than"),
        (form(b"", *((f"f{n}", b"") for n in range(17))), "more than 16 fields"),
        (form(b"")[:-8] + form(b""), "several files"),
    ],
)
def test_what_is_no_such_form_is_refused(body: bytes, reason: str) -> None:
    reader = FormReader(TYPE)
    with pytest.raises(ApiError, match=f"(?i){reason}"):
        for start in range(0, len(body), 7):
            reader.push(body[start : start + 7])
        reader.check_complete()


@pytest.mark.parametrize(
    "kind", ["application/json", "multipart/form-data", "multipart/mixed; boundary=x", ""]
)
def test_another_type_of_body_is_refused(kind: str) -> None:
    with pytest.raises(ApiError, match="multipart/form-data") as caught:
        FormReader(kind)
    assert caught.value.status == 415
