# ruff: noqa: E501  (programs stand on one line each)
"""Hostile programs in the code reward: escapes from the sandbox, and cheating uses of the score.

Every escape is tried by a real child; what it says of its success is compared with what happened to its parent: alive,
no signal, the same priority, I/O class, processors and limits, the same files. Run as root and as an ordinary user, with
newer versions of Landlock and the namespaces taken away. Left out: arm64 (its numbers are compared with the kernel's
table in `tests/data_prep/test_code_reward.py`, and were not run).
"""

import ctypes
import json
import os
import platform
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
from helpers.users import forked

from datasets_prep.apps import sandbox, sandbox_child
from datasets_prep.apps.reward import score_program
from datasets_prep.apps.sandbox import Limits, run_program

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs run on Linux only")
QUICK = Limits(seconds=3, memory=2**29, output=2**18)
COLUMN = 1 if platform.machine() == "aarch64" else 0
# Refused calls by their numbers on x86-64 and arm64, as attempts use them
NUMBERS = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122), "ioprio_set": (251, 30), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "fork": (57, 220), "clone": (56, 220), "clone3": (435, 435), "prlimit64": (302, 261), "fcntl": (72, 25),
    "ioctl": (16, 29), "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200),
    "sendto": (44, 206), "sendmsg": (46, 211), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "kcmp": (312, 272), "unshare": (272, 97),
    "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "fsopen": (430, 430), "mount_setattr": (442, 442), "io_uring_setup": (425, 425),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "memfd_create": (319, 279),
    "keyctl": (250, 219), "add_key": (248, 217), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "personality": (135, 92), "syslog": (103, 116), "sethostname": (170, 161),
    "setsid": (112, 157), "setpgid": (109, 154), "setuid": (105, 146), "setresuid": (117, 147), "setgid": (106, 144),
    "setgroups": (116, 159), "capset": (126, 91), "prctl": (157, 167), "seccomp": (317, 277), "getpgid": (121, 155),
    "getsid": (124, 156), "sched_getaffinity": (204, 123), "sched_getparam": (143, 121), "getpriority": (140, 141),
    "timer_create": (222, 107), "openat2": (437, 437), "landlock_create_ruleset": (444, 444), "execve": (59, 221),
    "name_to_handle_at": (303, 264), "statfs": (137, 43), "getxattr": (191, 8), "listxattr": (194, 11), "chdir": (80, 49),
    "ftruncate": (77, 46), "truncate": (76, 45), "flock": (73, 32), "mlockall": (151, 230), "swapoff": (168, 225),
}  # fmt: skip
TOOLS = f"""
import ctypes, os, signal, socket, struct, sys, threading, time
libc, N, PARENT = ctypes.CDLL(None, use_errno=True), { ({name: pair[COLUMN] for name, pair in NUMBERS.items()}) }, os.getppid()
def call(name, *given):
    answer = libc.syscall(ctypes.c_long(N[name] if isinstance(name, str) else name),
                          *[ctypes.c_long(x) if isinstance(x, int) else x for x in given])
    if answer < 0: raise OSError(ctypes.get_errno(), 'refused')
    return answer
pipe, pair = os.pipe(), socket.socketpair()
fds = dict(pipe=pipe[0], input=0, output=1, socket=pair[0].fileno(), folder=os.open(os.path.dirname(os.__file__), 0))
def poke():
    os.write(pipe[1], b'a'); pair[1].send(b'a')
"""


def escapes(canary: Path, open_to_all: Path) -> dict[str, str]:
    """Attempts by name; each raises if it was refused. `canary` is a file out of reach, the other one may be read."""
    found = {}
    places = ("pipe", "input", "output", "socket", "folder")
    for place in places:
        fd = f"fds['{place}']"
        for name, command, value in (
            ("F_SETOWN", 8, "PARENT"), ("F_SETOWN of its group", 8, "-PARENT"), ("F_SETSIG KILL", 10, "9"),
            ("F_SETSIG IO", 10, "29"), ("F_SETFL O_ASYNC", 4, "0x2000"), ("F_SETFL O_ASYNC among others", 4, "0x2802"),
            ("F_NOTIFY", 1026, "0x80000001"), ("F_SETLEASE", 1024, "0"), ("F_GETOWN", 9, "0"), ("F_SETLK", 6, "bytes(64)"),
            ("F_SETOWN_EX of a process", 15, "struct.pack('ii', 1, PARENT)"),
            ("F_SETOWN_EX of a thread", 15, "struct.pack('ii', 0, PARENT)"),
            ("F_SETOWN_EX of a group", 15, "struct.pack('ii', 2, PARENT)"),
            ("F_SETOWN in 64 bits", 8 + 2**32, "PARENT"), ("F_ADD_SEALS", 1033, "1"), ("F_SETPIPE_SZ", 1031, "2**20"),
        ):  # fmt: skip
            found[f"{name} on {place}"] = f"call('fcntl', {fd}, {command}, {value}); poke()"
        for name, request in (
            ("FIOSETOWN", 0x8901), ("SIOCSPGRP", 0x8902), ("FIOASYNC", 0x5452), ("TIOCSTI", 0x5412),
            ("TIOCSPGRP", 0x5410), ("SIOCGIFCONF", 0x8912), ("FIOSETOWN in 64 bits", 0x8901 + 2**32),
        ):  # fmt: skip
            found[f"{name} on {place}"] = f"call('ioctl', {fd}, {request}, struct.pack('i', PARENT)); poke()"
    for sign in ("KILL", "STOP", "TERM", "USR1", "IO", "CHLD"):
        number = int(getattr(signal, f"SIG{sign}"))
        found |= {
            f"kill {sign}": f"call('kill', PARENT, {number})",
            f"kill {sign} its group": f"call('kill', -PARENT, {number})",
            f"kill {sign} itself": f"call('kill', os.getpid(), {number})",
            f"tkill {sign}": f"call('tkill', PARENT, {number})",
            f"tgkill {sign}": f"call('tgkill', PARENT, PARENT, {number})",
            f"tgkill {sign} itself": f"call('tgkill', os.getpid(), os.getpid(), {number})",
            f"queue {sign}": f"call('rt_sigqueueinfo', PARENT, {number}, struct.pack('iiii112x', {number}, 0, -1, 0))",
            f"queue {sign} to a thread": f"call('rt_tgsigqueueinfo', PARENT, PARENT, {number}, struct.pack('iiii112x', {number}, 0, -1, 0))",
            f"{sign} by descriptor": f"call('pidfd_send_signal', call('pidfd_open', PARENT, 0), {number}, 0, 0)",
        }
    found["kill everyone"] = "call('kill', -1, 9)"
    found["kill by an x32 number"] = "call(0x40000000 + N['kill'], PARENT, 9)"
    found["queue by the x32 number"] = "call(0x40000000 + 524, PARENT, 9, bytes(128))"
    for whom, kind, target in (
        ("the parent", 0, "PARENT"),
        ("its group", 1, "PARENT"),
        ("the user", 2, "os.getuid()"),
        ("itself", 0, "0"),
    ):
        found[f"priority of {whom}"] = f"call('setpriority', {kind}, {target}, 19)"
        found[f"I/O class idle of {whom}"] = f"call('ioprio_set', {kind + 1}, {target}, 3 << 13)"
        found[f"I/O class best effort of {whom}"] = f"call('ioprio_set', {kind + 1}, {target}, 2 << 13 | 7)"
    for whom, target in (("the parent", "PARENT"), ("itself", "0")):
        found |= {
            f"scheduler batch of {whom}": f"call('sched_setscheduler', {target}, 3, struct.pack('i', 0))",
            f"scheduler idle of {whom}": f"call('sched_setscheduler', {target}, 5, struct.pack('i', 0))",
            f"scheduler's parameter of {whom}": f"call('sched_setparam', {target}, struct.pack('i', 0))",
            f"scheduler's attributes of {whom}": f"call('sched_setattr', {target}, struct.pack('IIQiIQQQ', 48, 5, 0, 19, 0, 0, 0, 0), 0)",
            f"processors of {whom}": f"call('sched_setaffinity', {target}, 8, struct.pack('Q', 1))",
        }
    found |= {
        "look at the parent's processors": "call('sched_getaffinity', PARENT, 8, bytes(8))",
        "look at the parent's scheduler": "call('sched_getparam', PARENT, bytes(8))",
        "look at the parent's priority": "call('getpriority', 0, PARENT)",
        "look at the parent's group": "call('getpgid', PARENT)",
        "look at the parent's session": "call('getsid', PARENT)",
        "timer that signals": "call('timer_create', 1, struct.pack('QiiI', 0, 9, 4, PARENT) + bytes(64), bytes(8))",
        "watch files": "call('inotify_init1', 0)", "watch mounts": "call('fanotify_init', 0, 0)",
        "fork": "call('fork', 17, 0, 0, 0, 0)", "os.fork": "os.fork()", "vfork by spawn": "os.posix_spawn('/bin/true', ['true'], {})",
        "execute": "call('execve', b'/bin/sh', 0, 0)", "clone a process": "call('clone', 17, 0, 0, 0, 0)",
        "clone with shared memory": "call('clone', 0x100, 0, 0, 0, 0)", "clone3": "call('clone3', bytes(88), 88)",
        "clone a sibling": "call('clone', 0x8000 | 17, 0, 0, 0, 0)", "clone into a user namespace": "call('clone', 0x10000000 | 17, 0, 0, 0, 0)",
        "thread with a parent of its choice": "call('clone', 0x18F00, 0, 0, 0, 0)",
        "thread in a new network": "call('clone', 0x40010F00, 0, 0, 0, 0)",
        "descriptor of the parent": "call('pidfd_open', PARENT, 0)", "file of the parent": "call('pidfd_getfd', call('pidfd_open', PARENT, 0), 0, 0)",
        "trace": "call('ptrace', 16, PARENT, 0, 0)", "seize": "call('ptrace', 0x4206, PARENT, 0, 0)",
        "read memory": "b = ctypes.create_string_buffer(8); v = struct.pack('QQ', ctypes.addressof(b), 8); call('process_vm_readv', PARENT, v, 1, v, 1, 0)",
        "write memory": "b = ctypes.create_string_buffer(8); v = struct.pack('QQ', ctypes.addressof(b), 8); call('process_vm_writev', PARENT, v, 1, v, 1, 0)",
        "advise memory": "call('process_madvise', 3, bytes(16), 1, 21, 0)", "compare": "call('kcmp', PARENT, os.getpid(), 0, 0, 0)",
        "new session": "call('setsid')", "new group": "call('setpgid', 0, 0)", "root again": "call('setuid', 0)",
        "root again by setresuid": "call('setresuid', 0, 0, 0)", "other group": "call('setgid', 0)", "other groups": "call('setgroups', 0, 0)",
        "capabilities": "call('capset', struct.pack('Ii', 0x20080522, 0), struct.pack('6I', *[2**32 - 1] * 6))",
        "survive the parent": "call('prctl', 1, 0, 0, 0, 0)", "be a reaper": "call('prctl', 36, 1, 0, 0, 0)", "be traced by anyone": "call('prctl', 0x59616D61, -1, 0, 0, 0)",
        "own filter": "call('seccomp', 1, 0, bytes(16))", "another process's limits": "call('prlimit64', PARENT, 7, struct.pack('QQ', 0, 0), 0)",
        "own CPU limit": "call('prlimit64', 0, 0, struct.pack('QQ', 0, 0), 0)",
        "raise a limit": "call('prlimit64', 0, 7, struct.pack('QQ', 2**20, 2**20), 0)",
        "limit in 64 bits": "call('prlimit64', 0, 2**32, struct.pack('QQ', 0, 0), 0)",
        "unshare": "call('unshare', 0x10000000)", "enter a namespace": "call('setns', 0, 0)", "mount": "call('mount', b'none', b'/dev', b'tmpfs', 0, 0)",
        "unmount": "call('umount2', b'/dev/stdin', 2)", "pivot": "call('pivot_root', b'.', b'.')", "chroot": "call('chroot', b'/')",
        "open a tree": "call('open_tree', -100, b'/', 1)", "open a file system": "call('fsopen', b'tmpfs', 0)",
        "writable again": "call('mount_setattr', -100, b'/', 0x8000, struct.pack('4Q', 0, 1, 0, 0), 32)",
        "rings": "call('io_uring_setup', 1, bytes(120))", "programs in the kernel": "call('bpf', 0, bytes(64), 64)",
        "counters": "call('perf_event_open', bytes(112), PARENT, -1, -1, 0)", "page faults": "call('userfaultfd', 1)",
        "memory as a file": "call('memfd_create', b'a', 0)", "keys": "call('keyctl', 0, -3, 0)", "a key": "call('add_key', b'user', b'a', b'a', 1, -3)",
        "shared memory": "call('shmget', 0x4711, 4096, 0o1666)", "messages": "call('msgget', 0x4711, 0o1666)", "semaphores": "call('semget', 0x4711, 1, 0o1666)",
        "message queue": "call('mq_open', b'a', 0o102, 0o666, 0)", "personality": "call('personality', 0x40000)", "kernel's log": "call('syslog', 3, bytes(64), 64)",
        "host name": "call('sethostname', b'a', 1)", "lock memory": "call('mlockall', 1)", "lock a file": "call('flock', 0, 2)", "swap": "call('swapoff', b'/')",
        "Landlock's rules": "call('landlock_create_ruleset', 0, 0, 1)",
        "files of another user by handle": "call('name_to_handle_at', -100, b'/', struct.pack('Ii', 128, 0) + bytes(128), bytes(8), 0)",
        "open as a path": "os.open(os.__file__, os.O_PATH)", "open without access": "os.open(os.__file__, 3)",
        "empty on opening": f"os.open({str(open_to_all)!r}, os.O_RDONLY | os.O_TRUNC)",
        "empty on opening without access": f"os.open({str(open_to_all)!r}, 3 | os.O_TRUNC)",
        "open to write": f"os.open({str(open_to_all)!r}, os.O_WRONLY)", "open to append": f"os.open({str(open_to_all)!r}, os.O_WRONLY | os.O_APPEND)",
        "empty and write": f"os.open({str(open_to_all)!r}, os.O_RDWR | os.O_TRUNC)",
        "truncate": f"os.truncate({str(open_to_all)!r}, 0)", "create beside": f"os.open({str(open_to_all) + '.new'!r}, os.O_CREAT | os.O_WRONLY)",
        "nameless file beside": f"os.open({str(open_to_all.parent)!r}, os.O_TMPFILE | os.O_RDWR)",
        "openat2": f"call('openat2', -100, {os.fsencode(canary)!r}, bytes(24), 24)",
        "write to the input": "os.write(0, b'a')", "truncate the input": "call('ftruncate', 0, 0)",
        "1200 threads": "threading.stack_size(2**15); [threading.Thread(target=time.sleep, args=(.3,), daemon=True).start() for _ in range(1200)]",
    }  # fmt: skip
    families = {"UNIX": 1, "INET": 2, "INET6": 10, "NETLINK": 16, "PACKET": 17, "BLUETOOTH": 31, "ALG": 38, "VSOCK": 40}
    for (family, number), kind in product(families.items(), (1, 2, 3, 5)):
        found[f"socket {family} of type {kind}"] = f"call('socket', {number}, {kind}, 0)"
        if (number, kind) != (1, 1):
            found[f"pair {family} of type {kind}"] = f"call('socketpair', {number}, {kind}, 0, bytes(8))"
    address = r"struct.pack('H', 1) + b'/dev/log\0'"
    for name in ("connect", "bind"):
        found[f"{name} the pair"] = f"call('{name}', fds['socket'], {address}, 11)"
    found["send to an address"] = f"call('sendto', fds['socket'], b'a', 1, 0, {address}, 11)"
    found["send a message"] = "pair[0].sendmsg([b'a'])"
    found["pass a descriptor"] = "socket.send_fds(pair[0], [b'a'], [0])"
    for name, code in {
        "read": "open(X).read()", "write": "open(X, 'w')", "append": "open(X, 'a')", "remove": "os.remove(X)", "rename": "os.rename(X, X + 'b')",
        "link": "os.link(X, X + 'b')", "symlink": "os.symlink(X, X + 'b')", "mode": "os.chmod(X, 0)", "owner": "os.chown(X, 1, 1)",
        "times": "os.utime(X, (1, 1))", "attribute": "os.setxattr(X, 'user.a', b'a')", "remove the folder": "os.rmdir(os.path.dirname(X))",
        "make a folder": "os.mkdir(X + 'b')", "make a pipe": "os.mkfifo(X + 'b')", "list": "os.listdir(os.path.dirname(X))",
        "list by descriptor": "os.listdir(os.open(os.path.dirname(X), 0))", "map": "import mmap; mmap.mmap(os.open(X, 0), 0)",
        "change folder": "os.chdir(os.path.dirname(X))", "by its parent": "open(f'/proc/{PARENT}/root' + X).read()", "by itself": "open('/proc/self/root' + X).read()",
        "by the folder above": "open('../' * 9 + X).read()", "by the working folder": "open('/proc/self/cwd/../' + X).read()",
    }.items():  # fmt: skip
        found[f"file: {name}"] = code.replace("X", repr(str(canary)))
    for what in (
        "mem", "environ", "cmdline", "maps", "fd/0", "status", "comm", "oom_score_adj", "cwd/a", "task", "limits",
    ):  # fmt: skip
        for who in ("PARENT", "1"):
            if what in ("status", "comm", "limits", "cmdline", "maps") and who == "1":
                continue
            found[f"proc: {what} of {who}"] = f"open(f'/proc/{{{who}}}/{what}').read()"
    found["proc: its priority"] = "open(f'/proc/{PARENT}/autogroup', 'w').write('19')"
    found["proc: its death first"] = "open(f'/proc/{PARENT}/oom_score_adj', 'w').write('1000')"
    return found


LOOKS = {
    "stat": "os.stat(X)", "lstat": "os.lstat(X)", "access": "1 / os.access(X, 0)", "exists": "1 / os.path.exists(X)", "readlink": "os.readlink(X)",
    "statvfs": "os.statvfs(X)", "attributes": "os.listxattr(X)", "an attribute": "os.getxattr(X, 'user.a')", "list": "os.listdir(X)", "open": "os.open(X, 0)",
    "open as a path": "os.open(X, os.O_PATH)", "change folder": "os.chdir(X)", "link": "os.link(X, '/tmp/a')", "scan": "list(os.scandir(X))",
    "relative": "os.stat('../' * 20 + X)", "by a descriptor": "os.stat(X[1:], dir_fd=os.open(os.path.dirname(os.__file__), 0)) and os.stat(X)",
}  # fmt: skip


class Watched:
    """What a program could do to the process that runs it, or to its files."""

    def __init__(self, folder: Path):
        self.folder, self.signals = folder, []
        for number in (signal.SIGIO, signal.SIGURG, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGRTMIN):
            signal.signal(number, lambda number, _: self.signals.append(number))
        os.setpriority(os.PRIO_PROCESS, 0, 0)

    def state(self) -> list:
        files = [
            [str(p), p.stat().st_mode, p.stat().st_mtime_ns, p.read_bytes().decode()]
            for p in sorted(self.folder.iterdir())
        ]
        io_class = ctypes.CDLL(None).syscall(ctypes.c_long((252, 31)[COLUMN]), 1, 0)
        limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
        priority = [
            os.getpriority(os.PRIO_PROCESS, 0),
            os.sched_getscheduler(0),
            sorted(os.sched_getaffinity(0)),
            io_class,
        ]
        return json.loads(json.dumps([self.signals, priority, limits, os.getpgrp(), os.getcwd(), os.uname()[1], files]))


def attempts(names: list[str], tried: dict[str, str]) -> str:
    """A program that makes attempts by name and tells which succeeded."""
    lines = [TOOLS]
    for name in names:
        body = f"try:\n    exec({tried[name]!r})\n    print('DONE', {name!r}, flush=True)\n"
        lines.append(f"{body}except BaseException as error: print('REFUSED', {name!r}, flush=True)")
    return "\n".join(lines)


def try_all(landlock: int, namespaces: bool) -> Iterator[list]:
    """Tries every escape in batches; yields name, whether it held, and what was seen."""
    sandbox.NEWEST_LANDLOCK, sandbox.NAMESPACES = landlock, namespaces
    if not landlock:
        os.environ[sandbox.PERMISSION] = "1"
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as shown:
        canary, open_to_all = Path(home, "canary"), Path(shown, "open")
        canary.write_text("alive"), open_to_all.write_text("alive")
        os.chmod(home, 0o755), os.chmod(shown, 0o777), open_to_all.chmod(0o666)
        readable = sandbox.readable_files()
        sandbox.readable_files = lambda: [*readable, shown]
        watches = [Watched(Path(home)), Watched(Path(shown))]
        before = [watch.state() for watch in watches]
        has_view = (
            "yes" in run_program(f"import os\nprint('no' if os.path.exists({home!r}) else 'yes')", limits=QUICK).output
        )
        yield ["a private view where namespaces are allowed", has_view or not namespaces, "" if has_view else "no view"]
        every = escapes(canary, open_to_all)
        if has_view:
            targets = (
                home,
                str(canary),
                "/etc/passwd",
                "/etc/hostname",
                "/proc/self",
                "/proc/1",
                f"/proc/{os.getpid()}",
                "/home",
                "/usr/bin",
                "/var",
                "/sys",
            )
            for path, (name, code) in product(targets, LOOKS.items()):
                every[f"look: {name} of {path if 'tmp' not in path else Path(path).name[:3]}"] = code.replace(
                    "X", repr(path)
                )
        elif not landlock:  # nothing guards files then
            every = {
                k: c
                for k, c in every.items()
                if not k.startswith(("file:", "proc:", "empty", "open to", "create", "nameless"))
            }
        if os.geteuid() == 0 and not has_view and os.stat(sys.base_prefix).st_uid == 0:
            del every["1200 threads"]  # root's threads are not counted where it cannot become another user
        waiting = list(every)
        size = 24
        while waiting:
            batch, waiting = waiting[:size], waiting[size:]
            outcome = run_program(attempts(batch, every), "input", limits=QUICK)
            words = [
                line.split(" ", 1) for line in outcome.output.splitlines() if line.startswith(("DONE ", "REFUSED "))
            ]
            said = {name: word for word, name in words}
            after = [watch.state() for watch in watches]
            if after != before and len(batch) > 1:  # which one?
                yield [f"one of the {size} from {batch[0]!r} on", False, "the parent has changed"]
                waiting, size = batch + waiting, 1
                before = after
                continue
            for name in batch:
                ended = "killed" if "x32" in name and outcome.kind == "runtime_error" else "ended"
                held = said.get(name, ended) in ("REFUSED", "killed") and after == before
                if name in said or len(batch) == 1:
                    yield [
                        name,
                        held,
                        ""
                        if held
                        else f"{said.get(name, outcome.kind)}, parent {'changed' if after != before else 'as before'}",
                    ]
            untried = [name for name in batch if name not in said]
            if untried and len(batch) > 1:  # the first of them ended the program
                waiting, size = untried[:1] + waiting + untried[1:], 1
                continue
            size, before = 24, after
        yield ["the parent is alive", True, ""]


CONFIGURATIONS = [(user, landlock, True) for user in ("root", "user") for landlock in (6, 5, 1, 0)]
CONFIGURATIONS += [(user, landlock, False) for user in ("root", "user") for landlock in (6, 5, 1, 0)]


@pytest.mark.parametrize(("user", "landlock", "namespaces"), CONFIGURATIONS)
def test_escapes(case, user, landlock, namespaces):
    if user == "root" and os.geteuid() != 0:
        pytest.skip("is not root")
    where = f"{user}, Landlock {landlock}, {'namespaces' if namespaces else 'no namespaces'}"
    last = ""
    try:
        for name, held, seen in forked(lambda: try_all(landlock, namespaces), ordinary=user == "user"):
            case(f"{where}: {name}", held, seen)
            last = name
    except PermissionError as error:
        pytest.skip(str(error))
    case(f"{where}: ended by itself", last == "the parent is alive", f"after {last!r}")


def test_every_other_call_is_refused(case):
    allowed = {pair[COLUMN] for pair in sandbox_child.ALLOWED.values()}
    allowed |= {numbers[COLUMN] for numbers, _ in sandbox_child.ALLOWED_IF.values()}
    probes = () if COLUMN else (335, 336)  # uretprobe and uprobe: exempt from filters; the kernel kills other callers
    others = [number for number in range(600) if number not in allowed and number not in probes]
    program = f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfor n in {others}:\n"
    program += (
        " r = libc.syscall(ctypes.c_long(n), *[ctypes.c_long(-1)] * 6)\n print(n, r, ctypes.get_errno(), flush=True)"
    )
    seen = {int(line.split()[0]): line.split()[1:] for line in run_program(program, limits=QUICK).output.splitlines()}
    for number in others:
        case(f"call number {number}", seen.get(number) in (["-1", "1"], ["-1", "38"]), " ".join(seen.get(number, [])))


# ---------------------------------------------------------------------------------------------------------- cheating
SECRET = "4711-only-the-parent-knows"
PRINT = json.dumps({"inputs": ["7\n", "8\n"], "outputs": [SECRET, SECRET]})
CALL = json.dumps({"fn_name": "f", "inputs": [[7], [8]], "outputs": [[SECRET], [SECRET]]})


def printing(expected: str, program: str) -> tuple[str, str]:
    return json.dumps({"inputs": ["7\n"], "outputs": [expected]}), program


def calling(expected: object, program: str) -> tuple[str, str]:
    return json.dumps({"fn_name": "f", "inputs": [[7]], "outputs": [[expected]]}), program


def cheats() -> dict[str, tuple[str, str]]:
    """Tests and a program that should get no test's reward and no mask, by name."""
    found: dict[str, tuple[str, str]] = {}
    ends = [f"{end}({value})" for end in ("sys.exit", "exit", "quit", "os._exit") for value in ("0", "1", "255")]
    ends += [
        "raise SystemExit",
        "raise SystemExit('ok')",
        "raise KeyboardInterrupt",
        "raise GeneratorExit",
        "os.abort()",
        "sys.exit(True)",
    ]
    ends += [
        "signal.raise_signal(9)",
        "os.kill(os.getpid(), 9)",
        "os.kill(0, 9)",
        "signal.pthread_kill(threading.get_ident(), 9)",
    ]
    ends += ["ctypes.string_at(0)", "sys.exit('4711')", "os.close(1)", "os.closerange(0, 32)"]
    imports = "import atexit, ctypes, os, signal, sys, threading\n"
    for end in ends:
        found[f"{end} at once"] = (PRINT, imports + end)
        found[f"{end} when imported"] = (CALL, imports + end)
        found[f"{end} in the function"] = (CALL, f"{imports}def f(x):\n {end}")
        found[f"{end} at exit"] = (PRINT, f"{imports}def g():\n {end}\natexit.register(g)")
        found[f"{end} in a thread"] = (PRINT, f"{imports}def g():\n {end}\nthreading.Thread(target=g).start()")
    for base in ("object", "str", "int", "float", "list", "tuple", "dict", "set", "bytes", "complex", "Exception"):
        for method, body in (("__eq__", "True"), ("__ne__", "False"), ("__repr__", repr(SECRET[:3])), ("__str__", "'1'"), ("__iter__", "iter('a')"), ("__contains__", "True"), ("__class__", "str")):  # fmt: skip
            head = "@property\n " if method == "__class__" else ""
            found[f"{base} with {method}"] = (
                CALL,
                f"class A({base}):\n {head}def {method}(self, *a): return {body}\n __hash__ = None\ndef f(x): return A()",
            )
    for target in (
        "builtins.all", "builtins.any", "builtins.zip", "builtins.map", "builtins.type", "builtins.isinstance", "builtins.len", "builtins.hasattr",
        "builtins.getattr", "builtins.print", "builtins.str", "builtins.float", "operator.eq", "json.dumps", "json.loads", "json.dump", "json.JSONEncoder.encode",
        "math.isclose", "re.fullmatch", "sys.exit", "os._exit", "sys.stdout.write", "decimal.Decimal", "types.ModuleType", "sys.modules['solution'].f", "sys.settrace",
    ):  # fmt: skip
        found[f"replaced {target}"] = (
            CALL,
            f"import builtins, decimal, json, math, operator, os, re, sys, types\ndef f(x): return x\ntry: {target} = lambda *a, **k: True\nexcept Exception: pass",
        )
    for name in ("plain", "run_function", "given_keys", "import_names", "checked", "json", "os"):
        code = f"import gc, types\ndef f(x): return 7\nfor g in gc.get_objects():\n if isinstance(g, types.FunctionType) and g.__name__ == 'plain': g.__globals__['{name}'] = lambda *a: True"
        found[f"replaced the child's {name}"] = (CALL, code)
    for module in (
        "datasets_prep", "datasets_prep.apps.reward", "datasets_prep.apps.sandbox",
        "datasets_prep.apps.sandbox_child", "lightrlhf", "sandbox_child", "__main__", "solution",
    ):  # fmt: skip
        found[f"imports {module}"] = (
            PRINT,
            f"import importlib\nm = importlib.import_module({module!r})\nm.same_text = m.same_answer = lambda *a: True\nprint(1)",
        )
        found[f"poses as {module}"] = (
            CALL,
            f"import sys, types\ndef f(x): return 1\nsys.modules[{module!r}] = types.SimpleNamespace(same_answer=lambda *a: True, plain=lambda x: True)",
        )
    for path in (
        "/proc/{p}/mem", "/proc/{p}/environ", "/proc/{p}/cmdline", "/proc/{p}/fd/0", "/proc/{p}/fd/3",
        "/proc/{p}/fd/5", "/proc/self/environ", "/proc/self/fd/3", "/proc/self/fd/4", "/dev/fd/3", "/dev/fd/4",
        "/dev/mem", "/dev/kmsg", "/dev/stderr", "../input", "../../tests.json", "tests.json",
    ):  # fmt: skip
        for where in ("print", "call"):
            read = f"open(f{path!r}.format(p=p)).read()".replace("open(f", "open(")
            found[f"{where}s {path}"] = (
                (PRINT, f"import os\np = os.getppid()\nprint({read})")
                if where == "print"
                else (CALL, f"import os\np = os.getppid()\ndef f(x): return {read}")
            )
    for name, code in {
        "frames": "found, frame = [], sys._getframe()\n while frame: found += [str(v) for v in frame.f_locals.values() if '4711' in str(v) and 'found' not in str(v)]; frame = frame.f_back\n return found[0]",
        "objects": "return next(o for o in gc.get_objects() if isinstance(o, dict) and 'outputs' in o)['outputs']",
        "referrers": "return [str(o) for o in gc.get_referrers(x) if 'only' in str(o)][0]", "arguments": "return sys.argv[1]", "original arguments": "return sys.orig_argv[-1]",
        "environment": "return os.environ['CODE_REWARD_SECRET']", "trace back": "return ''.join(traceback.format_stack())", "history": "return linecache.getlines('solution.py')",
        "own job": "return [o for o in gc.get_objects() if isinstance(o, dict) and 'program' in o][0]", "main": "return vars(sys.modules['__main__'])",
    }.items():  # fmt: skip
        found[f"searches {name}"] = (CALL, f"import gc, linecache, os, sys, traceback\ndef f(x):\n {code}")
        found[f"prints {name}"] = (PRINT, f"import gc, linecache, os, sys, traceback\ndef f(x):\n {code}\nprint(f(7))")
    for payload in ("true\n", '{"passed": true}\n', "[]\n", '["landlock", "seccomp"]\n', "NaN\n", "null\n", "1\n2\n", "{", "\\xff\n", "[" * 3000 + "\n", "9" * 9000 + "\n", '"a"\n' * 9, "\n", "\x00\n", "false\n", "Infinity\n"):  # fmt: skip
        write = f"import os\ndef g():\n for n in range(3, 32):\n  try: os.write(n, {payload.encode()!r})\n  except OSError: pass\n"
        found[f"writes {payload[:9]!r} and returns"] = (CALL, f"{write}def f(x):\n g()\n return 1")
        found[f"writes {payload[:9]!r} and ends"] = (CALL, f"{write}def f(x):\n g()\n os._exit(0)")
        found[f"writes {payload[:9]!r} when imported"] = (CALL, f"{write}g()\nos._exit(0)")
    found["answers a megabyte"] = (CALL, "def f(x): return 'a' * 2**20")
    for limit in ("CPU", "AS", "NOFILE", "FSIZE", "STACK", "DATA", "NPROC", "CORE", "RSS", "MEMLOCK"):
        found[f"lowers its {limit}"] = (
            PRINT,
            f"import resource as r\nr.setrlimit(r.RLIMIT_{limit}, (0, 0))\nwhile True: open('/dev/null'); x = [0] * 10**7",
        )
    wrong = [
        (1, "True"), (0, "False"), (True, "1"), (False, "0"), (True, "1.0"), (1, "'1'"), ("1", "1"), (3, "2.9999999999999996"), (3, "3.0000001"), (3, "[4]"), (0, "None"),
        (None, "0"), (None, "''"), ([], "None"), ([], "{}"), ({}, "[]"), ("", "[]"), ([1, 2], "[2, 1]"), ([1, 2], "{1, 2}"), ([1, 2], "[1]"), ([1, 2], "[1, 2, 2]"),
        ([1, 2], "(x for x in (1, 2))"), ([1, 2], "'[1, 2]'"), ([1, 2], "range(1, 3)"), ([1], "[True]"), ([True], "[1]"), ([[1]], "[[1.5]]"), ("abc", "'ABC'"), ("abc", "'abc '"),
        ("abc", "list('abc')"), ("abc", "b'abc'"), ({"a": 1}, "{'a': True}"), ({"a": 1}, "{'a': 1, 'b': 2}"), ({"a": 1}, "[('a', 1)]"), ({"1": 2}, "{1: 3}"), ({"a": 1}, "{}"),
        (0.5, "0.50001"), (0.5, "'0.5'"), (0.5, "float('nan')"), (0.5, "float('inf')"), (10**30, "1e30 + 1e20"), (2**53 + 1, "float(2**53 + 1)"), (10**400, "float('inf')"),
        (7.0, "object()"), ([0.1], "[0.2]"), ("None", "None"), (None, "'None'"), ("True", "True"), (1, "1j"), (1, "type"), (1, "lambda: 1"), (-1, "1"), ([None], "[0]"), ([[]], "[{}]"),
        ([1, 2, 3], "{1: 1, 2: 2, 3: 3}"), (5, "Decimal('5.1')"), (5, "Fraction(51, 10)"), (5, "np.array([5, 5])"), ([5], "np.array([5, 6])"), ("a", "['b']"), ("ab", "'a'"),
    ]  # fmt: skip
    for expected, answer in wrong:
        found[f"{answer} for {expected!r}"[:90]] = calling(
            expected, f"from decimal import Decimal\ndef f(x): return {answer}"
        )
    texts = [
        ("3", "2.9999999"), ("3", "3.0000001"), ("3", "03"), ("3", "+3"), ("3", "３"), ("3", "3."), ("3", "3 3"), ("3", "3\n3"), ("3", ""), ("3", "three"), ("3", "0x3"), ("3", "3L"),
        ("12", "1 2"), ("1 2", "2 1"), ("1 2", "1\n2"), ("1\n2", "1 2"), ("1\n2", "2\n1"), ("1 1 2", "1 2"), ("1 2", "1 2 2"), ("YES", "yes"), ("YES", "YES NO"), ("YES", "NO"), ("YES", "YES\nNO"),
        ("0.5", "0.6"), ("0.5", "nan"), ("0.5", "inf"), ("0.5", "0,5"), ("0.5", "1/2"), ("1000000007", "1000000007.1"), ("1000000007", "1e9"), ("1000000007", "1.000000007e8"), ("nan", "0.5"),
        ("inf", "1e999"), ("1e5", "1e6"), ("-0.5", "0.5"), ("a", "a b"), ("[1, 2]", "[2, 1]"), ("[1, 2]", "[1, 2"), ("3", "Answer: 3"), ("3", "3\nProcess finished"), ("0", "-1"), ("abc", "cba"), ("3", "*"), ("3", ".*"), ("3", "%s"),
        ("123456789012345678901234567890", "123456789012345678901234567891.0"), ("0.000000001", "0.00001"), ("100.0", "100.1"), ("3", "3\u200b"), ("3", "\ufeff3"), ("3", "\x1b[K3"),
    ]  # fmt: skip
    for expected, printed in texts:
        found[f"prints {printed!r} for {expected!r}"] = printing(expected, f"print({printed!r})")
    for number, program in enumerate(["", "#", "pass", "4711", "print()", "print(input())", "import this", "```", "```python\n```", "f = None", "f = 1", "class Solution: pass", "class Solution:\n f = 1", "def f(): return 1", "def f(x, y): return 1", "def g(x): return 1", "async def f(x): return 1", "def f(x): yield 1", "class f: pass", "import solution\ndef f(x): return solution", "return 1", "assert False", "1/0", "print(", "\0", "\ud800", "def f(x): return f", "def f(x): return f(x)", "f = input", "f = print", "f = eval", "def f(x):\n while 1: pass", "x = 1\ndel f", "def f(x): raise StopIteration", "def f(x): a = []; a.append(a); return a"]):  # fmt: skip
        found[f"empty program {number}: {program[:30]!r}, called"] = (CALL, program)
        found[f"empty program {number}: {program[:30]!r}, read"] = (PRINT, program)
    return found


def test_cheating_is_not_rewarded(case, monkeypatch):
    monkeypatch.setenv("CODE_REWARD_SECRET", SECRET)
    every = cheats()
    with ThreadPoolExecutor(2) as pool:
        scores = pool.map(lambda pair: score_program(pair[1], pair[0], QUICK), every.values())
        for name, score in zip(every, scores):
            case(name, score in (-1.0, -0.6, -0.3), f"{score}")
    assert len(every) >= 394
