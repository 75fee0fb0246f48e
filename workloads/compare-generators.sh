#!/bin/sh
# Compares elfen-load with two closed-loop generators, ab and wrk, on a service with known response
# times.
#
# The first service has constant response times, and a load at which a closed loop is right. All
# generators must agree. The second service stalls for 100 ms at every 1000th request. A closed loop
# sends nothing during a stall, and so sees it once. An open loop charges the stall to every request
# that was due in it.
#
# usage: compare-generators.sh [SECONDS]
#
# Needs wrk and ab of Debian's wrk and apache2-utils, and elfen-load in target/release.
set -eu

seconds=${1:-10}
here=$(dirname "$0")
load=${ELFEN_BIN:-$here/../target/release}/elfen-load
for tool in ab wrk taskset "$load"; do
	command -v "$tool" >/dev/null || {
		echo "compare-generators: no $tool: install it, or cargo build --release" >&2
		exit 3
	}
done

scratch=$(mktemp -d)
server=
trap 'if [ -n "$server" ]; then kill "$server" || true; fi; rm -r "$scratch"' EXIT

# The service is on the last CPU and the generator on the first, because both spin.
cpus=$(taskset -cp $$ | sed 's/.*: //')
on_first="taskset -c ${cpus%%[-,]*}" on_last="taskset -c ${cpus##*[-,]}"

# All in microseconds, because wrk changes its units.
row() { # <name> <p50> <p90> <p99>
	printf '%-42s %10.0f %10.0f %10.0f\n' "$@"
}

compare() { # <title> <service times>
	: >"$scratch/address"
	$on_last "$load" --reference-server 127.0.0.1:0 --service "$2" >"$scratch/address" &
	server=$!
	while ! grep -q serving "$scratch/address"; do sleep 0.05; done
	url=http://$(cut -d' ' -f3 "$scratch/address")/
	printf '%-42s %10s %10s %10s\n' "$1" 'p50 us' 'p90 us' 'p99 us'
	$on_first ab -q -k -c 1 -t "$seconds" -n 1000000 -e "$scratch/percentiles" "$url" \
		>"$scratch/ab"
	row 'ab, closed loop, 1 connection' $(awk -F, \
		'$1 == 50 || $1 == 90 || $1 == 99 { print $2 * 1000 }' "$scratch/percentiles")
	$on_first wrk -t 1 -c 1 -d "$seconds" --latency "$url" >"$scratch/wrk"
	row 'wrk, closed loop, 1 connection' $(awk '
		$1 == "50%" || $1 == "90%" || $1 == "99%" {
			unit = $2 ~ /us$/ ? 1 : $2 ~ /ms$/ ? 1000 : 1000000
			print ($2 + 0) * unit
		}' "$scratch/wrk")
	$on_first "$load" --json --busy --allow-late --arrivals uniform --rps 300 \
		--duration "${seconds}s" --connections 64 "$url" >"$scratch/load"
	row 'elfen-load, open loop, 300 requests/s' $(tr ',{}' '\n\n\n' <"$scratch/load" | awk -F: '
		/"latency_us"/ { inside = 1 }
		inside && $1 ~ /"p(50|90|99)"/ { print $2; if (++found == 3) exit }')
	kill "$server"
	wait "$server"
	server=
}

compare 'every request takes 1 ms' fixed:1ms
compare 'every 1000th takes 100 ms more' fixed:1ms,stall:1000:100ms
