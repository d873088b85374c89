"""Sorts the lines of logs by process, whichever file they are in."""

from __future__ import annotations

from typing import Any

from telemetry.report.process_log import ProcessLog, take_line


class ProcessLogs:
    """Sorts log lines by process, whichever file they are in.

    Several processes write to one file if a container is restarted with the same pid, or if two nodes share the folder.
    A ``run_start`` that does not continue a log begins another process.

    Attributes:
        all: the processes so far.
    """

    def __init__(self) -> None:
        self.all: list[ProcessLog] = []
        self._by_id: dict[str, ProcessLog] = {}

    @property
    def lives(self) -> set[str]:
        """The lives of these processes."""
        return {*self._by_id}

    def of_file(self, rank: int, pid: int) -> LinesOfFile:
        """Takes the lines of one log, with those of the files that were rotated away from it."""
        unused = ProcessLog(rank, pid)
        self.all.append(unused)
        return LinesOfFile(self, unused)

    def leave_out_if_empty(self, file: LinesOfFile) -> None:
        """All lines of a file are there: it has no process of its own if they belong to processes of other files."""
        if file.by_node and not file.unused.head and not file.unused.torn_lines:
            self.all = [log for log in self.all if log is not file.unused]

    def log_of(self, line: dict[str, Any], log: ProcessLog | None, fresh: ProcessLog) -> ProcessLog:
        """The process of a ``run_start``. ``log``: that of the line before; ``fresh``: for the lines of a new one."""
        id_ = line.get("life")
        if id_ in self._by_id:
            return self._by_id[id_]
        if log is None or not line.get("continued"):
            log = fresh
            if all(each is not fresh for each in reversed(self.all)):
                self.all.append(fresh)
        if id_ is not None:
            self._by_id[id_] = log
        return log


class LinesOfFile:
    """The lines of one log, in the order in which they were written.

    Attributes:
        newest: the process of the newest line.
        by_node: the processes by node. ``unused``: the process of this file, before its first line.
    """

    def __init__(self, logs: ProcessLogs, unused: ProcessLog) -> None:
        self._logs = logs
        self.newest = self.unused = unused
        self.by_node: dict[str, ProcessLog] = {}

    def add(self, line: dict[str, Any] | None, wrong: int) -> None:
        """Add a line, as `log_lines.parsed` returns it."""
        if line is None:
            self.newest.torn_lines += 1
            return
        node = line.get("node")
        log = self.newest if node is None else self.by_node.get(node)  # a line without a node is damaged
        if log is None or line.get("event") == "run_start":
            fresh = ProcessLog(self.unused.rank, self.unused.pid) if self.by_node else self.unused
            log = self._logs.log_of(line, log, fresh)
        self.newest = log
        if node is not None:
            self.by_node[node] = log
        log.wrong_fields += wrong
        take_line(line, log)
