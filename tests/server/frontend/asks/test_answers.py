"""What an ask yields, without HTTP: parts, their counts, and the end."""
