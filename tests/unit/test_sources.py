"""Source strings, and what each source of text yields."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import zstandard

from acsgd.io import SOURCES
from acsgd.io.sources import sources as module
from acsgd.io.sources.sources import OnBad, Piece, Source, Tally, parse_sources

LINES = '{"text": "one\\ntwo"}\n\n  \n{"meta": 1, "text": "zwölf"}\r\n{"text": ""}'
DATA = Path(__file__).parents[2].parent / "shared" / "data"


def write(path: Path, data: str | bytes) -> str:
    """Write a file and return its name, as the user types it."""
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def only(spec: str, bad: OnBad = "stop") -> Source:
    """Return the source of a spec of one."""
    [part] = parse_sources(spec, bad=bad)
    assert part.weight == 1
    return part.source


def read(name: str) -> list[str]:
    """Return the documents of a source."""
    pieces = list(only(name).pieces())
    assert all(piece.ends_document for piece in pieces)
    return [piece.text for piece in pieces]


@pytest.fixture
def sample(tmp_path: Path) -> dict[str, str]:
    """One readable source per entry of SOURCES."""
    compressed = zstandard.compress(LINES.encode())
    return {
        "demo": "demo",
        "*.jsonl": write(tmp_path / "a.jsonl", LINES),
        "*.jsonl.zst": write(tmp_path / "a.jsonl.zst", compressed),
        "*.txt": write(tmp_path / "a.txt", LINES),
    }


@pytest.mark.parametrize("pattern", SOURCES)
def test_every_source_yields_the_same_again_and_ends_its_last_document(sample: dict[str, str], pattern: str) -> None:
    source = only(sample[pattern])
    pieces = list(source.pieces())
    assert pieces == list(source.pieces())
    assert pieces[-1].ends_document
    assert any(piece.text for piece in pieces)
    assert only(sample[pattern]).fingerprint == source.fingerprint


@pytest.mark.parametrize("pattern", [pattern for pattern in SOURCES if pattern != "demo"])
def test_a_changed_file_changes_its_fingerprint(sample: dict[str, str], pattern: str) -> None:
    source = only(sample[pattern])
    before = source.fingerprint
    os.utime(sample[pattern], ns=(0, 1))
    assert source.fingerprint != before


def test_demo_is_english_that_python_carries() -> None:
    documents = read("demo")
    assert len(documents) > 50
    assert sum(map(len, documents)) > 400_000


def test_zst_equals_plain_even_in_several_frames(sample: dict[str, str], tmp_path: Path) -> None:
    raw = LINES.encode()
    frames = zstandard.compress(raw[:20]) + zstandard.compress(raw[20:])
    documents = read(sample["*.jsonl"])
    assert documents == ["one\ntwo", "zwölf", ""]
    assert read(sample["*.jsonl.zst"]) == documents
    assert read(write(tmp_path / "frames.jsonl.zst", frames)) == documents


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", b"\xef\xbb\xbfabc")) == ["abc"]


TEXTS = ["a\nb", "line\n" * 50, "x" * 1000, "x" * 16, "\n" * 40, "ab\ncdefghijklmnop" * 9, "ab\n" + "c" * 40 + "\nd"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_file_is_one_document_in_pieces_that_end_at_newlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(module, "PIECE_CHARS", 16)
    pieces = list(only(write(tmp_path / "a.txt", text)).pieces())
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(len(piece.text) < 32 for piece in pieces)
    assert all(len(piece.text) >= 16 for piece in pieces[:-1])
    cut = "".join(piece.text + "|" for piece in pieces)
    assert all(len(line.replace("|", "")) > 16 for line in cut.split("\n") if "|" in line[1:-1])


def test_lines_may_end_in_any_way(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", "a\r\nb\rc\n")) == ["a\nb\nc\n"]
    assert read(write(tmp_path / "a.jsonl", '{"text": "a"}\r{"text": "b"}\r\n')) == ["a", "b"]


def test_weights_are_normalised_and_default_to_one(sample: dict[str, str]) -> None:
    parts = parse_sources(f"demo:6, {sample['*.jsonl']} ,demo : 1e0")
    assert [part.source.name for part in parts] == ["demo", sample["*.jsonl"], "demo"]
    assert [part.weight for part in parts] == [6 / 8, 1 / 8, 1 / 8]


def test_a_name_may_hold_a_colon(tmp_path: Path) -> None:
    name = write(tmp_path / "12:30.txt", "text")
    assert [part.source.name for part in parse_sources(f"{name},{name}:3")] == [name, name]


def test_a_relative_path_starts_at_the_working_directory(
    sample: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read("a.jsonl") == read(sample["*.jsonl"])
    assert only("a.jsonl").fingerprint == only(sample["*.jsonl"]).fingerprint


KNOWN = '; use "demo", "*.jsonl", "*.jsonl.zst" or "*.txt"'


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", f'unknown source ""{KNOWN}'),
        ("demo,", f'unknown source ""{KNOWN}'),
        ("dmeo", f'unknown source "dmeo"{KNOWN} (did you mean "demo"?)'),
        ("x/a.json", f'unknown source "x/a.json"{KNOWN} (did you mean "*.jsonl"?)'),
        ("a.csv:0.5", f'unknown source "a.csv"{KNOWN}'),
        ("demo:0", 'weight "0" of demo is not a number greater than 0; write demo:0.5, say'),
        ("demo:-1", 'weight "-1" of demo is not a number greater than 0'),
        ("demo:nan", 'weight "nan" of demo is not a number greater than 0'),
        ("demo:inf", 'weight "inf" of demo is not a number greater than 0'),
        ("demo:", 'weight "" of demo is not a number greater than 0'),
        ("demo:half", 'weight "half" of demo is not a number greater than 0'),
        ("none.txt", "none.txt does not exist in {cwd}; give the path of an existing file"),
        ("demo,dir.txt:2", "dir.txt is not a file; give a file in it, as dir.txt/..."),
        ("empty.jsonl", "empty.jsonl is empty; give a file with text"),
    ],
)
def test_what_is_wrong_with_a_spec_is_said_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir.txt").mkdir()
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError) as caught:
        parse_sources(spec)
    assert str(caught.value).startswith(f'data.sources="{spec}": {message.format(cwd=tmp_path)}')


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_one_may_not_read_is_named(tmp_path: Path) -> None:
    name = write(tmp_path / "a.txt", "text")
    os.chmod(name, 0)
    with pytest.raises(ValueError, match=f"type: chmod \\+r {name}"):
        parse_sources(name)


def test_the_key_is_named_that_the_task_was_typed_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'^data\.eval_sources="none\.txt": none\.txt does not exist'):
        parse_sources("none.txt", key="data.eval_sources")
    [part] = parse_sources(write(tmp_path / "a.jsonl", "bad"), key="data.eval_sources")
    with pytest.raises(ValueError, match=r"^data\.eval_sources: .*a\.jsonl, line 1 is not JSON"):
        list(part.source.pieces())


BAD_LINES: list[tuple[bytes, str]] = [
    (b"{", "is not JSON (Expecting property name enclosed in double quotes at column 2): {"),
    (b"plain words", "is not JSON (Expecting value at column 1): plain words"),
    (b"[1]", 'has no string under "text": [1]'),
    (b"{}", 'has no string under "text": {}'),
    (b'{"txt": 1}', 'has no string under "text": {"txt": 1}'),
    (b'{"text": null}', 'has no string under "text": {"text": null}'),
    (b'{"text": ["a"]}', 'has no string under "text": {"text": ["a"]}'),
    (b'{"text": "\\ud800"}', 'holds half of a surrogate pair, which is no text: {"text": "\\ud800"}'),
    (b'{"text": "\\udc80"}', 'holds half of a surrogate pair, which is no text: {"text": "\\udc80"}'),
    (b'{"body": "' + b"y" * 500 + b'"}', f'has no string under "text": {{"body": "{"y" * 67}...'),
    (b"\x00\x1b\xe2\x80\xa8!", r"is not JSON (Expecting value at column 1): \x00\x1b\xe2\x80\xa8!"),
    (b"[" * 10**5, f"is JSON beyond what Python reads: {'[' * 77}..."),
    (b'{"n": ' + b"9" * 5000 + b"}", f'is JSON beyond what Python reads: {{"n": {"9" * 71}...'),
    (b'{"text": "zw\xf6lf"}', r'is not UTF-8 (byte 0xf6): {"text": "zw\xf6lf"}'),
    (b'{"text": "good", "meta": "\xff"}', r'is not UTF-8 (byte 0xff): {"text": "good", "meta": "\xff"}'),
    (b'{"text": "' + b"y" * 500 + b"\xed\xa0\x80", f"is not UTF-8 (byte 0xed): ...{'y' * 40}" + r"\xed\xa0\x80"),
]
"""Lines of JSON and what is said about them after their number."""
BAD_TEXT: list[tuple[bytes, str]] = [
    (b"zw\xf6lf", r"is not UTF-8 (byte 0xf6): zw\xf6lf"),
    (b"x" * 1000 + b"\xff" * 50, f"is not UTF-8 (byte 0xff): ...{'x' * 40}" + r"\xff" * 9 + r"\..."),
    (b"\xc3", r"is not UTF-8 (byte 0xc3): \xc3"),
]
"""Lines of plain text and what is said about them."""
CASES = [
    *(("a.jsonl", line, reason) for line, reason in BAD_LINES),
    *(("a.jsonl.zst", line, reason) for line, reason in BAD_LINES[-3:]),
    *(("a.txt", line, reason) for line, reason in BAD_TEXT),
]
GOOD = {
    "a.jsonl": [b'{"text": "one"}', b"", b'{"text": "zw\xc3\xb6lf"}', b'{"text": ""}', b'{"text": "end"}'],
    "a.txt": [b"one", b"", b"zw\xc3\xb6lf", b"x" * 100, b"end"],
}
GOOD["a.jsonl.zst"] = GOOD["a.jsonl"]


def save(path: Path, lines: list[bytes]) -> str:
    """Write lines, compressed where the name says so."""
    raw = b"\n".join(lines) + b"\n"
    return write(path, zstandard.compress(raw) if path.suffix == ".zst" else raw)


@pytest.mark.parametrize(("name", "line", "reason"), CASES)
def test_a_bad_line_is_named_in_one_sentence(tmp_path: Path, name: str, line: bytes, reason: str) -> None:
    path = save(tmp_path / name, [*GOOD[name], line, *GOOD[name], line])
    with pytest.raises(ValueError) as caught:
        list(only(path).pieces())
    told = str(caught.value)
    assert told.startswith(f"data.sources: {path}, line 6 {reason}; ")
    assert told.endswith(", or leave such lines out with --data.on_error skip")
    assert told.isprintable()
    assert len(told) < len(path) + 300


@pytest.mark.parametrize(("name", "line", "reason"), CASES)
@pytest.mark.parametrize("places", [[0], [3], [5], [0, 1, 5], [2, 2, 4]])
def test_skipping_leaves_exactly_what_a_file_without_the_bad_lines_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, line: bytes, reason: str, places: list[int]
) -> None:
    """Pieces and all, so that the tokens are the same too."""
    monkeypatch.setattr(module, "PIECE_CHARS", 16)
    mended, broken = GOOD[name], list(GOOD[name])
    for place in sorted(places, reverse=True):
        broken.insert(place, line)
    tally = Tally()
    pieces = list(only(save(tmp_path / name, broken), bad="skip").pieces(tally))
    assert (tally.lines, tally.skipped, tally.first) == (len(broken), len(places), min(places) + 1)
    told = f"left out {len(places)} of {len(broken)} lines, the first of which, line {min(places) + 1}, {reason}"
    if name != "a.txt" or len(line) < 16:  # a longer line of text is told about from the part that is bad
        assert tally.told() == told
    assert pieces == list(only(save(tmp_path / name, mended)).pieces())


@pytest.mark.parametrize("name", GOOD)
def test_where_nothing_is_bad_skipping_changes_nothing_and_says_nothing(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name, GOOD[name])
    tally = Tally()
    assert list(only(path, bad="skip").pieces(tally)) == list(only(path).pieces())
    assert tally == Tally(lines=5)
    assert tally.told() is None
    assert only(path, bad="skip").fingerprint != only(path).fingerprint


def test_a_bad_line_may_be_the_last_and_end_without_a_newline(tmp_path: Path) -> None:
    assert list(only(write(tmp_path / "a.txt", b"good\nbad\xff"), bad="skip").pieces()) == [Piece("good\n", True)]


def test_zst_that_is_not_zst_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst is not sound zstd .* zstd -t"):
        read(write(tmp_path / "a.jsonl.zst", LINES))


@pytest.mark.parametrize("lost", [1, 5, 1000, 130_000])
@pytest.mark.parametrize("bad", ["stop", "skip"])
def test_a_torn_download_is_no_bad_line(tmp_path: Path, bad: OnBad, lost: int) -> None:
    """Whatever is lost: a byte of a checksum, or the end of a line, or of a frame after a whole one."""
    lines = "".join(json.dumps({"text": f"{number**30:x}" * 12}) + "\n" for number in range(4000))
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(lines.encode())
    assert len(frame) > lost
    for torn in (frame[:-lost], frame + frame[:-lost]):
        with pytest.raises(ValueError, match=r"a\.jsonl\.zst is not sound zstd \(its end is missing\)"):
            list(only(write(tmp_path / "a.jsonl.zst", torn), bad=bad).pieces())


@pytest.mark.parametrize("bad", ["stop", "skip"])
def test_damage_in_a_zstd_stream_is_no_bad_line(tmp_path: Path, bad: OnBad) -> None:
    frame = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(b'{"text": "a"}\n' * 1000))
    frame[-1] ^= 1
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst is not sound zstd"):
        list(only(write(tmp_path / "a.jsonl.zst", bytes(frame)), bad=bad).pieces())


def test_frames_without_text_are_skipped(tmp_path: Path) -> None:
    """As pzstd writes them."""
    skippable = bytes.fromhex("502a4d18") + (3).to_bytes(4, "little") + b"any"
    frames = skippable + zstandard.compress(LINES.encode()) + skippable + zstandard.compress(b"")
    assert read(write(tmp_path / "a.jsonl.zst", frames)) == ["one\ntwo", "zwölf", ""]


def test_sources_of_the_real_world(tmp_path: Path) -> None:
    if not DATA.is_dir():
        pytest.skip(f"no {DATA}")
    for file in sorted((DATA / "pile-zst").glob("*.jsonl.zst")):
        assert all(isinstance(piece, Piece) and piece.text for piece in only(str(file)).pieces())
