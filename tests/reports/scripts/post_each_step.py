"""Each step posts its loss to a server, which takes its time."""

import json
import multiprocessing
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((64,), 1e-3 * (index % 97))


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.02)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *arguments):
        pass


def serve(port):
    server = HTTPServer(("127.0.0.1", 0), Handler)
    port.put(server.server_port)
    server.serve_forever()


def post(port, loss):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/", json.dumps({"loss": loss}).encode(), method="POST")
    with urllib.request.urlopen(request) as answer:  # <- slow
        answer.read()  # <- slow


def main():
    context = multiprocessing.get_context("spawn")
    port = context.Queue()
    context.Process(target=serve, args=(port,), daemon=True).start()
    where = port.get()
    trainer, pace, step = common.Trainer(seconds=0.01), common.Pace(), 0
    every = 100 if common.FIXED else 1
    for x in DataLoader(Rows(), batch_size=32, num_workers=common.workers(1)):
        loss = trainer.step(x)
        if step % every == 0:
            post(where, loss)
        step += 1
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
