"""Settings: from keywords and variables, checked once, with errors that help."""

from __future__ import annotations

from pathlib import Path

import pytest

from telemetry.config import GROUPS, Config, SettingError, settings, unknown_variables
from telemetry.safety.processes import disabled

CONTRACT = {
    "interval_seconds": 1.0, "log_interval_seconds": 10.0, "port": 9464, "host": "127.0.0.1", "stall_enter_ratio": 0.2,
    "stall_exit_ratio": 0.1, "stall_window_seconds": 30.0, "stuck_seconds": None, "snapshot_steps": 5,
    "snapshot_cooldown_seconds": 600.0, "max_snapshots": 10, "gpu_events": "auto", "patch": True,
}  # fmt: skip


def test_defaults_are_those_of_the_contract():
    assert Config.load({}, {}).as_log_fields().items() >= CONTRACT.items()


def test_keywords_win_over_variables():
    environ = {
        "TELEMETRY_INTERVAL_SECONDS": "5",
        "TELEMETRY_PORT": "off",
        "TELEMETRY_PATCH": "no",
        "TELEMETRY_RUN": "r",
    }
    config = Config.load({"interval_seconds": 2}, environ)
    assert (config.interval_seconds, config.port, config.patch, config.run) == (2.0, None, False, "r")


BAD = [
    ("interval_seconds", 0, "from 0.1 to 3600"),
    ("interval_seconds", float("nan"), "from 0.1 to 3600"),
    ("interval_seconds", True, "from 0.1 to 3600"),
    ("interval_seconds", 10**400, "from 0.1 to 3600"),
    ("port", 70000, "a port from 1 to 65535, 0 for any free port, or off"),
    ("port", 9464.5, "a port"),
    ("host", "a b", "the address to listen on"),
    ("run", "  ", "not empty"),
    ("run_dir", "a\0b", "the path of a folder"),
    ("stuck_seconds", "never", "a number from 1 to 604800, or auto"),
    ("gpu_events", "maybe", "auto | on | off"),
    ("patch", "perhaps", "on | off"),
    ("max_snapshots", 1.5, "a whole number from 0 to 10000"),
    ("step_buckets", [], "increasing numbers"),
    ("step_buckets", "0,1", "increasing numbers"),
    ("sinks", "wandb,neptune", "a list of tensorboard, wandb, mlflow; or none"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD, ids=lambda v: repr(v)[:30])
def test_a_bad_value_is_named_with_what_is_allowed(name, value, allowed):
    with pytest.raises(SettingError) as caught:
        Config.load({name: value}, {})
    text = str(caught.value)
    assert name in text
    assert repr(value)[:70] in text
    assert allowed in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("settings", "environ", "said"),
    [
        ({}, {"TELEMETRY_PORT": "x"}, r"port \(from TELEMETRY_PORT\) = 'x'"),
        ({"interval_second": 1}, {}, "did you mean interval_seconds"),
        ({"interval_seconds": 31}, {}, r"at most stall_window_seconds \(30\)"),
        ({"step_buckets": "3,2,1"}, {}, r"step_buckets = \(3.0, 2.0, 1.0\): allowed is numbers that increase"),
        ({"stall_enter_ratio": 0.1, "stall_exit_ratio": 0.1}, {}, r"less than stall_enter_ratio \(0.1\)"),
    ],
)
def test_what_does_not_go_together_is_named(settings, environ, said):
    with pytest.raises(SettingError, match=said):
        Config.load(settings, environ)


READ = [
    ("run_dir", "~/x", Path("~/x").expanduser()),
    ("run_dir", Path("~/x"), Path("~/x").expanduser()),
    ("start_line", "off", False),
    ("start_line", 1, True),
    ("step_buckets", "0.1, 1", (0.1, 1.0)),
    ("step_buckets", [1, 2], (1.0, 2.0)),
    ("interval_seconds", " 5 ", 5.0),
    ("snapshot_steps", "7", 7),
    ("stuck_seconds", "AUTO", None),
    ("stuck_seconds", None, None),
    ("gpu_hour_price", "none", None),
    ("gpu_events", True, "on"),
    ("end_line", True, "table"),
    ("end_line", "1", "table"),
    ("end_line", "Short", "short"),
    ("end_line", False, "off"),
    ("end_line", "0", "off"),
    ("sink_ranks", 0, "0"),
    ("sinks", "WandB, mlflow, wandb", ("wandb", "mlflow")),
    ("sinks", "none", ()),
    ("sinks", None, ()),
    ("port", False, None),
]


@pytest.mark.parametrize(("name", "value", "read"), READ, ids=repr)
def test_a_value_is_read_as_people_write_it(name, value, read):
    found = getattr(Config.load({name: value}, {}), name)
    assert (found, type(found)) == (read, type(read))


@pytest.mark.parametrize(("value", "off"), [("1", True), ("true", True), ("0", False), ("", False), ("no", False)])
def test_disabled(value, off):
    assert disabled({"TELEMETRY_DISABLED": value}) is off


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("TELEMETRY_PROT", "TELEMETRY_PORT"),
        ("TELEMETRY_INTERVAL", "TELEMETRY_INTERVAL_SECONDS"),
        ("telemetry_port", "TELEMETRY_PORT"),
        ("TELEMETRY_DISABLE", "TELEMETRY_DISABLED"),
        ("TELEMETRY_ENDPOINT_SECRET", None),
        ("TELEMETRY_", None),
    ],
)
def test_an_unknown_variable_comes_with_the_closest_setting(name, closest):
    known = {"TELEMETRY_PORT": "1", "TELEMETRY_DISABLED": "0", "PATH": ""}
    assert unknown_variables(known | {name: "1"}) == {name: closest}


def test_every_setting_is_documented_with_unit_range_and_default():
    known = {setting.name: setting for setting in settings()}
    assert list(known) == list(Config.load({}, {}).as_log_fields())
    assert list(dict.fromkeys(setting.group for setting in known.values())) == list(GROUPS.values())
    for setting in known.values():
        assert setting.help.endswith("."), setting.name
        assert setting.default_text, setting.name
        assert setting.parsed(setting.default, "") == setting.default, "the default is allowed"
    interval = known["interval_seconds"]
    assert (interval.option, interval.variable) == ("--interval-seconds", "TELEMETRY_INTERVAL_SECONDS")
    assert (interval.unit, interval.allowed, interval.default_text) == (
        "seconds", "a number from 0.1 to 3600", "1",
    )  # fmt: skip
    texts = [known[name].default_text for name in ("snapshot_disk_bytes", "patch", "stuck_seconds")]
    assert texts == ["1073741824 (1024 MiB)", "on", "auto"]
    assert known["log_max_files"].allowed == "a whole number from 1 to 1000"
