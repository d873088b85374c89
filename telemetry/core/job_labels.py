"""What the scheduler says of the job: its id, user, account and partition."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from telemetry.core.identity import clean_name

if TYPE_CHECKING:
    from collections.abc import Mapping

_VARIABLES: Final = {
    # The scheduler's own come first, then what a pod or a script can set for itself.
    "job": ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "JOB_NAME"),
    "user": ("SLURM_JOB_USER", "LSB_UNIXUSER", "PBS_O_LOGNAME", "USER", "LOGNAME"),
    "account": ("SLURM_JOB_ACCOUNT", "LSB_PROJECT_NAME", "PBS_ACCOUNT", "POD_NAMESPACE", "ACCOUNT"),
    "partition": ("SLURM_JOB_PARTITION", "LSB_QUEUE", "PBS_QUEUE", "QUEUE_NAME"),
}
"""By label: variables of Slurm, LSF, PBS, Kubernetes and the environment. The first that is set counts."""


def job_labels(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The labels; empty where nothing tells."""
    env = os.environ if environ is None else environ
    found = {}
    for label, names in _VARIABLES.items():
        value = next((env[name] for name in names if env.get(name)), "")
        found[label] = clean_name(value) if value else ""
    return found
