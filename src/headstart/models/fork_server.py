"""Fork server: a process that has done the imports of a model's process, and forks one for each load. Linux only.

front ──▶ fork server   a byte with the socket of a new process (a file descriptor)
fork server ──▶ front   lines of JSON: `{"pid": 5}` in the order of the bytes, `{"pid": 5, "code": -9}` when one has ended

The imports take about a second of a processor, and a request would wait for that whenever models take turns. It has no thread
and no model, so a fork is safe. Its objects are frozen: the collector of a forked process would write to the memory of all of
them, and so copy it. When the front ends it ends too, and the processes of models notice that themselves.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
import warnings
from importlib import import_module

from headstart.engines import registry
from headstart.models import child

LATE_IMPORTS = ("uvicorn.lifespan.on", "uvicorn.loops.uvloop", "uvicorn.protocols.http.httptools_impl")
"""What a server imports when it starts."""


def prepare() -> None:
    """Does what all processes of models would do first."""
    for name in LATE_IMPORTS:
        import_module(name)
    registry.import_forkable()
    gc.collect()
    gc.freeze()


def serve(front: socket.socket) -> int:
    """Forks until the front ends. Returns in this process -1, and in each forked one the descriptor of its socket."""
    with selectors.DefaultSelector() as watched:
        watched.register(front, selectors.EVENT_READ)
        while True:
            for key, _ in watched.select():
                if key.fileobj is front:
                    data, files, _, _ = socket.recv_fds(front, 1, 1)
                    if not data:
                        return -1
                    if (pid := os.fork()) == 0:
                        for inherited in [*watched.get_map().values()]:
                            if inherited.fileobj is not front:
                                os.close(inherited.fd)
                        return files[0]
                    os.close(files[0])
                    _say(front, pid=pid)
                    watched.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                else:
                    watched.unregister(key.fileobj)
                    os.close(key.fd)
                    _, status = os.waitpid(key.data, 0)
                    _say(front, pid=key.data, code=os.waitstatus_to_exitcode(status))


def _say(front: socket.socket, **said: int) -> None:
    try:
        front.sendall(json.dumps(said).encode() + b"\n")
    except OSError:  # the front has ended: the next look says so
        return


def main(descriptor: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Python counts the threads of a library for linear algebra, which ends them before a fork.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
    front = socket.socket(fileno=descriptor)
    prepare()
    model = serve(front)
    front.close()
    if model >= 0:
        os.setsid()
        child.main(model)


if __name__ == "__main__":
    main(int(sys.argv[1]))
