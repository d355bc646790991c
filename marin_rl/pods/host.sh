#!/usr/bin/env bash
# Runs on a host of a slice, in the folder marin_rl_launch/NAME of the user's home:
#   upload/     this file, code.tar.gz, environment.sh, install.sh, and JOB.sh for each job
#   code/       the uploaded code        venv/  its Python environment
#   jobs/JOB/   log.txt; command.sh, a copy of the started JOB.sh; pids; exit_status after the end; lock, held until then
#
# host.sh setup                unpack and install the code
# host.sh start JOB            start a job, unless it is running
# host.sh stop JOB SECONDS     stop a job; kill it after some seconds
# host.sh status               print a line for each job
# host.sh logs LINES [--follow]
set -euo pipefail
cd "$(dirname "$0")/.."

environment() {
  set -a
  . upload/environment.sh
  set +a
}

setup() {
  mkdir -p code
  find code -mindepth 1 -delete
  tar -xzf upload/code.tar.gz -C code
  environment
  (cd code && bash -eo pipefail ../upload/install.sh) >install.txt 2>&1 || {
    echo "installing the code failed on $(hostname):" >&2
    tail -n 20 install.txt >&2
    return 1
  }
}

# Shared, so that two of these checks at the same time do not see each other.
running() {
  ! flock --shared --nonblock "jobs/$1/lock" true
}

start() {
  mkdir -p "jobs/$1"
  # The job inherits the lock. The timeout is for checks, which hold it for a moment.
  exec 9>>"jobs/$1/lock"
  flock --timeout 2 9 || return 0
  rm -f "jobs/$1/exit_status" "jobs/$1/pids"
  cp "upload/$1.sh" "jobs/$1/command.sh"
  environment
  setsid nohup bash upload/host.sh run "$1" </dev/null >>"jobs/$1/log.txt" 2>&1 &
  until [ -s "jobs/$1/pids" ] || ! kill -0 $! 2>/dev/null; do
    sleep 0.05
  done
}

# Runs in a process group of its own.
run() {
  (cd code && exec bash "../jobs/$1/command.sh") &
  echo "$$ $!" >"jobs/$1/pids"
  status=0
  wait $! || status=$?
  echo "$status" >"jobs/$1/exit_status"
}

stop() {
  if [ ! -e "jobs/$1/lock" ] || ! running "$1"; then
    return
  fi
  read -r group command <"jobs/$1/pids"
  # One signal, to the command only: a second one would end a training run before it has saved its state.
  kill -TERM "$command" 2>/dev/null || true
  flock --shared --timeout "$2" "jobs/$1/lock" true || kill -KILL -- "-$group" 2>/dev/null || true
  flock --shared --timeout 10 "jobs/$1/lock" true
  [ "$(cat "jobs/$1/exit_status" 2>/dev/null)" = 0 ] || echo stopped >"jobs/$1/exit_status"
}

status() {
  for folder in jobs/*/; do
    [ -e "$folder/command.sh" ] || continue
    job=$(basename "$folder")
    state=$(running "$job" && echo running || cat "$folder/exit_status" 2>/dev/null || echo killed)
    # A short line, so that those of several hosts are not mixed.
    echo "status $job $(hostname) $state $(sha256sum <"$folder/command.sh" | cut -c 1-16)"
  done
}

logs() {
  if ! compgen -G "jobs/*/log.txt" >/dev/null; then
    echo "$(hostname): no job has started"
    return
  fi
  tail -n "$1" ${2:+"$2"} jobs/*/log.txt | sed -u "s/^/$(hostname): /"
}

"$@"
