"""Child process of the sandbox: isolates itself, then runs one program on one input.

Started by `sandbox.py` as `python -I -S sandbox_child.py JOB_FD STATUS_FD PARENT_PID` in an empty folder with a clean
environment; killed together with that parent. The job contains the program and one input, never a test's expected
value. Written to STATUS_FD, one JSON value per line: the active layers of isolation once all is ready for the program,
whether the program compiled, and the return value of a called function. A program that writes there itself can only
submit answers, which gains nothing without knowing the right one. A failure before the first line is the sandbox's.

Imports the standard library only: the sandbox cannot read this package.
"""

import _thread
import builtins
import ctypes
import errno
import importlib
import json
import os
import platform
import re
import resource
import struct
import sys
import types

# Allowed system calls with their numbers on x86-64 and arm64 (None: does not exist there); all others are refused.
ALLOWED = {
    # files by descriptor
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "lseek": (8, 62), "close": (3, 57),
    "close_range": (436, 436), "fstat": (5, 80), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "pipe": (22, None), "pipe2": (293, 59), "getdents": (78, None), "getdents64": (217, 61),
    # files by name: Landlock does not govern these, the private view of the files does
    "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "access": (21, None),
    "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78),
    "getcwd": (79, 17),
    # memory
    "brk": (12, 214), "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226),
    "madvise": (28, 233),
    # its threads and its end
    "futex": (202, 98), "futex_waitv": (449, 449), "set_robust_list": (273, 99), "set_tid_address": (218, 96),
    "rseq": (334, 293), "sched_yield": (24, 124), "getcpu": (309, 168), "exit": (60, 93), "exit_group": (231, 94),
    # signals and timers of its own
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "pause": (34, None),
    "alarm": (37, None), "getitimer": (36, 102), "setitimer": (38, 103), "restart_syscall": (219, 128),
    # waiting
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441), "eventfd": (284, None), "eventfd2": (290, 19), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    # what the kernel tells it of itself
    "time": (201, None), "gettimeofday": (96, 169), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "times": (100, 153), "getrusage": (98, 165), "getrlimit": (97, 163), "getrandom": (318, 278), "uname": (63, 160),
    "sysinfo": (99, 179), "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148),
    "getresgid": (120, 150), "getgroups": (115, 158), "getpgrp": (111, None),
    # the connected pair of sockets by which asyncio wakes itself
    "recvfrom": (45, 207), "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209),
    "shutdown": (48, 210),
}  # fmt: skip

O_TRUNC, O_ASYNC, O_PATH = 0x200, 0x2000, 0x200000  # the same on both
THREAD, OF_A_THREAD = 0x00010000, 0x007D0F00  # CLONE_THREAD; all flags with which libc starts a thread
READ_ONLY = ("lacks", 3 | O_TRUNC | O_PATH)
TERMINAL = (0x5401, 0x802C542A, 0x5413)  # TCGETS, TCGETS2 and TIOCGWINSZ: whether it is a terminal
DESCRIPTOR = (0x541B, 0x5421, 0x5450, 0x5451)  # FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
# Calls allowed for some arguments: lists of conditions (half word of the arguments, test, value), one list must hold.
# Half word 2n is the lower half of argument n, which is all the kernel reads of an `int`.
ALLOWED_IF = {
    # Landlock before its third version does not see that O_TRUNC empties a file opened for reading, nor any version
    # O_PATH or the access mode 3
    "open": ((2, None), [[(2, *READ_ONLY)]] + [[(2, "has", one), (2, "lacks", 3 - one | O_PATH)] for one in (1, 2)]),
    "openat": ((257, 56), [[(4, *READ_ONLY)]] + [[(4, "has", one), (4, "lacks", 3 - one | O_PATH)] for one in (1, 2)]),
    "clone": ((56, 220), [[(0, "has", THREAD), (0, "lacks", 0xFFFFFFFF - OF_A_THREAD)]]),
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC, and F_SETFL: no owner, signal, lease or notice
    "fcntl": ((72, 25), [[(2, "is", n)] for n in (0, 1, 2, 3, 1030)] + [[(2, "is", 4), (4, "lacks", O_ASYNC)]]),
    "ioctl": ((16, 29), [[(2, "is", request)] for request in TERMINAL + DESCRIPTOR]),
    "prctl": ((157, 167), [[(0, "is", 15)], [(0, "is", 16)]]),  # the name of a thread
    # its own limits, but for CPU time: death by a limit of its own would look like the machine's fault
    "prlimit64": ((302, 261), [[(0, "is", 0), (2, "has", 0xFFFFFFFF)]]),
    # AF_UNIX, SOCK_STREAM, with SOCK_NONBLOCK and SOCK_CLOEXEC or not; none can be given an address
    "socketpair": ((53, 199), [[(0, "is", 1), (2, "is", 1 + flags)] for flags in (0, 0x800, 0x80000, 0x80800)]),
    "sendto": ((44, 206), [[(8, "is", 0), (9, "is", 0)]]),
    "sched_getaffinity": ((204, 123), [[(0, "is", 0)]]),
}
NEWER = 424  # system calls from here on fail with ENOSYS, as on an older kernel, so that libc uses older ones
CAPSET = (126, 91)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH
NEW_MOUNT, NEW_USER, NEW_NETWORK_IPC = 0x00020000, 0x10000000, 0x40000000 | 0x08000000
NOBODY = 65534

libc = ctypes.CDLL(None, use_errno=True)


def checked(result, *lacking):
    """`result` of a libc call; None if it failed with one of `lacking`. Raises: OSError for other failures."""
    if result >= 0:
        return result
    number = ctypes.get_errno()
    if number in lacking:
        return None
    raise OSError(number, os.strerror(number))


def limit_resources(limits):
    """Set hard limits, which the program cannot raise."""
    for name, value in (
        ("RLIMIT_AS", limits["memory"]),
        ("RLIMIT_FSIZE", limits["output"]),
        ("RLIMIT_NOFILE", 32),
        ("RLIMIT_CORE", 0),
    ):
        _, most = resource.getrlimit(getattr(resource, name))
        value = int(value) if most < 0 else min(int(value), most)
        resource.setrlimit(getattr(resource, name), (value, value))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    seconds = max(int(limits["seconds"]), 1)
    last = seconds + 1 if most < 0 else min(seconds + 1, most)  # SIGXCPU first, SIGKILL for a program that ignores it
    resource.setrlimit(resource.RLIMIT_CPU, (min(seconds, last), last))
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = 256 * 2**20  # honest solutions recurse deeply
    resource.setrlimit(resource.RLIMIT_STACK, (wanted if most < 0 else min(wanted, most), most))


def limit_threads(wanted, counted_apart):
    """Limit threads to `wanted`; where the kernel counts all of the user's, to at most twice as many more."""
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    most = 2**22 if most < 0 else most  # the kernel's own limit
    value = min(wanted, most)
    resource.setrlimit(resource.RLIMIT_NPROC, (value, most))
    if not counted_apart:
        while value < most and not thread_starts():
            value = min(value + wanted, most)
            resource.setrlimit(resource.RLIMIT_NPROC, (value, most))
        value = min(value + wanted, most)
    resource.setrlimit(resource.RLIMIT_NPROC, (value, value))


def thread_starts():
    ended = _thread.allocate_lock()
    ended.acquire()
    try:
        _thread.start_new_thread(ended.release, ())
    except RuntimeError:
        return False
    return ended.acquire()


def isolate(job, parent):
    """Activate each layer of isolation that the kernel supports; returns their names."""
    layers = []
    root = os.geteuid() == 0
    mounts = False  # as root in the first user namespace
    if job["namespaces"]:
        mounts = root and libc.unshare(NEW_MOUNT | NEW_NETWORK_IPC) == 0
        if root and not mounts:
            layers += drop_user(job)  # then like any user
        if mounts or enter_user_namespace():
            layers += ["namespaces"]
            layers += ["view"] if private_view(job) else []
    if root and "user" not in layers:
        layers += drop_user(job)
    # a user namespace of its own counts its threads apart, since Linux 5.14
    apart = "namespaces" in layers and (not mounts or libc.unshare(NEW_USER) == 0)
    limit_threads(job["limits"]["processes"], apart and kernel() >= (5, 14))
    drop_capabilities()
    die_with(parent)  # a change of user forgets it
    checked(libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS, required by both below
    layers += ["landlock"] if restrict_files(job["readable"], job["landlock"]) else []
    layers += ["seccomp"] if allow_calls() else []
    return layers


def kernel():
    return tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2])


def die_with(parent):
    """Be killed when the process `parent` ends."""
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != parent:  # killed before
        os._exit(1)


def enter_user_namespace():
    """Whether namespaces of users, mounts, network and messages could be entered, as the same user."""
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(NEW_USER | NEW_MOUNT | NEW_NETWORK_IPC) != 0:
        return False
    try:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    except OSError:  # then without a private view
        pass
    return True


def private_view(job):
    """Whether all files but the readable ones could be taken out of sight, which Landlock does not do for `stat`."""
    folder = os.getcwd()
    os.umask(0o022)  # so that an unprivileged user may enter the folders of the private view
    try:
        mount(None, "/", None, 0x4000 | 0x40000)  # MS_REC, MS_PRIVATE
        mount("view", folder, "tmpfs", 2 | 4, "mode=755")  # MS_NOSUID, MS_NODEV
    except OSError as error:
        return unsupported(error)
    try:
        shown: list[str] = []
        for path in sorted(job["readable"]):
            if os.path.exists(path) and not any(path.startswith(above + "/") for above in shown):
                show(path, folder + path)
                shown.append(path)
        show(job["input"], f"{folder}/dev/stdin")
        os.chdir(folder)
        checked(libc.pivot_root(b".", b"."))
        checked(libc.umount2(b".", 2))  # MNT_DETACH
        os.chdir("/")
    except OSError as error:
        libc.umount2(os.fsencode(folder), 2)
        return unsupported(error)
    read_only = struct.pack("4Q", 1 | 2, 0, 0, 0)  # MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID; Linux 5.12
    libc.syscall(442, -100, b"/", 0x8000, read_only, len(read_only))  # mount_setattr, AT_FDCWD, AT_RECURSIVE
    return True


def unsupported(error):
    """False for a right that is missing. Raises: OSError `error` if the machine is short of something."""
    if error.errno in (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC):
        raise error
    return False


def show(path, target):
    """Make the file or folder `path` visible at `target`."""
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    mount(path, target, None, 0x1000 | 0x4000)  # MS_BIND, MS_REC


def mount(source, target, kind, flags, options=None):
    source, target, kind, options = (
        None if text is None else os.fsencode(text) for text in (source, target, kind, options)
    )
    checked(libc.mount(source, target, kind, flags, options))


def drop_user(job):
    """Become a user without rights, if Python can be read as that one: limits on processes do not hold for root."""
    try:
        os.setgroups([])
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    except OSError:
        return []
    needed = [path for path in job["needed"] if not os.access(path, os.R_OK | os.X_OK, effective_ids=True)]
    os.seteuid(0)
    os.setegid(0)
    if needed:
        return []
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/self is its own again, which /dev/stdin needs
    return ["user"]


def drop_capabilities():
    machine = platform.machine()
    if machine in MACHINES:
        header = struct.pack("Ii", 0x20080522, 0)  # version 3, this process
        checked(libc.syscall(CAPSET[MACHINES[machine][0]], header, struct.pack("6I", *[0] * 6)))


def restrict_files(readable, newest):
    """Landlock: only files below `readable` can be read, none written but /dev/null; no TCP, no signals to others.

    `newest`: the newest version of its rules to use; 0 for none.
    """
    abi = min(checked(libc.syscall(444, None, 0, 1), errno.ENOSYS, errno.EOPNOTSUPP) or 0, newest)
    if abi < 1:
        return False
    handled = (1 << 13) - 1  # all rights of the first version
    handled |= (1 << 13 if abi >= 2 else 0) | (1 << 14 if abi >= 3 else 0) | (1 << 15 if abi >= 5 else 0)
    network, scoped = (0b11 if abi >= 4 else 0), (0b11 if abi >= 6 else 0)
    attributes = struct.pack("QQQ", handled, network, scoped)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = checked(libc.syscall(444, attributes, len(attributes), 0))
    execute, write_file, read_file, read_directory = 1, 2, 4, 8
    for path in readable:
        try:
            below = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        rights = execute | read_file | (read_directory if os.path.isdir(path) else 0)
        rights |= write_file if path == os.devnull else 0
        checked(libc.syscall(445, ruleset, 1, struct.pack("=Qi", rights, below), 0))
        os.close(below)
    checked(libc.syscall(445, ruleset, 1, struct.pack("=Qi", read_file, 0), 0))  # its input, for /dev/stdin
    checked(libc.syscall(446, ruleset, 0))
    os.close(ruleset)
    return True


def allow_calls():
    """Seccomp: calls that are not allowed fail with EPERM (young ones with ENOSYS, so that libc takes older ones)."""
    machine = platform.machine()
    if machine not in MACHINES or struct.calcsize("P") != 8 or sys.byteorder != "little":
        return False
    code = ctypes.create_string_buffer(call_filter(*MACHINES[machine]))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(code))
    return checked(libc.prctl(22, 2, program, 0, 0), errno.EINVAL, errno.ENOSYS) == 0  # PR_SET_SECCOMP, filter


def call_filter(column, architecture):
    """The filter's instructions for a column of the tables: first conditions, then what is allowed as it is."""
    load, is_equal, is_above, has, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000

    def line(code, value, if_true=0, if_false=0):
        return struct.pack("HBBI", code, if_true, if_false, value)

    lines = [line(load, 4), line(is_equal, architecture, 1, 0), line(answer, kill)]
    lines += [line(load, 0), line(is_above, 0x40000000, 0, 1), line(answer, kill)]  # the x32 numbers
    for numbers, alternatives in ALLOWED_IF.values():
        if numbers[column] is None:
            continue
        block = []
        for conditions in alternatives:
            for index, (half_word, test, value) in enumerate(conditions):
                fail = 2 * (len(conditions) - index - 1) + 1  # behind the answer of this alternative
                block.append(line(load, 16 + 4 * half_word))
                if test == "lacks":
                    block.append(line(has, value, fail, 0))
                else:
                    block.append(line(has if test == "has" else is_equal, value, 0, fail))
            block.append(line(answer, allow))
        block.append(line(answer, refuse))
        lines += [line(is_equal, numbers[column], 0, len(block)), *block]
    for numbers in ALLOWED.values():
        if numbers[column] is not None:
            lines += [line(is_equal, numbers[column], 0, 1), line(answer, allow)]
    lines += [line(is_above, NEWER, 0, 1), line(answer, unknown), line(answer, refuse)]
    return b"".join(lines)


def import_names(wanted):
    """Names, each with the module that it stands for, or the member of one."""
    modules = {module: importlib.import_module(module) for _, module, _ in wanted}
    return {name: getattr(modules[module], member) if member else modules[module] for name, module, member in wanted}


def plain(value):
    """`value` as JSON data: a tuple becomes a list, a number a plain one, a dict's keys text. Raises: TypeError."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {(key if isinstance(key, str) else json.dumps(plain(key))): plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, float):
        return float.__float__(value)
    module = type(value).__module__
    if module == "numpy" and getattr(value, "shape", None) == ():
        return plain(value.item())
    if module in ("fractions", "decimal"):
        numerator, denominator = value.as_integer_ratio()
        return numerator if denominator == 1 else float(value)
    raise TypeError


def given_keys(arguments):
    """`arguments` with numbers as keys of a first dict, if all of them are numbers: JSON knows text only."""
    if arguments and isinstance(arguments[0], dict):
        try:
            return [{int(key): value for key, value in arguments[0].items()}, *arguments[1:]]
        except ValueError:
            pass
    return arguments


def run_function(namespace, name, arguments, status):
    """Call the function `name` and write its answer; nothing where JSON cannot hold the value."""
    owner = namespace.get("Solution")
    answer = getattr(owner(), name)(*arguments) if hasattr(owner, name) else namespace[name](*arguments)
    try:
        status.write(json.dumps(plain(answer)) + "\n")
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    status.close()
    os._exit(0)


def main():
    job_fd, status_fd, parent = map(int, sys.argv[1:])
    die_with(parent)
    with open(job_fd, encoding="utf-8") as file:
        job = json.load(file)
    status = open(status_fd, "w", encoding="utf-8", buffering=1)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # short of memory, the kernel ends this process before the trainer
    except OSError:
        pass
    sys.argv = ["solution.py"]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # defined by `site`, which -S leaves out
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)  # older solutions print long numbers; CPU time is limited
    sys.path += job["paths"]
    limit_resources(job["limits"])
    layers = isolate(job, parent)
    if job["must_isolate"] and not {"landlock", "seccomp"} <= set(layers):
        status.write(json.dumps(layers) + "\n")
        os._exit(1)
    name = job["function"]
    # a module of its own: the program finds neither this one's names nor, when its function is called, its own `main`
    module = types.ModuleType("__main__" if name is None else "solution")
    vars(module).update(import_names(job["names"]))
    if name is None:
        vars(module).update(stdin=sys.stdin, stdout=sys.stdout)  # as APPS's harness has it
    sys.modules[module.__name__] = module
    status.write(json.dumps(layers) + "\n")
    try:
        code = compile(job["program"], "solution.py", "exec", dont_inherit=True)
    except BaseException:
        status.write("false\n")
        os._exit(1)
    status.write("true\n")
    if name is not None:
        exec(code, vars(module))
        run_function(vars(module), name, given_keys(job["arguments"]), status)
    status.close()
    try:
        exec(code, vars(module))
    except SystemExit:  # whatever its status: the output is compared
        pass


if __name__ == "__main__":
    main()
