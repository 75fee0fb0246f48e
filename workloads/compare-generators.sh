#!/bin/sh
# elfen-load beside ab, a closed-loop generator, on the same service with known response times.
#
# First a service without surprises, at a load where a closed loop is right: both must agree. Then one
# that stalls for 100 ms at every 1000th request: a closed loop sends nothing during a stall and so sees
# it once; an open loop charges it to every request that was due meanwhile.
#
# usage: compare-generators.sh [SECONDS]    (needs ab, of Debian's apache2-utils, and elfen-load in target/release)
set -eu

seconds=${1:-10}
here=$(dirname "$0")
load=${ELFEN_LOAD:-$here/../target/release/elfen-load}
for tool in ab "$load"; do
	command -v "$tool" >/dev/null || {
		echo "compare-generators: $tool is missing: install it, or build with cargo build --release" >&2
		exit 3
	}
done

scratch=$(mktemp -d)
server=
trap 'if [ -n "$server" ]; then kill "$server" || true; fi; rm -r "$scratch"' EXIT

compare() { # <title> <service times>
	echo "== $1"
	"$load" --reference-server 127.0.0.1:0 --service "$2" >"$scratch/address" &
	server=$!
	while ! grep -q serving "$scratch/address"; do sleep 0.05; done
	url=http://$(cut -d' ' -f3 "$scratch/address")/
	echo "-- ab, closed loop, 1 connection"
	ab -q -k -c 1 -t "$seconds" -n 1000000 -e "$scratch/percentiles" "$url" >"$scratch/ab"
	grep 'Requests per second' "$scratch/ab"
	awk -F, '$1 == 50 || $1 == 90 || $1 == 99 { printf "p%s %.2f ms\n", $1, $2 }' \
		"$scratch/percentiles"
	echo "-- elfen-load, open loop, 300 requests/s at equal gaps"
	"$load" --busy --allow-late --arrivals uniform --rps 300 --duration "${seconds}s" \
		--connections 64 "$url"
	kill "$server"
	wait "$server"
	server=
}

compare "every request takes 1 ms" fixed:1ms
compare "every request takes 1 ms, every 1000th 100 ms more" fixed:1ms,stall:1000:100ms
