"""The features of a worker: a folder for each, and `installed.py`, which chooses those that a model has."""
