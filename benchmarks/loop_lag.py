"""How late the event loop of the service is while clients upload the largest edits that it takes.

    python -m benchmarks.loop_lag [--clients 8] [--duration 20] [--json FILE]

Whatever blocks the loop holds up every client. The service measures it itself (`easel_event_loop_lag_seconds`); this
reads the histogram before and after, so a figure is the upper edge of the bucket that it falls into. Bodies are made
beforehand and sent by threads that only write to sockets. Each edit has four images: files of the largest size,
pictures with the most pixels, or, as JSON, data URLs that fill the largest body. Beside it a process that does nothing
but sleep tells how late the machine itself is: under full load that is a part of the loop's lag.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import multiprocessing
import os
import threading
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from app.metrics import LAG_INTERVAL_SECONDS
from app.settings import Settings
from benchmarks.pictures import as_json
from tests.server import Server, serving

NUM_IMAGES = 4
TARGET_P99_S = 0.05
BOUNDARY = "benchmark"
FIELDS = {"prompt": "a red circle", "size": "64x64", "num_inference_steps": 1, "seed": 1}


@dataclass(frozen=True, slots=True)
class Load:
    """A request that every client sends again and again."""

    name: str
    path: str
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Lag:
    """What one load did. A lag is at most so many seconds."""

    load: str
    clients: int
    body_mib: float
    statuses: dict[int, int]
    mib_per_s: float
    samples: int
    p50_s: float
    p99_s: float
    max_s: float
    sleeper_p99_s: float
    load_average: float


def noise_file(max_bytes: int) -> bytes:
    """A PNG just under `max_bytes`: noise, which does not compress."""
    side_px = int((max_bytes * 0.998 / 3) ** 0.5)
    noise = np.random.default_rng(1).integers(0, 256, (side_px, side_px, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG", compress_level=1)
    assert 0.98 * max_bytes < file.tell() <= max_bytes
    return file.getvalue()


def large_picture(max_pixels: int) -> bytes:
    """A PNG of nearly `max_pixels` pixels, with a soft pattern that compresses well."""
    side_px = int(max_pixels**0.5)
    ramp = np.linspace(0, 255, side_px).astype(np.uint8)
    pixels = np.stack(np.broadcast_arrays(ramp[:, None], ramp[None], ramp[::-1, None]), axis=-1)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def as_form(name: str, image: bytes) -> Load:
    texts = [f'name="{field}"\r\n\r\n{value}'.encode() for field, value in FIELDS.items()]
    images = [b'name="image[]"; filename="a.png"\r\ncontent-type: image/png\r\n\r\n' + image] * NUM_IMAGES
    parts = [
        b"--%s\r\ncontent-disposition: form-data; %s\r\n" % (BOUNDARY.encode(), part) for part in (*texts, *images)
    ]
    body = b"".join([*parts, f"--{BOUNDARY}--\r\n".encode()])
    return Load(name, "/v1/images/edits", f"multipart/form-data; boundary={BOUNDARY}", body)


def as_data_urls(name: str, image: bytes) -> Load:
    references = [{"image_url": f"data:image/png;base64,{b64encode(image).decode()}"}] * NUM_IMAGES
    body = json.dumps({**FIELDS, "images": references}).encode()
    return Load(name, "/v1/images/edits", "application/json", body)


def loads(settings: Settings) -> Iterator[Load]:
    text = json.dumps(FIELDS).encode()
    yield Load("no images", "/v1/images/generations", "application/json", text)
    yield as_form("largest files", noise_file(settings.max_image_bytes))
    yield as_form("most pixels", large_picture(settings.max_image_pixels))
    fitting = min(settings.max_image_bytes, (settings.max_body_bytes - 4096) // NUM_IMAGES * 3 // 4)
    yield as_data_urls("data URLs", noise_file(fitting))


def send_until(ends_s: float, server: Server, load: Load, count: Callable[[int], None]) -> None:
    """Send `load` again and again over one connection, and count the statuses."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=300)
    while time.monotonic() < ends_s:
        connection.request("POST", load.path, load.body, {"content-type": load.content_type})
        response = connection.getresponse()
        response.read()
        count(response.status)
    connection.close()


def lag_buckets(server: Server) -> dict[float, float]:
    """How many samples were at most so late, by the edges of the buckets."""
    text = httpx.get(f"{server.url}/metrics").text
    return {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "easel_event_loop_lag_seconds_bucket"
    }


def quantile_s(buckets: dict[float, float], share: float) -> float:
    """The edge under which `share` of the samples are."""
    total = max(buckets.values())
    return min(edge for edge, count in buckets.items() if count >= share * total)


def oversleep_p99_s(duration_s: float) -> float:
    """How late a process wakes that does nothing else, measured as the service measures its loop."""
    late_s, ends_s = [], time.monotonic() + duration_s
    while (now_s := time.monotonic()) < ends_s:
        time.sleep(LAG_INTERVAL_SECONDS)
        late_s.append(time.monotonic() - now_s - LAG_INTERVAL_SECONDS)
    return float(np.quantile(late_s, 0.99))


def measure(server: Server, load: Load, num_clients: int, duration_s: float) -> Lag:
    statuses: Counter[int] = Counter()
    lock = threading.Lock()

    def count(status: int) -> None:
        with lock:
            statuses[status] += 1

    before, began_s = lag_buckets(server), time.monotonic()
    arguments = (began_s + duration_s, server, load, count)
    clients = [threading.Thread(target=send_until, args=arguments) for _ in range(num_clients)]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as beside:
        sleeping = beside.submit(oversleep_p99_s, duration_s)
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        took_s, after = time.monotonic() - began_s, lag_buckets(server)
        sleeper_p99_s = round(sleeping.result(), 4)
    buckets = {edge: after[edge] - before[edge] for edge in after}
    body_mib = len(load.body) / 2**20
    return Lag(
        load=load.name,
        clients=num_clients,
        body_mib=round(body_mib, 2),
        statuses=dict(statuses),
        mib_per_s=round(body_mib * statuses.total() / took_s, 1),
        samples=int(max(buckets.values())),
        p50_s=quantile_s(buckets, 0.5),
        p99_s=quantile_s(buckets, 0.99),
        max_s=quantile_s(buckets, 1),
        sleeper_p99_s=sleeper_p99_s,
        load_average=round(os.getloadavg()[0], 2),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Lag of the event loop under uploads.")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--duration", type=float, default=20.0, help="seconds in which requests are sent, per load")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found = []
    with TemporaryDirectory() as folder, serving(None, Path(folder)) as server:
        for load in loads(Settings()):
            lag = measure(server, load, options.clients, options.duration)
            found.append(lag)
            verdict = "" if lag.p99_s <= TARGET_P99_S else f"   over {TARGET_P99_S * 1000:.0f} ms"
            print(
                f"{lag.load:14} {lag.body_mib:6.1f} MiB {lag.mib_per_s:7.1f} MiB/s   p50 {lag.p50_s * 1000:4.0f} "
                f"p99 {lag.p99_s * 1000:4.0f} max {lag.max_s * 1000:5.0f} ms, sleeper p99 "
                f"{lag.sleeper_p99_s * 1000:5.1f} ms   {lag.statuses}{verdict}"
            )
    if options.json:
        options.json.write_text(as_json([asdict(lag) for lag in found]))


if __name__ == "__main__":
    main()
