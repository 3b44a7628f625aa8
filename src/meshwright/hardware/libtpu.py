"""The environment variables of libtpu on machines without TPUs."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

# Without these variables, libtpu queries the cloud for its machine type, and prints warnings if there is no answer.
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_DEVICES = Path("/dev")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"  # PCI vendor of all TPUs, and of the disks and network cards of Google's machines
_DISKS_AND_NETWORKS = ("0x01", "0x02")  # PCI classes


def quiet_libtpu() -> None:
    """Keeps libtpu from printing warnings when JAX starts on a machine without TPUs; call it before JAX starts.

    Has no effect if libtpu is not installed or the machine has TPUs, and keeps variables that are already set.
    """
    if importlib.util.find_spec("libtpu") is not None and not has_tpu():
        for name, value in TPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)


def skip_libtpu() -> None:
    """Keeps JAX from starting libtpu on a machine without TPUs; call it before JAX starts.

    Starting it to find no TPU can take 20 seconds. Compiling for TPUs still works. Has no effect if libtpu is not
    installed, the machine has TPUs, or JAX_PLATFORMS is set.
    """
    if os.environ.get("JAX_PLATFORMS") or importlib.util.find_spec("libtpu") is None or has_tpu():
        return
    platforms = "cuda,cpu" if any(_DEVICES.glob("nvidia[0-9]*")) else "cpu"
    os.environ["JAX_PLATFORMS"] = platforms
    if (jax := sys.modules.get("jax")) is not None:
        jax.config.update("jax_platforms", platforms)


def has_tpu(pci_devices: Path = _PCI_DEVICES) -> bool:
    """Returns whether this machine may have a TPU: a PCI device of Google's that is not a disk or network card."""
    for device in pci_devices.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:  # not a device, or just removed
            continue
        if vendor == _GOOGLE and not kind.startswith(_DISKS_AND_NETWORKS):
            return True
    return False
