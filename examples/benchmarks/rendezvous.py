"""Horovod's rendezvous for the ranks of one party, on host 0: a fresh server for every `hvd.init()`.

Arguments: the addresses of the hosts. Every line on stdin is a request for a server; its port is the answer. The server
before is kept, for a party's agreements go through it; all end when stdin closes.
"""

from __future__ import annotations

import sys

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

KEPT = 2


def main(addresses: list[str]) -> None:
    slots = get_host_assignments(parse_hosts(",".join(f"{a}:1" for a in addresses)), len(addresses))
    servers: list[RendezvousServer] = []
    for _ in sys.stdin:
        server = RendezvousServer(0)
        port = server.start()
        server.init(slots)
        servers.append(server)
        if len(servers) > KEPT:
            servers.pop(0).stop()
        print(port, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
