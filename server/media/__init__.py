"""Media that requests bring: where their bytes come from, and the processes that decode and prepare them."""
