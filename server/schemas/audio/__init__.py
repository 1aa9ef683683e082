"""Forms and answers of transcriptions."""
