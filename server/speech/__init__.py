"""How a recording becomes a text: its pieces, what is read of them, how good that is, and subtitles."""
