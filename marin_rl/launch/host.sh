#!/usr/bin/env bash
# Runs on a host of a slice, in the folder marin_rl_launch/NAME of the user's home:
#   upload/  this file, code.tar.gz, environment.sh, install.sh, and JOB.sh for each job
#   code/    the uploaded code        venv/  its Python environment
#   jobs/JOB/  log.txt, and the files of the supervisor
#
# host.sh setup                unpack and install the code
# host.sh start JOB            start the supervisor of a job, unless it is running
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

# Shared, so that two of these checks at the same time do not see each other.
running() {
  ! flock --shared --nonblock "jobs/$1/supervisor.lock" true
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

start() {
  mkdir -p "jobs/$1"
  if running "$1"; then
    return
  fi
  rm -f "jobs/$1/status.json"
  environment
  (cd code && exec setsid nohup bash "../upload/$1.sh" </dev/null >>"../jobs/$1/log.txt" 2>&1) &
  # The supervisor writes its status as soon as it runs.
  for _ in $(seq 600); do
    if [ -e "jobs/$1/status.json" ]; then
      return
    fi
    kill -0 $! 2>/dev/null || break
    sleep 0.1
  done
  echo "$1 did not start on $(hostname):" >&2
  tail -n 20 "jobs/$1/log.txt" >&2
  return 1
}

stop() {
  if [ ! -e "jobs/$1/supervisor.lock" ] || ! running "$1"; then
    return
  fi
  supervisor=$(cat "jobs/$1/supervisor.pid")
  # Without its supervisor, the command of a job still holds the lock.
  kill -TERM "$supervisor" 2>/dev/null || kill -TERM -- "-$supervisor" 2>/dev/null || true
  flock --shared --timeout "$2" "jobs/$1/supervisor.lock" true || kill -KILL -- "-$supervisor" 2>/dev/null || true
}

status() {
  for folder in jobs/*/; do
    [ -d "$folder" ] || continue
    job=$(basename "$folder")
    lock=$(running "$job" && echo running || echo ended)
    echo "status $job $lock $(cat "$folder/status.json" 2>/dev/null || echo '{}')"
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
