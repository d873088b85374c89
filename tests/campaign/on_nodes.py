"""``python on_nodes.py NODES RANKS ARGUMENTS…``: torchrun with ARGUMENTS on emulated nodes of RANKS ranks each.

Each node is a torchrun agent on this machine with a node's name. They end together.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def main() -> int:
    """Returns the largest exit status of the agents."""
    nodes, ranks, *arguments = sys.argv[1:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--node-rank", str(number)),
                *("--nproc-per-node", ranks, "--master-addr", "127.0.0.1", "--master-port", str(port), *arguments),
            ],
            env=os.environ | {"TELEMETRY_NODE": f"n{number + 1}"},
        )
        for number in range(int(nodes))
    ]
    return max(abs(agent.wait()) for agent in agents)


if __name__ == "__main__":
    sys.exit(main())
