#!/usr/bin/env python3
"""Checks elasticdl.torch on one GPU: `gpu-pytorch.py [--json FILE] [--only NAME,NAME]`.

Needs PyTorch, the package on PYTHONPATH, and the command `elasticdl` in PATH or ELASTICDL. Each
check is a local job of two workers on the GPU. Their parameters and loss must be those of a plain
loop to rounding, each record must be counted once, and the workers' exit codes must be 0:

    plain   the loop as it should be
    alive   a graph from before the loop is still alive
    stream  the loop is in `with torch.cuda.stream()`
    thread  the loop is in another thread than the first draw
    kill    a worker is killed in the middle, with SIGKILL, and replaced
    tables  rows of an embedding table, which the workers divide, are added to the inputs

over NCCL, as `nccl-...`, and over the host's memory. Several run at a time. FILE is written after
each. `...-unordered` does not order the streams: whether its result differs is only told.
`--device cpu` and `--device fake` (collective/stand-ins) try the script.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve()
CASES = ["plain", "alive", "stream", "thread", "kill", "tables"]
ALL = [f"nccl-{case}" for case in CASES] + CASES + ["stream-unordered", "nccl-alive-unordered"]
# Widths of the last layer, on a CPU and a GPU.
SIZES = [(64, 512), (1024, 8192)]
IDS = 97
# Two workers on one GPU: NCCL takes hosts of other names for other hosts.
ONE_GPU = {
    **dict.fromkeys(["NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"], "1"),
    **{"NCCL_MAX_NCHANNELS": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"},
    **{"NCCL_MNNVL_ENABLE": "0", "ELASTICDL_NCCL_SHARED": "1"},
}


def keep(folder, command):
    """Starts a worker in a session of its own, which the job's end leaves alone. Notes its exit
    code, and the time since the end of its program."""
    if child := os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
    os.setsid()
    host = {"NCCL_HOSTID": f"worker-{os.environ.get('ELASTICDL_LAUNCH')}"}
    worker = subprocess.Popen(command, env={**os.environ, **host})
    code, now, end = worker.wait(), time.time(), folder / f"end-{worker.pid}"
    took = round(now - float(end.read_text()), 2) if end.exists() else None
    part = folder / f"part-{worker.pid}"
    part.write_text(json.dumps([code, took]))
    part.rename(folder / f"exit-{worker.pid}")
    os._exit(code & 255)


if __name__ == "__main__" and sys.argv[1:2] == ["--keep"]:
    keep(pathlib.Path(sys.argv[2]), sys.argv[3:])

import torch


class Problem:
    """A network whose last layer is large, so that its gradients come late, and its data.

    ``embedding``: of IDS ids, whose rows begin as zeros and are added to the inputs.
    """

    def __init__(self, device, embedding=None):
        hidden, classes = SIZES[device == "cuda"]
        self.batch = 2 * hidden
        self.micro, self.records = self.batch // 4, self.batch * 20
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        torch.manual_seed(1)
        layers = torch.nn.Linear(256, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, classes)
        self.net = torch.nn.Sequential(*layers).to(self.device)
        self.x = torch.randn(self.records, 256).to(self.device)
        self.y = (torch.arange(self.records) * 7919 % classes).to(self.device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.5, momentum=0.9)
        self.embedding = embedding and embedding.to(self.device)

    @staticmethod
    def ids(indices):
        return torch.tensor(indices) ** 2 % IDS

    def loss(self, indices):
        at = torch.tensor(indices, device=self.device)
        x = self.x[at]
        if self.embedding is not None:
            x = x + self.embedding(self.ids(indices).to(self.device))
        return torch.nn.functional.cross_entropy(self.net(x), self.y[at])

    def result(self):
        return torch.cat([p.detach().reshape(-1).cpu() for p in self.net.parameters()])


def plain(options):
    """The plain loop, with the losses of its steps."""
    embedding = None
    if "tables" in options.plain:
        embedding = torch.nn.Embedding(IDS, 256, _weight=torch.zeros(IDS, 256))
    problem, losses = Problem(options.device, embedding), []
    if embedding is not None:
        problem.optimizer.add_param_group({"params": embedding.parameters(), "momentum": 0.0})
    before = problem.result()
    for start in 2 * list(range(0, problem.records, problem.batch)):
        problem.optimizer.zero_grad()
        loss = problem.loss(range(start, start + problem.batch))
        loss.backward()
        problem.optimizer.step()
        losses.append(loss.item())
    torch.save((before, problem.result(), [losses[0], losses[-1]]), options.folder)


def work(options):
    """The program of a worker."""
    import elasticdl.torch as et
    from elasticdl.torch import _place

    if "unordered" in options.work:
        _place.OnGpu.on_stream = lambda *_: contextlib.nullcontext()
    job, folder, embedding = et.join(), options.folder, None
    case = options.work.removeprefix("nccl-").removesuffix("-unordered")
    if case == "tables":
        embedding = job.embedding("user", 256, optimizer=et.RowSGD(lr=0.5), bound=0.0)
    problem = Problem(options.device, embedding)
    kept = problem.loss([0, 1]) if case == "alive" else None
    job.model(problem.net)
    opt = job.optimizer(problem.optimizer)
    sampler = job.sampler(problem.records, micro_batch=problem.micro)
    loader = sampler
    if case == "tables":
        loader = torch.utils.data.DataLoader(
            range(problem.records), batch_sampler=sampler, collate_fn=list
        )
        loader = job.batches(loader, ids=lambda indices: {"user": problem.ids(indices)})
    batches = (indices for _ in job.epochs() for indices in loader)

    def train(batches):
        for indices in batches:
            (folder / f"pid-{os.getpid()}").touch()
            opt.zero_grad()
            loss = problem.loss(indices)
            loss.backward()
            time.sleep(0.02 if case == "kill" else 0.0)
            opt.step(loss)

    if case == "stream":
        with torch.cuda.stream(torch.cuda.Stream()):
            train(batches)
    elif case == "thread":
        drawn = itertools.chain([next(batches)], batches)
        ThreadPoolExecutor(1).submit(train, drawn).result()
    else:
        train(batches)
    del kept
    torch.save(problem.result(), folder / f"result-{os.getpid()}")
    (folder / f"end-{os.getpid()}").write_text(str(time.time()))


def check(case, options, folder, right):
    """Runs a job. Returns what it shows, and its faults."""
    deadline, killed = time.monotonic() + options.limit, None
    elasticdl, job = os.environ.get("ELASTICDL", "elasticdl"), folder / "job"
    batch = 2 * SIZES[options.device == "cuda"][0]
    fakes = HERE.parents[1] / "worker/python/tests/on_fake_gpu.py"
    words = [sys.executable, *([fakes] if options.device == "fake" else []), HERE]
    words += ["--device", options.device, "--work", case, folder]
    command = [elasticdl, "train", "--local", "--replace", "--job-dir", job, "--shuffle", "none"]
    command += ["--num-workers", "2", "--min-workers", "2", "--max-workers", "2"]
    command += ["--global-batch-size", str(batch), "--num-epochs", "2"]
    command += ["--restart-without-checkpoint", "--", sys.executable, HERE, "--keep", folder]
    variables = {**os.environ, **(ONE_GPU if "nccl" in case else {"ELASTICDL_NCCL": "off"})}
    with open(folder / "log", "w") as log:
        running = subprocess.Popen([*command, *words], stdout=log, stderr=log, env=variables)
    started = lambda: {int(p.name[4:]) for p in folder.glob("pid-*")}
    exits = lambda: {int(p.name[5:]): json.loads(p.read_text()) for p in folder.glob("exit-*")}
    try:
        while running.poll() is None or started() - set(exits()):
            time.sleep(0.05)
            if time.monotonic() > deadline:
                raise TimeoutError(f"the job or a worker did not end in {options.limit} s")
            if "kill" in case and killed is None and len(started()) == 2:
                status = subprocess.run([elasticdl, "status", job, "--json"], capture_output=True)
                if status.returncode == 0 and json.loads(status.stdout)["step"] >= 8:
                    killed = min(started())
                    os.kill(killed, signal.SIGKILL)
    finally:
        if running.poll() is None:
            running.kill()
        for pid in started() - set(exits()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    summary = json.loads((job / "summary.json").read_text())
    results = [torch.load(path) for path in folder.glob("result-*")]
    return judge(case, summary, results, exits(), killed, right)


def judge(case, summary, results, exits, killed, right):
    """What a job shows, and its faults."""
    before, after, losses = right
    errors = [float((one - after).norm() / (after - before).norm()) for one in results]
    ours, transport = list(summary["loss"].values()), summary["allreduce_transport"] or ""
    shown = {
        **{"errors": errors, "losses": ours, "plain_losses": losses, "transport": transport},
        "exit_s": [took for _, took in exits.values() if took is not None],
        "gaps_ms": [change["gap_ms"] for change in summary["memberships"]],
        "steps_per_s": round(summary["throughput"]["steps_per_s"], 1),
    }
    faults = [] if summary["state"] == "completed" else [f"the job {summary['state']}"]
    if summary["records"]["missing"] or summary["records"]["repeated"]:
        faults.append(f"records {summary['records']}")
    if len(errors) < 2 or not max(errors) < 1e-3:
        faults.append(f"parameters differ from the plain loop's by {errors}")
    if any(abs(a - b) > 1e-3 * abs(b) for a, b in zip(ours, losses)):
        faults.append(f"losses {ours} are not the plain loop's {losses}")
    if ("NCCL 2" in transport) != ("nccl" in case):
        faults.append(f"transport {transport}")
    if any(code for pid, (code, _) in exits.items() if pid != killed):
        faults.append(f"exit codes {exits}")
    if ("kill" in case) != (exits.get(killed, [0])[0] == -signal.SIGKILL):
        faults.append("no worker was killed")
    return shown, faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda", "fake"])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--only", default=",".join(ALL), help=f"default: {','.join(ALL)}")
    parser.add_argument("--at-once", type=int, default=3, help="number of checks at a time")
    parser.add_argument("--limit", type=float, default=50, help="seconds of a check")
    parser.add_argument("--seconds", type=float, default=145, help="of all, for the last to begin")
    parser.add_argument("--work")
    parser.add_argument("--plain")
    parser.add_argument("folder", nargs="?", type=pathlib.Path)
    options = parser.parse_args()
    if options.folder:
        return work(options) if options.work else plain(options)
    results, began, lock = {}, time.monotonic(), threading.Lock()
    with tempfile.TemporaryDirectory() as root:
        path = pathlib.Path(root) / "right"
        right = {}
        for kind in ("dense", "tables"):
            plainly = [sys.executable, HERE, "--device", options.device, "--plain", kind, path]
            subprocess.run(plainly, check=True)
            right[kind] = torch.load(path)

        def run(case):
            folder, since, shown = pathlib.Path(root) / case, time.monotonic(), {}
            folder.mkdir()
            try:
                if since - began > options.seconds - 20:
                    raise TimeoutError("left out, as the time is up")
                of = right["tables" if "tables" in case else "dense"]
                shown, faults = check(case, options, folder, of)
            except Exception as error:
                faults = [f"{type(error).__name__}: {error}"]
            shown["took"] = f"{time.monotonic() - since:.1f} s"
            print(f"{case}: {'; '.join(faults) or 'ok'} {shown}", flush=True)
            if faults:
                logs = [folder / "log", *folder.glob("job/logs/*")]
                shown["logs"] = {p.name: p.read_text()[-2500:] for p in logs if p.exists()}
            with lock:
                results[case] = {"faults": faults, **shown}
                if options.json:
                    options.json.write_text(json.dumps(results, indent=1))

        with ThreadPoolExecutor(options.at_once) as threads:
            list(threads.map(run, options.only.split(",")))
    return int(any(r["faults"] for case, r in results.items() if "unordered" not in case))


if __name__ == "__main__":
    sys.exit(main())
