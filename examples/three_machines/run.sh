#!/usr/bin/env bash
# Starts trainer.py, rollouts.py and environment.py on one machine as if on three, and judges the run.
#
#   --versions N          that the trainer publishes (default 120)
#   --max-staleness N     train on what is at most so many versions behind the weights (default 4)
#   --ahead N             batches that are played per version (default 1)
#   --mbit N              Mbit/s of each link, each way (default 100)
#   --round-trip-ms N     ms from a machine to any other place (default 50)
#   --network KIND        namespaces, loopback, or auto: namespaces if possible (default auto)
#   --warm-up N           supervised steps before, at most (default 400)
#   --out DIR             directory to write, made anew (default three-out)
#   --seed N              of the policy and the games (default 0)
#
# DIR gets summary.json, and a folder with the events and log of each machine.
# PYTHON names the interpreter (default .venv/bin/python). Exit status: 0 the verdict holds, 1 it does not or something
# failed, 2 wrong usage, 130 interrupted.
#
# Where root may make network namespaces (iproute2), each machine is one: loopback, one address, and a cable to where
# its link begins. No route leads further and nothing is forwarded, so the trainer reaches the store only, the rollout
# machine the store and the environment, the environment nothing. Elsewhere all share loopback. Links and the S3 store
# are those of tests/tools/slow_store.py. Processes of a machine have the variable THREE_MACHINE=PID-NAME.
set -euo pipefail

fail() { echo "three machines: $1" >&2; exit "${2:-1}"; }

declare -A option=([versions]=120 [max-staleness]=4 [ahead]=1 [mbit]=100 [round-trip-ms]=50 [network]=auto
  [warm-up]=400 [out]=three-out [seed]=0)
while (($#)); do
  [[ $1 != --help && $1 != -h ]] || { sed -n '2,/^set /s/^# \?//p' "$0"; exit 0; }
  [[ $1 == --* && -v option[${1#--}] ]] || fail "unknown option $1; see --help" 2
  number='^[0-9]+$'
  [[ $1 != --mbit && $1 != --round-trip-ms ]] || number='^[0-9]+(\.[0-9]+)?$'
  [[ ($1 =~ ^--(network|out)$ && ${2:-}) || ${2:-} =~ $number ]] || fail "$1 is '${2:-}'; see --help" 2
  option[${1#--}]=$2
  shift 2
done
out=$(realpath -m "${option[out]}") network=${option[network]}
[[ $network =~ ^(auto|namespaces|loopback)$ ]] || fail "--network is '$network'; give auto, namespaces or loopback" 2

cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
machines=(trainer rollout environment) prefix=ds3m-$$
declare -A address gateway machine_of

[[ ! -e $out || -e $out/.delta-sync-three-machines || -z $(ls -A "$out") ]] ||
  fail "$out holds files that this did not write; give another directory with --out"
rm -rf "$out"
mkdir -p "$out"/{trainer,rollout,environment}
touch "$out/.delta-sync-three-machines" "$out"/{trainer,rollout}/events.jsonl
# What points to a proxy or to another run must not reach the machines.
for name in $(compgen -e | grep -iE '_proxy$|^DELTA_SYNC_|^AWS_|^VLLM_PLUGINS$' || true); do unset "$name"; done

processes() { grep -lzxE "THREE_MACHINE=$$-\w+" /proc/[0-9]*/environ | cut -d/ -f3; }

clean_up() {
  local status=$?
  trap '' INT TERM HUP
  set +eu
  exec 2>/dev/null # much of this need not exist
  kill $(jobs -p)  # first what starts programs again
  kill $(processes)
  for _ in {1..20}; do [[ -n $(processes) ]] || break; sleep 0.5; done
  kill -KILL $(processes) $store
  for name in trial "${machines[@]}"; do ip netns del "$prefix-$name"; done
  for number in 0 1 2; do ip link del "$prefix-$number"; done
  ((status != 130)) || echo "interrupted; all processes have ended"
}
trap clean_up EXIT
trap 'exit 130' INT TERM HUP

if [[ $network != loopback ]] && ip netns add "$prefix-trial" && ip netns exec "$prefix-trial" true; then
  ip netns del "$prefix-trial"
  network=namespaces environment_port=7000 server_host=0.0.0.0 server_port=8000
  for ((block = $$ % 256; ; block = (block + 1) % 256)); do # of addresses, which another run may use
    { ip -4 -o addr; ip -4 route; } | grep -qF " 10.77.$block." || break
  done
  for number in 0 1 2; do
    name=${machines[number]} ns=$prefix-${machines[number]} cable=$prefix-$number
    gateway[$name]=10.77.$block.$((4 * number + 1)) address[$name]=10.77.$block.$((4 * number + 2))
    ip netns add "$ns"
    ip link add "$cable" type veth peer name eth0 netns "$ns" # the outer end stays here
    ip addr add "${gateway[$name]}/30" dev "$cable"
    ip link set "$cable" up
    ip -n "$ns" addr add "${address[$name]}/30" dev eth0
    ip -n "$ns" link set eth0 up
    ip -n "$ns" link set lo up
    echo "$name: network namespace $ns, address ${address[$name]}"
  done
else
  [[ $network != namespaces ]] || fail "--network namespaces needs root, iproute2, and a system that allows ip netns"
  echo "all machines share this one's loopback"
  network=loopback server_host=127.0.0.1
  for name in "${machines[@]}"; do gateway[$name]=127.0.0.1 address[$name]=127.0.0.1; done
  read -r environment_port server_port < <("$python" -c 'import socket
made = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(one.getsockname()[1] for one in made))')
fi

# The store ends once this script has, however that ends: its standard input is then closed.
exec {lifeline}> >(exec "$python" -m tests.tools.slow_store runs --mbit "${option[mbit]}" \
  --round-trip-ms "${option[round-trip-ms]}" --link "trainer=${gateway[trainer]}" --link "rollout=${gateway[rollout]}" \
  --forward "rollout=${address[environment]}:$environment_port" >"$out/store.env" 2>"$out/store.log")
store=$!
until [[ -s $out/store.env ]]; do
  kill -0 "$store" 2>/dev/null || fail "the store did not start: $(tail -n 3 "$out/store.log")"
  sleep 0.2
done
source "$out/store.env"
mapfile -t client < <(grep ^AWS_ "$out/store.env")

start() { # MACHINE COMMAND…: in the background, and again 5 s after it was killed, as a service manager would
  local machine=$1 status inside=()
  shift
  [[ $network == loopback ]] || inside=(ip netns exec "$prefix-$machine")
  while :; do
    status=0
    "${inside[@]}" env "THREE_MACHINE=$$-$machine" "$@" >>"$out/$machine/events.jsonl" \
      2>>"$out/$machine/log" || status=$?
    ((status > 128)) || exit "$status"
    echo "$machine: ended by signal $((status - 128)), starts again"
    sleep 5
  done {lifeline}>&- &
  machine_of[$!]=$machine
}

run=(--bucket s3://runs/run --games s3://runs/games --versions "${option[versions]}")
start environment "$python" examples/three_machines/environment.py --host "${address[environment]}" \
  --port "$environment_port" --seed "${option[seed]}"
start trainer "${client[@]}" AWS_ENDPOINT_URL="$STORE_trainer" OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE \
  "$python" examples/three_machines/trainer.py "${run[@]}" --folder "$out/trainer" --warm-up "${option[warm-up]}" \
  --max-staleness "${option[max-staleness]}" --seed "${option[seed]}"
start rollout "${client[@]}" AWS_ENDPOINT_URL="$STORE_rollout" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 \
  VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=0 VLLM_HOST_IP=127.0.0.1 \
  "$python" examples/three_machines/rollouts.py "${run[@]}" --folder "$out/rollout" --environment "$FORWARD_rollout" \
  --host "$server_host" --port "$server_port" --ahead "${option[ahead]}"
tail -qn +1 -f "$out"/{trainer,rollout}/events.jsonl 2>/dev/null {lifeline}>&- | grep --line-buffered -oE \
  '^.*("event": "(ready|away|back|impatient|set_aside|verified|done)"|"step": [0-9]*0, ).{0,150}' &

for _ in trainer rollout; do # the environment does not end by itself
  wait -n -p ended "${!machine_of[@]}" ||
    fail "${machine_of[$ended]} ended with status $?: $(tail -n 3 "$out/${machine_of[$ended]}/log")"
  unset "machine_of[$ended]"
done
network+=", ${option[mbit]} Mbit/s, ${option[round-trip-ms]} ms"
env "${client[@]}" "$python" -m tests.tools.three_machines_verdict "${run[@]}" --out "$out" \
  --max-staleness "${option[max-staleness]}" --network "$network" || fail "the verdict does not hold"
echo "written: $out/summary.json"
