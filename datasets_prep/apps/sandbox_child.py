"""Child process of the sandbox: isolates itself, then runs one program on one input.

Started by `sandbox.py` as `python -I -S sandbox_child.py JOB_FD STATUS_FD PARENT_PID` in an empty folder with a clean
environment; killed together with that parent. The job contains the program and one input, never a test's expected
value. Written to STATUS_FD, one JSON value per line: the active layers of isolation, whether the program compiled, and
the return value of a called function. A program that writes there itself can only submit answers, which gains nothing
without knowing the right one.

Imports the standard library only: the sandbox cannot read this package.
"""

import builtins
import ctypes
import json
import os
import platform
import resource
import struct
import sys

# Refused system calls with their numbers on x86-64 and arm64 (None: does not exist there). Allowed remain threads,
# memory, and files within Landlock's rules.
REFUSED = {
    # other processes: none can be started, inspected or signalled
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "kill": (62, 129),
    "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "setsid": (112, 157), "setpgid": (109, 154), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "prctl": (157, 167),
    # network and messages
    "socket": (41, 198), "socketpair": (53, 199), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    # changes to files that Landlock does not cover
    "chmod": (90, None), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "lchown": (94, None),
    "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "mknod": (133, None), "mknodat": (259, 33),
    # the system itself
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "setns": (308, 268),
    "unshare": (272, 97), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsmount": (432, 432), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "quotactl": (179, 60), "acct": (163, 89), "syslog": (103, 116),
    "iopl": (172, None), "ioperm": (173, None), "personality": (135, 92), "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
}  # fmt: skip
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
PRLIMIT = {"x86_64": 302, "aarch64": 261}
CAPSET = {"x86_64": 126, "aarch64": 91}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE_THREAD = 0x00010000
NEW_USER_NET_IPC = 0x10000000 | 0x40000000 | 0x08000000
EPERM, ENOSYS = 1, 38

libc = ctypes.CDLL(None, use_errno=True)


def limit_resources(limits):
    """Set hard limits, which the program cannot raise."""
    for name, value in (
        ("RLIMIT_CPU", max(limits["seconds"], 1)),
        ("RLIMIT_AS", limits["memory"]),
        ("RLIMIT_FSIZE", limits["output"]),
        ("RLIMIT_NOFILE", 32),
        ("RLIMIT_NPROC", limits["processes"]),
        ("RLIMIT_CORE", 0),
    ):
        _, most = resource.getrlimit(getattr(resource, name))
        value = int(value) if most < 0 else min(int(value), most)
        resource.setrlimit(getattr(resource, name), (value, value))
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = 256 * 2**20  # honest solutions recurse deeply
    resource.setrlimit(resource.RLIMIT_STACK, (wanted if most < 0 else min(wanted, most), most))


def isolate(readable):
    """Activate each layer of isolation that the kernel supports; returns their names."""
    layers = []
    if libc.unshare(NEW_USER_NET_IPC) == 0:
        layers.append("namespaces")
    drop_capabilities()
    if libc.prctl(38, 1, 0, 0, 0) == 0:  # PR_SET_NO_NEW_PRIVS, required by both below
        layers += ["landlock"] if restrict_files(readable) else []
        layers += ["seccomp"] if refuse_calls() else []
    return layers


def drop_capabilities():
    machine = platform.machine()
    if machine in CAPSET:
        header = struct.pack("Ii", 0x20080522, 0)  # version 3, this process
        libc.syscall(CAPSET[machine], header, struct.pack("6I", *[0] * 6))


def restrict_files(readable):
    """Landlock: only files below `readable` can be read, none written; no TCP, no signals to other processes."""
    abi = libc.syscall(444, None, 0, 1)
    if abi < 1:
        return False
    handled = (1 << 13) - 1  # all rights of the first version
    handled |= (1 << 13 if abi >= 2 else 0) | (1 << 14 if abi >= 3 else 0) | (1 << 15 if abi >= 5 else 0)
    network, scoped = (0b11 if abi >= 4 else 0), (0b11 if abi >= 6 else 0)
    attributes = struct.pack("QQQ", handled, network, scoped)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = libc.syscall(444, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    execute, read_file, read_directory = 1, 4, 8
    for path in readable:
        try:
            below = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rights = execute | read_file | (read_directory if os.path.isdir(path) else 0)
        libc.syscall(445, ruleset, 1, struct.pack("=Qi", rights, below), 0)
        os.close(below)
    done = libc.syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return done


def refuse_calls():
    """Seccomp: refused calls and new processes (not threads) fail with EPERM."""
    machine = platform.machine()
    if machine not in AUDIT_ARCH:
        return False
    column = 0 if machine == "x86_64" else 1
    numbers = [pair[column] for pair in REFUSED.values() if pair[column] is not None]

    load, jump_equal, jump_above, jump_set, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown, kill = 0x7FFF0000, 0x00050000 | EPERM, 0x00050000 | ENOSYS, 0x80000000

    def instruction(code, value, if_true=0, if_false=0):
        return struct.pack("HBBI", code, if_true, if_false, value)

    program = [instruction(load, 4), instruction(jump_equal, AUDIT_ARCH[machine], 1, 0), instruction(answer, kill)]
    program += [instruction(load, 0), instruction(jump_above, 0x40000000, 0, 1), instruction(answer, kill)]
    program += [instruction(jump_equal, CLONE3, 0, 1), instruction(answer, unknown)]  # libc falls back to clone
    program += [instruction(jump_equal, CLONE[machine], 0, 4), instruction(load, 16)]  # its first argument, the flags
    program += [instruction(jump_set, CLONE_THREAD, 0, 1), instruction(answer, allow), instruction(answer, refuse)]
    # prlimit on itself only: its first argument, a process number of 32 bits, must be 0
    program += [instruction(jump_equal, PRLIMIT[machine], 0, 4), instruction(load, 16)]
    program += [instruction(jump_equal, 0, 0, 1), instruction(answer, allow), instruction(answer, refuse)]
    for number in numbers:
        program += [instruction(jump_equal, number, 0, 1), instruction(answer, refuse)]
    program.append(instruction(answer, allow))
    code = ctypes.create_string_buffer(b"".join(program))
    filter_program = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    return libc.prctl(22, 2, filter_program, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def plain(value):
    """`value` as JSON data; a tuple becomes a list. Raises: TypeError for an object."""
    if type(value) in (list, tuple):
        return [plain(item) for item in value]
    if type(value) is dict:
        return {(key if type(key) is str else json.dumps(plain(key))): plain(item) for key, item in value.items()}
    if type(value) in (str, int, float, bool, type(None)):
        return value
    raise TypeError


def main():
    job_fd, status_fd, parent = map(int, sys.argv[1:])
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != parent:  # killed before
        os._exit(1)
    with open(job_fd, encoding="utf-8") as file:
        job = json.load(file)
    status = open(status_fd, "w", encoding="utf-8", buffering=1)
    sys.argv = ["solution.py"]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # defined by `site`, which -S leaves out
    sys.path += job["paths"]
    limit_resources(job["limits"])
    layers = isolate(job["readable"])
    status.write(json.dumps(layers) + "\n")
    if job["must_isolate"] and not {"landlock", "seccomp"} <= set(layers):
        os._exit(1)
    try:
        code = compile(job["program"], "solution.py", "exec")
    except BaseException:
        status.write("false\n")
        os._exit(1)
    status.write("true\n")
    name, arguments = job["function"], job["arguments"]
    if name is None:
        status.close()
    namespace: dict = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(code, namespace)
    if name is not None:
        owner = namespace.get("Solution")
        answer = getattr(owner(), name)(*arguments) if owner is not None else namespace[name](*arguments)
        status.write(json.dumps(plain(answer)) + "\n")
        status.close()
        os._exit(0)


if __name__ == "__main__":
    main()
