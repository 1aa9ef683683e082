"""Turns recordings into text: cuts them, reads each piece, judges the reading, writes subtitles."""
