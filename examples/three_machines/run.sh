#!/usr/bin/env bash
# Starts trainer.py, rollouts.py and environment.py on three machines of one machine, and judges the run.
#
# Where root may make network namespaces (iproute2), each machine is one: loopback, one address, and a cable to where its
# link begins. No route leads further and nothing is forwarded, so a machine reaches what its link leads to and nothing
# else: the trainer the store, the rollout machine the store and the environment, the environment nothing. Links and the
# S3 store are those of tests/tools/slow_store.py. Elsewhere all share loopback. A program that is killed is started again
# after 5 s, as a service manager would. Processes of a machine have the variable THREE_MACHINE=PID-NAME.
set -euo pipefail

usage() {
  cat <<'END'
Usage: examples/three_machines/run.sh [options]

  --versions N          that the trainer publishes (default 120)
  --max-staleness N     train on what is at most so many versions behind the weights (default 4)
  --ahead N             batches that are played per version (default 1)
  --mbit N              Mbit/s of each link, each way (default 100)
  --round-trip-ms N     ms from a machine to any other place (default 50)
  --network KIND        namespaces, loopback, or auto: namespaces if possible (default auto)
  --warm-up N           supervised steps before, at most (default 400)
  --out DIR             directory to write, made anew (default three-out)
  --seed N              of the policy and the games (default 0)

DIR gets summary.json, three-machines.md, three-machines.png, and a folder with the events and log of each machine.
PYTHON names the interpreter (default .venv/bin/python). Exit status: 0 the verdict holds, 1 it does not or something
failed, 2 wrong usage, 130 interrupted.
END
}

fail() { echo "three machines: $1" >&2; exit "${2:-1}"; }

versions=120 staleness=4 ahead=1 mbit=100 round_trip=50 network=auto warm_up=400 out=three-out seed=0
while (($#)); do
  case $1 in
    --help | -h) usage; exit 0 ;;
    --versions | --max-staleness | --ahead | --mbit | --round-trip-ms | --warm-up | --seed)
      [[ ${2:-} =~ ^[0-9]+(\.[0-9]+)?$ ]] || fail "$1 is '${2:-}'; give a number" 2 ;;&
    --versions) versions=$2 ;;
    --max-staleness) staleness=$2 ;;
    --ahead) ahead=$2 ;;
    --mbit) mbit=$2 ;;
    --round-trip-ms) round_trip=$2 ;;
    --network) network=$2 ;;
    --warm-up) warm_up=$2 ;;
    --out) out=${2:?} ;;
    --seed) seed=$2 ;;
    *) fail "unknown option $1; see --help" 2 ;;
  esac
  shift 2
done
[[ $network =~ ^(auto|namespaces|loopback)$ ]] || fail "--network is '$network'; give auto, namespaces or loopback" 2

here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "$out")
cd "$here/../.."
python=${PYTHON:-.venv/bin/python}
machines=(trainer rollout environment)
prefix=ds3m
declare -A address gateway

[[ ! -e $out || -e $out/.delta-sync-three-machines || -z $(ls -A "$out") ]] ||
  fail "$out holds files that this did not write; give another directory with --out"
rm -rf "$out"
mkdir -p "$out"/{trainer,rollout,environment}
touch "$out/.delta-sync-three-machines"
# What points to a proxy or to another run must not reach the machines.
for name in $(compgen -e | grep -iE '_proxy$|^DELTA_SYNC_|^AWS_|^VLLM_PLUGINS$' || true); do unset "$name"; done

remove_networks() { # PID: namespaces and cables that a run has made
  local name
  for name in $(ip netns list | grep -oE "^$prefix-$1-\w+"); do ip netns del "$name"; done
  for name in $(ip -o link | grep -oE "\b$prefix-$1-[0-9]+"); do ip link del "$name" 2>/dev/null || true; done
}

processes() { # MACHINE: pids
  grep -lzxF "THREE_MACHINE=$$-$1" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3
}

clean_up() {
  local status=$? machine try
  trap '' INT TERM HUP
  set +e
  [[ -z $(jobs -p) ]] || kill $(jobs -p) 2>/dev/null
  for try in TERM {1..20} KILL; do
    pids=$(for machine in "${machines[@]}"; do processes "$machine"; done)
    [[ -n $pids ]] || break
    [[ $try =~ ^[0-9] ]] && sleep 0.5 || kill -"$try" $pids 2>/dev/null
  done
  [[ -z ${store:-} ]] || kill "$store" 2>/dev/null
  [[ $network != namespaces ]] || remove_networks $$
  ((status != 130)) || echo "interrupted; all processes have ended"
}
trap clean_up EXIT
trap 'exit 130' INT TERM HUP

make_machine() { # NUMBER NAME BLOCK: a namespace, and its cable, whose outer end stays here
  local ns=$prefix-$$-$2 cable=$prefix-$$-$1
  gateway[$2]=10.77.$3.$((4 * $1 + 1)) address[$2]=10.77.$3.$((4 * $1 + 2))
  ip netns add "$ns"
  ip link add "$cable" type veth peer name eth0 netns "$ns"
  ip addr add "${gateway[$2]}/30" dev "$cable"
  ip link set "$cable" up
  ip -n "$ns" addr add "${address[$2]}/30" dev eth0
  ip -n "$ns" link set eth0 up
  ip -n "$ns" link set lo up
  echo "$2: network namespace $ns, address ${address[$2]}"
}

why_not=""
trial=$prefix-$$-trial
if ! command -v ip >/dev/null; then why_not="there is no ip command (iproute2)"
elif ((EUID)); then why_not="only root may make network namespaces"
elif ! ip netns add "$trial" 2>/dev/null; then why_not="ip netns add fails"
else
  ip netns exec "$trial" ip link set lo up 2>/dev/null || why_not="ip netns exec fails"
  ip netns del "$trial"
fi
[[ $network != namespaces || -z $why_not ]] || { network=loopback; fail "--network namespaces is not possible: $why_not"; }
if [[ $network == loopback || -n $why_not ]]; then
  echo "all machines share this one's loopback: ${why_not:---network loopback was given}"
  network=loopback server_host=127.0.0.1
  for machine in "${machines[@]}"; do gateway[$machine]=127.0.0.1 address[$machine]=127.0.0.1; done
  read -r environment_port server_port < <("$python" -c 'import socket
made = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(one.getsockname()[1] for one in made))')
else
  network=namespaces environment_port=7000 server_host=0.0.0.0 server_port=8000
  for pid in $(ip netns list | grep -oP "^$prefix-\K[0-9]+" | sort -u); do
    [[ -e /proc/$pid ]] || remove_networks "$pid" # of a run that was killed before it could
  done
  for ((block = $$ % 256; ; block = (block + 1) % 256)); do
    { ip -4 -o addr; ip -4 route; } | grep -qF " 10.77.$block." || break
  done
  for number in 0 1 2; do make_machine "$number" "${machines[number]}" "$block"; done
fi

exec {lifeline}> >(exec "$python" -m tests.tools.slow_store runs --mbit "$mbit" --round-trip-ms "$round_trip" \
  --link "trainer=${gateway[trainer]}" --link "rollout=${gateway[rollout]}" \
  --forward "rollout=${address[environment]}:$environment_port" >"$out/store.env" 2>"$out/store.log")
store=$!
until [[ -s $out/store.env ]]; do
  kill -0 "$store" 2>/dev/null || fail "the store did not start: $(tail -n 3 "$out/store.log")"
  sleep 0.2
done
value() { sed -n "s/^$1=//p" "$out/store.env"; }
mapfile -t client < <(grep ^AWS_ "$out/store.env")

keep() { # MACHINE COMMAND…: runs it there, and again 5 s after it was killed
  local machine=$1 status inside=()
  shift
  exec {lifeline}>&-
  [[ $network == loopback ]] || inside=(ip netns exec "$prefix-$$-$machine")
  while :; do
    status=0
    "${inside[@]}" env "THREE_MACHINE=$$-$machine" "$@" >>"$out/$machine/events.jsonl" 2>>"$out/$machine/log" || status=$?
    ((status > 128)) || return "$status"
    echo "$machine: ended by signal $((status - 128)), starts again"
    sleep 5
  done
}

run=s3://runs/run games=s3://runs/games
keep environment "$python" "$here/environment.py" --host "${address[environment]}" --port "$environment_port" --seed "$seed" &
environment=$!
keep trainer "${client[@]}" AWS_ENDPOINT_URL="$(value STORE_trainer)" OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE \
  "$python" "$here/trainer.py" --bucket $run --games $games --folder "$out/trainer" --versions "$versions" \
  --max-staleness "$staleness" --warm-up "$warm_up" --seed "$seed" &
trainer=$!
keep rollout "${client[@]}" AWS_ENDPOINT_URL="$(value STORE_rollout)" \
  "$python" "$here/rollouts.py" --bucket $run --games $games --folder "$out/rollout" --versions "$versions" \
  --environment "$(value FORWARD_rollout)" --host "$server_host" --port "$server_port" --ahead "$ahead" &
rollout=$!
touch "$out"/{trainer,rollout}/events.jsonl
tail -qn +1 -f "$out"/{trainer,rollout}/events.jsonl 2>/dev/null {lifeline}>&- |
  grep --line-buffered -oE '^.*("event": "(ready|away|back|impatient|set_aside|verified|done)"|"step": [0-9]*0, ).{0,150}' &

left=("$trainer" "$rollout")
while ((${#left[@]})); do
  wait -n -p ended "${left[@]}" "$environment" && status=0 || status=$?
  ((status == 0)) || for name in "${machines[@]}"; do
    [[ ${!name} != "$ended" ]] || fail "$name ended with status $status: $(tail -n 3 "$out/$name/log")"
  done
  left=($(for pid in "${left[@]}"; do [[ $pid == "$ended" ]] || echo "$pid"; done))
done
env "${client[@]}" "$python" -m tests.tools.three_machines_verdict --bucket $run --games $games --out "$out" \
  --versions "$versions" --max-staleness "$staleness" --network "$network, $mbit Mbit/s, $round_trip ms" ||
  fail "the verdict does not hold"
echo "written: $out/summary.json, three-machines.md, three-machines.png"
