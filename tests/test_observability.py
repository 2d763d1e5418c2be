"""What is shipped for operators, run for real: nginx and Prometheus as plain processes in front of a real server."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import string
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from PIL import Image

from tests.server import Server, serving

DOCKER = Path(__file__).resolve().parent.parent / "docker"
PROMETHEUS = DOCKER / "prometheus"
URL = "/v1/images/generations"
EXPECT_IDLE = ("easel_gpu_memory_bytes",)  # has no sample on a CPU
LIMIT_MIB = 2


def tool(name: str) -> str:
    """Where a program of Debian's is; without it the test is skipped, or fails where REQUIRE_TOOLS is set."""
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None and not os.environ.get("REQUIRE_TOOLS"):
        pytest.skip(f"{name} is not installed")
    assert found, f"{name} is not installed"
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 60
        while not is_open(port):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = ("--max-body-bytes", str(LIMIT_MIB * 2**20))
    with serving(checkpoint, tmp_path_factory.mktemp("server"), *limits) as server:
        yield server


@pytest.fixture(scope="module")
def edge(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder, port = tmp_path_factory.mktemp("edge"), free_port()
    values = {
        "EASEL_UPSTREAM": server.url.removeprefix("http://"),
        "EDGE_LISTEN": f"127.0.0.1:{port}",
        "EDGE_MAX_BODY": f"{LIMIT_MIB + 1}m",
    }
    site = (DOCKER / "nginx" / "easel.conf.template").read_text()
    for name, value in values.items():  # like envsubst in the image: nginx's own variables stay
        site = site.replace(f"${{{name}}}", value)
    site = site.replace("_timeout 10s;", "_timeout 1s;")  # nobody should wait for the test
    paths = "\n".join(f"{kind}_temp_path {folder};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    config = f"daemon off; pid {folder}/pid; events {{}} http {{ access_log off; {paths}\n{site} }}"
    (folder / "nginx.conf").write_text(config)
    command = [tool("nginx"), "-c", f"{folder}/nginx.conf", "-e", "stderr"]
    with (
        running(command, port, folder / "log"),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        yield client


def order(**fields: object) -> dict[str, object]:
    return {"prompt": "a", "size": "64x64", "num_inference_steps": 2, **fields}


def test_events_pass_as_they_are_made(edge: httpx.Client) -> None:
    request = order(num_inference_steps=60, stream=True, stream_options={"include_progress": True})
    arrived = []
    with edge.stream("POST", URL, json=request) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("event:"):
                state = edge.get("/health").json()
                arrived.append((line, state["running"] + state["waiting"]))
    assert arrived[-1][0].endswith("completed")
    assert any(here for _, here in arrived[:-1]), "events came before the picture was done"


def test_refusals_have_one_form(edge: httpx.Client) -> None:
    by_service = edge.post(URL, content=b" " * (LIMIT_MIB * 2**20 + 1), headers={"content-type": "application/json"})
    by_nginx = edge.post(URL, content=b" " * (LIMIT_MIB + 2) * 2**20, headers={"content-type": "application/json"})
    for response in (by_service, by_nginx):
        assert response.status_code == 413
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert edge.get("/metrics").status_code == 404
    assert edge.post(URL, json=order()).status_code == 200


def test_large_uploads_pass(edge: httpx.Client) -> None:
    picture = io.BytesIO()
    Image.frombytes("RGB", (700, 700), os.urandom(700 * 700 * 3)).save(picture, "PNG")
    assert picture.tell() > 2**20
    fields = {key: str(value) for key, value in order().items()}
    response = edge.post("/v1/images/edits", data=fields, files={"image": ("noise.png", picture.getvalue())})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/images/generations HT",
        b"POST /v1/images/generations HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        b"content-length: 99\r\n\r\n{",
    ],
    ids=["header", "body"],
)
def test_slow_clients_are_cut_off(edge: httpx.Client, sent: bytes) -> None:
    with socket.create_connection((edge.base_url.host, edge.base_url.port or 0), timeout=15) as client:
        client.sendall(sent)
        answer = b""
        while chunk := client.recv(4096):
            answer += chunk
    assert answer == b"" or b" 408 " in answer.split(b"\r\n")[0]


def test_a_client_that_leaves_nginx_leaves_the_queue(edge: httpx.Client) -> None:
    with pytest.raises(httpx.ReadTimeout):
        edge.post(URL, json=order(num_inference_steps=200, n=10), timeout=0.5)
    deadline = time.monotonic() + 20
    while (state := edge.get("/health").json())["running"] + state["waiting"]:
        assert time.monotonic() < deadline, state
        time.sleep(0.05)


def test_prometheus_accepts_its_files_and_every_alert_fires() -> None:
    promtool = tool("promtool")
    subprocess.run([promtool, "check", "config", PROMETHEUS / "prometheus.yml"], check=True, capture_output=True)
    subprocess.run([promtool, "test", "rules", PROMETHEUS / "alerts_test.yml"], check=True, capture_output=True)
    rules = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]
    cases = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    fired = {test["alertname"] for case in cases for test in case.get("alert_rule_test", []) if test["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules}


def panel_queries() -> list[str]:
    dashboard: dict[str, Any] = json.loads((DOCKER / "grafana" / "dashboards" / "easel.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_every_panel_of_the_dashboard_shows_data(server: Server, tmp_path: Path) -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "250ms", "scrape_timeout": "200ms", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
    shutil.copy(PROMETHEUS / "alerts.yml", tmp_path)
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        tool("prometheus"),
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    queries = [string.Template(query).safe_substitute(__rate_interval="30s") for query in panel_queries()]
    with running(command, port, tmp_path / "log"), httpx.Client(timeout=30) as client:
        deadline = time.monotonic() + 40
        empty = queries
        while empty:
            assert time.monotonic() < deadline, empty
            request = order(stream=True, partial_images=1, num_inference_steps=4)
            assert client.post(f"{server.url}{URL}", json=request).status_code == 200
            empty = [query for query in queries if not has_data(client, port, query)]
            empty = [query for query in empty if not any(name in query for name in EXPECT_IDLE)]


def has_data(client: httpx.Client, port: int, query: str) -> bool:
    answer = client.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", query
    return any(sample["value"][1] != "NaN" for sample in answer["data"]["result"])
