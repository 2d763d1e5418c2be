"""What processes hold: memory, descriptors, threads. Read from /proc, so Linux only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of one process, or of several together."""

    rss_mib: float
    descriptors: int
    threads: int

    @classmethod
    def of(cls, *pids: int) -> Footprint:
        return cls(
            rss_mib=round(sum(_status(pid, "VmRSS") for pid in pids) / 1024, 2),
            descriptors=sum(1 for pid in pids for _ in Path(f"/proc/{pid}/fd").iterdir()),
            threads=sum(_status(pid, "Threads") for pid in pids),
        )

    def since(self, before: Footprint) -> dict[str, float]:
        return {
            "rss_growth_mib": round(self.rss_mib - before.rss_mib, 2),
            "descriptors_growth": self.descriptors - before.descriptors,
            "threads_growth": self.threads - before.threads,
        }


def cpu_seconds(*pids: int) -> float:
    """Processor time that processes have used so far, all their threads together."""
    ticks_per_s = 100  # USER_HZ, which Linux fixes for /proc
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / ticks_per_s


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
