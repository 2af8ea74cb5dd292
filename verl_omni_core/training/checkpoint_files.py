"""Names of a checkpoint's files, for whoever looks at checkpoints without the training libraries."""

INDEX_FILE = "checkpoint.json"
"""Comes last, with the digest of every other file: a folder without it is no checkpoint."""
