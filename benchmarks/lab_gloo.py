"""Bus bandwidth of gloo's all-reduce in the lab, and the bytes that each host's interface sent for it.

    python benchmarks/lab_gloo.py --nodes 4 --rates 100mbit 1gbit

Bus bandwidth is 2 (n-1)/n times the tensor's bytes over the time of one all-reduce: what a ring puts on each link.
"""

import argparse
import json
import os
import sys
import time


def rank_main(nbytes: int, repeats: int) -> None:
    import torch
    import torch.distributed as dist

    from thinwire.lab.counters import read_interface

    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    tensor = torch.ones(nbytes // 4)
    dist.all_reduce(tensor[: 1 << 14])
    times = []
    dist.barrier()
    before = read_interface(os.environ["THINWIRE_LAB_INTERFACE"])[0]
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    dist.barrier()
    sent = read_interface(os.environ["THINWIRE_LAB_INTERFACE"])[0] - before
    payload = 2 * (world_size - 1) / world_size * nbytes
    if dist.get_rank() == 0:
        median = sorted(times)[len(times) // 2]
        record = {
            "bus_bps": 8 * payload / median,
            "best_bus_bps": 8 * payload / min(times),
            "sent_nbytes_per_payload": sent / payload / repeats,
        }
        print(json.dumps(record))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--latency")
    parser.add_argument("--seconds", type=float, default=1.0, help="ideal time of one all-reduce")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    from thinwire.lab import Lab, parse_rate

    for rate in args.rates:
        bits = parse_rate(rate) or 10**10
        nbytes = round(args.seconds * bits / 8 / 2 / (args.nodes - 1) * args.nodes) // 4096 * 4096
        lines: list[str] = []
        with Lab(args.nodes, rate, args.latency) as lab:
            argv = [sys.executable, __file__, "--rank", str(nbytes), str(args.repeats)]
            run = lab.start(argv, on_line=lambda rank, line, lines=lines: lines.append(f"[rank {rank}] {line}"))
            result = run.wait(timeout=60 + 10 * args.seconds * args.repeats)
        if not result.ok:
            sys.exit("\n".join([*lines, result.message]))
        record = json.loads(next(line for line in lines if "bus_bps" in line).partition("] ")[2])
        print(
            f"{args.nodes} ranks, {rate}, tensor {nbytes / 1e6:.1f} MB: "
            f"bus bandwidth {record['bus_bps'] / 1e6:.1f} Mbit/s (median of {args.repeats}; "
            f"best {record['best_bus_bps'] / 1e6:.1f}), "
            f"{record['sent_nbytes_per_payload']:.4f} interface bytes per payload byte"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
