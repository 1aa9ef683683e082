"""Whisper in CTranslate2's format, as faster-whisper publishes it, becomes a checkpoint like any other."""
