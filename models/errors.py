"""The one error of this package that users meet: a checkpoint that cannot be served."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint file is missing, corrupt or not what its configs promise; the message names file and tensor."""
