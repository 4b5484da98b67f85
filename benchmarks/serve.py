"""perdure serve against a bare FastAPI endpoint: requests per second and p99 latency.

    python -m benchmarks serve --out serve.json

Both are asked for the class of single digits (8 x 8 pixels as JSON) by 1, 8 and 32 connections, in
turns; each runs in a separate process. The bare endpoint checks nothing: it reads the JSON, calls
the same module (`TrainedModel.module`) and returns the label.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

CONNECTIONS = (1, 8, 32)
SECONDS, TURNS = 3.0, 5
LEAST_RATIO = 0.5
VALUES: dict[str, Any] = {
    "data": {"source": "digits"},
    "stream": {"kind": "split", "tasks": 5},
    "model": {"kind": "mlp", "hidden": [64]},
    "train": {"rounds": 2},
}


def bare_app(run: str) -> Any:
    """Return the endpoint of the comparison."""
    import torch
    from fastapi import FastAPI

    import perdure

    module, app = perdure.load(run).module, FastAPI()

    @app.post("/predict")
    async def predict(body: dict[str, Any]) -> dict[str, list[int]]:
        with torch.no_grad():
            x = torch.tensor(body["inputs"], dtype=torch.uint8).unsqueeze(1)
            return {"labels": module(x).argmax(1).tolist()}

    return app


def serve_bare(run: str) -> None:
    """Serve the bare endpoint, and print its address first."""
    from perdure.deploy.serve import bound_socket, run_server

    app, bound = bare_app(run), bound_socket("127.0.0.1", 0)
    print(f"{run} at http://127.0.0.1:{bound.getsockname()[1]} bare", flush=True)
    run_server(app, bound)


def start(command: list[str]) -> tuple[subprocess.Popen[str], int]:
    """Start a server; return its process and port."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, int(line.split(" at ")[1].split()[0].rpartition(":")[2])


def request_bytes() -> list[bytes]:
    """Return HTTP requests for single digits."""
    from sklearn.datasets import load_digits

    digits = np.rint(load_digits().images[:100] * (255 / 16)).astype(int).tolist()
    bodies = [json.dumps({"inputs": [digit]}).encode() for digit in digits]
    head = (
        b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    )
    return [head + str(len(body)).encode() + b"\r\n\r\n" + body for body in bodies]


async def ask(port: int, requests: list[bytes], until: float) -> list[float]:
    """Return the seconds of one request after the other over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found: list[float] = []
    while (began := time.perf_counter()) < until:
        writer.write(requests[len(found) % len(requests)])
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server answered {head[:40]!r}")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        await reader.readexactly(length)
        found.append(time.perf_counter() - began)
    writer.close()
    return found


async def load(port: int, connections: int, seconds: float) -> dict[str, float]:
    """Return requests per second and the 99th percentile in milliseconds."""
    requests, until = request_bytes(), time.perf_counter() + seconds
    parts = await asyncio.gather(*(ask(port, requests, until) for _ in range(connections)))
    times = [value for part in parts for value in part]
    return {"per_second": len(times) / seconds, "p99_ms": float(np.percentile(times, 99)) * 1000}


def measure(ports: dict[str, int], seconds: float, turns: int) -> dict[str, Any]:
    """Return the figures of both servers by number of connections."""
    by_connections: dict[str, Any] = {}
    for connections in CONNECTIONS:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ports}
        for turn in range(turns + 1):
            for name in list(ports)[:: 1 if turn % 2 else -1]:
                found[name].append(asyncio.run(load(ports[name], connections, seconds)))
        figures: dict[str, Any] = {name: _median(runs[1:]) for name, runs in found.items()}
        pairs = zip(found["serve"][1:], found["bare"][1:], strict=True)
        ratio = statistics.median(a["per_second"] / b["per_second"] for a, b in pairs)
        by_connections[str(connections)] = {**figures, "ratio": round(ratio, 3)}
    return by_connections


def _median(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}


def main(seconds: float = SECONDS, turns: int = TURNS) -> dict[str, Any]:
    """Both servers in turns, with each number of connections."""
    import perdure

    processes = []
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        perdure.run(VALUES, out=run)
        commands = {
            "serve": [sys.executable, "-m", "perdure", "serve", run, "--port", "0"],
            "bare": [sys.executable, "-m", __spec__.name, run],
        }
        try:
            ports = {}
            for name, command in commands.items():
                process, ports[name] = start(command)
                processes.append(process)
            found = measure(ports, seconds, turns)
        finally:
            for process in processes:
                process.terminate()
                process.wait()
    worst = min(figures["ratio"] for figures in found.values())
    return {
        "benchmark": "serve",
        "statistic": f"median of {turns} turns of {seconds} s; ratio: median within turns",
        "connections": found,
        "worst_ratio": worst,
        "bounds": {"worst_ratio": LEAST_RATIO},
        "met": bool(worst >= LEAST_RATIO),
    }


if __name__ == "__main__":
    serve_bare(sys.argv[1])
