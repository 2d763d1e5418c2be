"""What the commands write: files, whole or not at all, and texts for streams that may be closed or full."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EBADF})


def open_standard_streams() -> None:
    """Tie standard streams that are closed to the null device. The next socket or file would get their number, and with
    it whatever C code prints."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to `path`, over what is there. Where that fails, what was there stays, and it ends in `SystemExit`
    with the reason."""
    target = path.resolve()  # the file that a link means, not the link
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise SystemExit(f"easel: can't write {path}: {error.strerror}") from error


@contextlib.contextmanager
def checked_stdout() -> Iterator[None]:
    """End in `SystemExit` with the reason if what was printed inside can't be written: a full disk, a closed pipe."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails again as it ends
        raise SystemExit(f"easel: can't write to standard output: {error.strerror}") from error


class ProgressStream:
    """Standard error for a progress bar: what can't be written there is dropped, for it is no reason to stop work."""

    def __init__(self) -> None:
        self._stream: TextIO = sys.stderr
        self.encoding = self._stream.encoding

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()
