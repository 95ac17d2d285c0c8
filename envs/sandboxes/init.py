"""Process 1 of a local sandbox: starts commands, reaps orphans, kills the tree of a timed-out command.

The driver runs this file's text inside the sandbox with the system's python3 (3.8 or later, isolated,
no site), so it imports C modules where their Python wrappers would double the start-up time.

Messages travel on one SOCK_SEQPACKET socket whose number is `argv[1]`:

    driver -> init   b"run N"  with four file descriptors: request, stdin, stdout, stderr
                     b"kill N" kill every descendant of command N, daemons included
    init -> driver   b"ready" with the listening sockets that the driver asked for, then per command
                     b"exit N STATUS RUNNING": the wait status of its main process, and how many
                     processes are alive at that moment besides process 1

`argv[2]` is the sandbox's id, there to be seen in process lists; then come resource limits (`FSIZE=1024`)
and loopback ports to listen on (`listen=8000`).

The request holds NUL-separated fields: directory, argument count, arguments, NAME=value pairs. The
socket's end of file means that the driver has gone: process 1 exits and the kernel kills the rest.
Nothing here is trusted by the driver: the agent may attack this process, and then only harms itself.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket as socket
import ctypes
import os
import resource
import select
import sys

PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
DESCRIPTORS = 4
OOM_SCORE = b"500"  # commands are to be killed before process 1

prctl = ctypes.CDLL(None).prctl


def main() -> None:
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    listeners: list[socket.socket] = []
    for option in sys.argv[3:]:
        name, value = option.split("=")
        if name == "listen":
            listeners.append(listen(int(value)))
        else:
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (int(value), int(value)))
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no debugger from inside
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    poll = select.poll()
    poll.register(control.fileno(), select.POLLIN)
    poll.register(wake, select.POLLIN)
    commands: dict[int, int] = {}  # pid -> number
    descriptors = b"".join(listener.fileno().to_bytes(4, sys.byteorder) for listener in listeners)
    control.sendmsg([b"ready"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)] if listeners else [])
    for listener in listeners:
        listener.close()
    while True:
        for ready, _ in poll.poll():
            if ready == wake:
                drain(wake)
            else:
                serve(control, commands)
        reap(control, commands)


def listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


def serve(control: socket.socket, commands: dict[int, int]) -> None:
    message, ancillary, _, _ = control.recvmsg(
        64, socket.CMSG_SPACE(4 * DESCRIPTORS), socket.MSG_CMSG_CLOEXEC
    )
    if not message:
        os._exit(0)
    verb, number = message.split()
    if verb == b"kill":
        for pid in [pid for pid, known in commands.items() if known == int(number)]:
            kill_tree(pid)
        return
    data = ancillary[0][2]
    descriptors = [int.from_bytes(data[at : at + 4], sys.byteorder) for at in range(0, 4 * DESCRIPTORS, 4)]
    try:
        pid = os.fork()
    except OSError as error:  # the process limit is reached
        os.write(descriptors[3], f"sandbox: cannot start a process: {error.strerror}\n".encode())
        control.send(b"exit %s %d 0" % (number, 126 << 8))
    else:
        if pid == 0:
            become_command(descriptors)
        commands[pid] = int(number)
    for descriptor in descriptors:
        os.close(descriptor)


def become_command(descriptors: list[int]) -> None:
    """In the forked child: turn into the command. Never returns."""
    status = 126
    try:
        os.setsid()
        for target, descriptor in enumerate(descriptors[1:]):
            os.dup2(descriptor, target)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        with open("/proc/self/oom_score_adj", "wb", 0) as score:
            score.write(OOM_SCORE)
        # Daemons stay below the command while it runs, so that a timeout finds them; survives exec.
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with open(descriptors[0], "rb", 0, closefd=False) as request:
            directory, count, *rest = request.read().split(b"\0")
        arguments, pairs = rest[: int(count)], rest[int(count) :]
        os.chdir(directory)
        status = 127
        os.execvpe(arguments[0], arguments, dict(pair.split(b"=", 1) for pair in pairs))
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            status = 126
        where = os.fsdecode(error.filename or "")
        os.write(2, f"sandbox: {where}: {error.strerror}\n".encode())
    finally:
        os._exit(status)


def reap(control: socket.socket, commands: dict[int, int]) -> None:
    """Bury the dead; then report the commands among them, with the number of processes that remain."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        if pid in commands:
            ended.append((commands.pop(pid), status))
    if ended:
        running = sum(name.isdigit() for name in os.listdir("/proc")) - 1
        for number, status in ended:
            control.send(b"exit %d %d %d" % (number, status, running))


def kill_tree(root: int) -> None:
    """Stop the whole tree first, so that nothing forks between looking and killing."""
    stopped: set[int] = set()
    for _ in range(64):
        found = descendants(root) - stopped
        if not found:
            break
        for pid in found:
            send_signal(pid, signal.SIGSTOP)
        stopped |= found
    else:
        stopped = {-1}  # it grows faster than it can be stopped: kill everything but process 1
    for pid in stopped:
        send_signal(pid, signal.SIGKILL)


def descendants(root: int) -> set[int]:
    """`root` and every process below it."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb", 0) as stat:
                    parent = int(stat.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(name))
    found, todo = {root}, [root]
    while todo:
        for child in children.get(todo.pop(), ()):
            found.add(child)
            todo.append(child)
    return found


def send_signal(pid: int, number: int) -> None:
    try:  # noqa: SIM105 (importing contextlib is not worth it)
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        pass


main()
