"""A CUDA load that reads prompts and generates tokens, and serves vLLM's metric names:

    python token_load.py PROMPT STEPS BATCH PERIOD_MS PORT LOG GO STOP

In each period, it reads one prompt of PROMPT tokens and runs STEPS steps of BATCH tokens through a
stack of linear layers, so a request is one large product and many small ones that read all weights.
A period of 0 means without pauses. First measures the GPU time of a request, while no other load
runs. Works from when the file GO exists until STOP exists. Serves its counters, and writes
`requests seconds_of_work_per_request` to LOG when it has stopped.
"""

from __future__ import annotations

import fcntl
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

WIDTH = 8192
LAYERS = 12
prompt, steps, batch = (int(word) for word in sys.argv[1:4])
period = float(sys.argv[4]) / 1e3
port = int(sys.argv[5])
log, go, stop = (Path(word) for word in sys.argv[6:9])
device = "cuda" if torch.cuda.is_available() else "cpu"
counted = {"requests": 0}


class Metrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        requests = counted["requests"]
        labels = f'{{engine="0",model_name="linear-{prompt}-{steps}"}}'
        lines = (
            "# TYPE vllm:prompt_tokens_total counter",
            f"vllm:prompt_tokens_total{labels} {requests * prompt}.0",
            "# TYPE vllm:generation_tokens_total counter",
            f"vllm:generation_tokens_total{labels} {requests * steps * batch}.0",
            "",
        )
        body = "\n".join(lines).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def serve_request() -> None:
    """Queues all work of the request at once, so that the GPU never waits for the CPU."""
    for layer in layers:
        torch.mm(prompts, layer, out=read)
    for _ in range(steps):
        for layer in layers:
            torch.mm(tokens, layer, out=written)
    if device == "cuda":
        torch.cuda.synchronize()


def measure() -> float:
    """Returns the GPU seconds of a request: the median of 15."""
    times = []
    for _ in range(15):
        began = time.monotonic()
        serve_request()
        times.append(time.monotonic() - began)
    return sorted(times)[7]


server = ThreadingHTTPServer(("127.0.0.1", port), Metrics)
threading.Thread(target=server.serve_forever, daemon=True).start()
# Zeros need less power, so the clocks are the same alone and beside another load.
kind = torch.bfloat16
layers = [torch.zeros(WIDTH, WIDTH, device=device, dtype=kind) for _ in range(LAYERS)]
prompts = torch.zeros(prompt, WIDTH, device=device, dtype=kind)
tokens = torch.zeros(batch, WIDTH, device=device, dtype=kind)
read = torch.empty_like(prompts)
written = torch.empty_like(tokens)
with Path(__file__).open() as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    serve_request()
    seconds = measure()
log.write_text(f"0 {seconds:.9f}\n")

while not go.exists():
    time.sleep(0.02)
while not stop.exists():
    started = time.monotonic()
    serve_request()
    counted["requests"] += 1
    time.sleep(max(0.0, period - (time.monotonic() - started)))
log.write_text(f"{counted['requests']} {seconds:.9f} stopped\n")
while True:
    time.sleep(1.0)
