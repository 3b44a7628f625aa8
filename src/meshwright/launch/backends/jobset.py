"""A JobSet manifest for Kubernetes: an indexed job with one pod per process, restarted as a whole when one fails."""

from __future__ import annotations

import re
import secrets
import subprocess
from collections.abc import Sequence
from typing import Any

from meshwright.errors import ConfigError
from meshwright.launch.command import given
from meshwright.launch.events import EXIT_RESUME
from meshwright.launch.launch_options import LaunchOptions

_PORT = 12345
_JOB = "ranks"


def manifest(options: LaunchOptions, command: Sequence[str], *, token: str = "TOKEN") -> list[dict[str, Any]]:
    """Returns a Secret with the run's token and a JobSet, as dictionaries.

    Example:
        >>> options = LaunchOptions(backend="k8s", processes=2, devices_per_process=8, image="me/train:1")
        >>> _, jobset = manifest(options, ["train", "--run", "/data/run"])
        >>> jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"]
        2
    """
    if options.image is None:
        raise ConfigError("a Kubernetes job needs a container image.", hint="pass --image NAME with Meshwright inside.")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?", options.name):
        raise ConfigError(
            f"{options.name!r} is not a name for Kubernetes.", hint="use lower case letters, digits and -."
        )
    run = given(command, "--run")
    if run is None or not run.startswith("/"):
        raise ConfigError(
            "a Kubernetes job needs an absolute run folder.", hint="add --run /data/NAME, on a shared volume."
        )
    host = f"{options.name}-{_JOB}-0-0.{options.name}"  # the first pod, by the name that JobSet gives it
    words = ["meshwright", *command, *(word for word in ("--resume", "--or-start") if word not in command)]
    words += ["--coordinator", f"{host}:{_PORT}", "--num-processes", str(options.processes)]
    words += ["--process-id", "$(JOB_COMPLETION_INDEX)"]
    secret = f"{options.name}-token"
    container: dict[str, Any] = {
        "name": "rank",
        "image": options.image,
        "command": words,
        "ports": [{"containerPort": _PORT}],
        "env": [{"name": "MESHWRIGHT_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret, "key": "token"}}}],
        "volumeMounts": [
            {"name": "runs", "mountPath": "/" + run.split("/")[1]},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if options.devices_per_process:
        container["resources"] = {"limits": {"nvidia.com/gpu": options.devices_per_process}}
        total = options.devices_per_process * options.processes
        container["env"].append({"name": "MESHWRIGHT_DEVICES", "value": str(total)})
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(options.grace_seconds),
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": f"{options.name}-runs"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    job = {
        "parallelism": options.processes,
        "completions": options.processes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        # A pod that saved on request fails its job like any other, but does not use up the restarts.
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "rank", "operator": "In", "values": [EXIT_RESUME]},
                },
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": pod},
    }
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": options.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": options.name, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": options.attempts,
                "rules": [
                    {
                        "name": "preempted",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }
    made = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": secret},
        "type": "Opaque",
        "stringData": {"token": token},
    }
    return [made, jobset]


def apply(options: LaunchOptions, command: Sequence[str]) -> int:
    """Applies the manifest with kubectl; with --dry-run, prints it as YAML."""
    import shutil

    import yaml

    documents = manifest(options, command, token=secrets.token_hex(32) if not options.dry_run else "TOKEN")
    text = yaml.safe_dump_all(documents, sort_keys=False)
    if options.dry_run:
        print(text, end="")
        return 0
    if shutil.which("kubectl") is None:
        raise ConfigError("kubectl is not on the PATH.", hint="install it, or apply the output of --dry-run elsewhere.")
    return subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True).returncode
