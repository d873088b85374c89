"""What NVML reports about each GPU of the machine, for ``telemetry doctor``."""

from __future__ import annotations

from typing import Any

from telemetry.collect.collector import CollectorError
from telemetry.collect.nvml.activity import gpm_supported, process_supported
from telemetry.collect.nvml.device import (
    NvmlError,
    mig_enabled,
)
from telemetry.collect.nvml.driver import NvmlDriver
from telemetry.core.own_threads import OwnThread


def device_summary(timeout_seconds: float = 5.0) -> list[dict[str, Any]]:
    """One dict for each GPU of this machine.

    The keys are ``index``, ``uuid``, ``name``, ``driver_version``, ``sm_source`` (source of SM activity: ``gpm``,
    ``process`` or None), ``mig`` (whether the GPU is partitioned) and ``error`` (None, or why the other values are
    missing).

    Raises:
        CollectorError: there is no driver, or it has not answered within ``timeout_seconds``.
    """
    driver = NvmlDriver()
    answers: list[list[dict[str, Any]] | Exception] = []

    def ask() -> None:
        try:
            driver.open()
            answers.append(_summaries(driver))
        except Exception as error:
            answers.append(error)
        driver.close()

    thread = OwnThread(ask, name="telemetry-nvml-summary")
    thread.start()
    thread.join(timeout_seconds)
    if not answers:
        function = driver.running[0] if driver.running else "loading the library"
        raise CollectorError(f"NVML has not answered for {timeout_seconds:g} s ({function})")
    answer = answers[0]
    if isinstance(answer, Exception):
        raise CollectorError(str(answer)) from answer
    return answer


def _summaries(driver: NvmlDriver) -> list[dict[str, Any]]:
    version = driver.call("nvmlSystemGetDriverVersion")
    return [_summary(driver, index, version) for index in range(driver.call("nvmlDeviceGetCount"))]


def _summary(driver: NvmlDriver, index: int, version: str) -> dict[str, Any]:
    """One GPU. A lost GPU must not hide the others."""
    summary: dict[str, Any] = dict.fromkeys(("uuid", "name", "sm_source", "mig", "error"))
    summary = {"index": index, **summary, "driver_version": version}
    try:
        gpu = driver.call("nvmlDeviceGetHandleByIndex", index)
        summary["uuid"] = driver.call("nvmlDeviceGetUUID", gpu)
        summary["name"] = driver.call("nvmlDeviceGetName", gpu)
        summary["mig"] = mig_enabled(driver, gpu)
        if gpm_supported(driver, gpu):
            summary["sm_source"] = "gpm"
        elif process_supported(driver, gpu):
            summary["sm_source"] = "process"
    except NvmlError as error:
        summary["error"] = str(error)
    return summary
