#!/usr/bin/env bash
# Prometheus and Alertmanager for the runs of one machine: no containers, no root, no systemd. All on loopback.
#
#   export TELEMETRY_TARGETS_DIR=$HOME/telemetry-targets       # the agent reads the same variable
#   deploy/single-node/monitoring.sh up                        # http://127.0.0.1:9090, alerts at :9093
#   telemetry run train.py
#   deploy/single-node/monitoring.sh status | down
#
# Needs the commands prometheus and, for alerts that go somewhere, alertmanager (Debian's packages prometheus and
# prometheus-alertmanager, or the upstream binaries in PATH). MONITORING_DIR holds data, logs and pids. The configuration
# is copied there at `up`: edit it here, then `down` and `up`.
set -euo pipefail

deploy=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${MONITORING_DIR:-$HOME/.local/share/telemetry-monitoring}
prometheus_port=${PROMETHEUS_PORT:-9090}
alertmanager_port=${ALERTMANAGER_PORT:-9093}

# Whether the process that NAME.pid names is the one we started: its pid may have become another's.
alive() {
  [ -r "$folder/$1.pid" ] && tr '\0' '\n' 2>/dev/null <"/proc/$(cat "$folder/$1.pid")/cmdline" | grep -qF "$folder"
}

start() { # NAME COMMAND...
  local name=$1
  shift
  if alive "$name"; then
    echo "$name runs already"
    return
  fi
  setsid nohup "$@" >"$folder/$name.log" 2>&1 </dev/null &
  echo $! >"$folder/$name.pid"
  echo "$name: pid $!, log $folder/$name.log"
}

up() {
  : "${TELEMETRY_TARGETS_DIR:?set it to the folder that the agents write their target files to}"
  command -v prometheus >/dev/null || {
    echo "prometheus is not installed" >&2
    exit 1
  }
  mkdir -p "$folder" "$TELEMETRY_TARGETS_DIR"
  cp "$deploy"/prometheus/*.rules.yml "$deploy"/alertmanager/alertmanager.yml "$folder"
  sed "s/127\.0\.0\.1:9093/127.0.0.1:$alertmanager_port/" "$deploy/prometheus/prometheus.yml" >"$folder/prometheus.yml"
  ln -sfn "$(cd "$TELEMETRY_TARGETS_DIR" && pwd)" "$folder/targets"
  start prometheus prometheus --config.file="$folder/prometheus.yml" --storage.tsdb.path="$folder/prometheus" \
    --storage.tsdb.retention.time=30d --web.listen-address="127.0.0.1:$prometheus_port"
  echo "prometheus: http://127.0.0.1:$prometheus_port"
  local alertmanager
  if alertmanager=$(command -v alertmanager || command -v prometheus-alertmanager); then
    start alertmanager "$alertmanager" --config.file="$folder/alertmanager.yml" --storage.path="$folder/alertmanager" \
      --web.listen-address="127.0.0.1:$alertmanager_port" --cluster.listen-address=
  else
    echo "alertmanager is not installed: alerts are shown by Prometheus and sent nowhere" >&2
  fi
}

down() {
  local name
  for name in alertmanager prometheus; do
    if alive "$name"; then
      kill "$(cat "$folder/$name.pid")"
      echo "$name: stopped"
    fi
    rm -f "$folder/$name.pid"
  done
}

status() {
  local name
  for name in prometheus alertmanager; do
    if alive "$name"; then echo "$name: pid $(cat "$folder/$name.pid")"; else echo "$name: not running"; fi
  done
}

case ${1:-} in
  up | down | status) "$1" ;;
  *)
    echo "usage: monitoring.sh up | status | down" >&2
    exit 2
    ;;
esac
